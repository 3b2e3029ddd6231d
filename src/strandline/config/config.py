"""Every option of a job, typed, with the Flink keys that set the same thing."""

# An option is a descriptor, made once for the class and meant to be shared by all its instances.
# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from strandline.config import option as kinds
from strandline.config.option import REQUIRED, DurationLike, Option, SizeLike, option
from strandline.config.rocksdb import PROFILES, SETTINGS, RocksDBOptions
from strandline.errors import ConfigError, UnknownOptionError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Config", "reference_markdown"]

Duration = Option[DurationLike, float]
Size = Option[SizeLike, int]
Int = Option[int, int]
Flag = Option[bool, bool]
Choice = Option[str, str]
Location = Option[kinds.PathLike, str]
OptionalLocation = Option[kinds.PathLike | None, str | None]

RocksDBLike = RocksDBOptions | str | Mapping[str, object]
RocksDBFactory = Callable[..., Any]


def _parse_factory(value: object) -> RocksDBFactory | str:
    if isinstance(value, str):
        module, _, function = value.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
            raise ValueError
        return value
    if not callable(value):
        raise ValueError
    return cast(RocksDBFactory, value)


_ROCKSDB: kinds.Kind[RocksDBLike, RocksDBOptions] = kinds.Kind(
    "`RocksDBOptions`, name of a profile, or mapping",
    f"a RocksDBOptions, a profile ({', '.join(PROFILES)}), or a mapping of options to values",
    RocksDBOptions.of,
)
_FACTORY: kinds.Kind[RocksDBFactory | str, RocksDBFactory | str] = kinds.Kind(
    "function", 'a function of (rocksdict.Options, info), or the text "module:function" that names one', _parse_factory
)
_POSITIVE = kinds.duration()
_BACKENDS = {
    "hashmap": "heap",
    "filesystem": "heap",
    "jobmanager": "heap",
    **{f"{name}statebackend{end}": "heap" for name in ("hashmap", "fs", "memory") for end in ("", "factory")},
    **{f"{name}statebackend{end}": "rocksdb" for name in ("embeddedrocksdb", "rocksdb") for end in ("", "factory")},
}
_RETENTION = {
    "retain_on_cancellation": "retain",
    "delete_on_cancellation": "delete",
    "no_externalized_checkpoints": "delete",
}
_RESTARTS = {
    "exponential": "exponential-delay",
    "exponentialdelay": "exponential-delay",
    "fixed": "fixed-delay",
    "fixeddelay": "fixed-delay",
    "off": "none",
    "disable": "none",
    "false": "none",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a job; immutable. Every value is checked here, and a wrong one is a `ConfigError`.

    Durations are written as `"500ms"`, `"10 min"`, a number of seconds or a `timedelta`, and are floats of seconds when
    read. Sizes are written as `"512mb"` or a number of bytes, and are ints of bytes when read.
    """

    checkpoint_dir: Location = option(
        REQUIRED,
        kinds.PATH,
        keys=("state.backend.fs.checkpointdir", "state.checkpoints.dir", "execution.checkpointing.dir"),
        doc="Durable storage for checkpoints: a path, or a `file://`, `s3://`, `gs://` or `az://` URL.",
        missing='say where checkpoints go, for instance Config(checkpoint_dir="s3://bucket/checkpoints") '
        "or a path that the driver and every executor can reach",
    )
    checkpoint_interval: Duration = option(
        "10s",
        _POSITIVE,
        keys=("execution.checkpointing.interval",),
        doc="Time from the start of one checkpoint to the start of the next.",
    )
    min_pause: Duration = option(
        0,
        kinds.duration(zero=True),
        keys=("execution.checkpointing.min-pause",),
        doc="Least time between the end of one checkpoint and the start of the next. Above 0, only one checkpoint "
        "is under way at a time.",
    )
    checkpoint_timeout: Duration = option(
        "10min",
        _POSITIVE,
        keys=("execution.checkpointing.timeout",),
        doc="A checkpoint that takes longer is given up.",
    )
    max_concurrent_checkpoints: Int = option(
        1,
        kinds.integer(1),
        keys=("execution.checkpointing.max-concurrent-checkpoints",),
        doc="How many checkpoints may be under way at a time.",
    )
    tolerable_failed_checkpoints: Int = option(
        0,
        kinds.integer(-1, note=" (-1: any number)"),
        keys=("execution.checkpointing.tolerable-failed-checkpoints",),
        doc="How many checkpoints may fail in a row before the run fails; -1 for any number.",
    )
    num_retained: Int = option(
        1,
        kinds.integer(1),
        keys=("state.checkpoints.num-retained", "execution.checkpointing.num-retained"),
        doc="How many completed checkpoints are kept.",
    )
    on_cancel: Choice = option(
        "retain",
        kinds.choice("retain", "delete", also=_RETENTION),
        keys=("execution.checkpointing.externalized-checkpoint-retention",),
        doc="What `cancel()` does with the checkpoints of the job.",
    )
    checkpoint_every_batch: Flag = option(
        False,
        kinds.FLAG,
        doc="Complete a checkpoint with every micro-batch, before the source is told that the batch is done.",
    )
    batch_interval: Option[DurationLike | None, float | None] = option(
        None,
        kinds.optional(_POSITIVE),
        doc="Time from the start of one micro-batch to the start of the next.",
        unset="batches follow each other at once",
    )
    state_backend: Choice = option(
        "rocksdb",
        kinds.choice("rocksdb", "heap", also=_BACKENDS),
        keys=("state.backend", "state.backend.type"),
        doc="Where a slot keeps its keyed state: on local disk, or in memory.",
    )
    state_memory: Size = option(
        "512mb",
        kinds.size(at_least=1 << 20),
        keys=("taskmanager.memory.managed.size",),
        doc="Memory for state per executor, divided among its slots; RocksDB's cache and write buffers get two thirds.",
    )
    rocksdb: Option[RocksDBLike, RocksDBOptions] = option(
        "default",
        _ROCKSDB,
        keys=("state.backend.rocksdb.predefined-options",),
        doc="Settings of RocksDB, see below: all of them, a profile (`default`, `spinning-disk`, "
        "`spinning-disk-high-memory` or `ssd`; Flink's names, too), or a mapping of some, with a `profile` to begin "
        "with.",
    )
    rocksdb_factory: Option[RocksDBFactory | str | None, RocksDBFactory | str | None] = option(
        None,
        kinds.optional(_FACTORY),
        keys=("state.backend.rocksdb.options-factory",),
        doc="Function that changes RocksDB's own options before a slot opens a database, or `module:function`.",
        unset="none",
    )
    batch_memory: Size = option(
        "128mb",
        kinds.size(at_least=1),
        doc="Changes of one micro-batch that a slot keeps in memory before they spill to local disk.",
    )
    incremental: Flag = option(
        True,
        kinds.FLAG,
        keys=("state.backend.incremental", "execution.checkpointing.incremental"),
        doc="Upload only what is new since the last completed checkpoint.",
    )
    changelog: Flag = option(
        False,
        kinds.FLAG,
        keys=("state.backend.changelog.enabled", "state.changelog.enabled"),
        doc="Upload state changes continuously, so that a checkpoint has little left to do.",
    )
    changelog_dir: OptionalLocation = option(
        None,
        kinds.optional(kinds.PATH),
        keys=("dstl.dfs.base-path", "state.changelog.dstl.dfs.base-path"),
        doc="Durable storage for the changelog.",
        unset="`checkpoint_dir`",
    )
    changelog_upload_timeout: Duration = option(
        "1s",
        _POSITIVE,
        keys=("dstl.dfs.upload.timeout", "state.changelog.dstl.dfs.upload.timeout"),
        doc="A changelog upload that takes longer is tried again beside the first.",
    )
    changelog_upload_attempts: Int = option(
        3,
        kinds.integer(1),
        keys=("dstl.dfs.upload.max-attempts", "state.changelog.dstl.dfs.upload.max-attempts"),
        doc="How often a changelog upload that is slow or fails is tried before the batch goes on without it.",
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
        _POSITIVE,
        keys=("state.backend.changelog.periodic-materialize.interval", "state.changelog.periodic-materialize.interval"),
        doc="How often the state itself is uploaded while the changelog is on, so that the changelog can be truncated.",
    )
    local_recovery: Flag = option(
        False,
        kinds.FLAG,
        keys=(
            "state.backend.local-recovery",
            "execution.state-recovery.from-local",
            "execution.checkpointing.local-backup.enabled",
        ),
        doc="Keep a second copy of each snapshot on local disk, and restore from it where it still is.",
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
        doc="State files below this size are put together into one uploaded file per task manager; 0 to do without.",
    )
    max_space_amplification: Option[float, float] = option(
        2.0,
        kinds.number(at_least=1.0),
        keys=("execution.checkpointing.file-merging.max-space-amplification",),
        doc="How much larger such files together may be than the parts of them that the newest checkpoint needs.",
    )
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
    timer_service: Choice = option(
        "heap",
        kinds.choice("heap", "rocksdb"),
        keys=("state.backend.rocksdb.timer-service.factory",),
        doc="Where timers are kept.",
    )
    restart_strategy: Choice = option(
        "exponential-delay",
        kinds.choice("exponential-delay", "fixed-delay", "none", also=_RESTARTS),
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
        _POSITIVE,
        keys=("restart-strategy.exponential-delay.max-backoff",),
        doc="Longest pause with exponential delay.",
    )
    restart_multiplier: Option[float, float] = option(
        2.0,
        kinds.number(1.0),
        keys=("restart-strategy.exponential-delay.backoff-multiplier",),
        doc="What the pause is multiplied by after each restart, with exponential delay.",
    )
    restart_reset_after: Duration = option(
        "10min",
        _POSITIVE,
        keys=("restart-strategy.exponential-delay.reset-backoff-threshold",),
        doc="A run that went well for so long counts its restarts from 0 again.",
    )
    rest_port: Option[int | None, int | None] = option(
        None,
        kinds.optional(kinds.integer(0, 65535)),
        keys=("rest.port", "rest.bind-port"),
        doc="Port of the REST server and the web page; 0 for any free one.",
        unset="no REST server",
    )
    bind_host: Option[str | None, str | None] = option(
        None,
        kinds.optional(kinds.TEXT),
        keys=("taskmanager.bind-host", "rest.bind-address"),
        doc="Address that the processes of a run listen on; `0.0.0.0` for every network of a host.",
        unset="loopback if Spark runs in one process, else `0.0.0.0`",
    )
    storage_options: Option[Mapping[str, str], Mapping[str, str]] = dataclasses.field(
        # Not in repr: it may hold keys. Not in the hash: a mapping has none.
        default=option(
            {},
            kinds.SETTINGS,
            doc="Settings of the object store (`endpoint`, `region`, `access_key_id`, ...), over those from the "
            "environment. Flink's `s3.endpoint`, `s3.endpoint.region`, `s3.access-key`, `s3.secret-key` and "
            "`s3.path.style.access` arrive here.",
        ),
        repr=False,
        hash=False,
    )
    heartbeat_timeout: Duration = option(
        "8s",
        _POSITIVE,
        keys=("heartbeat.timeout",),
        doc="A task manager or slot that is silent for so long is taken for lost.",
    )

    def __new__(cls, *args: object, **options: object) -> Self:
        """Refuse keywords that are no options before the dataclass sees them, and name the nearest."""
        for name in options:
            if name not in OPTIONS:
                raise _unknown(name, OPTIONS)
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

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Self:
        """A config from keys and plain values: our option names, and Flink's keys in both spellings.

        Under a Flink key a duration without a unit counts milliseconds, as in Flink; under our names, seconds. An
        unknown key is an `UnknownOptionError` that names the nearest one.
        """
        return cls._build(_read(mapping))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """A config from a YAML file, with the keys of `from_mapping`, flat or nested."""
        try:
            content: object = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"cannot read the config file {path}: {e.strerror or e}; check the path") from e
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise ConfigError(f"the config file {path} is not valid YAML: {e}") from e
        if content is None:
            content = {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"the config file {path} holds no mapping; write one `option: value` per line")
        try:
            return cls.from_mapping(_flatten(content))
        except UnknownOptionError as e:
            raise UnknownOptionError(f"{path}: {e}") from None
        except ConfigError as e:
            raise ConfigError(f"{path}: {e}") from None

    def replace(self, **changes: object) -> Self:
        """A copy with other values for some options."""
        return self._build({**{name: getattr(self, name) for name in OPTIONS}, **changes})

    def to_mapping(self) -> dict[str, object]:
        """Our option names with plain JSON values; `from_mapping` gives an equal config back.

        A `rocksdb_factory` that was given as a function is named as `module:function`.
        """
        return {name: _plain(getattr(self, name)) for name in OPTIONS}

    @classmethod
    def _build(cls, values: Mapping[str, object]) -> Self:
        # The values' types are checked at run time, by the options themselves.
        return cast("Callable[..., Self]", cls)(**values)


OPTIONS: Mapping[str, Option[object, object]] = {
    field.name: cast("Option[object, object]", vars(Config)[field.name]) for field in dataclasses.fields(Config)
}
"""Every option by its name."""

_BY_KEY = {key: opt for opt in (*OPTIONS.values(), *SETTINGS.values()) for key in (opt.name, *opt.keys)}

_FIXED = {
    "state.backend.changelog.storage": "filesystem",
    "state.changelog.storage": "filesystem",
    "state.checkpoint-storage": "filesystem",
    "execution.checkpointing.storage": "filesystem",
    "execution.checkpointing.mode": "exactly_once",
    "execution.checkpointing.unaligned": "false",
    "execution.checkpointing.unaligned.enabled": "false",
    "state.backend.rocksdb.memory.managed": "true",
}
"""Flink keys that choose what is always so here: accepted with this value, refused with others."""

_S3_KEYS = {
    "s3.endpoint": "endpoint",
    "s3.endpoint.region": "region",
    "s3.region": "region",
    "s3.access-key": "access_key_id",
    "s3.access.key": "access_key_id",
    "s3.secret-key": "secret_access_key",
    "s3.secret.key": "secret_access_key",
}
_PATH_STYLE = ("s3.path.style.access", "s3.path-style-access")
_OWN_STORAGE = "storage_options."
_OWN_ROCKSDB = "rocksdb."
_USE_FILTERS = "state.backend.rocksdb.use-bloom-filter"


def _read(mapping: Mapping[str, object]) -> dict[str, object]:
    """The options that `mapping` sets, by our names, with their stored values."""
    values: dict[str, object] = {}
    written_as: dict[str, str] = {}
    settings: dict[str, object] = {}
    unused = _unused_restart_keys(mapping)
    for key, value in mapping.items():
        if key in _FIXED:
            if str(value).strip().lower() != _FIXED[key]:
                raise ConfigError(f"{key} = {value!r} is not supported; allowed: {_FIXED[key]}")
        elif key in _S3_KEYS:
            settings[_S3_KEYS[key]] = value
        elif key in _PATH_STYLE:
            settings["virtual_hosted_style_request"] = str(value).strip().lower() != "true"
        elif key.startswith(_OWN_STORAGE):
            settings[key.removeprefix(_OWN_STORAGE)] = value
        elif key == _USE_FILTERS:
            continue
        elif key not in _BY_KEY:
            raise _unknown(key, [*_BY_KEY, *_FIXED, *_S3_KEYS, *_PATH_STYLE, _USE_FILTERS])
        else:
            opt = _BY_KEY[key]
            stored = opt.read(value, key)
            if key in unused:
                continue
            if opt.name in values and values[opt.name] != stored:
                raise ConfigError(
                    f"{written_as[opt.name]} = {mapping[written_as[opt.name]]!r} and {key} = {value!r} set the same "
                    f"option, {opt.name}, to different values; keep one of them"
                )
            values[opt.name] = stored
            written_as[opt.name] = key
    if settings:
        own = values.get("storage_options", {})
        values["storage_options"] = {**settings, **(own if isinstance(own, Mapping) else {})}
    tuned = {name: values.pop(name) for name in list(values) if name.startswith(_OWN_ROCKSDB)}
    if _USE_FILTERS in mapping and not _flag(_USE_FILTERS, mapping[_USE_FILTERS]):
        tuned["rocksdb.bloom_bits_per_key"] = 0
    if tuned:
        profile = cast(RocksDBOptions, values.get("rocksdb", RocksDBOptions()))
        changes: dict[str, Any] = {name.removeprefix(_OWN_ROCKSDB): value for name, value in tuned.items()}
        values["rocksdb"] = dataclasses.replace(profile, **changes)
    return values


def _flag(key: str, value: object) -> bool:
    try:
        return kinds.FLAG.parse(value)
    except ValueError:
        raise ConfigError(f"{key} = {value!r} is not valid; allowed: {kinds.FLAG.allowed}") from None


def _plain(value: object) -> object:
    if isinstance(value, RocksDBOptions):
        return value.to_mapping()
    if isinstance(value, Mapping):
        return dict(value)
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    return value


def _unused_restart_keys(mapping: Mapping[str, object]) -> set[str]:
    """Keys of a restart strategy that is not the chosen one: a Flink config may carry the settings of several."""
    opt = OPTIONS["restart_strategy"]
    written = [key for key in (opt.name, *opt.keys) if key in mapping]
    chosen = opt.read(mapping[written[0]], written[0]) if written else opt.read(opt.default)
    strategies = ("fixed-delay", "exponential-delay")
    if chosen not in strategies or not written:
        return set()
    others = tuple(f"restart-strategy.{strategy}." for strategy in strategies if strategy != chosen)
    return {key for key in mapping if key.startswith(others)}


def _flatten(content: Mapping[object, object], prefix: str = "") -> dict[str, object]:
    """Nested keys joined with dots; the settings of the object store and of RocksDB are left as they are."""
    flat: dict[str, object] = {}
    for part, value in content.items():
        key = f"{prefix}{part}"
        nests = isinstance(value, Mapping) and key not in ("storage_options", "rocksdb")
        nested = _flatten(cast("Mapping[object, object]", value), f"{key}.") if nests else {key: value}
        for name, leaf in nested.items():
            if name in flat:
                raise ConfigError(f"{name} is set twice, once flat and once nested; keep one of them")
            flat[name] = leaf
    return flat


def _unknown(name: str, known: Mapping[str, object] | list[str]) -> UnknownOptionError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return UnknownOptionError(f"unknown option {name!r}; the nearest one is {nearest!r}")


_REFERENCE = """\
# Configuration

<!-- Generated by strandline.config.reference_markdown(); a test compares. Do not edit by hand. -->

Every option is a keyword of `Config(...)`. `Config.from_mapping({...})` and `Config.load("strandline.yaml")` take the
option names as well as the Flink keys; in a YAML file, keys may be flat or nested. An unknown option or key is an error
that names the nearest one.

- **Duration**: `"500ms"`, `"10s"`, `"10 min"`, `"1h"`, a number of seconds, or a `timedelta`. Under a Flink key, a
  number without a unit counts milliseconds, as in Flink.
- **Size**: `"512mb"`, `"1gb"` (1 kb is 1024 bytes), or a number of bytes.

| option | type | default | Flink keys | description |
|---|---|---|---|---|
@options

Flink keys that choose what is always so here are accepted with these values only:

@fixed

## RocksDB

The fields of `RocksDBOptions`: `Config(rocksdb=RocksDBOptions(open_files=-1))`, `Config(rocksdb={"profile": "ssd",
"block_bytes": "16kb"})`, or in a file as `rocksdb.open_files: -1` or under the Flink key. What the profiles are, and
when to turn what: [Tuning RocksDB](operations.md#tuning-rocksdb). The heap backend ignores them.

| field | type | default | Flink key | description |
|---|---|---|---|---|
@rocksdb
"""


def reference_markdown() -> str:
    """The text of `docs/configuration.md`, made from the options themselves."""
    parts = {
        "@options": _rows(OPTIONS),
        "@fixed": "\n".join(f"- `{key}`: `{value}`" for key, value in _FIXED.items()),
        "@rocksdb": _rows(SETTINGS),
    }
    text = _REFERENCE
    for place, part in parts.items():
        text = text.replace(place, part)
    return text


def _rows(options: Mapping[str, Option[object, object]]) -> str:
    rows = []
    for name, opt in options.items():
        keys = "<br>".join(f"`{key}`" for key in opt.keys) or "–"
        rows.append(f"| `{name}` | {opt.kind.name} | {opt.default_text} | {keys} | {opt.doc} |")
    return "\n".join(rows)
