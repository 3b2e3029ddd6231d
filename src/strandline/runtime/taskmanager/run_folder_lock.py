"""Says which runs still live on this host, so that the local files of dead runs can be deleted."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

RUN_IS_DEAD_AFTER = 60.0
"""Seconds without a task manager on this host after which a run's local files may be deleted."""
_LOCK = "alive.lock"


class RunFolderLock:
    """Held by every task manager of a run, in the run's folder. The operating system releases it with the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle = (folder / _LOCK).open("ab")
        fcntl.flock(self._handle, fcntl.LOCK_SH)

    def refresh(self) -> None:
        """Note that the run lives now."""
        with suppress(FileNotFoundError):  # somebody has deleted the folder; the slots that need it will say so
            os.utime(self._folder / _LOCK)

    def release(self) -> bool:
        """Give the lock up; True if no other task manager of the run holds it, so that the folder may be deleted."""
        self._handle.close()
        return _nobody_holds(self._folder)

    def delete_dead_runs(self) -> None:
        """Delete the local files of those runs of the job that died with their host, or whose processes were killed.

        A run that has just lost its only task manager here is about to start another one, and needs its files. So a
        run counts as dead only after some time.
        """
        for folder in self._folder.parent.iterdir():
            if folder == self._folder:
                continue
            with suppress(OSError):  # no folder of a run, or another task manager deletes it just now
                age = time.time() - (folder / _LOCK).stat().st_mtime
                if age >= RUN_IS_DEAD_AFTER and _nobody_holds(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _nobody_holds(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
