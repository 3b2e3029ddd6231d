"""Durable storage behind one abstract class, and the builder of all paths of a job.

Job, driver, task, task manager, slot, admin and testing import it. It knows nothing about checkpoints.
"""

from __future__ import annotations

from strandline.storage.base import Storage, StoredFile
from strandline.storage.paths import JobPaths
from strandline.storage.schemes import is_local, open_storage

__all__ = ["JobPaths", "Storage", "StoredFile", "is_local", "open_storage"]
