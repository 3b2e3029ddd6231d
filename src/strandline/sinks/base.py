"""The contract of a sink: rows are staged while a batch runs, and published with the checkpoint that covers them.

A sink has three parts, one for each place where it works:

- `ExactlyOnceSink` is what the user writes into the job. It is a value, and contacts nobody.
- `Stager` puts rows aside. It runs in slots, or in Spark's tasks. Nobody sees the rows yet.
- `SinkTarget` makes them visible. It runs in the driver.

`strandline.sinks.marked` has a target for everything that can do one atomic write with a marker in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from strandline.checkpoint.job_log import JobLog
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.storage.retries import Retries

SinkT = TypeVar("SinkT", bound="ExactlyOnceSink")


class Sink(ABC):  # noqa: B024 - `Stream.sink` takes two kinds of sinks that have nothing in common
    """Any sink that `Stream.sink` takes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink is told of its job, and of the stream whose rows it gets."""

    job: str
    schema: pa.Schema
    """The columns of the stream."""
    checkpoint_dir: str
    """The folder of the job's checkpoints, as a URL or an absolute path. Rows of some sinks wait there."""
    keys: tuple[str, ...] = ()
    """The columns by which the rows of one key come from one subtask, in the order in which the step emitted them.
    Empty if the rows do not come straight from a step."""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


class ExactlyOnceSink(Sink):
    """A sink whose rows become visible once, with the checkpoint that covers them."""

    __slots__ = ()

    @property
    @abstractmethod
    def place(self) -> str:
        """Names the target in checkpoints, in errors and on the page, without passwords. No two sinks of a job may
        have the same place, and a sink keeps its place for as long as its job lives."""

    @property
    def added_columns(self) -> tuple[str, ...]:
        """The columns that the target gets and the stream has not."""
        return ()

    def bound(self: SinkT, context: SinkContext) -> SinkT:
        """This sink for the rows of a stream. Contacts nobody.

        Raises `JobDefinitionError` or `ConfigError` if it cannot take them.
        """
        return self

    @abstractmethod
    def stager(self, context: SinkContext) -> Stager:
        """The part that runs in slots, or in Spark's tasks."""

    @abstractmethod
    def target(self, context: SinkContext) -> SinkTarget:
        """The part that runs in the driver. Contacts nobody yet."""


class Stager(ABC):
    """Puts rows aside in a slot, or in a Spark task. It is pickled and sent there, so it holds no connection."""

    @abstractmethod
    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        """Write the rows of one subtask, or of one task, somewhere, and name what was written.

        `batch` is the id of the micro-batch, and `partition` the number of the subtask or task in it. The names must be
        new: the same rows may be staged several times, and only what one of the attempts named counts. What is named
        must be durable.
        """


@dataclass(frozen=True, slots=True)
class SinkStart:
    """What a target is told before a driver takes the job over."""

    restored: CheckpointMetadata | None
    """The checkpoint from which the job would go on; None if it would begin anew."""
    log: JobLog
    """The job's log before the takeover."""
    retries: Retries
    takes_sinks: bool = False
    """Whether the user named the checkpoint, so that the target may be taken over from another log of the job."""
    repeat_rows: bool = False
    """Whether the user accepts that rows are written a second time which the target cannot take back."""
    reached: bool = False
    """Whether the run has worked with the target before, in an earlier generation. What the target refuses now, such as
    a password that is being changed, may pass then."""


@dataclass(frozen=True, slots=True)
class SinkTakeover:
    """What a target is told when a driver has taken the job over."""

    restored: CheckpointMetadata | None
    """The checkpoint from which the job goes on; None if it begins anew."""
    log: JobLog
    """The job's log after the takeover."""
    check_not_fenced: Callable[[], None]
    """Raises `FencedError` if another driver has taken the job, or the target, over meanwhile."""
    retries: Retries
    named: tuple[SinkFile, ...] = ()
    """Rows that later checkpoints name, if the job went back behind them."""


@dataclass(frozen=True, slots=True)
class SinkCommit:
    """The rows that a completed checkpoint covers."""

    checkpoint: int
    batch: int
    """The last batch that the checkpoint covers."""
    files: tuple[SinkFile, ...]
    """The staged rows of this target since the checkpoint before, and perhaps some that it has already."""
    log: JobLog


class SinkTarget(ABC):
    """The target of one sink, as the driver sees it.

    A generation calls `check` before it takes the job over, then `claim` and `recover`, and then `publish` for every
    completed checkpoint, one after the other. Every call may be repeated after an error. Errors that may pass are
    `StorageError` and `SinkError`.
    """

    place: str
    """As in `ExactlyOnceSink`."""

    @property
    @abstractmethod
    def can_go_back(self) -> bool:
        """Whether the job may go on from an older checkpoint by itself: the target takes later rows back, or comes to
        the same content when they arrive again."""

    @property
    def position(self) -> int | None:
        """The last batch whose rows the target has, as far as the target keeps one and the driver has seen it."""
        return None

    @abstractmethod
    def check(self, start: SinkStart) -> int:
        """Raise an error unless the job may write into the target and can go on from `start.restored`.

        Changes nothing. Returns the newest generation of the job that the target knows; 0 if it knows none.
        """

    @abstractmethod
    def claim(self, log: JobLog) -> None:
        """Keep every earlier driver of the job out of the target. `log` is the job's log after the takeover."""

    @abstractmethod
    def recover(self, takeover: SinkTakeover) -> None:
        """Publish what the restored checkpoint covers, and delete what is staged and belongs to no checkpoint."""

    @abstractmethod
    def publish(self, commit: SinkCommit) -> None:
        """Make rows visible. Does nothing if the target has them.

        The checkpoint is complete, so this has to happen: now, or in `recover` of the next generation. Raises
        `FencedError` if another driver has claimed the target.
        """

    @abstractmethod
    def check_still_ours(self, log: JobLog) -> None:
        """Raise `FencedError` if another log of the job, or another job, has claimed the target."""

    def close(self) -> None:  # noqa: B027 - most targets keep nothing open
        """Let go of connections. The target may be used again afterwards."""
