"""The relay splits rows by subtask: every row goes to its slot once, and rows keep their order."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from strandline.operators.base import SUBTASK_COLUMN
from strandline.operators.combining import Combined, Combiner, Combining
from strandline.runtime.delivery.deliveries import by_subtask
from strandline.runtime.task.direct_relay import GATHERED_BYTES, combined


@given(st.lists(st.integers(0, 4), max_size=40))
def test_rows_are_split_by_subtask(subtasks: list[int]) -> None:
    batch = pa.record_batch({"x": pa.array(range(len(subtasks))), SUBTASK_COLUMN: pa.array(subtasks, pa.int32())})
    parts = list(by_subtask(batch))
    assert [subtask for subtask, _rows in parts] == sorted(set(subtasks))
    for subtask, rows in parts:
        assert rows.schema.names == ["x"]
        assert rows.column("x").to_pylist() == [at for at, one in enumerate(subtasks) if one == subtask]


class Largest(Combiner):
    """Leaves one row of a table, and remembers how large the largest table was."""

    def __init__(self) -> None:
        self.most = 0

    def combine(self, rows: pa.Table, late_watermark_ms: int | None) -> Combined:
        self.most = max(self.most, rows.nbytes)
        return Combined(rows.slice(0, 1), None)


def test_large_rows_are_combined_before_they_fill_the_memory_of_a_worker() -> None:
    batch = pa.record_batch({"x": pa.array(["x" * (1 << 20)] * 16)})

    def rows() -> Iterator[pa.RecordBatch]:
        for _ in range(20):
            yield batch

    combiner = Largest()
    left = sum(one.num_rows for one in combined(rows(), Combining(combiner, None)))
    assert GATHERED_BYTES <= combiner.most < GATHERED_BYTES + batch.nbytes
    assert left < 20 * batch.num_rows
