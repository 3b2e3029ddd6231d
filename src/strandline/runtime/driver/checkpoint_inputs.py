"""What a checkpoint records beside the state: the position in the sources, and the sink files that it publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter

from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, SinkFile, SourcePosition
from strandline.runtime.driver.restore.source_logs import SourceLogs


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """The last committed batch."""

    batch: int
    """Its id, which includes the generation."""
    spark_batch: int
    """Its number in Spark's offset log."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one checkpoint records."""

    position: SourcePosition
    batch: int
    """The last batch that it covers."""


class CheckpointInputs:
    """Follows commits, and keeps the inputs of every checkpoint that has begun.

    The caller holds the lock of `Checkpoints`, except for `position`, `store_logs` and `of`: the first two read Spark's
    files, and nobody may wait for a disk with the lock held.
    """

    def __init__(
        self,
        restored: CheckpointMetadata | None,
        capture: Callable[[int], SourcePosition],
        logs: SourceLogs | None = None,
    ) -> None:
        """`capture` reads the position after one of Spark's batches; `logs` makes the logs of file sources durable."""
        self.committed = CommittedBatch(restored.batch_id, restored.source.batch) if restored else None
        """The batch that a checkpoint would cover now; None if nothing was ever committed."""
        self._restored = restored
        self._capture = capture
        self._logs = logs
        self._covered = restored.batch_id if restored else -1
        self._uncovered: list[tuple[int, SinkFile]] = []
        self._inputs: dict[int, Inputs] = {}

    @property
    def batch(self) -> int | None:
        """The id of the last committed batch."""
        return self.committed.batch if self.committed is not None else None

    @property
    def all_covered(self) -> bool:
        """Whether a completed checkpoint covers everything that is committed."""
        return self.committed is None or self._covered >= self.committed.batch

    def add(self, committed: CommittedBatch, files: list[SinkFile]) -> None:
        """A batch was committed; its rows are in `files`, which are staged."""
        self.committed = committed
        self._uncovered += [(committed.batch, file) for file in files]

    def add_staged(self, batch: int, files: Iterable[SinkFile]) -> None:
        """Rows of committed epochs are staged, the last of which is at most `batch`."""
        self._uncovered += [(batch, file) for file in files]

    def sink_files(self, batch: int) -> list[SinkFile]:
        """The staged files up to `batch` that no completed checkpoint covers."""
        # Rows of epochs are staged late, behind those of a drain that follows them.
        return [file for written, file in sorted(self._uncovered, key=itemgetter(0)) if written <= batch]

    def staged_bytes(self) -> dict[str, int]:
        """The size of the staged files that no completed checkpoint covers, by sink."""
        sizes: dict[str, int] = {}
        for _written, file in self._uncovered:
            sizes[file.sink] = sizes.get(file.sink, 0) + file.size
        return sizes

    def position(self, committed: CommittedBatch) -> SourcePosition:
        """The position in the sources after a batch."""
        if self._restored is not None and committed.batch == self._restored.batch_id:
            return self._restored.source  # the offset log of this generation begins after that batch
        return self._capture(committed.spark_batch)

    def store_logs(self, position: SourcePosition, *, whole: bool) -> tuple[SourcePosition, list[FileHandle]]:
        """The position with the logs of file sources, and the files that were uploaded for them.

        `whole` puts the logs into the position itself. See `SourceLogs.store`.
        """
        return (position, []) if self._logs is None else self._logs.store(position, whole=whole)

    def note(self, checkpoint_id: int, inputs: Inputs) -> None:
        """A checkpoint has begun, and will record `inputs`."""
        self._inputs[checkpoint_id] = inputs

    def of(self, checkpoint_id: int) -> Inputs | None:
        """What a checkpoint records; None if it was aborted."""
        return self._inputs.get(checkpoint_id)

    def end(self, checkpoint_id: int) -> None:
        """A checkpoint is complete or aborted."""
        self._inputs.pop(checkpoint_id, None)

    def confirm(self, metadata: CheckpointMetadata) -> None:
        """A checkpoint is complete: it covers everything up to its batch, and later ones refer to its logs."""
        self.cover(metadata.batch_id)
        if self._logs is not None:
            self._logs.confirm(metadata.source)

    def cover(self, batch: int) -> None:
        """A completed checkpoint covers everything up to `batch`."""
        self._covered = batch
        self._uncovered = [(written, file) for written, file in self._uncovered if written > batch]
