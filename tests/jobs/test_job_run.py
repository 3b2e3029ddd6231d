"""A run as its user holds it: in a `with` statement, in a notebook, and what it tells about itself."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.checkpoint.batch import batch_id
from strandline.errors import UserCodeError
from tests.jobs.place import Place, Sum, running_sums
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

ROWS: list[list[tuple[str | None, int]]] = [[("a", 1), ("b", 2), ("a", 3)]]


class Raises(Sum):
    """Fails in the first batch."""

    def process(self, key: object, rows: object, context: object) -> None:
        raise ValueError("<b>no</b>\nsecond line")


# --- with ----------------------------------------------------------------------------------------


def test_leaving_a_with_block_stops_the_run_and_every_row_is_visible(place: Place) -> None:
    place.write(ROWS[0])
    with place.sums(checkpoint_interval="1h").start() as run:
        wait_until(lambda: run.figures().batches == 1, what="the first batch")
        assert place.rows() == []
    assert run.status is sl.RunStatus.STOPPED
    assert (run.figures().generation, run.figures().batches, run.figures().rows) == (1, 1, len(ROWS[0]))
    assert place.rows() == running_sums(ROWS)


def test_an_exception_cancels_the_run_keeps_its_checkpoints_and_goes_on(place: Place) -> None:
    place.write(ROWS[0])
    run = place.sums(checkpoint_interval="1h", on_cancel="delete").start()

    def fail_inside() -> None:
        with run:
            run.process_all_available()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert run.status is sl.RunStatus.CANCELLED
    assert place.rows() == running_sums(ROWS)
    (checkpoint,) = run.checkpoints()
    assert checkpoint.path is not None
    assert Path(checkpoint.path).exists()


class NoClock(Sum):
    """Wants a timer in a step without a clock."""

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        context.register_timer(0)
        yield from super().process(key, rows, context)


def test_a_wrong_call_in_user_code_ends_the_run_at_once(place: Place) -> None:
    place.write(ROWS[0])
    run = place.sums(NoClock()).start()
    with pytest.raises(UserCodeError, match="has no clock for timers"):
        run.await_termination(timeout=60)
    assert (run.figures().restarts, run.figures().rounds_repeated) == (0, 0)


def test_an_exit_in_a_sinks_function_fails_the_run_instead_of_hanging_it(place: Place) -> None:
    place.write(ROWS[0])
    job = place.job(restart_strategy="none")
    job.source(place.source()).sink(sl.ForeachBatchSink(lambda _rows, _batch: sys.exit("from the sink")))
    run = job.start()
    with pytest.raises(UserCodeError, match="from the sink"):
        run.await_termination(timeout=60)


def test_a_run_that_fails_in_its_block_raises_its_own_error_once(place: Place) -> None:
    place.write(ROWS[0])
    job = place.sums(Raises(), restart_strategy="none")
    with pytest.raises(UserCodeError) as caught, job.start() as run:
        run.await_termination(timeout=60)
    assert caught.value is run.error
    assert not getattr(caught.value, "__notes__", [])
    assert run.status is sl.RunStatus.FAILED
    assert run.status.ended
    figures = run.figures()
    assert (figures.status, figures.generation, figures.steps["sums"].rows_in) == ("failed", 1, 0)
    assert run.last_progress is None
    # A failed run must not raise where somebody only looks at it.
    assert repr(run).startswith("<JobRun 'visits' failed: generation 1, ")
    assert "error UserCodeError: " in repr(run)
    assert "\n" not in repr(run)
    assert run.processes() == sl.RunProcesses()


# --- facts ---------------------------------------------------------------------------------------


def test_a_run_tells_its_figures_and_processes_as_structs(place: Place) -> None:
    place.write(ROWS[0])
    with place.sums(changelog=True).start() as run:
        run.process_all_available()
        figures, processes = run.figures(), run.processes()
        shown, table = repr(run), run._repr_html_()
    assert isinstance(figures, sl.RunFigures)
    assert (figures.status, figures.generation, figures.parallelism) == ("running", 1, 2)
    assert (figures.batches, figures.rows, figures.restarts) == (1, 3, 0)
    assert figures.state_memory.slot_budget_bytes > 0
    assert figures.changelog is not None
    assert figures.changelog.upload_bytes > 0
    plain = figures.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["status"] == "running"
    assert plain["changelog"]["upload_bytes"] == figures.changelog.upload_bytes
    with pytest.raises(AttributeError, match="immutable"):
        figures.rows = 4  # type: ignore[misc]  # that it is refused is the point

    (manager,) = processes.task_managers
    assert [slot.index for slot in manager.slots] == [0, 1]
    assert all(slot.alive for slot in processes.slots)
    assert processes.pids == (manager.pid, *(slot.pid for slot in processes.slots))
    assert len(set(processes.pids)) == 3
    assert processes.as_dict()["task_managers"][0]["slots"][1]["pid"] == processes.slots[1].pid

    assert (figures.steps["sums"].rows_in, figures.steps["sums"].rows_out, figures.rows_out) == (3, 2, 2)
    # Two rows of a text, which has an offset, and two numbers; and what tells absent values.
    assert 2 * (8 + 8 + 4) <= (figures.steps["sums"].bytes_out or 0) <= 2 * (8 + 8 + 8) + 100
    assert 3 * (8 + 4) <= (figures.steps["sums"].bytes_in or 0) <= 3 * 50 + 300
    assert figures.steps["sums"].estimated_keys >= 2
    assert figures.state_bytes == figures.steps["sums"].state_bytes > 0
    after = run.figures()
    assert (after.status, after.rows, after.rows_per_second) == ("stopped", 3, 0.0)
    assert after.steps["sums"].rows_in == 3
    assert after.state_bytes > 0, "the figures survive the end of the run"
    assert after.changelog is not None

    assert shown.startswith("<JobRun 'visits' running: generation 1, batches 1, rows 3, ")
    assert re.search(r"last checkpoint [12] \(", shown), "the second, if a periodic one was under way already"
    assert "<th>status</th><td>running</td>" in table


class Recorder(sl.RunListener):
    """Notes the names of what it is told, and the progress. One may fail at everything."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[str] = []
        self.progress: list[dict[str, Any]] = []
        self._fails = fails

    def on_started(self, run: sl.JobRun) -> None:
        self._note("started")

    def on_progress(self, run: sl.JobRun, progress: dict[str, Any]) -> None:
        self.progress.append(progress)
        self._note("progress")

    def on_checkpoint(self, run: sl.JobRun, checkpoint: sl.CheckpointStats) -> None:
        self._note(checkpoint.status)

    def on_terminated(self, run: sl.JobRun) -> None:
        self._note(f"terminated {run.status}")

    def _note(self, what: str) -> None:
        self.told.append(what)
        if self._fails:
            raise ValueError(what)


