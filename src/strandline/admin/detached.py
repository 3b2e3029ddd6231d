"""Starts a process that outlives the command that starts it, and waits until its job is registered."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from strandline.errors import StrandlineError

T = TypeVar("T")

LOOK_SECONDS: Final = 0.1
SHOWN_LOG: Final = 8_000
"""How many bytes of the end of a log an error shows."""
END_PATIENCE: Final = 10.0
"""Seconds that a process gets to end by itself before it is killed."""


@dataclass(frozen=True, slots=True)
class Detached(Generic[T]):
    """A process that was started, and what was found of it."""

    pid: int
    log: Path
    found: T


def start_detached(
    command: Sequence[str],
    log: Path,
    find: Callable[[int], T | None],
    *,
    timeout: float,
    waiting: Callable[[], None] = lambda: None,
) -> Detached[T]:
    """Start `command` in a session of its own, with its output in `log`, and wait until `find` finds it by its pid.

    `waiting` is called while there is nothing yet. Raises `StrandlineError` with the end of the log if the process ends
    before, or if nothing is found within `timeout` seconds: the process is ended then, so that no job starts later that
    nobody expects. Ctrl-C ends it, too.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    finally:
        os.close(descriptor)
    try:
        return Detached(process.pid, log, _wait(process, log, find, timeout, waiting))
    except BaseException:
        _end(process)
        raise


def log_end(log: Path, size: int = SHOWN_LOG) -> str:
    """The last bytes of a log as text, from the beginning of a line on."""
    try:
        with log.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - size))
            text = file.read(size).decode(errors="replace")
    except OSError:
        return ""
    return text if length <= size else text.partition("\n")[2]


def _wait(
    process: subprocess.Popen[bytes],
    log: Path,
    find: Callable[[int], T | None],
    timeout: float,
    waiting: Callable[[], None],
) -> T:
    deadline = time.monotonic() + timeout
    while True:
        code = process.poll()  # before the look: a job may register and end between the two
        found = find(process.pid)
        if found is not None:
            return found
        if code is not None:
            raise StrandlineError(f"the script ended with exit code {code} before a job of it ran.{_shown(log)}")
        if time.monotonic() > deadline:
            raise StrandlineError(f"no job of the script ran after {timeout:g} s; the script was ended.{_shown(log)}")
        waiting()
        time.sleep(LOOK_SECONDS)


def _shown(log: Path) -> str:
    end = log_end(log).rstrip()
    return f" The end of its log, {log}:\n{end}" if end else f" Its log, {log}, is empty."


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its JVM: it leads a process group of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_PATIENCE)
