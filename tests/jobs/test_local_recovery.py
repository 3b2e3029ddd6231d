"""Slots without their working files take from local copies what is there and whole, and the rest from storage."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

import strandline as sl
from tests.jobs.place import Place, running_sums
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

RANDOM = random.Random(3)
ROWS = [[(f"user{RANDOM.randrange(80)}", RANDOM.randrange(100)) for _ in range(120)] for _ in range(8)]


def copies(place: Place) -> list[Path]:
    return [path for path in place.root.glob("local/strandline-*/*/*/copies/*/*") if path.name != "lock"]


def lose_all_slots(place: Place, run: sl.JobRun) -> sl.Recovery:
    """With their working files, so that only the last checkpoint is left."""
    before = len(run.recoveries())
    for folder in place.root.glob("local/strandline-*/*/*/gen-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for slot in run.processes().slots:
        os.kill(slot.pid, signal.SIGKILL)
    wait_until(lambda: len(run.recoveries()) > before, 60, "a recovery")
    assert run.recoveries()[-1].slots == (0, 1)
    return run.recoveries()[-1]


@pytest.mark.parametrize("changelog", [pytest.param(False, marks=pytest.mark.slow), True])
def test_local_copies_are_used_verified_and_replaced_by_the_primary(
    place: Place, runs: list[sl.JobRun], changelog: bool
) -> None:
    run = place.sums(local_recovery=True, changelog=changelog, checkpoint_interval="1h").start()
    runs.append(run)
    done = 0

    def feed(count: int) -> None:
        nonlocal done
        for batch in ROWS[done : done + count]:
            place.write(batch)
        done += count
        run.process_all_available()
        assert place.rows() == running_sums(ROWS[:done])

    feed(3)
    kept = copies(place)
    assert all(path.stat().st_nlink > 1 for path in kept), "no bytes of their own"
    recovery = lose_all_slots(place, run)
    assert (recovery.local_bytes > 0, recovery.durable_bytes) == (True, 0)
    feed(1)

    damaged = max(copies(place), key=lambda path: path.stat().st_size)
    content = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    recovery = lose_all_slots(place, run)
    assert recovery.durable_bytes == len(content), "that file, and nothing else"
    assert recovery.local_bytes > 0
    feed(1)

    for path in copies(place):
        path.unlink()
    recovery = lose_all_slots(place, run)
    assert (recovery.local_bytes, recovery.durable_bytes > 0) == (0, True)
    feed(1)

    # A disk that takes no copies fails no checkpoint.
    for folder in place.root.glob("local/strandline-*/*/*/copies/*"):
        shutil.rmtree(folder)
    feed(1)
    assert all(one.status == "completed" for one in run.checkpoints())
    run.stop()


@pytest.mark.slow
def test_without_local_recovery_storage_is_read(place: Place, runs: list[sl.JobRun]) -> None:
    run = place.sums(checkpoint_interval="1h").start()
    runs.append(run)
    place.write(ROWS[0])
    run.process_all_available()
    recovery = lose_all_slots(place, run)
    assert (recovery.local_bytes, recovery.durable_bytes > 0) == (0, True)
    place.write(ROWS[1])
    run.process_all_available()
    assert place.rows() == running_sums(ROWS[:2])
