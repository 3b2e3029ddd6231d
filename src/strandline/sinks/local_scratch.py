"""Temporary folders in which rows lie between a sink and its storage: those of processes that were killed go later.

A process holds a file lock in its folder, and the operating system releases the lock with the process. So every process
that makes its first folder can tell which other ones nobody needs any more. Process ids would not do: in another
container the same number is another process, or none. A file system without such locks keeps the folder of a process
that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_PREFIX = "strandline-sink-"
_LOCK = ".lock"
_WITHOUT_LOCK = 3600.0
"""Seconds after which an empty folder without a lock is deleted: its process was killed before it made one."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)

_looked = threading.Event()
"""Whether this process has looked for folders that were left behind."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new private folder in the system's temporary folder, which is deleted at the end of the block."""
    if not _looked.is_set():
        _looked.set()
        delete_abandoned(Path(tempfile.gettempdir()))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = _locked(folder)
            if lock is None:
                continue
            with lock:
                yield folder
                return
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def delete_abandoned(parent: Path) -> None:
    """Delete the folders in `parent` of this user's processes that have ended."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            _delete_if_abandoned(folder)
        except OSError:
            continue  # somebody holds it or has just deleted it, or it belongs to another user


def _locked(folder: Path) -> IO[bytes] | None:
    """The lock of a new folder, held; None if another process took the folder for abandoned before that."""
    try:
        handle = (folder / _LOCK).open("xb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            handle.close()
            raise
        # Nobody can tell any more whether the folder is in use, so nobody may delete it.
        handle.write(b"not locked")
        handle.flush()
    if not (folder / _LOCK).exists():
        handle.close()
        return None
    return handle


def _delete_if_abandoned(folder: Path) -> None:
    status = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or status.st_uid != os.geteuid():
        return
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - status.st_mtime > _WITHOUT_LOCK:
            folder.rmdir()  # what is not empty has another owner
        return
    with open(descriptor, "rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if handle.read(1):
            return
        shutil.rmtree(folder, ignore_errors=True)
