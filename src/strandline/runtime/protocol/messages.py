"""What several calls between processes have in common: settings, specifications, reports; encoded with msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from strandline.checkpoint.metadata import StateFile, SubtaskState
from strandline.checkpoint.steps import StepDescription
from strandline.config.rocksdb import RocksDBOptions
from strandline.logs import LogFormat
from strandline.redaction import secret_values, shown
from strandline.runtime.protocol.address import NOWHERE, Address
from strandline.runtime.protocol.tls import Tls
from strandline.state.coding.keys import key_group_range


class BackendSettings(msgspec.Struct, frozen=True):
    """How a slot keeps state."""

    kind: str
    memory_bytes: int
    batch_memory: int
    incremental: bool
    compression: str
    rocksdb: RocksDBOptions = RocksDBOptions()
    rocksdb_factory: bytes | None = None
    """The user's function that changes RocksDB's options, pickled."""

    @property
    def shares_files(self) -> bool:
        """Whether a snapshot consists of files that later ones share."""
        return self.incremental and self.kind == "rocksdb"


class StorageSettings(msgspec.Struct, frozen=True):
    """Where durable storage is."""

    url: str
    options: dict[str, str]

    def __repr__(self) -> str:
        """Without the values of the options, which may be secrets."""
        return f"StorageSettings({shown(self.url)!r}, options={sorted(self.options)})"


class UploadSettings(msgspec.Struct, frozen=True):
    """How a task manager deals with small files."""

    inline_bytes: int
    small_bytes: int
    max_amplification: float


class ChangelogSettings(msgspec.Struct, frozen=True):
    """How a task manager keeps the changelog of its slots."""

    upload_timeout: float
    upload_attempts: int
    max_behind_bytes: int
    materialization_interval: float
    max_amplification: float
    storage: StorageSettings | None
    """Where it is kept; None: with the checkpoints."""


class StagerSpec(msgspec.Struct, frozen=True):
    """A sink whose rows a slot stages itself."""

    output: str | None
    """The side output of the step that the sink takes; None for the main output."""
    blob: bytes = b""
    """The pickled stager."""


class FeedSpec(msgspec.Struct, frozen=True):
    """Output rows of a step that its slots deliver straight to the slots of another step."""

    operator: str
    """The step that reads the rows."""
    output: str | None
    """The side output that it reads; None for the main output."""
    columns: list[tuple[str, str | int | None]]
    """The columns that the step reads, each with the output column that it is, or a number, or null."""
    number: int
    """Different for all feeds of a job."""


class OperatorSpec(msgspec.Struct, frozen=True):
    """One stateful step: its uid and the pickled operator."""

    uid: str
    blob: bytes
    stagers: list[StagerSpec] = []
    pushed: list[str | None] = []
    """The outputs whose rows the slot sends to the driver with the answer to `prepare`; None is the main output."""
    feeds: list[FeedSpec] = []
    """The steps that read the output without Spark in between."""


class RunInfo(msgspec.Struct, frozen=True):
    """What every process of a run knows from its start."""

    job: str
    run_id: str
    secret: str
    coordinator: Address
    local_dir: str
    bind_host: str
    """What its processes listen on; see `listen_on`."""
    heartbeat_timeout: float
    storage: StorageSettings
    sys_path: list[str]
    uploads: UploadSettings
    local_recovery: bool = False
    """Whether a restart uses the local copies of durable files."""
    changelog: ChangelogSettings | None = None
    """None: every checkpoint uploads the state itself."""
    tls: Tls | None = None
    """None: connections are not encrypted."""
    log_format: LogFormat = "text"
    """How task managers and slots write their logs."""

    @property
    def secrets(self) -> list[str]:
        """What no log may show."""
        return [self.secret, *secret_values(self.storage.options)]

    def __repr__(self) -> str:
        """Without secrets."""
        return f"RunInfo(job={self.job!r}, run_id={self.run_id!r}, coordinator={self.coordinator!r})"


class SlotSpec(msgspec.Struct, frozen=True):
    """Everything a slot process needs to come up at the last committed batch."""

    run: RunInfo
    generation: int
    index: int
    incarnation: int
    parallelism: int
    max_parallelism: int
    backend: BackendSettings
    operators: list[OperatorSpec]
    restore: list[SubtaskState]
    """The states that hold some of the slot's key groups; for each operator, the largest part first.

    One per operator, unless the parallelism has changed; empty for a fresh start."""
    restore_batch: int
    """The batch that `restore` covers; -1 for a fresh start."""
    decided_batch: int
    """The last batch that was committed; the slot is ready once it has applied it."""
    restore_storage: StorageSettings | None = None
    """Where the files of `restore` are, if not in the run's own storage."""
    restore_owned: bool = True
    """Whether the files of `restore` are the job's own, so that a checkpoint may refer to them."""
    segments: list[tuple[str, StateFile]] = []
    """The durable segments after `restore_batch`, in order, each with its operator."""
    segments_complete: bool = False
    """Whether `segments` lead to `decided_batch`."""
    manager: Address = NOWHERE
    """Where the slot's task manager is."""
    copies: str | None = None
    """The folder with local copies of durable files on the slot's host; None: the slot does not use them."""
    steps: list[StepDescription] = []
    """The steps as the checkpoint of `restore` describes them; empty if an earlier release wrote it."""
    restore_checkpoint: int = 0
    """The id of the checkpoint that `restore` is of; 0 for a fresh start."""
    allow_non_restored: bool = False
    """Whether states of `restore` that an operator does not declare any more may be dropped."""

    @property
    def key_groups(self) -> range:
        """The key groups that the slot's subtasks own."""
        return key_group_range(self.index, self.parallelism, self.max_parallelism)

    @property
    def rescaled(self) -> bool:
        """Whether the states to start from have other key group ranges than the slot."""
        groups = self.key_groups
        return any(
            (state.key_group_start, state.key_group_end) != (groups.start, groups.stop) for state in self.restore
        )


