"""A change set is the batch's own view of state: it hides the backend's values, and touches nothing until commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.chunks import CHUNK_BYTES, CHUNK_ENTRIES


@pytest.fixture
def backend() -> Iterator[HeapBackend]:
    backend = HeapBackend()
    backend.apply([b"aa1", b"aa2", b"bb1"], [b"1", b"2", b"3"])
    yield backend
    backend.close()


@pytest.fixture(params=[1 << 20, 1], ids=["in memory", "spilled"])
def changes(request: pytest.FixtureRequest, backend: HeapBackend, tmp_path: Path) -> Iterator[ChangeSet]:
    changes = ChangeSet(backend, request.param, tmp_path / "spill")
    yield changes
    changes.discard()


def test_own_changes_hide_the_backend_and_leave_it_alone(changes: ChangeSet, backend: HeapBackend) -> None:
    changes.put(b"aa1", b"one")
    changes.put_many([b"aa2", b"cc", b"empty"], [None, b"c", b""])
    assert changes.get_many([b"cc", b"aa1", b"aa2", b"bb1", b"zz", b"empty"]) == [b"c", b"one", None, b"3", None, b""]
    assert [changes.get(k) for k in (b"aa1", b"aa2", b"bb1", b"empty")] == [b"one", None, b"3", b""]
    assert list(changes.scan(b"aa")) == [(b"aa1", b"one")]
    assert list(changes.scan(b"")) == [(b"aa1", b"one"), (b"bb1", b"3"), (b"cc", b"c"), (b"empty", b"")]
    assert len(changes) == 4
    assert changes.size_bytes > 0
    assert list(backend.scan(b"")) == [(b"aa1", b"1"), (b"aa2", b"2"), (b"bb1", b"3")]


def test_chunks_are_the_net_changes_in_key_order(changes: ChangeSet) -> None:
    for value in (b"first", None, b"last"):
        changes.put(b"b", value)
    changes.put(b"c", b"gone")
    changes.put(b"c", None)
    changes.put(b"a", b"")
    assert list(changes.chunks()) == [([b"a", b"b", b"c"], [b"", b"last", None])]


def test_chunks_are_bounded_in_entries_and_in_bytes(backend: HeapBackend, tmp_path: Path) -> None:
    for limit in (1 << 30, 1 << 20):
        changes = ChangeSet(backend, limit, tmp_path / "spill")
        small = [b"k%06d" % i for i in range(CHUNK_ENTRIES + 1)]
        changes.put_many(small, small)
        large = [b"l%d" % i for i in range(8)]
        for name in large:
            changes.put(name, b"x" * (CHUNK_BYTES // 3))
        parts = list(changes.chunks())
        assert [k for keys, _ in parts for k in keys] == small + large
        assert all(len(keys) <= CHUNK_ENTRIES for keys, _ in parts)
        assert all(sum(len(v) for v in values if v) < 2 * CHUNK_BYTES for _, values in parts)
        changes.discard()


def test_a_hot_key_that_is_overwritten_does_not_spill(backend: HeapBackend, tmp_path: Path) -> None:
    changes = ChangeSet(backend, 4_000, tmp_path / "spill")
    for i in range(10_000):
        changes.put(b"hot", b"%d" % i)
    assert not changes.spilled
    assert changes.get(b"hot") == b"9999"
    assert not (tmp_path / "spill").exists()


def test_discard_forgets_everything_and_deletes_the_scratch_files(backend: HeapBackend, tmp_path: Path) -> None:
    changes = ChangeSet(backend, 2_000, tmp_path / "spill")
    for i in range(100):
        changes.put(b"k%d" % i, b"v" * 50)
    left_open = changes.scan(b"k")
    next(left_open)
    assert changes.spilled
    changes.discard()
    changes.discard()
    assert list((tmp_path / "spill").iterdir()) == []
    assert len(changes) == 0
    assert changes.get(b"k1") is None
    assert len(list(changes.scan(b""))) == 3


def test_scanning_a_small_prefix_for_every_key_is_not_quadratic(tmp_path: Path) -> None:
    def seconds(keys: int) -> float:
        changes = ChangeSet(HeapBackend(), 1 << 30, tmp_path)
        started = time.perf_counter()
        for i in range(keys):
            name = b"%08d" % (i * 7919 % keys)
            changes.put(name + b"/a", b"1")
            changes.put(name + b"/b", None)
            assert list(changes.scan(name)) == [(name + b"/a", b"1")]
        return time.perf_counter() - started

    few = seconds(4_000)
    assert seconds(32_000) < 8 * 4 * max(few, 0.01)
