"""What the operating system knows of a process, and how a process is killed that may not answer any more."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

SLOT_MODULE = "runtime.slot.process"


def started_at(pid: int) -> int:
    """When a process began, in ticks since its host did; 0 if there is no such process.

    Together with its id this names the process, because ids are used again. The time of day would not do: it is set
    now and then, and two processes may then see two different times of the same start.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return int(psutil.Process(pid).create_time())  # where there is no /proc
    except psutil.Error:
        return 0


def is_there(pid: int, started: int) -> bool:
    """Whether a process has not ended. A zombie has: only its parent has not asked for its exit code."""
    try:
        zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False
    return not zombie and started_at(pid) == started


def is_working(pid: int, started: int) -> bool:
    """Whether a process is there and can work: it is neither stopped nor a zombie."""
    try:
        frozen = psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
    return not frozen and started_at(pid) == started


def progress(pid: int) -> tuple[float, int]:
    """How much processor time a process has used, and how many bytes it has read and written.

    If two looks differ, the process works, even if it does not answer: its interpreter may be busy.
    """
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        used = times.user + times.system
    except psutil.Error:
        return 0.0, 0
    try:
        moved = process.io_counters()
    except (psutil.Error, OSError):
        return used, 0
    return used, moved.read_bytes + moved.write_bytes


def exit_text(code: int) -> str:
    """How a process ended, by its exit code as `subprocess` gives it: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def mark_of_task_manager(pid: int, started: int) -> str:
    """An argument of every slot, which says whose slot it is."""
    return f"task-manager-{pid}-{started}"


def kill_task_manager(pid: int, started: int) -> bool:
    """Kill a task manager of this host and its slots, frozen or not; False if there is nothing to kill.

    A task manager leads a process group, which its slots belong to. SIGKILL ends a process that is stopped, too.
    """
    if pid == os.getpid():
        return False  # a task manager in the caller's own process, as in a test
    if started_at(pid) == started:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
            return True
        return False
    orphans = [process for process in psutil.process_iter() if _is_slot_of(process, pid, started)]
    for slot in orphans:
        with suppress(psutil.Error):
            slot.kill()
    return bool(orphans)


def _is_slot_of(process: psutil.Process, pid: int, started: int) -> bool:
    """Whether a process is a slot of a task manager that is gone. Such a slot may be stopped and not know it."""
    try:
        words = process.cmdline()
    except (OSError, psutil.Error):
        return False
    return mark_of_task_manager(pid, started) in words and any(SLOT_MODULE in word for word in words)


def stopped_python_workers(executor: int) -> list[psutil.Process]:
    """Spark's Python workers of an executor that are stopped, as by SIGSTOP, and the daemon that starts them."""
    try:
        below = psutil.Process(executor).children(recursive=True)
    except psutil.Error:
        return []
    found = []
    for process in below:
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED and "pyspark.daemon" in process.cmdline():
                found.append(process)
    return found
