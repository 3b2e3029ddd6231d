"""Both backends keep the contract, and open each other's snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from strandline.errors import ConfigError, DamagedFileError, DirectoryNotOursError, StorageError
from strandline.state.backends.base import CacheReads, SnapshotFile, StateBackend
from strandline.state.backends.factory import BACKENDS, RestoredFile, load_snapshot, open_backend
from strandline.state.backends.full_snapshot import read_full_snapshot, write_full_snapshot
from strandline.state.backends.heap import HeapBackend
from strandline.state.backends.rocksdb import RocksDBBackend, RocksDBMemory, RocksDBOptions
from strandline.testing.backend import BackendContract, Opener, key, restorable
from strandline.testing.backend_machine import BackendMachine
from tests.examples import examples
from tests.waiting import wait_until

MODES = {"heap": ("heap", True), "rocksdb": ("rocksdb", True), "rocksdb-full": ("rocksdb", False)}
MEMORY = 8 << 20


def opener(mode: str) -> Opener:
    kind, incremental = MODES[mode]

    def open_(directory: Path, files: Sequence[RestoredFile] = ()) -> StateBackend:
        return open_backend(kind, directory, memory=MEMORY, incremental=incremental, restored_files=files)

    return open_


class TestHeap(BackendContract):
    @pytest.fixture
    def open_backend(self) -> Opener:
        return opener("heap")


class TestRocksDB(BackendContract):
    @pytest.fixture
    def open_backend(self) -> Opener:
        return opener("rocksdb")


class TestRocksDBWithFullSnapshots(BackendContract):
    @pytest.fixture
    def open_backend(self) -> Opener:
        return opener("rocksdb-full")


class HeapMachine(BackendMachine):
    kind = "heap"


class RocksDBMachine(BackendMachine):
    kind = "rocksdb"


class RocksDBFullMachine(BackendMachine):
    kind, incremental = "rocksdb", False


SLOW = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHeapHistories = HeapMachine.TestCase
TestHeapHistories.settings = SLOW
TestRocksDBHistories = RocksDBMachine.TestCase
TestRocksDBHistories.settings = SLOW
TestRocksDBFullHistories = RocksDBFullMachine.TestCase
TestRocksDBFullHistories.settings = SLOW


def filled(mode: str, directory: Path, groups: range = range(8), per_group: int = 50) -> StateBackend:
    backend = opener(mode)(directory)
    keys = [key(group, b"%04d" % i) for group in groups for i in range(per_group)]
    backend.apply(keys, keys)
    return backend


def shared(files: Sequence[SnapshotFile]) -> dict[str, str]:
    return {file.name: file.identity for file in files if file.shared}


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("origin", MODES)
def test_a_snapshot_opens_in_every_backend(origin: str, target: str, tmp_path: Path) -> None:
    source = filled(origin, tmp_path / "source")
    files = restorable(source.snapshot(tmp_path / "snapshot").write())
    restored = opener(target)(tmp_path / "target", files)
    assert list(restored.scan(b"")) == list(source.scan(b""))
    source.close()
    restored.close()


@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("origin", MODES)
def test_a_restore_can_be_clipped_and_merged_by_key_group(origin: str, target: str, tmp_path: Path) -> None:
    parts = []
    for at, groups in enumerate([range(0, 4), range(4, 8)]):
        source = filled(origin, tmp_path / f"source-{at}", groups)
        parts.append(restorable(source.snapshot(tmp_path / f"snapshot-{at}").write()))
        source.close()
    kind, incremental = MODES[target]
    wanted = range(2, 6)
    merged = open_backend(
        kind, tmp_path / "m", memory=MEMORY, incremental=incremental, restored_files=parts[0], key_groups=wanted
    )
    load_snapshot(merged, parts[1], tmp_path, wanted)
    assert [k for k, _ in merged.scan(b"")] == [key(group, b"%04d" % i) for group in wanted for i in range(50)]
    again = opener(target)(tmp_path / "again", restorable(merged.snapshot(tmp_path / "s").write()))
    assert list(again.scan(b"")) == list(merged.scan(b""))
    merged.close()
    again.close()


def test_unchanged_files_keep_their_identity_through_snapshots_and_restores(tmp_path: Path) -> None:
    source = filled("rocksdb", tmp_path / "source")
    first = source.snapshot(tmp_path / "1").write()
    source.apply([key(0, b"more")], [b"1"])
    second = source.snapshot(tmp_path / "2").write()
    assert shared(first).items() < shared(second).items()
    source.close()
    restored = opener("rocksdb")(tmp_path / "restored", restorable(second))
    restored.apply([key(0, b"and more")], [b"2"])
    third = restored.snapshot(tmp_path / "3").write()
    assert shared(second).items() < shared(third).items()
    private = [file.identity for files in (first, second, third) for file in files if not file.shared]
    assert len(private) == len(set(private))
    restored.close()


def test_a_restored_backend_leaves_the_files_it_came_from_alone(tmp_path: Path) -> None:
    source = filled("rocksdb", tmp_path / "source")
    files = source.snapshot(tmp_path / "snapshot").write()
    before = {file.name: file.path.read_bytes() for file in files}
    source.close()
    for attempt in range(2):
        restored = opener("rocksdb")(tmp_path / f"restored-{attempt}", restorable(files))
        restored.apply([key(0, b"x")], [b"y"])
        restored.snapshot(tmp_path / f"again-{attempt}")
        restored.close()
    assert {file.name: file.path.read_bytes() for file in files} == before


@pytest.mark.parametrize("mode", ["rocksdb", "rocksdb-full"])
def test_a_closed_database_can_be_opened_again(mode: str, tmp_path: Path) -> None:
    backend = filled(mode, tmp_path / "db", per_group=500)
    scan = backend.scan(b"")
    next(scan)
    snapshot = backend.snapshot(tmp_path / "snapshot")
    snapshot.release()
    backend.close()
    again = RocksDBBackend(tmp_path / "db", MEMORY)
    assert len(list(again.scan(b""))) == 4_000
    with pytest.raises(StorageError, match=str(tmp_path)):
        RocksDBBackend(tmp_path / "db", MEMORY)
    again.close()


def test_databases_share_one_memory(tmp_path: Path) -> None:
    memory = RocksDBMemory(16 << 20)
    backends = [RocksDBBackend(tmp_path / str(i), memory) for i in range(3)]
    keys = [key(i % 8, b"%08d" % i) for i in range(20_000)]
    for _ in range(5):
        for backend in backends:
            backend.apply(keys, [b"v" * 100] * len(keys))
            backend.get_many(keys[::10])
    assert memory.used_bytes() > 0
    wait_until(lambda: memory.used_bytes() <= memory.total_bytes, 60)  # buffers are written in the background
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("harm", ["missing", "truncated", "manifest"])
def test_a_damaged_incremental_snapshot_is_refused(harm: str, tmp_path: Path) -> None:
    source = filled("rocksdb", tmp_path / "source")
    files = restorable(source.snapshot(tmp_path / "snapshot").write())
    source.close()
    victim = next(f.path for f in files if (f.name.startswith("MANIFEST") if harm == "manifest" else f.shared))
    if harm == "missing":
        victim.unlink()
    else:
        data = victim.read_bytes()
        victim.unlink()
        victim.write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedFileError):
        opener("rocksdb")(tmp_path / "restored", files)


def test_wrong_options_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="heap"):
        open_backend("memory", tmp_path / "db")
    with pytest.raises(ConfigError, match="zstd"):
        write_full_snapshot(tmp_path / "f", iter([]), "gzip")
    inside = RestoredFile("state.full", tmp_path / "db" / "state.full", "x", False)
    with pytest.raises(DirectoryNotOursError):
        open_backend("heap", tmp_path / "db", restored_files=[inside])


@pytest.mark.parametrize("compression", ["none", "snappy", "lz4", "zstd"])
def test_a_key_group_of_a_full_snapshot_can_be_read_alone(compression: str, tmp_path: Path) -> None:
    entries = [(key(group, b"%05d" % i), b"v" * (i % 50)) for group in (0, 3, 256) for i in range(300)]
    path = tmp_path / "state.full"
    assert write_full_snapshot(path, iter(entries), compression) == path.stat().st_size
    assert [int.from_bytes(keys[0][:2], "big") for keys, _ in read_full_snapshot(path)] == [0, 3, 256]
    for wanted in (None, range(3, 4), range(1, 300), range(4, 200)):
        found = [entry for keys, values in read_full_snapshot(path, wanted) for entry in zip(keys, values, strict=True)]
        assert found == [e for e in entries if wanted is None or int.from_bytes(e[0][:2], "big") in wanted]


def test_any_damage_to_a_full_snapshot_is_found(tmp_path: Path) -> None:
    entries = [(key(group, b"%d" % i), b"value") for group in (1, 2) for i in range(3)]
    path = tmp_path / "state.full"
    write_full_snapshot(path, iter(entries))
    good = path.read_bytes()
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes((good[at] ^ 0x41,)) + good[at + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(DamagedFileError, match=str(path)):
                list(read_full_snapshot(path))
    path.unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        read_full_snapshot(path)


@pytest.mark.parametrize("count", [5, 40, 20_000])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_damaged_block_is_an_error_and_never_the_end_of_a_scan(kind: str, count: int, tmp_path: Path) -> None:
    """RocksDB's fast iterators end at a damaged block as if there were no more entries."""
    backend = open_backend("rocksdb", tmp_path / "db", options=RocksDBOptions(compression="none"))
    keys = [b"\0\0%06d" % number for number in range(count)]
    backend.apply(keys, [b"x" * 100] * count)
    files = [RestoredFile(f.name, f.path, f.identity, f.shared) for f in backend.snapshot(tmp_path / "s").write()]
    backend.close()
    table = next(file for file in files if file.shared)
    data = bytearray(table.path.read_bytes())
    data[data.index(b"x" * 100, len(data) // 3 if count > 5 else 0)] ^= 1
    table.path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="Corruption"):  # noqa: PT012 - the heap reads all when it is opened
        opened = open_backend(kind, tmp_path / "again", restored_files=files)
        try:
            with pytest.raises(DamagedFileError, match="Corruption"):
                opened.get_many(keys)
            list(opened.scan(b""))
        finally:
            opened.close()


def test_a_full_snapshot_of_a_damaged_database_is_not_written(tmp_path: Path) -> None:
    backend = open_backend("rocksdb", tmp_path / "db", options=RocksDBOptions(compression="none"))
    backend.apply([b"\0\0%06d" % number for number in range(5_000)], [b"x" * 100] * 5_000)
    snapshot = backend.snapshot(tmp_path / "s", full=True)
    table = next((tmp_path / "s" / "frozen").glob("*.sst"))
    data = bytearray(table.read_bytes())
    data[data.index(b"x" * 100, len(data) // 3)] ^= 1
    table.write_bytes(data)
    with pytest.raises(DamagedFileError, match="Corruption"):
        snapshot.write()
    backend.close()


def test_the_heap_counts_its_size_anew_when_a_tenth_of_its_entries_has_changed() -> None:
    """So that figures, which are taken every second, do not add up millions of lengths each time."""
    backend = HeapBackend()
    keys = [b"%04d" % number for number in range(1000)]
    backend.apply(keys, [b"x"] * 1000)
    assert (backend.size_bytes(), backend.estimated_keys()) == (5000, 1000)
    backend.apply(keys[:50], [b"x" * 101] * 50)
    assert backend.size_bytes() == 5000
    backend.apply(keys[50:100], [None] * 50)
    assert (backend.size_bytes(), backend.estimated_keys()) == (5000 + 50 * 100 - 50 * 5, 950)
    backend.apply(keys, [None] * 1000)
    assert (backend.size_bytes(), backend.estimated_keys()) == (0, 0)


def test_rocksdb_counts_the_reads_that_its_cache_answers(tmp_path: Path) -> None:
    backend = open_backend("rocksdb", tmp_path / "db")
    keys = [b"\0\0%06d" % number for number in range(5000)]
    backend.apply(keys, [b"v" * 100] * len(keys))
    assert backend.cache_reads() == CacheReads(0, 0)  # write buffers hold everything
    backend.snapshot(tmp_path / "snapshot")  # which writes the buffers to a file
    backend.get_many(keys)
    first = backend.cache_reads()
    backend.get_many(keys)
    second = backend.cache_reads()
    backend.close()
    assert first is not None
    assert second is not None
    assert first.misses > 0
    assert second.misses == first.misses
    assert second.hits > first.hits
    assert backend.cache_reads() is None
    assert open_backend("heap", tmp_path / "heap").cache_reads() is None
