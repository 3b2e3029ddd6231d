"""Finds the processes of a worker: all of them inherit a mark in their environment."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import psutil

MARK: Final = "STRANDLINE_CHAOS"
"""The environment variable with the mark."""

_MODULES: Final = {
    "slot": "strandline.runtime.slot.process",
    "taskmanager": "strandline.runtime.taskmanager.process",
    "relay": "pyspark.daemon",
}


def marked(mark: str, kind: str) -> list[psutil.Process]:
    """The processes of one kind with this mark: `slot`, `taskmanager` or `relay`; oldest first."""
    found = [process for process in _all(mark) if _is(process, kind)]
    return sorted(found, key=lambda process: process.pid)


def _all(mark: str) -> Iterator[psutil.Process]:
    wanted = f"{MARK}={mark}\0".encode()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            with open(f"/proc/{process.pid}/environ", "rb") as environment:
                if wanted not in environment.read() + b"\0":
                    continue
            yield process


def _is(process: psutil.Process, kind: str) -> bool:
    with suppress(psutil.Error):
        if process.status() == psutil.STATUS_ZOMBIE or _MODULES[kind] not in process.cmdline():
            return False
        if kind != "relay":
            return True
        parent = process.parent()  # the daemon forks the workers; the daemon itself serves no rows
        return parent is not None and _MODULES[kind] in parent.cmdline()
    return False


def end_all(mark: str) -> int:
    """Kill every process with this mark but the caller. Returns how many there were."""
    count = 0
    for process in _all(mark):
        if process.pid != os.getpid():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
                count += 1
    return count
