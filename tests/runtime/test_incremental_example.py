"""Flink's example of incremental checkpoints, CP 1 to CP 4 with two retained, on a real RocksDB and real storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rocksdict import Options

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition, encode
from strandline.checkpoint.registry import SharedKey
from strandline.runtime.driver.restore.job_log import read_metadata
from strandline.runtime.protocol.messages import SnapshotReport
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.state.backends.factory import RestoredFile, open_backend
from strandline.state.backends.rocksdb import RocksDBBackend, RocksDBOptions
from strandline.storage.checksums import checksum
from strandline.storage.local import LocalStorage
from strandline.storage.paths import JobPaths
from tests.runtime.taskmanager.changelog.host import upload_settings

OPERATOR = "sums"
KEY_GROUPS = range(0, 128)
PATHS = JobPaths("visits")
SHAPE = JobShape("visits", 1, 1, 128, (OPERATOR,))
LOW, HIGH = b"a", b"m"
"""Keys of sstable-(1) to (3) begin with the one, those of (4) to (6) with the other: RocksDB merges by key range."""


def without_compactions(options: Options) -> Options:
    """Leaves every flush and every compaction to the test."""
    options.set_disable_auto_compactions(True)
    return options


class DrivenBackend(RocksDBBackend):
    """A database whose SSTs have the example's names: sstable-(4) is "4"."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 16 << 20, options=RocksDBOptions(compaction="level"), tune=without_compactions)
        self.names: dict[str, str] = {}
        """The example's name of every SST there ever was, by RocksDB's name."""

    def live(self) -> set[str]:
        return {str(file["name"]).lstrip("/") for file in self._db.live_files()}

    def flush_as(self, name: str, prefix: bytes, version: int) -> dict[bytes, bytes]:
        """Write some entries, most of them over older ones, and have them flushed into one SST."""
        entries = {prefix + b"%04d" % i: b"%d/%d" % (version, i) for i in range(version, 500 + version)}
        self.apply(list(entries), list(entries.values()))
        self._db.flush()
        self._name(name)
        return entries

    def merge_as(self, name: str, prefix: bytes) -> None:
        """Compact the files with the keys of `prefix` into one."""
        self._db.compact_range(prefix, prefix + b"\xff")
        self._name(name)

    def _name(self, name: str) -> None:
        (new,) = self.live() - self.names.keys()
        self.names[new] = name


