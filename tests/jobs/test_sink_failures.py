"""Sinks that fail: what may pass goes through the restart strategy, and what cannot pass ends the run at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame

import strandline as sl
from tests.jobs.place import Place

pytestmark = pytest.mark.spark

Function = Callable[[DataFrame, int], None]


def counts(place: Place, function: Function, **options: Any) -> sl.JobRun:
    job = place.job(**options)
    job.source(place.source()).key_by("user").aggregate(n=sl.count()).sink(sl.ForeachBatchSink(function))
    return job.start()


def test_a_database_that_is_down_for_a_while_costs_restarts_and_no_rows(place: Place) -> None:
    calls: list[int] = []
    table: dict[str, int] = {}

    def write(rows: DataFrame, batch: int) -> None:
        calls.append(batch)
        if len(calls) <= 2:
            raise ConnectionError("database down")
        table.update({row.user: row.n for row in rows.collect()})

    place.write([("a", 1), ("b", 2), ("a", 3)])
    with counts(place, write, restart_attempts=2, restart_strategy="fixed-delay") as run:
        run.process_all_available()
        assert table == {"a": 2, "b": 1}
        assert (run.figures().restarts, run.figures().rounds_repeated) == (2, 0)
        assert len(calls) == 3


def test_a_database_that_stays_down_ends_the_run_after_its_restarts(place: Place) -> None:
    def write(_rows: DataFrame, _batch: int) -> None:
        raise ConnectionError("database down")

    place.write([("a", 1)])
    run = counts(place, write, restart_attempts=1, restart_strategy="fixed-delay")
    with pytest.raises(sl.SinkError, match=r"(?s)raised ConnectionError: database down\n.*in write\n"):
        run.await_termination(timeout=60)
    assert run.figures().restarts == 1


def sends(_rows: Any) -> None:
    raise AssertionError("a partition is never sent")


def test_an_assertion_of_the_user_ends_the_run_at_once_also_inside_a_task(place: Place) -> None:
    def write(rows: DataFrame, _batch: int) -> None:
        assert rows.isEmpty(), "there were rows"

    place.write([("a", 1)])
    run = counts(place, write)
    with pytest.raises(sl.UserCodeError, match=r"(?s)raised AssertionError: there were rows; .*in write\n"):
        run.await_termination(timeout=60)
    assert (run.figures().restarts, run.figures().rounds_repeated) == (0, 0)

    run = counts(place, lambda rows, _batch: rows.foreachPartition(sends))
    with pytest.raises(sl.UserCodeError, match=r"(?s)in a Spark task raised AssertionError.*a partition is never"):
        run.await_termination(timeout=60)
    assert (run.figures().restarts, run.figures().rounds_repeated) == (0, 0)


def test_a_function_that_raises_no_exception_but_more_than_that_ends_the_run(place: Place) -> None:
    def write(_rows: DataFrame, _batch: int) -> None:
        pytest.fail("wrong rows")

    place.write([("a", 1)])
    run = counts(place, write)
    with pytest.raises(sl.UserCodeError, match=r"raised Failed: wrong rows; a restart would raise it again"):
        run.await_termination(timeout=60)


def test_a_parquet_sink_that_may_not_write_any_more_ends_the_run_at_once(place: Place) -> None:
    place.write([("a", 1)])
    run = place.sums().start()
    run.process_all_available()
    folder = place.output / "_strandline"
    shutil.rmtree(folder)
    folder.touch()
    place.write([("a", 2)])
    with pytest.raises(sl.StorageRefusedError, match=r"cannot create the folder .*_strandline is not a folder"):
        run.await_termination(timeout=60)
    assert (run.figures().restarts, run.figures().rounds_repeated) == (0, 0)
