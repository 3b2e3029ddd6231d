"""Whole jobs on Spark while a process is frozen: the job goes on, its output is exact, and it can be cancelled."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import psutil
import pytest
from pyspark.sql import DataFrame

import strandline as sl
from strandline.errors import JobFailedError
from strandline.runtime.protocol.coordinator_calls import CoordinatorClient, Heartbeat
from strandline.runtime.protocol.failures import Failure
from tests.jobs.kills import manager_pids, slot_pid, slot_pids
from tests.jobs.place import Batch, Place, Sum, batches, running_sums
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.faults]

TIMEOUT = "2s"


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def all_gone(pids: list[int]) -> bool:
    return all(map(gone, pids))


def one_slot(run: sl.JobRun) -> list[int]:
    return [slot_pid(run, 0)]


def task_managers_and_slots(run: sl.JobRun) -> list[int]:
    return [*manager_pids(run), *slot_pids(run)]


def python_workers(_run: sl.JobRun) -> list[int]:
    """All of them: whichever gets the next relay is frozen."""
    found: list[int] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process ends just now
            if all("pyspark.daemon" in one.cmdline() for one in (process, process.parent() or process)):
                found.append(process.pid)
    return found


def freeze(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def in_a_batch(run: sl.JobRun) -> bool:
    generation = run._run._generations.current
    return generation is not None and generation.batches.busy.locked()


class TestFrozen:
    """One run after the other: each test has a job of its own in one session."""

    @pytest.mark.parametrize("changelog", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_a_job_goes_on_whoever_is_frozen(self, place: Place, runs: list[sl.JobRun], changelog: bool) -> None:
        run = place.sums(heartbeat_timeout=TIMEOUT, changelog=changelog).start()
        runs.append(run)
        given: list[Batch] = []

        def go_on(batch: Batch) -> None:
            given.append(batch)
            place.write(batch)
            run.process_all_available()
            assert place.rows() == running_sums(given)

        victims: list[Callable[[sl.JobRun], list[int]]] = [one_slot, manager_pids, python_workers]
        first, *others = batches(5 if changelog else 4)
        go_on(first)
        for who, batch in zip([*victims, task_managers_and_slots] if changelog else victims, others, strict=True):
            frozen = who(run)
            freeze(frozen)
            go_on(batch)
            wait_until(partial(all_gone, frozen), what="the end of the frozen processes")
        assert run.figures().restarts == 0
        run.stop()
        assert place.rows() == running_sums(given)

    @pytest.mark.parametrize(
        "who",
        [
            one_slot,
            pytest.param(manager_pids, marks=pytest.mark.slow),
            pytest.param(python_workers, marks=pytest.mark.slow),
            task_managers_and_slots,
        ],
    )
    def test_a_run_can_be_cancelled_whoever_is_frozen(
        self, place: Place, runs: list[sl.JobRun], who: Callable[[sl.JobRun], list[int]]
    ) -> None:
        """The heartbeat timeout is long: nobody helps."""
        run = place.sums(heartbeat_timeout="10min").start()
        runs.append(run)
        first, second = batches(2)
        place.write(first)
        run.process_all_available()
        pids = task_managers_and_slots(run)
        frozen = who(run)
        freeze(frozen)
        place.write(second)
        wait_until(lambda: in_a_batch(run), what="a batch that waits")
        began = time.monotonic()
        run.cancel()
        assert time.monotonic() - began < 10
        wait_until(partial(all_gone, pids), what="the end of all processes")
        if who is python_workers:
            for pid in frozen:
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)
        again = place.sums().start()
        runs.append(again)
        again.process_all_available()
        assert place.rows() == running_sums([first, second])
        again.stop()

    def test_a_run_can_be_cancelled_while_it_is_being_stopped(self, place: Place, runs: list[sl.JobRun]) -> None:
        """The stop waits for a batch that does not end."""
        entered, over = threading.Event(), threading.Event()

        def never_ends(_rows: DataFrame, _batch: int) -> None:
            entered.set()
            over.wait()

        job = place.job()
        job.source(place.source()).key_by("user").process(Sum(), place.OUTPUT, uid="sums").sink(
            sl.ForeachBatchSink(never_ends)
        )
        run = job.start()
        runs.append(run)
        place.write(batches(1)[0])
        assert entered.wait(60)
        with ThreadPoolExecutor(1) as pool:
            stop = pool.submit(run.stop)
            wait_until(run._run._ending.locked, what="the stop")
            pids = task_managers_and_slots(run)
            run.cancel()
            assert run.status == "cancelled"
            assert isinstance(stop.exception(10), JobFailedError)
            over.set()
        wait_until(partial(all_gone, pids), what="the end of all processes")

    def test_a_thread_that_dies_takes_the_run_through_its_restart_strategy(
        self, place: Place, runs: list[sl.JobRun]
    ) -> None:
        run = place.sums(restart_delay="10ms").start()
        runs.append(run)
        first, second = batches(2)
        place.write(first)
        run.process_all_available()
        (manager,) = run.processes().task_managers
        cluster = run._run._generations.cluster
        assert cluster is not None
        info = cluster.run
        driver = CoordinatorClient(info.coordinator, info.secret, info.run_id, lambda: 1)
        driver.heartbeat(Heartbeat(manager.id, [], Failure("StrandlineError", "the background thread upkeep has died")))
        driver.close()
        wait_until(lambda: run.figures().restarts == 1, what="the restart")
        place.write(second)
        run.process_all_available()
        assert place.rows() == running_sums([first, second])
        assert any("upkeep has died" in recovery.reason for recovery in run.recoveries())
        assert gone(manager.pid)
        run.stop()
