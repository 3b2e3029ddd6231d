"""The log files of a run's processes on one host: their folder, their names, their bounds, and how ends are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from strandline.errors import StrandlineError
from strandline.redaction import without_controls
from strandline.runtime.protocol.figures import Facts
from strandline.runtime.protocol.messages import RunInfo
from strandline.runtime.protocol.user_folder import user_folder
from strandline.storage import JobPaths, open_storage

LOGS: Final = ".logs"
"""The folder of all logs in the folder of a user. It outlives the runs."""
DRIVER: Final = "driver"
"""The name of the driver among the processes that have a log. Its log is in its memory."""
MOST_FILE_BYTES: Final = 5_000_000
"""A log file that is larger is moved aside, in place of the one that was moved aside before."""
KEPT_BYTES: Final = 200_000
"""So much of the end of each log is kept in the job's history."""
MOST_READ_BYTES: Final = 2_000_000
"""The most that one call reads."""
KEPT_RUNS: Final = 10
"""The log files of so many runs of a job stay on a host."""
MOST_LOGS: Final = 200
"""Of so many processes at most the ends are collected. A run with more keeps the others on their hosts."""

_NAME: Final = re.compile(r"(?:slot-[0-9]{1,6}|task-manager-[0-9A-Za-z-]{1,80})", re.ASCII)
_OLDER: Final = ".1"


class ReadLog(msgspec.Struct, frozen=True):
    """Asks for the end of a log."""

    process: str
    max_bytes: int


class LogText(Facts, frozen=True):
    """The end of the log of one process.

    Attributes:
        process: Which process: `driver`, `task-manager-…` or `slot-0`.
        text: The last lines.
        cut: Whether there were more lines before.
    """

    process: str
    text: str
    cut: bool = False


def log_folder(local_dir: str, job: str, run_id: str) -> Path:
    """Where the processes of a run on a host write their logs. `make_private` makes it. It outlives the run."""
    return user_folder(local_dir) / LOGS / job / run_id


def slot_log(index: int) -> str:
    """The name of a slot among the processes that have a log."""
    return f"slot-{index}"


def task_manager_log(host: str, executor: str) -> str:
    """The name of the task manager of an executor among the processes that have a log."""
    name = re.sub(r"[^0-9A-Za-z]+", "-", f"{host.partition(':')[0]}-{executor}").strip("-")
    return f"task-manager-{name[-80:]}"


def log_file(folder: Path, process: str) -> Path:
    """The log file of a process. Raises `StrandlineError` for a name that no process has, such as a path."""
    if not _NAME.fullmatch(process):
        raise StrandlineError(f"there is no process {process!r} with a log; names are like slot-0 and task-manager-…")
    return folder / f"{process}.log"


def open_log(path: Path) -> int:
    """A descriptor that appends to a log file, which only its user can read."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def log_names(folder: Path) -> list[str]:
    """The processes that have a log in `folder`."""
    with suppress(FileNotFoundError):
        return sorted(path.stem for path in folder.glob("*.log") if _NAME.fullmatch(path.stem))
    return []


def bound_file(path: Path) -> None:
    """Move the text of a log file aside if the file is too large.

    Its process goes on writing at the end of the file, wherever that is. What it writes at this very moment is lost.
    """
    with suppress(FileNotFoundError):
        if path.stat().st_size <= MOST_FILE_BYTES:
            return
        with path.open("r+b") as file:
            file.seek(-MOST_FILE_BYTES, os.SEEK_END)
            path.with_name(path.name + _OLDER).write_bytes(file.read(MOST_FILE_BYTES))
            file.truncate(0)


def read_end(folder: Path, request: ReadLog) -> LogText:
    """The end of a log, in whole lines. Raises `StrandlineError` if there is none."""
    path = log_file(folder, request.process)
    wanted = max(1, min(request.max_bytes, MOST_READ_BYTES))
    try:
        data, more = _tail(path, wanted)
        if not more:
            with suppress(FileNotFoundError):
                older, more = _tail(path.with_name(path.name + _OLDER), wanted - len(data))
                data = older + data
    except FileNotFoundError:
        known = ", ".join(log_names(folder)) or "none"
        raise StrandlineError(f"there is no log of {request.process}; there are those of: {known}") from None
    return LogText(request.process, as_text(data, more), more)


def as_text(data: bytes, cut: bool) -> str:
    """The bytes of a log as text that a terminal can show. If text before it is cut off, the broken line is, too."""
    if cut:
        _broken, newline, rest = data.partition(b"\n")
        data = rest if newline else data
    return without_controls(data.decode(errors="replace"))


def in_order(processes: Iterable[str]) -> list[str]:
    """Names of processes in the order in which people look for them: task managers, then slots by their numbers."""
    return sorted(processes, key=lambda name: (name.startswith("slot-"), len(name), name))


def write_ends(run: RunInfo, ends: Mapping[str, LogText]) -> None:
    """Write the ends of logs into the job's history. Raises `StorageError`."""
    storage = open_storage(run.storage.url, run.storage.options)
    for name, end in ends.items():
        storage.write(JobPaths(run.job).history_log(run.run_id, name), end.text.encode())


def _tail(path: Path, count: int) -> tuple[bytes, bool]:
    """The last bytes of a file, and whether there are more before them."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - count))
        return file.read(count), size > count
