"""Second copies of durable state files on a host's own disk, so that a restart need not fetch them.

A copy is a hard link to what a slot has on disk anyway, known by the identity of its bytes; it takes no room as long as
the slot keeps the file. Each task manager prunes its own folder; whoever restores looks into all of them on the host.
Nothing here ever fails a checkpoint or a restore: without a copy, the primary is used.
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
        """Copies that could not be made."""

    def keep(self, identity: str, path: Path) -> None:
        """Have a copy of the file at `path`, which will not change any more."""
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
        """Only what is `needed` stays; what task managers that are gone had kept goes, too.

        Files that are kept while this goes on stay in any case: what is needed is asked for after the folder is read.
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
            log.warning("older local copies stay: %s", error)


def _abandoned(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
