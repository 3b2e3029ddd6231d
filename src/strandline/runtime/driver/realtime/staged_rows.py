"""The output rows of epochs, which wait in the driver until a checkpoint publishes them.

Slots do not stage them: that would be a file for each slot and epoch. The epoch log holds a copy, so that the next
takeover can stage them if this driver is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from strandline.checkpoint.metadata import SinkFile
from strandline.sinks.base import Stager

Outputs = Mapping[str, Sequence[tuple[str | None, Stager]]]
"""For every step, the stagers of its outputs; None names the main output."""


@dataclass(frozen=True, slots=True)
class EpochRows:
    """The rows of one output of one subtask in one epoch."""

    batch: int
    operator: str
    output: str | None
    subtask: int
    stream: bytes
    """An Arrow stream."""


class StagedRows:
    """Keeps the rows of committed epochs until they are staged. Safe to use from several threads."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._lock = threading.Lock()
        self._staging = threading.Lock()
        """Held while rows are staged. Taken before `_lock`."""
        self._rows: list[EpochRows] = []
        self._barriers: list[int] = []
        """The epochs after which checkpoints were taken: no file has rows from both sides of one."""
        self.size = 0
        """How many bytes of rows are in memory."""

    def add(self, rows: Iterable[EpochRows]) -> None:
        """Take the rows of a committed epoch."""
        with self._lock:
            for one in rows:
                self._rows.append(one)
                self.size += len(one.stream)

    def barrier(self, batch: int) -> None:
        """A checkpoint is taken after this epoch, and the rows of no later one are here."""
        with self._lock:
            self._barriers.append(batch)

    def stage(self, batch: int) -> list[tuple[int, list[SinkFile]]]:
        """Stage all rows of epochs up to `batch`. Returns what was staged, each with the last epoch that it may hold.

        If staging fails, the rows are still there for another try.
        """
        with self._staging:
            with self._lock:
                bounds = [one for one in self._barriers if one < batch] + [batch]
                groups = [(bound, [one for one in self._rows if one.batch <= bound]) for bound in bounds]
            done: list[tuple[int, list[SinkFile]]] = []
            taken = 0
            for bound, rows in groups:
                if len(rows) > taken:
                    done.append((bound, staged(rows[taken:], self._outputs, bound)))
                    taken = len(rows)
            with self._lock:
                self.size -= sum(len(one.stream) for one in self._rows[:taken])
                self._rows = self._rows[taken:]  # rows are added at the end, in the order of epochs
                self._barriers = [one for one in self._barriers if one > batch]
            return done


def staged(rows: Sequence[EpochRows], outputs: Outputs, batch: int) -> list[SinkFile]:
    """Stage rows for the sinks, as those of one batch: one file for each sink, as a rule."""
    files: list[SinkFile] = []
    for operator, stagers in outputs.items():
        for name, stager in stagers:
            # Rows of a key are those of one subtask, in the order of epochs.
            mine = [one.stream for one in rows if (one.operator, one.output) == (operator, name)]
            if mine:
                files += stager.stage(iter(_batches(mine)), batch, 0)
    return files


def _batches(streams: Sequence[bytes]) -> list[pa.RecordBatch]:
    table = pa.concat_tables(pa.ipc.open_stream(stream).read_all() for stream in streams)
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    return batches
