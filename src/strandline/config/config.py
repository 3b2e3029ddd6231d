"""`Config`: the options of a job, checked and immutable."""

# An option is a descriptor. The class creates it once, and all instances share it.
# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import ClassVar, Self, cast

from strandline.config import option as kinds
from strandline.config.mapping import read_file, read_mapping, unknown_option
from strandline.config.option import REQUIRED, DurationLike, Option, option
from strandline.config.rocksdb import RocksDBOptions
from strandline.config.values import (
    BACKEND,
    HOSTS,
    PORTS,
    POSITIVE,
    RESTART_STRATEGY,
    RETENTION,
    ROCKSDB,
    ROCKSDB_FACTORY,
    TOKEN,
    Choice,
    Duration,
    Flag,
    Int,
    Location,
    OptionalLocation,
    RocksDBFactory,
    RocksDBLike,
    Size,
)
from strandline.errors import ConfigError, UnknownOptionError
from strandline.redaction import shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a job.

    A config is immutable; `replace` makes a changed copy. The constructor checks every value, and raises `ConfigError`
    for a wrong one. The error names the option and says what is allowed.

    Durations are written as `"500ms"`, `"10 min"`, a number of seconds or a `timedelta`. Reading one gives seconds as a
    float. Sizes are written as `"512mb"` or a number of bytes. Reading one gives bytes as an int.
    """

    __signature__: ClassVar[inspect.Signature]
    """What `help` shows as the signature; type checkers use the fields."""

    # --- places -------------------------------------------------------------------------------

    checkpoint_dir: Location = option(
        REQUIRED,
        kinds.PATH,
        keys=("state.backend.fs.checkpointdir", "state.checkpoints.dir", "execution.checkpointing.dir"),
        doc="Durable storage for checkpoints: a path, or a `file://`, `s3://`, `gs://`, `az://` or `hdfs://` URL.",
        missing='say where checkpoints go, for instance Config(checkpoint_dir="s3://bucket/checkpoints") '
        "or a path that the driver and every executor can reach",
    )
    changelog_dir: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        keys=("dstl.dfs.base-path", "state.changelog.dstl.dfs.base-path"),
        doc="Durable storage for the changelog.",
        unset="`checkpoint_dir`",
    )
    savepoint_dir: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        keys=("state.savepoints.dir", "execution.checkpointing.savepoint-dir"),
        doc="Where savepoints go that are asked for without a directory, on the command line or the web page.",
        unset="a directory must be given",
    )
    trusted_dirs: Option[Sequence[kinds.PathLike], tuple[str, ...]] = option(
        (),
        kinds.PATHS,
        doc="Other storages whose files the checkpoints may name, beside `checkpoint_dir` and `changelog_dir`: for "
        "instance the `changelog_dir` of an earlier run. A checkpoint that names a file elsewhere is refused.",
    )
    local_dir: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        keys=(
            "state.backend.rocksdb.localdir",
            "taskmanager.state.local.root-dirs",
            "execution.checkpointing.local-backup.dirs",
        ),
        doc="Local disk of the executors for state, segments and local copies.",
        unset="the system's folder for temporary files",
    )
    spark_checkpoint_dir: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        doc="Scratch folder of the driver for Spark's own checkpoint of the query; fast matters, durable does not.",
        unset="`/dev/shm` where it can be written, else the system's folder for temporary files",
    )
    storage_options: Option[Mapping[str, str], Mapping[str, str]] = dataclasses.field(
        # The repr leaves it out because it may hold secrets; the hash leaves it out because a mapping has none.
        default=option(
            {},
            kinds.SETTINGS,
            doc="Settings of the object store (`endpoint`, `region`, `access_key_id`, ...) or of HDFS, over those from "
            "the environment. Flink's `s3.endpoint`, `s3.endpoint.region`, `s3.access-key`, `s3.secret-key` and "
            "`s3.path.style.access` arrive here.",
        ),
        repr=False,
        hash=False,
    )

    allow_unfenced_storage: Flag = option(
        False,
        kinds.FLAG,
        doc="Run although the storage of the checkpoints ignores the conditions of writes (`If-None-Match`). Nothing "
        "then keeps a second driver of the job out. Without it, `start()` refuses such a storage.",
    )

    # --- checkpoints --------------------------------------------------------------------------

    checkpoint_interval: Duration = option(
        "10s",
        POSITIVE,
        keys=("execution.checkpointing.interval",),
        doc="Time from the start of one checkpoint to the start of the next.",
    )
    min_pause: Duration = option(
        0,
        kinds.duration(zero=True),
        keys=("execution.checkpointing.min-pause",),
        doc="Least time between the end of one checkpoint and the start of the next. Above 0, only one checkpoint "
        "is in progress at a time.",
    )
    checkpoint_timeout: Duration = option(
        "10min",
        POSITIVE,
        keys=("execution.checkpointing.timeout",),
        doc="Longest duration of a checkpoint; a checkpoint that takes longer is aborted.",
    )
    max_concurrent_checkpoints: Int = option(
        1,
        kinds.integer(1),
        keys=("execution.checkpointing.max-concurrent-checkpoints",),
        doc="How many checkpoints may be in progress at a time.",
    )
    tolerable_failed_checkpoints: Int = option(
        0,
        kinds.integer(-1, note=" (-1: any number)"),
        keys=("execution.checkpointing.tolerable-failed-checkpoints",),
        doc="How many checkpoints may fail in a row before the run restarts, as its restart strategy says; -1 for any "
        "number.",
    )
    checkpoint_every_batch: Flag = option(
        False,
        kinds.FLAG,
        doc="Complete a checkpoint with every micro-batch, before the source is told that the batch is done. A "
        "checkpoint that fails is taken again while `tolerable_failed_checkpoints` allows it.",
    )
    num_retained: Int = option(
        1,
        kinds.integer(1),
        keys=("state.checkpoints.num-retained", "execution.checkpointing.num-retained"),
        doc="How many completed checkpoints are kept.",
    )
    on_cancel: Choice = option(
        "retain",
        RETENTION,
        keys=("execution.checkpointing.externalized-checkpoint-retention",),
        doc="What `cancel()` does with the checkpoints of the job.",
    )
    incremental: Flag = option(
        True,
        kinds.FLAG,
        keys=("state.backend.incremental", "execution.checkpointing.incremental"),
        doc="Upload only the files that the last completed checkpoint does not hold.",
    )
    snapshot_compression: Choice = option(
        "none",
        kinds.choice("none", "snappy", "lz4", "zstd", also={"true": "snappy", "false": "none"}),
        keys=("execution.checkpointing.snapshot-compression",),
        doc="Compression of full snapshots and savepoints. Flink's `true` means snappy.",
    )
    inline_threshold: Size = option(
        "20kb",
        kinds.size(at_least=0),
        keys=("execution.checkpointing.data-inline-threshold", "state.storage.fs.memory-threshold"),
        doc="State files up to this size that no later checkpoint can share are kept inside `_metadata`.",
    )
    small_file_threshold: Size = option(
        "1mb",
        kinds.size(at_least=0),
        doc="A task manager packs state files below this size into one uploaded file; 0 turns packing off.",
    )
    max_space_amplification: Option[float, float] = option(
        2.0,
        kinds.number(at_least=1.0),
        keys=("execution.checkpointing.file-merging.max-space-amplification",),
        doc="How much larger packed files may be than the parts of them that the newest checkpoint needs.",
    )

    sink_backlog: Size = option(
        "512mb",
        kinds.size(at_least=1),
        doc="How much of its output a job may stage while a sink still publishes an earlier checkpoint; beyond that, "
        "batches wait for the sink.",
    )

    # --- changelog ----------------------------------------------------------------------------

    changelog: Flag = option(
        False,
        kinds.FLAG,
        keys=("state.backend.changelog.enabled", "state.changelog.enabled"),
        doc="Upload state changes continuously, so that a checkpoint has little left to do.",
    )
    changelog_upload_timeout: Duration = option(
        "1s",
        POSITIVE,
        keys=("dstl.dfs.upload.timeout", "state.changelog.dstl.dfs.upload.timeout"),
        doc="A changelog upload that takes longer is started a second time; the first one to finish counts. A large "
        "upload gets more time, by its size and by the rate of the last one.",
    )
    changelog_upload_attempts: Int = option(
        3,
        kinds.integer(1),
        keys=("dstl.dfs.upload.max-attempts", "state.changelog.dstl.dfs.upload.max-attempts"),
        doc="How many attempts a slow or failing changelog upload gets before the batch goes on without it. A slow "
        "attempt goes on, and counts when it succeeds.",
    )
    changelog_max_in_flight: Size = option(
        "100mb",
        kinds.size(at_least=0),
        keys=("dstl.dfs.upload.max-in-flight", "state.changelog.dstl.dfs.upload.max-in-flight"),
        doc="How much of the changelog of a task manager may be committed without being durable while uploads fail; "
        "beyond that, processing waits.",
    )
    changelog_max_amplification: Option[float, float] = option(
        1.5,
        kinds.number(1.0),
        doc="How much larger state and changelog together may become than the state alone before the state is "
        "materialized early.",
    )
    materialization_interval: Duration = option(
        "10min",
        POSITIVE,
        keys=("state.backend.changelog.periodic-materialize.interval", "state.changelog.periodic-materialize.interval"),
        doc="How often the state itself is uploaded while the changelog is on, so that the changelog can be truncated.",
    )

    # --- state --------------------------------------------------------------------------------

    state_backend: Choice = option(
        "rocksdb",
        BACKEND,
        keys=("state.backend", "state.backend.type"),
        doc="Where a slot keeps its keyed state: on local disk, or in memory.",
    )
    state_memory: Size = option(
        "512mb",
        kinds.size(at_least=1 << 20),
        keys=("taskmanager.memory.managed.size",),
        doc="Memory for state per executor, divided among its slots; RocksDB's cache and write buffers get two thirds.",
    )
    batch_memory: Size = option(
        "128mb",
        kinds.size(at_least=1),
        doc="How much of a micro-batch each step of a slot keeps in memory: of the rows delivered to it, of its "
        "changes and of its output rows, so much each. What is more spills to local disk.",
    )
    timer_service: Choice = option(
        "heap",
        kinds.choice("heap", "rocksdb"),
        keys=("state.backend.rocksdb.timer-service.factory",),
        doc="Where timers are kept.",
    )
    local_recovery: Flag = option(
        False,
        kinds.FLAG,
        keys=(
            "state.backend.local-recovery",
            "execution.state-recovery.from-local",
            "execution.checkpointing.local-backup.enabled",
        ),
        doc="Keep a copy of each snapshot on local disk, and restore from that copy if it still exists.",
    )
    rocksdb: Option[RocksDBLike, RocksDBOptions] = option(
        "default",
        ROCKSDB,
        keys=("state.backend.rocksdb.predefined-options",),
        doc="Settings of RocksDB: a `RocksDBOptions`, a profile (`default`, `spinning-disk`, "
        "`spinning-disk-high-memory` or `ssd`; Flink's names, too), or a mapping of some, with a `profile` to begin "
        "with.",
    )
    rocksdb_factory: Option[RocksDBFactory | str | None, RocksDBFactory | str | None] = option(
        None,
        kinds.optional(ROCKSDB_FACTORY),
        keys=("state.backend.rocksdb.options-factory",),
        doc="Function that changes RocksDB's own options before a slot opens a database, or its name as "
        "`module:function`.",
        unset="none",
    )

    # --- restart ------------------------------------------------------------------------------

    restart_strategy: Choice = option(
        "exponential-delay",
        RESTART_STRATEGY,
        keys=("restart-strategy", "restart-strategy.type"),
        doc="Whether and how a run that failed starts again from its last completed checkpoint.",
    )
    restart_attempts: Int = option(
        10,
        kinds.integer(-1, note=" (-1: any number)"),
        keys=(
            "restart-strategy.fixed-delay.attempts",
            "restart-strategy.exponential-delay.attempts-before-reset-backoff",
        ),
        doc="How many restarts in a row before the run fails for good; -1 for any number.",
    )
    restart_delay: Duration = option(
        "1s",
        kinds.duration(zero=True),
        keys=("restart-strategy.fixed-delay.delay", "restart-strategy.exponential-delay.initial-backoff"),
        doc="Pause before a restart; with exponential delay, before the first one.",
    )
    restart_max_delay: Duration = option(
        "1min",
        POSITIVE,
        keys=("restart-strategy.exponential-delay.max-backoff",),
        doc="Longest pause with exponential delay.",
    )
    restart_multiplier: Option[float, float] = option(
        2.0,
        kinds.number(1.0),
        keys=("restart-strategy.exponential-delay.backoff-multiplier",),
        doc="Factor by which the pause grows after each restart, with exponential delay.",
    )
    restart_reset_after: Duration = option(
        "10min",
        POSITIVE,
        keys=("restart-strategy.exponential-delay.reset-backoff-threshold",),
        doc="A run that did not fail for this long counts its restarts from 0 again.",
    )

    # --- execution ----------------------------------------------------------------------------

    parallelism: Option[int | None, int | None] = option(
        None,
        kinds.optional(kinds.integer(1, 32768)),
        keys=("parallelism.default",),
        doc="Number of subtasks of a stateful step.",
        unset="Spark's default parallelism",
    )
    max_parallelism: Int = option(
        128,
        kinds.integer(1, 32768),
        keys=("pipeline.max-parallelism",),
        doc="Number of key groups: the most subtasks the job can ever have. Fixed for the life of the job's state.",
    )
    shuffle: Choice = option(
        "auto",
        kinds.choice("auto", "direct", "spark"),
        doc="How rows come to the slots. `direct`: Spark's tasks deliver them, and the slots sort them and stage their "
        "output for the sinks. `spark`: through Spark's shuffle. `auto`: directly, if no transform stands "
        "between two steps, every sink takes the rows of a step as they are, and no sink is a `ForeachBatchSink`.",
    )
    latency_mode: Choice = option(
        "batch",
        kinds.choice("batch", "realtime"),
        doc="`batch`: Spark cuts the stream into micro-batches. `realtime`: rows of Kafka reach the slots as they "
        "arrive, and are committed in epochs of some milliseconds. With the changelog an epoch is durable without a "
        "checkpoint, and `checkpoint_interval` says how soon rows are visible in sinks. Needs Spark 4.3.",
    )
    epoch_interval: Duration = option(
        "10ms",
        kinds.duration(zero=True),
        doc="Least time from the start of one epoch to the start of the next, in real time.",
    )
    transfer_rows: Int = option(
        1,
        kinds.integer(1, 1 << 16),
        doc="In real time, how many rows of a partition Spark gathers before it passes them to Python. With 1, every "
        "row is passed on as it comes, which takes the most CPU. With more, a row waits until so many have come after "
        "it, at most for a minute: take at most the rows that a partition gets in some milliseconds.",
    )
    batch_interval: Option[DurationLike | None, float | None] = option(
        None,
        kinds.optional(POSITIVE),
        doc="Time from the start of one micro-batch to the start of the next.",
        unset="batches follow each other at once",
    )
    bind_host: Option[str | None, str | None] = option(
        None,
        kinds.optional(kinds.TEXT),
        keys=("taskmanager.bind-host",),
        doc="Address that the processes of a run listen on; `0.0.0.0` for every network of a host.",
        unset="loopback if Spark runs in one process, else the network between driver and executors",
    )
    tls: Choice = option(
        "off",
        kinds.choice("off", "auto"),
        doc="`auto` encrypts the connections between hosts with a certificate that the driver makes for the run, and "
        "hands out with the run's secret.",
    )
    tls_certificate: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        doc="File with the certificate (PEM) of each host; with `tls_key` and `tls_ca`, it encrypts the connections "
        "between hosts.",
    )
    tls_key: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        doc="File with the private key of `tls_certificate`.",
    )
    tls_ca: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        doc="File with the certificates of the authorities that signed the certificates of all hosts. Use an authority "
        "of your own: every certificate that it signs is accepted.",
    )
    tls_server_name: Option[str | None, str | None] = option(
        None,
        kinds.optional(kinds.TEXT),
        doc="The name that all certificates hold.",
        unset="each holds the address of its host",
    )
    heartbeat_timeout: Duration = option(
        "8s",
        kinds.duration(least=2.0),
        keys=("heartbeat.timeout",),
        doc="A task manager or slot that is silent for this long counts as lost. Processes give a sign of life every "
        "second; on a busy host, less than 5 s takes healthy ones for lost.",
    )

    # --- web page and REST ----------------------------------------------------------------------

    rest_port: Option[int | str | None, int | str] = option(
        "8081-8130",
        PORTS,
        keys=("rest.port", "rest.bind-port"),
        doc="Port of the run's web page and REST API: one port, or the first free one of a range; 0 for any free port. "
        "`off` starts no server.",
    )
    rest_bind: Option[str, str] = option(
        "127.0.0.1",
        kinds.TEXT,
        keys=("rest.bind-address",),
        doc="Address that the web page and the REST API listen on; `0.0.0.0` for every network of a host. Elsewhere "
        "than on loopback, every call needs the token.",
    )
    rest_hosts: Option[Sequence[str], tuple[str, ...]] = option(
        (),
        HOSTS,
        doc="Other names under which the page is reached, such as that of a proxy. A call for another host is refused.",
    )
    rest_token: Option[str | None, str | None] = dataclasses.field(
        # The repr leaves it out because it is a secret.
        default=option(
            None,
            kinds.optional(TOKEN),
            doc="Secret that a call must carry to change something. It is in a file of its own beside the entry of the "
            "run, and only the user of the run can read that file.",
            unset="a new one for every process",
        ),
        repr=False,
    )

    # --- ----------------------------------------------------------------------------------------

    def __new__(cls, *args: object, **options: object) -> Self:
        """Refuse wrong arguments before the dataclass sees them; for an unknown keyword, name the nearest option."""
        if args:
            if isinstance(args[0], Mapping):
                raise ConfigError("options are keywords; Config.from_mapping({...}) takes a mapping")
            raise ConfigError("options are keywords: Config(checkpoint_dir='ckpt')")
        for name in options:
            if name not in OPTIONS:
                raise unknown_option(name, OPTIONS)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.parallelism is not None and self.parallelism > self.max_parallelism:
            raise ConfigError(
                f"parallelism = {self.parallelism} is more than max_parallelism = {self.max_parallelism}; allowed: "
                "a parallelism up to max_parallelism (raise max_parallelism only for a job without state to restore)"
            )
        if self.restart_strategy == "exponential-delay" and self.restart_max_delay < self.restart_delay:
            raise ConfigError(
                f"restart_max_delay = {self.restart_max_delay} is less than restart_delay = {self.restart_delay}; "
                "allowed: a longest pause that is not below the first (both in seconds)"
            )
        self._check_tls()

    def _check_tls(self) -> None:
        files = {name: getattr(self, name) for name in ("tls_certificate", "tls_key", "tls_ca")}
        given = [name for name, value in files.items() if value is not None]
        if given and self.tls == "auto":
            raise ConfigError(f'tls = "auto" makes its own certificate; remove it, or remove {", ".join(given)}')
        if given and len(given) < len(files):
            missing = ", ".join(name for name in files if name not in given)
            raise ConfigError(f"{', '.join(given)} alone does not encrypt anything; set {missing}, too")
        if self.tls_server_name is not None and not given:
            raise ConfigError("tls_server_name goes with tls_certificate, tls_key and tls_ca; set them, too")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Self:
        """Returns a config from keys and plain values: our option names, and Flink's keys in both spellings.

        Under a Flink key a duration without a unit counts milliseconds, as in Flink; under our names, seconds.

        Raises `UnknownOptionError` for an unknown key; the error names the nearest one. Raises `ConfigError` for a
        wrong value, and for two keys that set one option to different values.
        """
        return cls._build(read_mapping(mapping, OPTIONS))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Returns a config from a YAML file with the keys of `from_mapping`, flat or nested.

        Raises `ConfigError` if the file cannot be read or is no YAML mapping, and what `from_mapping` raises, with the
        file's path in front.
        """
        mapping = read_file(path)
        try:
            return cls.from_mapping(mapping)
        except UnknownOptionError as e:
            raise UnknownOptionError(f"{path}: {e}") from None
        except ConfigError as e:
            raise ConfigError(f"{path}: {e}") from None

    def replace(self, **changes: object) -> Self:
        """Returns a copy with other values for some options; raises `ConfigError` as the constructor does."""
        return self._build({**{name: getattr(self, name) for name in OPTIONS}, **changes})

    def with_mapping(self, mapping: Mapping[str, object]) -> Self:
        """Returns a copy with other values for the keys of `mapping`, which are those of `from_mapping`.

        Single settings of `storage_options` and `rocksdb` leave the others as they are. Raises what `from_mapping`
        raises.
        """
        changes = read_mapping(mapping, OPTIONS, self.rocksdb)
        if "storage_options" in changes:
            changes["storage_options"] = {
                **self.storage_options,
                **cast("Mapping[str, str]", changes["storage_options"]),
            }
        return self.replace(**changes)

    def to_mapping(self) -> dict[str, object]:
        """Returns our option names with plain JSON values; `from_mapping` gives an equal config back.

        The mapping holds the secrets of `storage_options` and `rest_token`; `shown` leaves them out.

        A `rocksdb_factory` that was given as a function is named as `module:function`.
        """
        return {name: _plain(getattr(self, name)) for name in OPTIONS}

    def shown(self) -> dict[str, object]:
        """Returns our option names with plain JSON values, as they may be shown: without `storage_options` and
        `rest_token`, and without credentials in URLs."""
        return {name: _shown(_plain(getattr(self, name))) for name, opt in OPTIONS.items() if not opt.kind.secret}

    @classmethod
    def _build(cls, values: Mapping[str, object]) -> Self:
        # The options themselves check the types of the values at run time.
        return cast("Callable[..., Self]", cls)(**values)


OPTIONS: Mapping[str, Option[object, object]] = {
    field.name: cast("Option[object, object]", vars(Config)[field.name]) for field in dataclasses.fields(Config)
}
"""Every option by its name."""


def _shown(value: object) -> object:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, (tuple, list)):
        return [_shown(part) for part in value]
    if isinstance(value, Mapping):
        return {str(name): _shown(part) for name, part in value.items()}
    return value


def _plain(value: object) -> object:
    if isinstance(value, RocksDBOptions):
        return value.to_mapping()
    if isinstance(value, Mapping):
        return dict(value)
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    return value
