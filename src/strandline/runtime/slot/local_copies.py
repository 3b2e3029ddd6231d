"""Finds local copies of durable files, which task managers keep, so that a restore need not fetch the files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from strandline.checkpoint.metadata import StateFile
from strandline.runtime.protocol.folders import copy_name
from strandline.storage.checksums import checksum

log = logging.getLogger(__name__)


def find_copy(parent: Path, file: StateFile, target: Path) -> bool:
    """Bring a file of a checkpoint to `target` from a copy on this host; False if there is no good one."""
    if file.handle is None:
        return False
    for found in parent.glob(f"*/{copy_name(file.identity)}"):
        try:
            target.unlink(missing_ok=True)
            os.link(found, target)
            if target.stat().st_size == file.handle.size and checksum(target) == file.handle.checksum:
                return True
            log.warning("the local copy %s of %s is damaged, so the durable file is fetched", found, file.handle.path)
            found.unlink(missing_ok=True)
            target.unlink()
        except OSError as error:
            log.warning("the local copy %s cannot be used: %s", found, error)
    target.unlink(missing_ok=True)
    return False
