"""Opens a backend, empty or from a snapshot of any backend."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from strandline.errors import ConfigError, DamagedFileError, DirectoryNotOursError, StorageError, StorageFullError
from strandline.state.backends.base import StateBackend
from strandline.state.backends.full_snapshot import FULL_SNAPSHOT_NAME, read_full_snapshot
from strandline.state.backends.heap import HeapBackend
from strandline.state.backends.rocksdb import RocksDBBackend, RocksDBMemory, RocksDBOptions, live_files
from strandline.state.backends.rocksdb_logs import is_log_file, log_problem
from strandline.state.backends.rocksdb_tuning import Tune
from strandline.state.chunks import chunked
from strandline.state.disk_full import disk_full_error
from strandline.state.key_ranges import AFTER_ALL_KEYS, key_range

BACKENDS: Final = (RocksDBBackend.name, HeapBackend.name)
_DEFAULT_MEMORY: Final = 64 << 20
_MERGE_MEMORY: Final = 32 << 20
_DEFAULT_OPTIONS: Final = RocksDBOptions()


class RestoredFile(NamedTuple):
    """A file of a snapshot that was brought back to the local disk."""

    name: str
    path: Path
    identity: str
    shared: bool


def open_backend(
    kind: str,
    directory: Path,
    *,
    memory: RocksDBMemory | int | None = None,
    incremental: bool = True,
    compression: str = "lz4",
    restored_files: Sequence[RestoredFile] = (),
    key_groups: range | None = None,
    options: RocksDBOptions = _DEFAULT_OPTIONS,
    tune: Tune | None = None,
) -> StateBackend:
    """Open a backend of `kind` in `directory`, empty or with the state of `restored_files`. Old content is deleted.

    Both backends open full and incremental snapshots. Only RocksDB opens an incremental snapshot in place and keeps
    sharing its files. With `key_groups`, only the entries of these groups are kept. The restored files do not change.
    `options` and `tune` are those of `RocksDBBackend`. Raises `DamagedFileError` if the files cannot be used, and
    `StorageFullError` if the disk is full.
    """
    if kind not in BACKENDS:
        raise ConfigError(f"state_backend is {kind!r}; it must be one of {', '.join(BACKENDS)}")
    if any(file.path.is_relative_to(directory) for file in restored_files):
        raise DirectoryNotOursError(f"{directory} is emptied first; keep the restored files in another folder")
    shutil.rmtree(directory, ignore_errors=True)
    if kind == HeapBackend.name:
        backend: StateBackend = HeapBackend(compression)
    else:
        budget = _DEFAULT_MEMORY if memory is None else memory
        if restored_files and not _is_full(restored_files):
            rocksdb = _open_in_place(directory, restored_files, budget, incremental, compression, options, tune)
            if key_groups is not None:
                _clip(rocksdb, key_groups)
            return rocksdb
        backend = RocksDBBackend(
            directory, budget, incremental=incremental, compression=compression, options=options, tune=tune
        )
    try:
        load_snapshot(backend, restored_files, directory.parent, key_groups)
    except BaseException:
        backend.close()
        raise
    return backend


def load_snapshot(
    backend: StateBackend, files: Sequence[RestoredFile], scratch: Path, key_groups: range | None = None
) -> None:
    """Add the entries of another snapshot, or only those in `key_groups`, to `backend`. This merges subtasks.

    Temporary files go into the folder `scratch`. Raises `DamagedFileError` if the files cannot be used.
    """
    if not files:
        return
    if _is_full(files):
        backend.load(read_full_snapshot(files[0].path, key_groups), scratch)
        return
    folder = scratch / f"merge-{uuid4().hex}"
    try:
        other = _open_in_place(folder, files, _MERGE_MEMORY)
        try:
            backend.load(chunked(other.scan(*key_range(key_groups))), scratch)
        finally:
            other.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_in_place(
    directory: Path,
    files: Sequence[RestoredFile],
    memory: RocksDBMemory | int,
    incremental: bool = True,
    compression: str = "none",
    options: RocksDBOptions = _DEFAULT_OPTIONS,
    tune: Tune | None = None,
) -> RocksDBBackend:
    _lay_out(files, directory)
    restored = {file.name: file.identity for file in files if file.shared}
    try:
        for file in files:
            if is_log_file(file.name) and (problem := log_problem(directory / file.name)) is not None:
                raise StorageError(f"{file.name}: {problem}")
        if (known := live_files(directory)) != set(restored):
            raise StorageError(f"its MANIFEST names {sorted(known)}, the checkpoint has {sorted(restored)}")
        return RocksDBBackend(
            directory,
            memory,
            incremental=incremental,
            compression=compression,
            restored=restored,
            options=options,
            tune=tune,
        )
    except StorageFullError:
        raise
    except StorageError as error:
        raise DamagedFileError(
            f"the restored state in {directory} cannot be opened: {error}; restore from another checkpoint"
        ) from error


def _is_full(files: Sequence[RestoredFile]) -> bool:
    return len(files) == 1 and files[0].name == FULL_SNAPSHOT_NAME


def _lay_out(files: Sequence[RestoredFile], directory: Path) -> None:
    """Put the files into `directory` under their names: hard links for immutable files, copies for the others."""
    with disk_full_error(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            target = directory / file.name
            try:
                if not file.shared:
                    shutil.copyfile(file.path, target)
                    continue
                try:
                    os.link(file.path, target)
                except FileNotFoundError:
                    raise
                except OSError:  # the folder is on another disk, or the file system has no hard links
                    shutil.copyfile(file.path, target)
            except FileNotFoundError as error:
                raise DamagedFileError(f"{file.path}, a file of the restored state, is missing") from error


def _clip(backend: RocksDBBackend, key_groups: range) -> None:
    start, end = key_range(key_groups)
    backend.delete_between(b"", start)
    if end is not None:
        backend.delete_between(end, AFTER_ALL_KEYS)
