"""The RocksDB backend: state on local disk. The increments of its snapshots are RocksDB's immutable files."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, cast
from uuid import uuid4
from weakref import WeakSet

from rocksdict import (
    AccessType,
    Checkpoint,
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
    WriteBatch,
)

from strandline.config.rocksdb import RocksDBOptions
from strandline.errors import ConfigError, StorageError, StorageFullError
from strandline.state.backends.base import CacheReads, Snapshot, SnapshotFile, StateBackend
from strandline.state.backends.full_snapshot import FULL_SNAPSHOT_NAME, write_full_snapshot
from strandline.state.backends.rocksdb_scans import SHORT_SCAN, long_scan, raise_if_damaged, scan_head, whole_scan
from strandline.state.backends.rocksdb_setup import (
    RocksDBMemory,
    bounded,
    cache_reads,
    counting,
    rocksdict_options,
    without_log,
)
from strandline.state.backends.rocksdb_tuning import Tune, check_tuned
from strandline.state.disk_full import disk_full_error, is_disk_full

__all__ = ["RocksDBBackend", "RocksDBMemory", "RocksDBOptions"]

_BATCH_ENTRIES: Final = 16_384
_READ_ENTRIES: Final = 4096
"""Keys per call. Until the call returns, every key pins a block of the cache and holds a copy of its value."""
_FLUSH_DELETES: Final = 65_536
"""Number of deletes after which the write buffer is flushed. Until a compaction removes deleted entries and their
tombstones, scans pass over both. Compaction needs files, and only frequent checkpoints would flush a small state."""
_LOADED_FILE_BYTES: Final = 64 << 20
_READER_MEMORY: Final = 16 << 20
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_DEFAULTS: Final = RocksDBOptions()
_READ_WRITE: Final = AccessType.read_write()


class RocksDBBackend(StateBackend):
    """One database without a write-ahead log: after a crash, a lost batch is applied again from its segment.

    `restored` maps the names of restored SSTs to the identities under which they were uploaded. The identity of a new
    SST is an id created at this opening plus the file name, because two databases that are restored from the same
    checkpoint give their new files the same names.
    """

    name: ClassVar[str] = "rocksdb"

    def __init__(
        self,
        directory: Path,
        memory: RocksDBMemory | int,
        *,
        incremental: bool = True,
        compression: str = "lz4",
        restored: Mapping[str, str] = _NOTHING,
        options: RocksDBOptions = _DEFAULTS,
        tune: Tune | None = None,
    ) -> None:
        """Open the database in `directory`, or create an empty one. `compression` applies to full snapshots.

        `tune` may change RocksDB's options last. Raises `StorageError` if RocksDB cannot open the files, because they
        are damaged or open in another process. Raises `ConfigError` if the options that `tune` returned do not work.
        """
        self._directory = directory
        self._owns_memory = isinstance(memory, int)
        self._memory = RocksDBMemory(memory, options.write_buffer_share) if isinstance(memory, int) else memory
        self._incremental = incremental
        self._compression = compression
        self._restored = dict(restored)
        self._unlogged = without_log()
        self._long_scans: WeakSet[Generator[tuple[bytes, bytes]]] = WeakSet()
        self._deletes = 0
        """Deletes since the last full compaction."""
        self._unflushed_deletes = 0
        self._closed = False
        self.open_id = uuid4().hex
        self._options = options
        directory.mkdir(parents=True, exist_ok=True)
        settings = counting(rocksdict_options(options, self._memory))
        if tune is None:
            self._db = _open(directory, settings)
        else:
            settings = tune(settings)
            self._db = _open_tuned(directory, settings, options, self._memory)
        self._counters = settings
        """RocksDB's statistics are reached through the options of the open database."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = []
        try:
            for at in range(0, len(keys), _READ_ENTRIES):
                found += cast("list[bytes | None]", self._db.get(list(keys[at : at + _READ_ENTRIES])))
        except Exception as error:
            raise_if_damaged(error, self._directory)
            raise
        return found

    def get(self, key: bytes) -> bytes | None:
        try:
            return cast("bytes | None", self._db.get(key))
        except Exception as error:
            raise_if_damaged(error, self._directory)
            raise

    def scan(self, start: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        bounds = bounded(end)
        head = scan_head(self._db, start, bounds, self._directory)
        if len(head) < SHORT_SCAN:
            return iter(head)
        # An open iterator keeps the database open and locked, so `close` must be able to close it.
        scan = long_scan(self._db, head, bounds, self._directory)
        self._long_scans.add(scan)
        return scan

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        with disk_full_error(self._directory):
            for at in range(0, len(keys), _BATCH_ENTRIES):
                some_keys, some_values = keys[at : at + _BATCH_ENTRIES], values[at : at + _BATCH_ENTRIES]
                batch = WriteBatch(raw_mode=True)
                if None not in some_values:
                    deque(map(batch.put, some_keys, some_values), maxlen=0)
                else:
                    self._unflushed_deletes += some_values.count(None)
                    put, delete = batch.put, batch.delete
                    for key, value in zip(some_keys, some_values, strict=True):
                        if value is None:
                            delete(key)
                        else:
                            put(key, value)
                self._db.write(batch, self._unlogged)
            if self._unflushed_deletes >= _FLUSH_DELETES:
                self._deletes += self._unflushed_deletes
                self._unflushed_deletes = 0
                self._db.flush(False)

    def load(self, chunks: Iterable[tuple[list[bytes], list[bytes]]], scratch: Path) -> None:
        """Add many entries as SST files of their own. They bypass the write buffers and cause no compaction."""
        folder = scratch / f"load-{uuid4().hex}"
        files: list[str] = []
        options = rocksdict_options(self._options, self._memory)
        try:
            with disk_full_error(scratch):
                writer: SstFileWriter | None = None
                for keys, values in chunks:
                    if writer is None:
                        folder.mkdir(parents=True, exist_ok=True)
                        files.append(str(folder / f"{len(files)}.sst"))
                        writer = SstFileWriter(options)
                        writer.open(files[-1])
                    deque(map(writer.__setitem__, keys, values), maxlen=0)
                    if writer.file_size() > _LOADED_FILE_BYTES:
                        writer.finish()
                        writer = None
                if writer is not None:
                    writer.finish()
                if files:
                    moved = IngestExternalFileOptions()
                    moved.set_move_files(True)
                    self._db.ingest_external_file(files, moved)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def delete_between(self, start: bytes, end: bytes) -> None:
        """Delete all entries with start <= key < end, at the cost of a single delete."""
        with disk_full_error(self._directory):
            self._db.delete_range(start, end, self._unlogged)

    def snapshot(self, directory: Path, *, full: bool = False) -> Snapshot:
        incremental = self._incremental and not full
        frozen = directory if incremental else directory / "frozen"
        frozen.parent.mkdir(parents=True, exist_ok=True)
        with disk_full_error(frozen.parent):
            Checkpoint(self._db).create_checkpoint(str(frozen))
        self._deletes += self._unflushed_deletes
        self._unflushed_deletes = 0
        if not incremental:
            return _FullSnapshot(frozen, directory, self._compression)
        return _IncrementalSnapshot(directory, self.open_id, self._restored)

    def compact(self) -> None:
        deletes = self._deletes + self._unflushed_deletes
        if deletes >= _FLUSH_DELETES and 2 * deletes > self._property("rocksdb.estimate-num-keys"):
            self._deletes = 0
            self._db.compact_range(None, None)

    def size_bytes(self) -> int:
        return self._property("rocksdb.live-sst-files-size") + self._property("rocksdb.cur-size-all-mem-tables")

    def estimated_keys(self) -> int:
        """RocksDB's estimate. A key that was overwritten counts again until it is compacted."""
        return self._property("rocksdb.estimate-num-keys")

    def memory_bytes(self) -> int:
        """Write buffers and table readers, and the cached blocks if no other database shares the memory."""
        buffers = self._property("rocksdb.size-all-mem-tables")
        readers = self._property("rocksdb.estimate-table-readers-mem")
        return max(self._memory.used_bytes(), buffers) + readers if self._owns_memory else buffers + readers

    def cache_reads(self) -> CacheReads | None:
        return None if self._closed else cache_reads(self._counters)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for scan in list(self._long_scans):
            with suppress(ValueError):  # another thread is using it; the iterator closes when that thread is done
                scan.close()
        self._db.close()

    def _property(self, name: str) -> int:
        return self._db.property_int_value(name) or 0


def live_files(directory: Path) -> set[str]:
    """The names of the SSTs that belong to the database in `directory`, according to its MANIFEST. Changes nothing.

    RocksDB accepts a truncated MANIFEST and would silently open an older state; callers compare the names to detect
    this. Raises `StorageError` if the database cannot be opened.
    """
    db = _open(directory, rocksdict_options(_DEFAULTS, RocksDBMemory(_READER_MEMORY)), AccessType.read_only())
    try:
        return {str(file["name"]).lstrip("/") for file in db.live_files()}
    finally:
        db.close()


def _open(directory: Path, options: Options, access: AccessType = _READ_WRITE) -> Rdict:
    with disk_full_error(directory):
        try:
            # The options are passed for the column family too. Otherwise rocksdict (0.3.29) opens an existing database
            # with the options stored in the folder and a small cache of its own.
            return Rdict(str(directory), options, {"default": options}, access)
        except Exception as error:
            if is_disk_full(error):
                raise
            raise StorageError(f"RocksDB cannot open {directory}: {error}") from error


def _open_tuned(directory: Path, tuned: Options, options: RocksDBOptions, memory: RocksDBMemory) -> Rdict:
    try:
        db = _open(directory, tuned)
    except StorageFullError:
        raise
    except StorageError as error:
        _open(directory, rocksdict_options(options, memory)).close()  # raises if the files are the cause
        raise ConfigError(f"with the options of rocksdb_factory, {error}; without them it can") from error
    try:
        check_tuned(directory)
    except ConfigError:
        db.close()
        raise
    return db


class _IncrementalSnapshot(Snapshot):
    """RocksDB's own checkpoint: a flush and hard links. It does not depend on the running database."""

    def __init__(self, directory: Path, open_id: str, restored: Mapping[str, str]) -> None:
        self._directory = directory
        self._open_id = open_id
        self._restored = restored

    def write(self) -> list[SnapshotFile]:
        files = []
        for path in sorted(self._directory.iterdir()):
            size = path.stat().st_size
            if path.name in ("LOCK", "LOG") or (path.suffix == ".log" and size == 0):
                continue
            shared = path.suffix == ".sst"
            identity = self._restored.get(path.name) if shared else f"{self._open_id}/{path.name}/{uuid4().hex}"
            files.append(SnapshotFile(path.name, path, size, identity or f"{self._open_id}/{path.name}", shared))
        return files

    def release(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class _FullSnapshot(Snapshot):
    """The whole state in one file. It is read from RocksDB's own checkpoint, independently of the running database.

    `Rdict.snapshot()` cannot be used: iterating over it shows later writes (rocksdict 0.3.29).
    """

    def __init__(self, frozen: Path, directory: Path, compression: str) -> None:
        self._frozen = frozen
        self._directory = directory
        self._compression = compression
        self._files: list[SnapshotFile] | None = None

    def write(self) -> list[SnapshotFile]:
        if self._files is None:
            path = self._directory / FULL_SNAPSHOT_NAME
            options = rocksdict_options(_DEFAULTS, RocksDBMemory(_READER_MEMORY))
            db = _open(self._frozen, options, AccessType.read_only())
            try:
                size = write_full_snapshot(path, whole_scan(db, self._frozen), self._compression)
            finally:
                db.close()
            self._files = [SnapshotFile(path.name, path, size, identity=f"full/{uuid4().hex}", shared=False)]
            shutil.rmtree(self._frozen, ignore_errors=True)
        return self._files

    def release(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
