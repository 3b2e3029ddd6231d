"""Runs random histories of batches, commits, snapshots and restores on a backend, and compares it with a dict."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from strandline.state.backends.base import Snapshot, StateBackend
from strandline.state.backends.factory import RestoredFile, open_backend
from strandline.state.batch.changes import ChangeSet
from strandline.state.batch.segment import SegmentHeader, read_segment, write_segment
from strandline.testing.backend import restorable

Model = dict[bytes, bytes]

KEYS = st.builds(
    lambda group, rest: group.to_bytes(2, "big") + rest,
    st.sampled_from([0, 1, 255, 256]),
    st.lists(st.sampled_from([b"\x00", b"a", b"b", b"\xff"]), max_size=3).map(b"".join),
)
VALUES = st.one_of(st.binary(max_size=12), st.just(b"\x00"), st.just(b"x" * 150))


class BackendMachine(RuleBasedStateMachine):
    """A subclass names the backend with `kind` and `incremental`, or overrides `open`."""

    kind = "heap"
    incremental = True
    memory_limit = 2_000

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="strandline-machine-"))
        self.numbers = count()
        self.backend = self.open(self.path("state"))
        self.committed: Model = {}
        self.snapshots: list[tuple[Snapshot, Model]] = []

    def open(self, directory: Path, files: Sequence[RestoredFile] = ()) -> StateBackend:
        """A backend in a new directory, empty or from the files of a snapshot."""
        return open_backend(self.kind, directory, memory=8 << 20, incremental=self.incremental, restored_files=files)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self.numbers)}"

    @initialize()
    def begin(self) -> None:
        self.changes = ChangeSet(self.backend, self.memory_limit, self.folder / "spill")
        self.model = dict(self.committed)
        self.changed: set[bytes] = set()

    # --- within a batch --------------------------------------------------------------------------

    @rule(key=KEYS, value=st.none() | VALUES)
    def put(self, key: bytes, value: bytes | None) -> None:
        self.changes.put(key, value)
        self._expect_changed(key, value)

    @rule(entries=st.lists(st.tuples(KEYS, st.none() | VALUES), max_size=20))
    def put_many(self, entries: list[tuple[bytes, bytes | None]]) -> None:
        self.changes.put_many([key for key, _ in entries], [value for _, value in entries])
        for key, value in entries:
            self._expect_changed(key, value)

    @rule(keys=st.lists(KEYS, max_size=8))
    def get(self, keys: list[bytes]) -> None:
        expected = [self.model.get(key) for key in keys]
        assert self.changes.get_many(keys) == expected
        assert [self.changes.get(key) for key in keys] == expected

    @rule(prefix=KEYS | st.sampled_from([b"", b"\x00", b"\x01", b"\xff"]))
    def scan(self, prefix: bytes) -> None:
        expected = sorted(item for item in self.model.items() if item[0].startswith(prefix))
        assert list(self.changes.scan(prefix)) == expected

    @rule(start=KEYS, end=KEYS)
    def scan_range(self, start: bytes, end: bytes) -> None:
        expected = sorted(item for item in self.model.items() if start <= item[0] < end)
        assert list(self.changes.scan_range(start, end)) == expected

    @rule(prefix=st.sampled_from([b"", b"\x00"]))
    def write_while_scanning(self, prefix: bytes) -> None:
        expected = sorted(item for item in self.model.items() if item[0].startswith(prefix))
        seen = []
        for key, value in self.changes.scan(prefix):
            seen.append((key, value))
            self.put(key, None if value else b"was empty")
            self.put(key + b"+", b"y" * 100)
        assert seen == expected

    @rule()
    def length(self) -> None:
        assert len(self.changes) == len(self.changed)

    # --- between batches -------------------------------------------------------------------------

    @rule()
    def commit(self) -> None:
        header = SegmentHeader(1, next(self.numbers), 0, "operator", 0, 7)
        segment = write_segment(self.path("segment"), header, self.changes.chunks())
        assert segment.entries == len(self.changed)
        self.changes.discard()
        found, chunks = read_segment(segment.path)
        assert found == header
        for keys, values in chunks:
            assert keys == sorted(keys)
            self.backend.apply(keys, values)
        self.committed = self.model
        self.begin()

    @rule()
    def abandon(self) -> None:
        self.changes.discard()
        self.begin()
        self.scan(b"")

    @rule()
    def barrier(self) -> None:
        self.snapshots.append((self.backend.snapshot(self.path("snapshot")), dict(self.committed)))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, state = self.snapshots.pop(data.draw(st.integers(0, len(self.snapshots) - 1)))
        self.changes.discard()
        self.backend.close()
        self.backend = self.open(self.path("state"), restorable(snapshot.write()))
        snapshot.release()
        self.committed = state
        self.begin()
        self.scan(b"")

    def teardown(self) -> None:
        try:
            self.changes.discard()
            assert dict(self.backend.scan(b"")) == self.committed
        finally:
            self.backend.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _expect_changed(self, key: bytes, value: bytes | None) -> None:
        self.changed.add(key)
        if value is None:
            self.model.pop(key, None)
        else:
            self.model[key] = value