def test_the_figures_of_a_job_with_event_time_two_readers_and_two_sinks(place: Place) -> None:
    """One run for all of it: sources and steps, late rows, watermark, progress, listeners."""
    from pyspark.sql import functions as F

    listener, failing = Recorder(), Recorder(fails=True)
    job = place.job(checkpoint_interval="1h")
    job.add_listener(listener)
    job.add_listener(failing)
    rows = place.source().withColumn("ts", F.timestamp_seconds("x"))
    source = job.source(rows, event_time="ts", watermark_delay="0s")
    seen: list[int] = []
    big = source.transform(lambda frame: frame.filter("x >= 60"))
    big.key_by("user").aggregate(n=sl.count(), uid="big").sink(sl.ParquetSink(str(place.output)))
    source.key_by("user").window(sl.tumbling("1 minute")).aggregate(n=sl.count(), uid="minutes").sink(
        sl.ForeachBatchSink(lambda frame, _batch: seen.append(frame.count()))
    )
    with job.start() as run:
        place.write([("a", 1), ("b", 2), ("a", 100)])
        run.process_all_available()
        place.write([("late", 3), ("b", 200)])
        run.process_all_available()
        figures, last = run.figures(), run.last_progress
    assert figures.rows == 5, "rows of the source, although two steps read it"
    assert [(one.rows, one.offset) for one in figures.sources] == [(5, {"logOffset": 1})]
    big_step, minutes = figures.steps["big"], figures.steps["minutes"]
    assert (big_step.rows_in, big_step.rows_out, big_step.late_rows) == (2, 2, 0)
    assert (minutes.rows_in, minutes.rows_out, minutes.late_rows) == (5, sum(seen), 1)
    assert figures.rows_out == 2 + sum(seen)
    assert figures.late_rows == 1
    assert figures.watermark_ms == minutes.watermark_ms == 200_000
    assert figures.watermark_lag_ms is not None
    assert figures.watermark_lag_ms > 1e12, "the rows are of 1970"
    assert figures.rows_per_second > 0
    assert figures.batch_duration_ms > 0
    assert json.loads(json.dumps(figures.as_dict())) == figures.as_dict()
    assert repr(figures).startswith("<RunFigures running: ")
    assert "\n" not in repr(figures)

    assert last is not None
    assert run.last_progress == last == run.recent_progress[-1]
    assert last["batchId"] == batch_id(1, figures.batches - 1)
    assert sum(one["numInputRows"] for one in run.recent_progress) == 5
    assert len(run.recent_progress) == figures.batches
    assert [one["operatorName"] for one in last["stateOperators"]] == ["big", "minutes"]
    assert last["eventTime"]["watermark"] == "1970-01-01T00:03:20.000Z"
    assert json.loads(json.dumps(last)) == last
    assert run.figures().rows == 5

    assert listener.told[0] == "started"
    assert listener.told[-1] == "terminated stopped"
    assert listener.told.count("progress") == figures.batches
    assert "completed" in listener.told
    assert listener.progress == run.recent_progress
    assert failing.told == listener.told


def test_rows_count_once_also_where_spark_reads_them_once_for_several_steps(place: Place) -> None:
    """Steps with the same key and columns share one reading; another column or a filter makes one more."""
    job = place.job()
    source = job.source(place.source())
    other = job.source(place.source())
    first = source.key_by("user").aggregate(n=sl.count(), uid="first")
    first.sink(sl.ParquetSink(str(place.root / "first")))
    first.key_by("n").aggregate(users=sl.count(), uid="second").sink(sl.ParquetSink(str(place.root / "second")))
    source.key_by("user").aggregate(m=sl.count(), uid="third").sink(sl.ParquetSink(str(place.root / "third")))
    source.key_by("user").aggregate(x=sl.sum("x"), uid="fourth").sink(sl.ParquetSink(str(place.root / "fourth")))
    both = source.union(other).transform(lambda rows: rows.filter("x > 1"))
    both.key_by("user").aggregate(n=sl.count(), uid="fifth").sink(sl.ParquetSink(str(place.root / "fifth")))
    for rows in ([("a", 1), ("b", 2), ("a", 3)], [("c", 4), ("a", 5)]):
        place.write(rows)
    run = job.start(available_now=True)
    assert run.await_termination(timeout=120)
    figures = run.figures()
    assert [source.rows for source in figures.sources] == [5, 5]
    assert figures.rows == sum(report["numInputRows"] for report in run.recent_progress) == 10
    assert figures.steps["fifth"].rows_in == 8
