"""The contract of a state backend, as tests that every backend must pass.

A subclass gives a fixture `open_backend`; it may hand out any backend that can be restored from its own snapshots:

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def open_backend(self) -> Opener:
            return lambda directory, files=(): MyBackend(directory, files)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from strandline.state.backends.base import Snapshot, SnapshotFile, StateBackend
from strandline.state.backends.factory import RestoredFile


class Opener(Protocol):
    """Opens a backend, empty or from the files of a snapshot, in a directory that does not exist yet."""

    def __call__(self, directory: Path, files: Sequence[RestoredFile] = ()) -> StateBackend: ...


def restorable(files: Sequence[SnapshotFile]) -> list[RestoredFile]:
    """The files of a snapshot, as if they had been uploaded and downloaded again."""
    return [RestoredFile(file.name, file.path, file.identity, file.shared) for file in files]


def key(group: int, rest: bytes = b"") -> bytes:
    """A key of a key group."""
    return group.to_bytes(2, "big") + rest


class BackendContract:
    """The behaviour of a backend that the runtime relies on."""

    @pytest.fixture
    def open_backend(self) -> Opener:
        raise NotImplementedError("a subclass says how its backend is opened")

    @pytest.fixture
    def backend(self, open_backend: Opener, tmp_path: Path) -> Iterator[StateBackend]:
        backend = open_backend(tmp_path / "state")
        yield backend
        backend.close()

    def test_values_come_back_in_the_order_of_the_keys_asked_for(self, backend: StateBackend) -> None:
        backend.apply([b"aa1", b"aa2", b"aa3"], [b"1", b"", b"3"])
        assert backend.get_many([b"aa3", b"none", b"aa2", b"aa3"]) == [b"3", None, b"", b"3"]
        assert backend.get_many((b"aa1",)) == [b"1"]
        assert backend.get_many([]) == []
        assert (backend.get(b"aa2"), backend.get(b"none")) == (b"", None)

    def test_a_range_is_deleted(self, backend: StateBackend) -> None:
        keys = [b"aa0", b"aa1", b"aa1\xff", b"aa2", b"ab"]
        backend.apply(keys, [b"x"] * 5)
        backend.delete_between(b"aa1", b"aa2")
        assert [key for key, _ in backend.scan(b"")] == [b"aa0", b"aa2", b"ab"]
        assert backend.get_many([b"aa1", b"aa1\xff"]) == [None, None]
        backend.apply([b"aa1"], [b"new"])
        backend.delete_between(b"ac", b"ad")
        assert dict(backend.scan(b"aa1", b"aa2")) == {b"aa1": b"new"}

    def test_many_values_come_back_in_one_call(self, backend: StateBackend) -> None:
        keys = [b"%05d" % number for number in range(10_000)]
        backend.apply(keys[::2], keys[::2])
        found = backend.get_many(keys)
        assert found[::2] == keys[::2]
        assert found[1::2] == [None] * 5000

    def test_a_scan_is_in_key_order_whatever_the_order_of_writing(self, backend: StateBackend) -> None:
        backend.apply([b"bb", b"aa\xff", b"aa", b"aa\x00"], [b"4", b"3", b"1", b"2"])
        expected = [(b"aa", b"1"), (b"aa\x00", b"2"), (b"aa\xff", b"3"), (b"bb", b"4")]
        assert list(backend.scan(b"")) == expected

    def test_a_scan_includes_its_start_and_excludes_its_end(self, backend: StateBackend) -> None:
        keys = [b"a", b"ab", b"b", b"ba", b"c"]
        backend.apply(keys, keys)
        assert [k for k, _ in backend.scan(b"ab", b"ba")] == [b"ab", b"b"]
        assert [k for k, _ in backend.scan(b"aa", b"aaa")] == []
        assert [k for k, _ in backend.scan(b"c")] == [b"c"]
        assert [k for k, _ in backend.scan(b"d")] == []

    def test_key_groups_are_ranges_of_keys(self, backend: StateBackend) -> None:
        groups = [0, 1, 127, 128, 255, 256, 257, 32767]
        keys = [key(group, rest) for group in groups for rest in (b"", b"\x00", b"\xff\xff")]
        backend.apply(list(reversed(keys)), list(reversed(keys)))
        assert [k for k, _ in backend.scan(b"")] == keys
        assert [k for k, _ in backend.scan(key(128), key(257))] == [k for k in keys if key(128) <= k < key(257)]

    def test_deletes_hide_what_was_there_and_later_puts_bring_it_back(self, backend: StateBackend) -> None:
        backend.apply([b"aa1", b"aa2", b"aa3"], [b"1", b"2", b"3"])
        assert len(list(backend.scan(b"aa"))) == 3
        backend.apply([b"aa1", b"aa2", b"never"], [None, b"two", None])
        assert backend.get_many([b"aa1", b"aa2", b"aa3"]) == [None, b"two", b"3"]
        assert list(backend.scan(b"")) == [(b"aa2", b"two"), (b"aa3", b"3")]
        backend.apply([b"aa1"], [b"again"])
        assert list(backend.scan(b"")) == [(b"aa1", b"again"), (b"aa2", b"two"), (b"aa3", b"3")]

    def test_a_long_scan_is_complete(self, backend: StateBackend) -> None:
        keys = [key(i % 7, b"%06d" % i) for i in range(5_000)]
        backend.apply(keys, keys)
        assert [k for k, _ in backend.scan(b"")] == sorted(keys)
        assert backend.size_bytes() > 0
        assert backend.estimated_keys() > 0
        assert backend.memory_bytes() >= 0

    def test_scans_that_wait_still_stop_at_their_ends(self, backend: StateBackend) -> None:
        """A scan must keep its end bound alive, even if the caller's bytes object is gone."""
        keys = [key(i % 4, b"%04d" % i) for i in range(800)]
        backend.apply(keys, keys)
        scans = [backend.scan(key(i % 4), key(i % 4 + 1)) for i in range(400)]
        overwritten = [key(0, b"%d" % (i % 10)) for i in range(10_000)]
        assert [len(list(scan)) for scan in scans] == [200] * 400
        assert len(overwritten) == 10_000

    def test_what_is_applied_after_a_snapshot_is_not_in_it(
        self, backend: StateBackend, open_backend: Opener, tmp_path: Path
    ) -> None:
        backend.apply([b"aa1", b"aa2"], [b"old", b"kept"])
        snapshot = backend.snapshot(tmp_path / "snapshot")
        backend.apply([b"aa1", b"aa2", b"aa3"], [b"new", None, b"later"])
        assert _restored(open_backend, tmp_path / "restored", snapshot) == {b"aa1": b"old", b"aa2": b"kept"}
        assert dict(backend.scan(b"")) == {b"aa1": b"new", b"aa3": b"later"}

    def test_loaded_entries_are_entries_like_all_others(
        self, backend: StateBackend, open_backend: Opener, tmp_path: Path
    ) -> None:
        there = [key(0, b"a"), key(3, b"z")]
        backend.apply(there, [b"old", b"old"])
        backend.delete_between(key(1), key(2))
        backend.load(iter(()), tmp_path)
        keys = [key(1, b"%06d" % i) for i in range(30_000)]
        backend.load(((keys[at : at + 7_000], keys[at : at + 7_000]) for at in range(0, len(keys), 7_000)), tmp_path)
        assert backend.get_many([there[0], keys[0], keys[-1]]) == [b"old", keys[0], keys[-1]]
        backend.apply([keys[0], keys[1]], [None, b"new"])
        state = {**dict.fromkeys(there, b"old"), **dict(zip(keys, keys, strict=True)), keys[1]: b"new"}
        del state[keys[0]]
        assert dict(backend.scan(b"")) == state
        assert _restored(open_backend, tmp_path / "restored", backend.snapshot(tmp_path / "snapshot")) == state
        assert not list(tmp_path.glob("load-*"))

    def test_tidying_up_changes_nothing_but_the_size(self, backend: StateBackend, tmp_path: Path) -> None:
        keys = [key(i % 4, b"%06d" % i) for i in range(140_000)]
        for some in (keys[:70_000], keys[70_000:]):
            backend.apply(some, some)
        backend.apply(keys[:-100], [None] * (len(keys) - 100))
        backend.compact()
        assert list(backend.scan(b"")) == sorted((one, one) for one in keys[-100:])
        snapshot = backend.snapshot(tmp_path / "compacted")
        assert sum(file.size for file in snapshot.write()) < 100_000
        snapshot.release()

    def test_a_restored_backend_goes_on_by_itself(
        self, backend: StateBackend, open_backend: Opener, tmp_path: Path
    ) -> None:
        backend.apply([b"aa1"], [b"1"])
        files = restorable(backend.snapshot(tmp_path / "first").write())
        other = open_backend(tmp_path / "other", files)
        other.apply([b"aa2"], [b"2"])
        backend.apply([b"aa3"], [b"3"])
        again = other.snapshot(tmp_path / "second")
        other.close()
        assert _restored(open_backend, tmp_path / "third", again) == {b"aa1": b"1", b"aa2": b"2"}
        assert dict(backend.scan(b"")) == {b"aa1": b"1", b"aa3": b"3"}

    def test_an_empty_state_can_be_snapshot_and_restored(
        self, backend: StateBackend, open_backend: Opener, tmp_path: Path
    ) -> None:
        assert _restored(open_backend, tmp_path / "restored", backend.snapshot(tmp_path / "snapshot")) == {}

    def test_one_identity_means_the_same_bytes(
        self, backend: StateBackend, open_backend: Opener, tmp_path: Path
    ) -> None:
        """Two backends restored from one snapshot give new files the same names, so identities must differ."""
        backend.apply([b"aa"], [b"common"])
        files = restorable(backend.snapshot(tmp_path / "base").write())
        seen: dict[str, bytes] = {file.identity: file.path.read_bytes() for file in files}
        for name in (b"left", b"right"):
            twin = open_backend(tmp_path / f"twin-{name.decode()}", files)
            twin.apply([b"bb"], [name])
            for file in twin.snapshot(tmp_path / f"snapshot-{name.decode()}").write():
                data = file.path.read_bytes()
                assert file.size == len(data)
                assert seen.setdefault(file.identity, data) == data
            twin.close()

    def test_a_snapshot_is_written_while_the_next_batches_are_applied(
        self, backend: StateBackend, open_backend: Opener, tmp_path: Path
    ) -> None:
        keys = [key(i % 16, b"%06d" % i) for i in range(20_000)]
        backend.apply(keys, keys)
        snapshot = backend.snapshot(tmp_path / "snapshot")
        with ThreadPoolExecutor(1) as writer:
            written = writer.submit(snapshot.write)
            rounds = 0
            while rounds < 3 or (not written.done() and rounds < 200):
                backend.apply(keys[:2_000], [b"%d" % rounds] * 2_000)
                backend.apply([k + b"x" for k in keys[:200]], [None if rounds % 2 else b""] * 200)
                rounds += 1
            written.result()
        assert _restored(open_backend, tmp_path / "restored", snapshot) == dict(zip(keys, keys, strict=True))

    def test_writing_a_snapshot_again_gives_the_same_files(self, backend: StateBackend, tmp_path: Path) -> None:
        backend.apply([b"aa"], [b"1"])
        snapshot = backend.snapshot(tmp_path / "snapshot")
        names = {(file.name, file.size) for file in snapshot.write()}
        assert {(file.name, file.size) for file in snapshot.write()} == names

    def test_a_released_snapshot_leaves_nothing(self, backend: StateBackend, tmp_path: Path) -> None:
        backend.apply([b"aa"], [b"1"])
        unwritten = backend.snapshot(tmp_path / "unwritten")
        written = backend.snapshot(tmp_path / "written")
        written.write()
        for snapshot in (unwritten, written, written):
            snapshot.release()
        assert not (tmp_path / "unwritten").exists()
        assert not (tmp_path / "written").exists()
        assert backend.get(b"aa") == b"1"

    def test_closing_twice_is_fine_even_with_a_scan_left_open(self, backend: StateBackend) -> None:
        keys = [b"aa%05d" % i for i in range(1_000)]
        backend.apply(keys, keys)
        scan = backend.scan(b"")
        next(scan)
        backend.close()
        backend.close()


def _restored(open_backend: Opener, directory: Path, snapshot: Snapshot) -> dict[bytes, bytes]:
    backend = open_backend(directory, restorable(snapshot.write()))
    try:
        return dict(backend.scan(b""))
    finally:
        backend.close()
