"""A fault at one chosen operation of a run: a control file tells all processes which one it is, and what happens there.

An operation is a call of a storage (`storage create job/log/...`) or a call between processes (`call commit`, `rows
open`, `rows chunk`). All processes count together. So "the third `call commit` of the run fails after it took effect"
can be said, whichever process makes that call. The file is read at every operation: a test changes it during a run.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from strandline.decoding import json_decoder

PATIENCE: Final = 20.0
"""Seconds for which a process waits until somebody has done what it asked for."""

Happening = Literal["fail", "hang", "ask"]


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a control file."""

    pattern: str = ""
    """The regular expression of the operations that count. Empty: none."""
    number: int = 1
    """Which of them it is, counted from 1 over all processes."""
    after: bool = False
    """Whether the operation takes effect first."""
    happening: Happening = "fail"
    """`fail`: the operation raises an error, `seconds` late. `hang`: it takes `seconds` longer. `ask`: it waits until
    the file `acted` exists; somebody kills or stops a process meanwhile."""
    seconds: float = 0.0
    journal: bool = False
    """Whether every operation is written to the file `journal`."""

    def write(self, path: Path) -> None:
        """Put this into force at once, for all processes."""
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(path)


class Trigger:
    """The control file at one path, with its neighbours `count`, `fired`, `acted` and `journal`."""

    def __init__(self, control: Path) -> None:
        self._control = control

    @contextmanager
    def around(self, operation: str, failure: Callable[[str, Control], Exception]) -> Iterator[None]:
        """Carry an operation out, with the fault if this is the chosen one.

        `failure` makes the error from a text.
        """
        control = self._read()
        if control is None:
            yield
            return
        if control.journal:
            with self._beside("journal").open("a") as journal:
                journal.write(f"{operation}\n")  # one short write, so that lines of several processes do not mix
        if not (control.pattern and re.search(control.pattern, operation) and self._is_the_one(control.number)):
            yield
            return
        if not control.after:
            self._happen(control, operation, failure)
            yield
            return
        try:
            yield
        finally:
            # The caller does not learn how the operation ended: this error replaces an error of the operation, too.
            self._happen(control, operation, failure)

    def _read(self) -> Control | None:
        try:
            return json_decoder(Control).decode(self._control.read_bytes())
        except FileNotFoundError:
            return None

    def _beside(self, name: str) -> Path:
        return self._control.with_name(name)

    def _is_the_one(self, number: int) -> bool:
        """Count an operation as one byte."""
        try:
            with self._beside("count").open("r+b") as count:
                fcntl.flock(count, fcntl.LOCK_EX)
                count.seek(0, os.SEEK_END)
                count.write(b".")
                return count.tell() == number
        except FileNotFoundError:  # the test is over
            return False

    def _happen(self, control: Control, operation: str, failure: Callable[[str, Control], Exception]) -> None:
        temporary = self._beside(f".fired-{os.getpid()}")
        temporary.write_text(f"{os.getpid()} {time.time()} {operation}")
        temporary.replace(self._beside("fired"))
        if control.happening == "ask":
            deadline = time.monotonic() + PATIENCE
            while not self._beside("acted").exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        else:
            time.sleep(control.seconds)
        if control.happening == "fail":
            when = "after it took effect" if control.after else "before it took effect"
            raise failure(f"{operation}: fails on purpose, {when}", control)


def prepare(folder: Path, control: Control) -> Path:
    """Begin a new count in `folder`, and put `control` into force there. Returns the path of the control file."""
    for name in ("fired", "acted", "journal"):
        (folder / name).unlink(missing_ok=True)
    (folder / "count").write_bytes(b"")
    control.write(folder / "control")
    return folder / "control"
