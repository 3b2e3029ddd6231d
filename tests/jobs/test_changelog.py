"""Jobs with the changelog: lost hosts cost only their own subtasks, and results never show what happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.admin.verification import Verification
from strandline.checkpoint.metadata import all_files
from strandline.storage.local import LocalStorage
from tests.jobs.driver import Driver
from tests.jobs.durable import check_storage, chk, files_of, metadata
from tests.jobs.kills import DELETED, WON, Slow, kill_now_and_then, lose_slot, manager_pids, slot_pid, slot_pids
from tests.jobs.place import Place, batches, running_sums, wait_for_batches
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.faults]

LOG: dict[str, Any] = {"changelog": True, "materialization_interval": "700ms", "checkpoint_interval": "100ms"}


def changelog_of(run: sl.JobRun) -> sl.ChangelogFigures:
    figures = run.figures().changelog
    assert figures is not None
    return figures


def test_a_slot_that_is_lost_with_its_files_is_rebuilt_alone_and_the_query_goes_on(
    place: Place, runs: list[sl.JobRun]
) -> None:
    data = batches(9)
    # Only what is committed after the last checkpoint is in doubt: there is one checkpoint, by hand.
    run = place.sums(**{**LOG, "checkpoint_interval": "1h"}, restart_strategy="none").start()
    runs.append(run)
    for count, rows in enumerate(data[:6], 1):
        place.write(rows)
        wait_for_batches(run, count)
        if count == 3:
            run.trigger_checkpoint()
    query = place.spark.streams.active[0].runId
    other = slot_pid(run, 1)
    lose_slot(place, run, 0)
    for rows in data[6:]:
        place.write(rows)
    run.process_all_available()

    assert place.rows() == running_sums(data)
    (recovery,) = run.recoveries()
    assert (recovery.kind, recovery.slots) == ("slots", (0,))
    assert recovery.durable_bytes > 0
    assert recovery.local_bytes == 0
    assert place.spark.streams.active[0].runId == query
    assert slot_pid(run, 1) == other
    figures = run.figures()
    assert (figures.generation, figures.replaced_slots) == (1, 1)
    run.stop()
    check_storage(place)


@pytest.mark.parametrize(
    ("victims", "backend"), [(manager_pids, "rocksdb"), pytest.param(slot_pids, "heap", marks=pytest.mark.slow)]
)
def test_killed_processes_with_the_changelog(
    place: Place, runs: list[sl.JobRun], victims: Callable[[sl.JobRun], list[int]], backend: str
) -> None:
    data = batches(14, seed=11)
    for rows in data[:3]:
        place.write(rows)
    run = place.sums(Slow(), **LOG, restart_strategy="none", state_backend=backend).start()
    runs.append(run)
    wait_until(lambda: run.figures().batches >= 1, what="the first batch")

    def feed() -> None:
        for rows in data[3:]:
            place.write(rows)
            time.sleep(0.25)  # so that kills meet running batches and idle times

    feeder = threading.Thread(target=feed)
    feeder.start()
    kill_now_and_then(run, victims, times=3, seed=5)
    feeder.join()
    run.process_all_available()
    figures = run.figures()
    run.stop()
    assert (figures.restarts, figures.generation) == (0, 1)
    assert figures.replaced_slots >= 1
    assert all(recovery.kind == "slots" for recovery in run.recoveries())
    assert place.rows() == running_sums(data)
    check_storage(place)


@pytest.mark.slow  # drivers are killed at random in every run: test_driver_kills.py
@pytest.mark.timeout(600)
def test_a_driver_killed_with_the_changelog_on(place: Place) -> None:
    moments = (WON, DELETED)
    data = batches(3 * len(moments), seed=8)
    switch = place.root / "on"
    faults = {"switch": str(switch), "journal": str(place.root / "journal")}
    for number, moment in enumerate(moments):
        driver = Driver(place.root, **LOG, faults={**faults, "kill_pattern": moment})
        driver.start()
        driver.await_run()
        switch.touch()
        for rows in data[3 * number : 3 * number + 3]:
            place.write(rows)
            time.sleep(0.5)  # a batch and a checkpoint for each file
        driver.await_death(f"the kill {moment}")
        switch.unlink()
        assert set(place.rows()) <= set(running_sums(data)), moment
    driver = Driver(place.root, **LOG, faults=faults)
    driver.start()
    driver.finish()
    assert place.rows() == running_sums(data)
    check_storage(place)


def test_the_changelog_is_switched_on_and_off_between_runs_over_the_same_state(
    place: Place, runs: list[sl.JobRun]
) -> None:
    data = batches(10, users=15, rows=40)
    modes: list[dict[str, Any]] = [
        {"changelog": True, "state_backend": "heap"},
        {"changelog": False},
        {"changelog": True},
        {"changelog": True, "state_backend": "heap", "incremental": False},
        {"changelog": False, "state_backend": "heap"},
    ]
    for number, mode in enumerate(modes):
        run = place.sums(**{**LOG, **mode}).start()
        runs.append(run)
        for rows in data[2 * number : 2 * number + 2]:
            place.write(rows)
            run.process_all_available()
        logged = any(
            file.is_segment for _state, file in all_files(metadata(Path(str(run.checkpoints()[-1].path)).parent))
        )
        if not mode["changelog"]:
            assert not logged
        run.stop() if number % 2 else run.cancel()
        assert place.rows() == running_sums(data[: 2 * number + 2])
    check_storage(place)


@pytest.mark.slow
def test_no_claim_and_overlapping_checkpoints_work_with_the_changelog(place: Place, runs: list[sl.JobRun]) -> None:
    """What the original cannot do."""
    data = batches(6, users=20, rows=50)
    options = {**LOG, "max_concurrent_checkpoints": 3, "num_retained": 2, "materialization_interval": "1h"}
    run = place.sums(**options).start()
    runs.append(run)
    for rows in data[:3]:
        place.write(rows)
        run.process_all_available()
    newest = run.checkpoints()[-1].id
    run.cancel()
    origin = files_of(place, chk(place, newest))
    assert any(file.is_segment for _state, file in all_files(metadata(chk(place, newest))))

    options["changelog_dir"] = str(place.root / "log")
    run = place.sums(**options).start(restore=chk(place, newest), claim_mode="no_claim")
    runs.append(run)
    for rows in data[3:]:
        place.write(rows)
        run.process_all_available()
    assert place.rows() == running_sums(data)
    mine = [checkpoint for checkpoint in run.checkpoints() if checkpoint.status == "completed"]
    for checkpoint in mine[-2:]:
        assert not files_of(place, chk(place, checkpoint.id)).keys() & origin.keys()
    assert files_of(place, chk(place, newest)) == origin
    run.stop()
    # The log of the second run has a storage of its own: files there are found, verified and collected, too.
    assert list((place.root / "log").glob("visits/shared/*-log"))
    verified = Verification.of_job(
        LocalStorage(str(place.checkpoints)), "visits", others=(options["changelog_dir"],)
    ).run()
    assert [checkpoint.damage for checkpoint in verified] == [()] * len(verified)
    run = place.sums(**options).start()
    runs.append(run)
    run.process_all_available()
    assert place.rows() == running_sums(data)
    run.stop()
    check_storage(place, options["changelog_dir"])


def test_a_full_checkpoint_stands_alone_and_restores(place: Place, runs: list[sl.JobRun]) -> None:
    data = batches(6, users=20, rows=50)
    options = {**LOG, "checkpoint_interval": "1h", "materialization_interval": "300ms", "num_retained": 5}
    run = place.sums(**options).start()
    runs.append(run)
    for rows in data[:4]:
        place.write(rows)
        run.process_all_available()
    before = run.checkpoints()[-1]
    full = run.trigger_checkpoint(full=True)
    assert full.checkpointed_bytes == full.full_bytes > 0
    own, older = files_of(place, chk(place, full.id)), files_of(place, chk(place, before.id))
    assert own
    assert older
    assert not own.keys() & older.keys()
    assert not any(file.is_segment for _state, file in all_files(metadata(chk(place, full.id))))
    place.write(data[4])
    run.process_all_available()
    run.cancel()
    again = place.sums(**options).start()
    runs.append(again)
    place.write(data[5])
    again.process_all_available()
    assert place.rows() == running_sums(data)
    again.stop()
    check_storage(place)


def test_uploads_that_fail_for_a_while_fail_checkpoints_and_lose_nothing(place: Place, runs: list[sl.JobRun]) -> None:
    data = batches(6, users=20, rows=50)
    switch = place.root / "broken"
    config = place.config(
        # A materialization has files of its own: with it, checkpoints would complete without the log.
        **{**LOG, "materialization_interval": "1h"},
        tolerable_failed_checkpoints=-1,
        changelog_upload_attempts=2,
        changelog_upload_timeout="300ms",
    ).replace(
        checkpoint_dir=f"faulty+file://{place.checkpoints}",
        storage_options={"switch": str(switch), "fail_pattern": "^(write|upload) .*-log$"},
    )
    run = place.sums(config=config).start()
    runs.append(run)
    place.write(data[0])
    run.process_all_available()
    switch.touch()
    for count, rows in enumerate(data[1:4], 2):
        place.write(rows)
        wait_for_batches(run, count)  # without storage
    assert changelog_of(run).behind_bytes > 0
    wait_until(lambda: any(c.status == "failed" for c in run.checkpoints()), what="a failed checkpoint")
    assert place.rows() == running_sums(data[:1])
    switch.unlink()
    for rows in data[4:]:
        place.write(rows)
    run.process_all_available()
    assert place.rows() == running_sums(data)
    assert changelog_of(run).behind_bytes == 0
    assert run.figures().restarts == 0
    run.stop()
    check_storage(place)
