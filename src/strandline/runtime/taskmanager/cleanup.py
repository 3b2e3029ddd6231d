"""Deletes uploaded files that nobody refers to."""

from __future__ import annotations

import logging
from collections.abc import Collection

from strandline.storage import Storage
from strandline.storage.external import delete_files

log = logging.getLogger(__name__)


def delete_unneeded(storage: Storage, paths: Collection[str]) -> None:
    """Delete the files at `paths`. A failure is only logged: the files take up space, but do no harm."""
    if not paths:
        return
    try:
        delete_files(storage, paths)
    except Exception as error:  # noqa: BLE001  # also what a storage plugin raises: nobody waits for a deletion
        log.warning("cannot delete %d files that nobody needs, %s among them: %s", len(paths), min(paths), error)