class Example:
    """One subtask, its database, the uploader and the coordinator; time is the number of the checkpoint."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.db = DrivenBackend(root / "db")
        self.storage = LocalStorage(str(root / "durable"))
        self.uploader = SnapshotUploader(self.storage, "visits", upload_settings(small_bytes=0))
        self.coordinator = CheckpointCoordinator(interval=1.0, subtasks=[(OPERATOR, 0)], num_retained=2)
        self.uploaded: dict[str, str] = {}
        """Where each SST was uploaded, by the example's name."""

    def checkpoint(self, number: int) -> tuple[set[str], set[str]]:
        """Take a checkpoint from barrier to deletion; returns the SSTs that it uploaded and those it had deleted."""
        pending = self.coordinator.trigger(float(number), float(number), batch=number)
        assert pending.id == number
        snapshot = self.db.snapshot(self.root / f"snapshot-{number}")
        files = [(f.name, str(f.path), f.size, f.identity, f.shared) for f in snapshot.write()]
        report = SnapshotReport(OPERATOR, files, [], 0, 1.0, 1.0)
        (ack,) = self.uploader.upload(number, [SubtaskSnapshot(0, KEY_GROUPS, "rocksdb", True, report, float(number))])
        snapshot.release()
        assert self.coordinator.acknowledge(number, OPERATOR, 0, ack).status == "ready"

        before = self.stored()
        plan = self.coordinator.prepare_completion(
            number, float(number), shape=SHAPE, source=SourcePosition(number, {})
        )
        self.storage.create(PATHS.metadata(number), encode(plan.metadata))
        decision = self.coordinator.confirm_completion(number, float(number))
        self.uploader.completed(number, {})
        self.storage.delete([handle.path for handle in decision.delete])
        self.storage.delete([PATHS.metadata(gone) for gone in decision.dropped])

        names = {file.handle.path: self.db.names[file.name] for file in ack.state.files if file.handle is not None}
        self.uploaded.update({name: path for path, name in names.items()})
        assert {handle.path for handle in ack.uploaded} <= before
        by_path = {path: name for name, path in self.uploaded.items()}
        deleted = {by_path[handle.path] for handle in decision.delete}
        assert before - self.stored() == {self.uploaded[name] for name in deleted}
        return {names[handle.path] for handle in ack.uploaded}, deleted

    def stored(self) -> set[str]:
        return {file.path for file in self.storage.list(PATHS.shared_dir)}

    def counts(self) -> dict[str, int]:
        """The registry as the example draws it: how many checkpoints use each file; it agrees with what is stored."""
        registry = self.coordinator.registry
        counts = {}
        for file, name in self.db.names.items():
            key = SharedKey(OPERATOR, KEY_GROUPS.start, KEY_GROUPS.stop, f"{self.db.open_id}/{file}")
            if key in registry:
                counts[name] = len(registry.uses(key))
                handle = registry.handle(key)
                assert handle is not None
                assert handle.path == self.uploaded[name]
        assert len(registry) == len(counts)
        assert self.stored() == {self.uploaded[name] for name in counts}
        return counts

    def metadata(self) -> list[CheckpointMetadata]:
        """What is retained, as a reader finds it in storage."""
        found = [PATHS.parse_metadata(file.path) for file in self.storage.list(PATHS.root)]
        return [read_metadata(self.storage, PATHS, number, others=()) for number in sorted(n for n in found if n)]

    def restored(self, metadata: CheckpointMetadata) -> dict[bytes, bytes]:
        """The state that a checkpoint holds, from durable storage alone."""
        folder = self.root / f"restored-{metadata.checkpoint_id}"
        folder.mkdir()
        files = []
        for file in metadata.subtasks[0].files:
            local = folder / file.name
            if file.handle is None:
                local.write_bytes(file.inline or b"")
            else:
                self.storage.download(file.handle.path, local)
                assert checksum(local) == file.handle.checksum
            files.append(RestoredFile(file.name, local, file.identity, file.shared))
        backend = open_backend("rocksdb", self.root / f"opened-{metadata.checkpoint_id}", restored_files=files)
        try:
            return dict(backend.scan(b""))
        finally:
            backend.close()


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Example]:
    example = Example(tmp_path)
    yield example
    example.uploader.close()
    example.db.close()


def test_the_four_checkpoints_upload_share_and_drop_the_files_of_the_example(example: Example) -> None:
    db = example.db
    state: dict[bytes, bytes] = {}

    state |= db.flush_as("1", LOW, 1)
    state |= db.flush_as("2", LOW, 2)
    assert example.checkpoint(1) == ({"1", "2"}, set())
    assert example.counts() == {"1": 1, "2": 1}

    state |= db.flush_as("3", LOW, 3)
    state |= db.flush_as("4", HIGH, 4)
    assert example.checkpoint(2) == ({"3", "4"}, set())
    assert example.counts() == {"1": 2, "2": 2, "3": 1, "4": 1}

    db.merge_as("1,2,3", LOW)
    state |= db.flush_as("5", HIGH, 5)
    assert {db.names[file] for file in db.live()} == {"1,2,3", "4", "5"}
    assert example.checkpoint(3) == ({"1,2,3", "5"}, set())
    assert example.counts() == {"1": 1, "2": 1, "3": 1, "4": 2, "1,2,3": 1, "5": 1}
    assert [metadata.checkpoint_id for metadata in example.metadata()] == [2, 3]
    third = dict(state)

    state |= db.flush_as("6", HIGH, 6)
    db.merge_as("4,5,6", HIGH)
    assert {db.names[file] for file in db.live()} == {"1,2,3", "4,5,6"}
    assert example.checkpoint(4) == ({"4,5,6"}, {"1", "2", "3"})
    assert example.counts() == {"4": 1, "1,2,3": 2, "5": 1, "4,5,6": 1}

    retained = example.metadata()
    assert [metadata.checkpoint_id for metadata in retained] == [3, 4] == list(example.coordinator.retained)
    assert [example.restored(metadata) for metadata in retained] == [third, state]


def test_every_retained_checkpoint_holds_the_state_of_its_barrier(example: Example) -> None:
    """A merge between two checkpoints changes the files, not the state that the older one restores."""
    first = example.db.flush_as("1", LOW, 1)
    example.checkpoint(1)
    second = first | example.db.flush_as("2", LOW, 2)
    example.db.merge_as("1,2", LOW)
    assert example.checkpoint(2) == ({"1,2"}, set())
    assert [example.restored(metadata) for metadata in example.metadata()] == [first, second]
