"""A full local disk, whichever library noticed it, becomes one error that names the folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strandline.errors import StorageFullError

_SIGNS = ("no space left on device", "disk quota exceeded")


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says that a disk or a quota is used up; RocksDB and Arrow tell it in their message only."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    message = str(error).lower()
    return any(sign in message for sign in _SIGNS)


@contextmanager
def disk_full_error(folder: Path) -> Iterator[None]:
    """Raise `StorageFullError` for `folder` when the block fails because its disk is full; other errors pass."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise StorageFullError(
                f"no space left for state files in {folder}; free space there, or set local_dir to a larger disk"
            ) from error
        raise
