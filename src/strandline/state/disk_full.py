"""Turns the errors of every library about a full local disk into one error that names the folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strandline.errors import StorageFullError

_SIGNS = ("no space left on device", "disk quota exceeded")


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` means that a disk or a quota is full. RocksDB and Arrow only say so in their message."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    message = str(error).lower()
    return any(sign in message for sign in _SIGNS)


@contextmanager
def disk_full_error(folder: Path) -> Iterator[None]:
    """Raise `StorageFullError` for `folder` if the block fails because the disk is full. Other errors pass."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise StorageFullError(
                f"no space left for state files in {folder}; free space there, or set local_dir to a larger disk"
            ) from error
        raise
