"""The local folder that a query uses as Spark's own checkpoint folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import IO

from strandline.errors import StorageRefusedError
from strandline.runtime.protocol.user_folder import make_private, user_folder

_MEMORY = Path("/dev/shm")
_PREFIX = "strandline-spark-"
_LOCK = ".lock"


class ScratchFolder:
    """A fresh folder in `directory`, else in memory, else on the disk. Folders of drivers that have died are removed.

    Its content is needed only while the generation runs: what a restore needs of it is part of our checkpoints.

    A driver holds a file lock beside its folder for as long as it lives, and the operating system releases the lock
    with the process. A process id would not do: in another container the same number is another process, or none.
    """

    def __init__(self, directory: str | None, job: str, generation: int) -> None:
        parent = _parent(directory)
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageRefusedError(
                f"job {job}: cannot create the folder {parent} of the option spark_checkpoint_dir: "
                f"{error.strerror or error}; name another folder, or give the user that runs the job write access"
            ) from error
        _remove_abandoned(parent)
        self.path = parent / f"{_PREFIX}{job}-{generation}-{uuid.uuid4().hex}"
        # The lock comes first: nobody ever sees the folder of a living driver without a lock.
        self._lock = _take_lock(_lock_of(self.path))
        self.path.mkdir(mode=0o700)

    def remove(self) -> None:
        """Delete the folder and what is in it. May be repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)
        self._lock.close()


def _parent(directory: str | None) -> Path:
    """All users share the default places, so the folder of this user is used there."""
    if directory is not None:
        return Path(directory)
    return make_private(user_folder(_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()))


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _take_lock(path: Path) -> IO[bytes]:
    """Create and hold a lock file. It is made again if another driver took it for abandoned before it was held."""
    while True:
        handle = path.open("ab")
        fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(handle.fileno()), path.stat()):
            return handle
        handle.close()


def _remove_abandoned(parent: Path) -> None:
    """Delete the folders whose drivers hold no lock any more. A folder without a lock file is left alone."""
    for lock in parent.glob(f"{_PREFIX}*{_LOCK}"):
        try:
            with open(os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
                lock.unlink(missing_ok=True)
        except OSError:
            continue  # Somebody holds it, or it belongs to another user.
