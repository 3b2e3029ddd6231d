"""Output rows of epochs between the driver's memory and the sinks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint.epochs import Rows
from strandline.checkpoint.metadata import SinkFile
from strandline.errors import StorageError
from strandline.runtime.driver.realtime.staged_rows import StagedRows
from strandline.sinks.base import Stager
from strandline.storage.retries import Retries


@dataclass
class Kept(Stager):
    """Keeps the rows that are staged in memory, and refuses as often as it is told to."""

    staged: list[tuple[int, list[int]]] = field(default_factory=list)
    refuses: int = 0

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        if self.refuses:
            self.refuses -= 1
            raise StorageError("not now")
        rows = [row for some in batches for row in some.column("x").to_pylist()]
        self.staged.append((batch, rows))
        yield SinkFile("place", f"staged-{len(self.staged)}", "final", len(rows), 8 * len(rows))


def row(batch: int, x: int, subtask: int = 0, output: str | None = None) -> Rows:
    sink = pa.BufferOutputStream()
    table = pa.table({"x": [x]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return "step", output, subtask, batch, sink.getvalue().to_pybytes()


class Noted(StagedRows):
    """Rows of the main output of a step, and what was noted of them: how many rows, and up to which epoch."""

    def __init__(self, stager: Stager) -> None:
        self.noted: list[tuple[int, int]] = []
        super().__init__("job", {"step": [(None, stager)]}, Retries(tries=2, first_pause=0.001), self._noted)

    def _noted(self, batch: int, files: list[SinkFile]) -> None:
        self.noted += [(batch, file.rows) for file in files]


def test_the_rows_of_all_subtasks_up_to_a_checkpoint_are_one_file() -> None:
    kept = Kept()
    rows = Noted(kept)
    rows.add([row(1, 10), row(1, 11, subtask=1)])
    rows.add([row(2, 20)])
    rows.add([row(3, 30)])
    rows.stage(2)
    assert rows.noted == [(2, 3)]
    assert kept.staged == [(2, [10, 11, 20])]
    assert rows.size > 0, "the rows of epoch 3 wait for the next checkpoint"
    rows.stage(3)
    rows.stage(3)
    assert (rows.noted, rows.size) == ([(2, 3), (3, 1)], 0)


def test_rows_of_an_output_without_a_sink_are_not_staged() -> None:
    kept = Kept()
    rows = Noted(kept)
    rows.add([row(1, 10, output="late")])
    rows.stage(1)
    assert (kept.staged, rows.noted, rows.size) == ([], [], 0)


def test_rows_that_could_not_be_staged_are_there_for_the_next_try() -> None:
    kept = Kept(refuses=100)
    rows = Noted(kept)
    rows.add([row(1, 10)])
    with pytest.raises(StorageError, match="not now"):
        rows.stage(1)
    kept.refuses = 0
    rows.stage(1)
    assert kept.staged == [(1, [10])]


@given(st.lists(st.sampled_from(["epoch", "barrier", "early", "checkpoint"]), max_size=30))
def test_every_checkpoint_gets_the_rows_before_its_barrier_and_no_others(acts: list[str]) -> None:
    """Rows may be staged early, beyond barriers of checkpoints that have not completed."""
    kept = Kept()
    rows = Noted(kept)
    epoch = 0
    barriers: list[int] = []
    covered = 0
    for act in acts:
        match act:
            case "epoch":
                epoch += 1
                rows.add([row(epoch, epoch)])
            case "barrier":
                rows.barrier(epoch)
                barriers.append(epoch)
            case "early":
                rows.stage(epoch)
            case "checkpoint" if barriers:
                until = barriers.pop(0)
                rows.stage(until)
                covered += sum(count for batch, count in rows.noted if batch <= until)
                rows.noted = [(batch, count) for batch, count in rows.noted if batch > until]
                assert covered == until, "one row for every epoch"
    rows.stage(epoch)
    assert covered + sum(count for _batch, count in rows.noted) == epoch
    assert sorted(x for _batch, some in kept.staged for x in some) == list(range(1, epoch + 1))