class StepWatermarks(msgspec.Struct, frozen=True, array_like=True):
    """The watermarks of one step in a batch; see `BatchInfo`."""

    watermark_ms: int | None = None
    late_watermark_ms: int | None = None


class BatchTime(msgspec.Struct, frozen=True):
    """The processing time of a batch, and the watermarks of every step that has some."""

    processing_ms: int
    steps: dict[str, StepWatermarks] = {}

    def of(self, step: str) -> StepWatermarks:
        """The watermarks of the step with the uid `step`."""
        return self.steps.get(step, StepWatermarks())


class Rebuilt(msgspec.Struct, frozen=True):
    """How one operator's state came back in a slot."""

    operator: str
    local_bytes: int
    """What was read from local files."""
    durable_bytes: int
    """What was read from durable storage."""
    duration_ms: float
    changed: bool = False
    """Whether the operator's states differ from the checkpoint's: a later checkpoint cannot share its files then."""


class Sealed(msgspec.Struct, frozen=True):
    """A sealed segment: what a batch changed in one subtask. The slot tells its task manager of it."""

    operator: str
    subtask: int
    batch: int
    round: int
    path: str
    size: int
    entries: int


class SnapshotReport(msgspec.Struct, frozen=True):
    """The files of one operator's snapshot, for the task manager that uploads them."""

    operator: str
    files: list[tuple[str, str, int, str, bool]]
    """(name, local path, size, identity, shared)"""
    states: list[dict[str, Any]]
    batch: int
    """The last batch that the state holds."""
    sync_ms: float
    write_ms: float


class SegmentUpload(msgspec.Struct, frozen=True):
    """What became of a sealed segment in the changelog."""

    durable: bool
    file: StateFile | None
    """Where the segment is; None if it is empty or not durable."""
