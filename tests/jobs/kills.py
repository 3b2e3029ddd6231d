"""Whom a test kills, and when."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import strandline as sl
from tests.jobs.place import Place, Sum
from tests.waiting import wait_until

WRITTEN, WON, DELETED = "after create .*/_metadata$", "after create .*/log/", "after delete .*/shared/"
UPLOADED, PUBLISHED = "before create .*/_metadata$", "after rename "
"""Calls of `FaultyStorage` that end the process, as its option `kill_pattern` takes them."""


def slot_pids(run: sl.JobRun) -> list[int]:
    return [slot.pid for slot in run.processes().slots if slot.alive]


def manager_pids(run: sl.JobRun) -> list[int]:
    return [manager.pid for manager in run.processes().task_managers]


def slot_pid(run: sl.JobRun, index: int) -> int:
    (pid,) = [slot.pid for slot in run.processes().slots if slot.index == index]
    return pid


def lose_slot(place: Place, run: sl.JobRun, index: int) -> None:
    """Kill a slot, and delete everything that it has on local disk, as the loss of its host would."""
    pid = slot_pid(run, index)
    (folder,) = (place.root / "local").glob(f"strandline-*/visits/*/gen-*/slot-{index}")
    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)


class Slow(Sum):
    """Leaves time to be killed in."""

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        time.sleep(0.005)
        yield from super().process(key, rows, context)


def kill_now_and_then(run: sl.JobRun, victims: Callable[[sl.JobRun], list[int]], times: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(times):
        time.sleep(chance.uniform(0.05, 1.2))  # any moment of a batch or a checkpoint
        pids = wait_until(lambda: victims(run), what="somebody to kill")
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)
