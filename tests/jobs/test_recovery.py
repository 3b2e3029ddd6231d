"""Processes die while a job runs; its results do not show it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import strandline as sl
from strandline.errors import FencedError, SchemaError, StrandlineError, UserCodeError
from tests.jobs.kills import Slow, kill_now_and_then, manager_pids, slot_pids
from tests.jobs.place import Place, Sum, batches, running_sums
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.faults]


def python_workers(_run: sl.JobRun) -> list[int]:
    """Spark's Python workers: children of PySpark's daemon, which is a child of the JVM."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if parent and all("pyspark.daemon" in " ".join(one.cmdline()) for one in (process, parent)):
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("victims", "seed"),
    [
        pytest.param(slot_pids, 1, marks=pytest.mark.slow),
        (slot_pids, 2),
        pytest.param(manager_pids, 3, marks=pytest.mark.slow),  # with the changelog in every run: test_changelog.py
        pytest.param(python_workers, 4, marks=pytest.mark.slow),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_killed_processes_are_replaced_without_restarting_the_query(
    place: Place, runs: list[sl.JobRun], victims: Callable[[sl.JobRun], list[int]], seed: int
) -> None:
    data = batches(14, seed=seed)
    for batch in data[:3]:
        place.write(batch)
    run = place.sums(Slow(), restart_strategy="none").start()
    runs.append(run)
    wait_until(lambda: run.figures().batches >= 1, what="the first batch")

    def feed() -> None:
        for batch in data[3:]:
            place.write(batch)
            time.sleep(0.25)  # so that kills meet running batches and idle times

    feeder = threading.Thread(target=feed)
    feeder.start()
    kill_now_and_then(run, victims, times=4, seed=seed)
    feeder.join()
    run.process_all_available()
    figures = run.figures()
    run.stop()
    assert figures.restarts == 0
    assert figures.generation == 1
    if victims is not python_workers:
        assert figures.replaced_slots >= 1  # not 4: one may be killed again while it is being replaced
    assert place.rows() == running_sums(data)


class Recoveries(sl.RunListener):
    """Notes recoveries."""

    def __init__(self) -> None:
        self.told: list[sl.Recovery] = []

    def on_recovery(self, run: sl.JobRun, recovery: sl.Recovery) -> None:
        self.told.append(recovery)


def test_a_slot_that_dies_while_the_source_is_idle_is_replaced(place: Place, runs: list[sl.JobRun]) -> None:
    data = batches(2)
    place.write(data[0])
    run = place.sums().start()
    runs.append(run)
    listener = Recoveries()
    run.add_listener(listener)
    run.process_all_available()
    victim = slot_pids(run)[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(pids := slot_pids(run)) == 2 and victim not in pids, what="the replacement")
    place.write(data[1])
    run.process_all_available()
    figures = run.figures()
    assert figures.rounds_repeated == 0
    assert figures.rows == figures.steps["sums"].rows_in == 600, "also those of the slot that was lost"
    (recovery,) = run.recoveries()
    assert re.fullmatch(rf"slot \d: its process {victim} was killed by SIGKILL", recovery.reason)
    assert repr(recovery).startswith("<Recovery 2")
    assert recovery.reason in repr(recovery)
    assert listener.told == [recovery]
    assert place.rows() == running_sums(data)


def test_a_slot_whose_local_files_are_gone_restarts_the_run_from_its_checkpoint(
    place: Place, runs: list[sl.JobRun]
) -> None:
    data = batches(4)
    local = place.root / "local"
    place.write(data[0])
    run = place.sums(local_dir=str(local), checkpoint_interval="1h").start()
    runs.append(run)
    run.process_all_available()
    place.write(data[1])
    wait_until(lambda: run.figures().batches == 2, what="a batch that no checkpoint covers")
    folder = next(local.glob("strandline-*/visits/*/gen-1/slot-0"))
    victim = run.processes().slots[0].pid
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else None
    os.kill(victim, signal.SIGKILL)
    place.write(data[2])
    wait_until(lambda: run.figures().generation == 2, what="the restart")
    place.write(data[3])
    run.process_all_available()
    assert run.figures().restarts == 1
    assert run.figures().rows == 1200, "the batch that was computed again counts once"
    assert place.rows() == running_sums(data)


def test_a_second_start_takes_over_and_the_first_stops_with_an_error_that_says_why(
    place: Place, runs: list[sl.JobRun]
) -> None:
    data = batches(4)
    place.write(data[0])
    first = place.sums().start()
    runs.append(first)
    first.process_all_available()
    second = place.sums().start()
    runs.append(second)
    place.write(data[1])
    with pytest.raises(FencedError, match="took the job over as generation 2"):
        first.await_termination(timeout=30)
    assert first.status == "failed"
    place.write(data[2])
    second.process_all_available()
    second.stop()
    third = place.sums().start()
    runs.append(third)
    place.write(data[3])
    third.process_all_available()
    assert place.rows() == running_sums(data)


@pytest.mark.slow
def test_an_idle_first_run_learns_that_it_was_taken_over(place: Place, runs: list[sl.JobRun]) -> None:
    place.write(batches(1)[0])
    first = place.sums().start()
    runs.append(first)
    first.process_all_available()
    second = place.sums().start()
    runs.append(second)
    with pytest.raises(FencedError):
        first.await_termination(timeout=30)
    second.stop()


class Raises(Sum):
    def process(self, key: Any, rows: Any, context: Any) -> Any:
        for row in rows:
            if row.x < 0:
                raise ValueError(f"negative: {row.x}")
        yield (*key, 1, 1)


class WrongRow(Sum):
    def process(self, key: Any, rows: Any, context: Any) -> Any:
        yield (*key, "many", 1)


BROKEN: list[tuple[sl.KeyedProcessor, type[StrandlineError], list[str]]] = [
    (Raises(), UserCodeError, ["ValueError: negative: -1", "sums", "'bad'"]),
    (WrongRow(), SchemaError, ["sums", "'many'", "n"]),
]


def test_errors_of_user_code_say_what_and_where_and_the_checkpoint_stays_usable(
    place: Place, runs: list[sl.JobRun]
) -> None:
    good = batches(2)
    place.write(good[0])
    run = place.sums().start()
    runs.append(run)
    run.process_all_available()
    run.stop()
    place.write([("bad", -1)])
    for processor, error, words in BROKEN:
        broken = place.sums(processor).start()
        runs.append(broken)
        with pytest.raises(error) as caught:
            broken.await_termination(timeout=60)
        for word in words:
            assert word in str(caught.value)
        assert broken.status == "failed"
        assert broken.processes() == sl.RunProcesses()
        assert place.rows() == running_sums(good[:1])
    mended = place.sums().start()
    runs.append(mended)
    place.write(good[1])
    mended.process_all_available()
    assert place.rows() == running_sums([good[0], [("bad", -1)], good[1]])


def test_a_checkpoint_folder_that_cannot_be_made_any_more_ends_the_run(place: Place, runs: list[sl.JobRun]) -> None:
    data = batches(2)
    place.write(data[0])
    run = place.sums(restart_attempts=2, restart_strategy="fixed-delay").start()
    runs.append(run)
    run.process_all_available()
    folder = place.checkpoints / "visits"
    aside = place.checkpoints / "aside"
    folder.rename(aside)
    folder.write_text("in the way")
    place.write(data[1])
    with pytest.raises(StrandlineError):
        run.await_termination(timeout=60)
    folder.unlink()
    aside.rename(folder)
    again = place.sums().start()
    runs.append(again)
    again.process_all_available()
    assert place.rows() == running_sums(data)


def test_task_managers_end_when_their_driver_is_killed(place: Place, tmp_path: Path) -> None:
    """See test_driver_kills for what the results look like; here only: nobody is left behind."""
    from tests.jobs.driver import Driver

    place.write(batches(1)[0])
    with Driver(place.root) as driver:
        driver.start()
        pids = wait_until(driver.pids, seconds=60, what="the processes of the run")
        driver.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of all processes")
