"""Probes whether a storage fences drivers: whether `create` refuses a file that exists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from strandline.errors import AlreadyExistsError, ConfigError, StorageError, UnknownOutcomeError
from strandline.storage.base import Storage

log = logging.getLogger(__name__)

_PROBES = 3


def probe_create(storage: Storage, new_path: Callable[[], str]) -> None:
    """Create a file twice, and delete it. Raises `ConfigError` if the second call did not fail.

    Some services that speak S3 ignore the condition of a write (`If-None-Match`). There, two drivers of a job can both
    win the same entry of its log. `new_path` gives unused paths. Raises `StorageError` if the storage fails.
    """
    for attempt in range(_PROBES):
        path = new_path()
        try:
            if _refuses_second(storage, path):
                return
            raise ConfigError(
                f"the storage {storage.url} does not honour conditional writes: it let a file be created twice "
                "(If-None-Match has no effect). Nothing would keep a second driver of the job out, and state could be "
                "lost. Use another storage; or set allow_unfenced_storage=True, and make sure yourself that never two "
                "drivers of a job run"
            )
        except UnknownOutcomeError as error:
            if "501 Not Implemented" in str(error):
                raise ConfigError(
                    f"the storage {storage.url} cannot do conditional writes, which fence drivers: {error}. Use "
                    "another storage"
                ) from error
            if attempt == _PROBES - 1:
                raise
            log.warning("the probe of %s has an unknown outcome, and is repeated: %s", storage.url, error)
        finally:
            # A file that stays is an orphan. It does not hinder a start, because its name says that it is a probe.
            with suppress(StorageError):
                storage.delete([path])


def _refuses_second(storage: Storage, path: str) -> bool:
    # An `AlreadyExistsError` of the first call is a proof, too: its answer was lost, and it was sent again.
    try:
        storage.create(path, b"probe")
        storage.create(path, b"second")
    except AlreadyExistsError:
        return True
    return False
