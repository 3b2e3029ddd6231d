"""What a subtask counts: the time in which it works, and its rows per key group."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pyarrow as pa

from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.runtime.protocol.slot_calls import RowCounts
from strandline.runtime.slot.row_counts import CommittedRows, CountedRows
from strandline.runtime.slot.work_clock import WorkClock


def test_time_in_which_two_threads_work_counts_once() -> None:
    clock, began = WorkClock(), time.monotonic_ns()
    both = threading.Barrier(2)

    def work() -> None:
        with clock.running():
            both.wait(10)
            time.sleep(0.05)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 50_000_000 <= clock.total_ns() <= time.monotonic_ns() - began


def test_work_that_goes_on_counts_already_and_time_between_does_not() -> None:
    clock = WorkClock()
    assert clock.total_ns() == 0
    clock.begin()
    first = clock.total_ns()
    assert clock.total_ns() >= first
    clock.end()
    done = clock.total_ns()
    time.sleep(0.01)
    assert clock.total_ns() == done


def batch(groups: list[int]) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(groups), KEY_GROUP_COLUMN: pa.array(groups, pa.int32())})


def test_rows_are_counted_per_key_group_and_waiting_for_them_is_no_work() -> None:
    clock, began = WorkClock(), time.monotonic_ns()

    batches = [batch([4, 4, 7]), batch([]), batch([5, 9, 9]).slice(0, 1)]

    def slow() -> Iterator[pa.RecordBatch]:
        time.sleep(0.05)
        yield from batches

    with clock.running():
        counted = CountedRows(slow(), range(4, 8), clock)
        assert sum(one.num_rows for one in counted) == 4
    assert (counted.rows, counted.of_groups.tolist()) == (4, [2, 1, 0, 1])
    assert counted.bytes == sum(one.nbytes for one in batches)
    assert clock.total_ns() <= time.monotonic_ns() - began - 50_000_000
    rows = CommittedRows(range(4, 8))
    for _ in range(2):
        rows.add(RowCounts(4, 2, 1, 100, 50), counted.of_groups)
    assert (rows.counts, rows.of_groups.tolist()) == (RowCounts(8, 4, 2, 200, 100), [4, 2, 0, 2])
    assert rows.counts.minus(RowCounts(4, 2, 1, 100, 50)) == RowCounts(4, 2, 1, 100, 50)
    assert sum(rows.of_groups) == rows.counts.rows_in
