"""A function in the driver sees every row as soon as it is computed, at least once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from tests.jobs.place import Place

pytestmark = pytest.mark.spark

Function = Callable[[pa.Table, int], None]


class Seen:
    """What a callback has seen; it fails at some of its calls."""

    def __init__(self, *fails_at: int) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.batches: list[int] = []
        self._fails_at = fails_at

    def __call__(self, rows: pa.Table, batch: int) -> None:
        self.batches.append(batch)
        self.rows += [tuple(row.values()) for row in rows.to_pylist()]
        if len(self.batches) in self._fails_at:
            raise ConnectionError("nobody listens")


def sums(place: Place, **options: Any) -> tuple[sl.Job, sl.Stream]:
    job = place.job(**options)
    return job, job.source(place.source()).key_by("user").process(place.processor(), place.OUTPUT, uid="sums")


def test_rows_are_seen_without_a_checkpoint_and_beside_other_sinks(place: Place, runs: list[sl.JobRun]) -> None:
    first, second = Seen(), Seen()
    refused: list[str] = []

    def wait_for_itself(_rows: pa.Table, _batch: int) -> None:
        calls = (run.stop, run.process_all_available, run.trigger_checkpoint, run.savepoint, run.cancel)
        for call in (*calls, lambda: run.rescale(1)):
            with pytest.raises(sl.StrandlineError, match="was called by the function of a sink") as raised:
                call()
            refused.extend(re.findall(r"^job 'visits': (\w+)\(\)", str(raised.value)))

    job, stream = sums(place, shuffle="direct", checkpoint_interval="1h")
    stream.sink(sl.CallbackSink(first)).sink(sl.CallbackSink(second)).sink(sl.ParquetSink(str(place.output)))
    stream.sink(sl.CallbackSink(wait_for_itself))
    runs.append(run := job.start())
    place.write([("a", 1), ("b", 2), ("a", 3)])
    place.write([("a", 5)])
    run.process_all_available()
    assert sorted(first.rows[:2]) == [("a", 2, 4), ("b", 1, 2)]
    assert first.rows[2:] == [("a", 3, 9)]
    assert second.rows == first.rows
    assert len(first.batches) == 2, "a batch without rows is no reason for a call"
    waiting = ["stop", "process_all_available", "trigger_checkpoint", "savepoint", "cancel", "rescale"]
    assert refused == waiting * 2
    assert run.figures().rows_out == 6, "three for the callbacks, three for the files"


def test_rows_that_come_through_spark_are_the_same(place: Place, runs: list[sl.JobRun]) -> None:
    seen = Seen()
    job, stream = sums(place)
    rare = stream.transform(lambda df: df.filter("s < 9").selectExpr("user", "s", "timestamp '2026-01-01' as t"))
    rare.sink(sl.CallbackSink(seen))
    runs.append(run := job.start())
    place.write([("a", 1), ("a", 3)])
    place.write([("a", 100)])  # of which nothing is left for the function
    run.process_all_available()
    assert run.figures().restarts == 0
    ((user, s, t),) = seen.rows
    assert (user, s, str(t.tzinfo)) == ("a", 4, "UTC")


@pytest.mark.parametrize("shuffle", ["direct", "spark"])
def test_a_function_that_fails_sees_its_rows_again(place: Place, shuffle: str) -> None:
    seen = Seen(1, 2)
    job, stream = sums(place, shuffle=shuffle, restart_strategy="fixed-delay", restart_attempts=2)
    stream.sink(sl.CallbackSink(seen))
    place.write([("a", 1), ("b", 2)])
    with job.start() as run:
        run.process_all_available()
        assert run.figures().restarts == 2
        assert sorted(seen.rows) == sorted([("a", 1, 1), ("b", 1, 2)] * 3)
        assert len(set(seen.batches)) == 3, "a batch id is never used again"


def test_rows_of_which_the_function_was_not_told_come_again_after_a_crash(place: Place) -> None:
    """A checkpoint never covers rows that the function has not returned for."""
    place.write([("a", 1)])

    def fails(_rows: pa.Table, _batch: int) -> None:
        raise ConnectionError("nobody listens")

    job, stream = sums(place, shuffle="direct", restart_strategy="none", checkpoint_every_batch=True)
    stream.sink(sl.CallbackSink(fails))
    with pytest.raises(sl.SinkError, match=r"the function of a sink raised ConnectionError: nobody listens"):
        job.start().await_termination(timeout=60)
    seen = Seen()
    job, stream = sums(place, shuffle="direct")
    stream.sink(sl.CallbackSink(seen))
    with job.start() as run:
        run.process_all_available()
    assert seen.rows == [("a", 1, 1)]


def test_an_error_in_the_code_of_the_function_ends_the_run(place: Place) -> None:
    job, stream = sums(place, shuffle="direct")
    stream.sink(sl.CallbackSink(lambda rows, _batch: rows["no such column"]))
    place.write([("a", 1)])
    with pytest.raises(sl.UserCodeError, match=r"the function of a sink raised KeyError"):
        job.start().await_termination(timeout=60)


def test_side_rows_go_to_a_callback_of_their_own(place: Place, runs: list[sl.JobRun]) -> None:
    main, late = Seen(), Seen()
    job = place.job(shuffle="direct")
    rows = job.source(
        place.source().selectExpr("user", "timestamp_seconds(x) ts"), event_time="ts", watermark_delay="0s"
    )
    windows = rows.key_by("user").window(sl.tumbling("1m"), late="late").aggregate(n=sl.count(), uid="windows")
    windows.sink(sl.CallbackSink(main))
    windows.side("late").sink(sl.CallbackSink(late))
    runs.append(run := job.start())
    place.write([("a", 10), ("a", 20)])
    place.write([("b", 100)])
    run.process_all_available()
    place.write([("c", 1)])
    run.process_all_available()
    assert [(row[0], row[-1]) for row in main.rows] == [("a", 2)]
    assert [row[0] for row in late.rows] == ["c"]
