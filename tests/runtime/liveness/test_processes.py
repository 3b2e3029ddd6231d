"""Processes are killed that belong to a task manager, and no others."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from strandline.runtime.liveness.processes import (
    SLOT_MODULE,
    exit_text,
    kill_task_manager,
    mark_of_task_manager,
    started_at,
)


@contextmanager
def sleeper(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group, as a task manager does, and has these arguments, as a slot has."""
    sleep = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", sleep, *arguments], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_slots_of_another_task_manager_that_got_the_same_process_id_are_not_killed() -> None:
    with sleeper(f"strandline.{SLOT_MODULE}") as other:
        assert not kill_task_manager(other.pid, started_at(other.pid) - 1)
        assert other.poll() is None


def test_a_task_manager_is_killed() -> None:
    with sleeper() as manager:
        assert kill_task_manager(manager.pid, started_at(manager.pid))
        assert manager.wait(10) < 0


def test_slots_whose_task_manager_is_gone_are_killed() -> None:
    with sleeper() as manager, ExitStack() as others:
        started = started_at(manager.pid)
        slot = others.enter_context(sleeper(f"strandline.{SLOT_MODULE}", mark_of_task_manager(manager.pid, started)))
        stranger = others.enter_context(
            sleeper(f"strandline.{SLOT_MODULE}", mark_of_task_manager(manager.pid, started + 1))
        )
        manager.kill()
        manager.wait()
        assert kill_task_manager(manager.pid, started)
        assert slot.wait(10) < 0
        assert stranger.poll() is None


def test_how_a_process_ended_is_said_in_words() -> None:
    assert exit_text(-signal.SIGKILL) == "was killed by SIGKILL"
    assert exit_text(-1000) == "was killed by signal 1000"
    assert exit_text(3) == "ended with exit code 3"
