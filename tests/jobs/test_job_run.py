"""A run as its user holds it: in a `with` statement, in a notebook, and what it tells about itself."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
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

    assert shown.startswith("<JobRun 'visits' running: generation 1, batches 1, rows 3, ")
    assert re.search(r"last checkpoint [12] \(", shown), "the second, if a periodic one was under way already"
    assert "<th>status</th><td>running</td>" in table
