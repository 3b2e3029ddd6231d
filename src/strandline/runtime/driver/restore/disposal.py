"""Disposes of savepoints."""

from __future__ import annotations

from pathlib import Path

from strandline.checkpoint.metadata import CheckpointMetadata, all_files
from strandline.runtime.driver.restore.savepoints import METADATA
from strandline.storage import Storage


def dispose_savepoint(storage: Storage, metadata: CheckpointMetadata) -> int:
    """Delete a savepoint and return the number of deleted files.

    The metadata is deleted last, so that a disposal that failed can be repeated.
    """
    paths = sorted({file.handle.path for _state, file in all_files(metadata) if file.handle is not None})
    storage.delete(paths)
    storage.delete([METADATA])
    if "://" not in storage.url and not any(storage.list()):
        Path(storage.url).rmdir()
    return len(paths) + 1
