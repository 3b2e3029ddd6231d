"""Brings the state files of a checkpoint to local disk, and checks their size and checksum.

Slots restore state with it, and the state reader reads state with it. So both refuse the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strandline.checkpoint.metadata import StateFile
from strandline.errors import DamagedFileError, NotFoundError
from strandline.state.backends.factory import RestoredFile
from strandline.state.disk_full import disk_full_error
from strandline.storage import Storage
from strandline.storage.checksums import checksum
from strandline.storage.external import fetch_file

_THREADS: Final = 4
_ADVICE: Final = "Restore from another checkpoint, or bring the file back."

FindCopy = Callable[[StateFile, Path], bool]
"""Puts a local copy of a file at a path; False if there is no copy."""


@dataclass(frozen=True, slots=True)
class FetchedFiles:
    """State files on local disk, in the order in which they were asked for, and how many bytes were read for them."""

    files: list[RestoredFile]
    local_bytes: int = 0
    durable_bytes: int = 0


def fetch_state_files(
    files: Sequence[StateFile],
    storage: Storage,
    target: Path,
    whose: str,
    find_copy: FindCopy | None = None,
    advice: str = _ADVICE,
) -> FetchedFiles:
    """Bring files of a checkpoint into the folder `target`; local copies that `find_copy` knows are preferred.

    `whose` names the job and the operator in errors. Raises `DamagedFileError` if a file is missing, or has another
    size or checksum than the checkpoint says, and `StorageFullError` if the local disk is full.
    """
    if not files:
        return FetchedFiles([])
    target.mkdir(parents=True, exist_ok=True)

    def fetch(position: int) -> tuple[RestoredFile, int, int]:
        file = files[position]
        path = target / (f"{position}-{file.name}" if file.is_segment else file.name)
        restored = RestoredFile(file.name, path, file.identity, file.shared)
        if file.handle is None:
            with disk_full_error(target):
                path.write_bytes(file.inline or b"")
            return restored, 0, 0
        if find_copy is not None and find_copy(file, path):
            return restored, file.size, 0
        what = f"{whose}: {storage.url}/{file.handle.path}"
        try:
            with disk_full_error(target):
                fetch_file(storage, file.handle.path, path, file.handle.part)
        except NotFoundError as error:
            raise DamagedFileError(f"{what} is missing, though the checkpoint needs it. {advice}") from error
        found = checksum(path)
        if path.stat().st_size != file.handle.size or found != file.handle.checksum:
            raise DamagedFileError(
                f"{what} is damaged: {path.stat().st_size} bytes with {found}, expected {file.handle.size} bytes with "
                f"{file.handle.checksum}. {advice}"
            )
        return restored, 0, file.size

    with ThreadPoolExecutor(_THREADS) as pool:
        fetched = list(pool.map(fetch, range(len(files))))
    return FetchedFiles(
        [file for file, _local, _durable in fetched],
        sum(local for _file, local, _durable in fetched),
        sum(durable for _file, _local, durable in fetched),
    )
