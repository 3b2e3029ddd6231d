"""Keeps second copies of durable state files on a host's own disk, so that a restart need not download them.

A copy is a hard link to a file of a slot, and is named by the identity of its bytes. It takes no space as long as the
slot keeps the file. Each task manager prunes its own folder. A slot that restores looks into all folders on its host.
A problem with a copy never fails a checkpoint or a restore: without a copy, the file is downloaded.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from strandline.runtime.protocol.folders import copy_name

log = logging.getLogger(__name__)

_LOCK = "lock"


class LocalCopies:
    """The copies of one task manager."""

    def __init__(self, parent: Path, name: str) -> None:
        self._parent = parent
        self._folder = parent / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / _LOCK).open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.failed = 0
        """How many copies could not be made."""

    def keep(self, identity: str, path: Path) -> None:
        """Copy the file at `path`, which must not change any more. A failure is logged."""
        target = self._folder / copy_name(identity)
        if target.exists():
            return
        try:
            os.link(path, target)
        except FileExistsError:
            pass
        except OSError as error:
            self.failed += 1
            log.warning("no local copy of %s: %s", path, error)

    def prune(self, needed: Callable[[], Collection[str]]) -> None:
        """Delete all copies but those whose identity is `needed`, and all copies of task managers that have ended.

        A copy that is made meanwhile stays, because `needed` is called after the folder is listed.
        """
        try:
            found = [path for path in self._folder.iterdir() if path.name != _LOCK]
            names = set(map(copy_name, needed()))
            for path in found:
                if path.name not in names:
                    path.unlink(missing_ok=True)
            for other in self._parent.iterdir():
                if other != self._folder and _abandoned(other):
                    shutil.rmtree(other, ignore_errors=True)
        except OSError as error:
            log.warning("older local copies could not be deleted: %s", error)


def _abandoned(folder: Path) -> bool:
    """Whether the task manager that owns the folder has ended."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
