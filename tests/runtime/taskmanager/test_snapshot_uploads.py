"""Small files of many snapshots: put together, never lost, and never much more in storage than is needed."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from strandline.admin.verification import verify_files
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, SourcePosition, all_files, keyed_files
from strandline.errors import CheckpointError, StorageError
from strandline.runtime.protocol.messages import SnapshotReport, UploadSettings
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.examples import examples
from tests.runtime.taskmanager.changelog.host import upload_settings
from tests.waiting import wait_until

SUBTASKS = 3
SMALL = 100
INLINE = 10
SHAPE = JobShape("visits", 1, SUBTASKS, 12, ("count",))


class Uploads(RuleBasedStateMachine):
    """One task manager: subtasks whose SSTs come and go, checkpoints that complete or fail, slots that move away."""

    @initialize(amplification=st.sampled_from([1.0, 1.5, 2.0, 5.0]), retained=st.sampled_from([1, 2]))
    def begin(self, amplification: float, retained: int) -> None:
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.storage = LocalStorage(str(self.root / "durable"))
        self.settings = UploadSettings(INLINE, SMALL, amplification)
        self.coordinator = CheckpointCoordinator(
            interval=1.0,
            subtasks=[("count", n) for n in range(SUBTASKS)],
            max_concurrent=2,
            num_retained=retained,
            tolerable_failures=1 << 30,
        )
        self.live: list[dict[str, bytes]] = [{} for _ in range(SUBTASKS)]
        self.taken: dict[int, list[dict[str, bytes]]] = {}
        self.retained: dict[int, CheckpointMetadata] = {}
        self.uploaded_twice: set[int] = set()
        """Checkpoints that may have uploaded files again which another checkpoint had: the registry keeps the first."""
        self.identities: dict[str, str] = {}
        self.names = 0
        self.clock = 0.0
        self.new_uploader()

    def new_uploader(self) -> None:
        self.uploader = SnapshotUploader(self.storage, "visits", self.settings, threads=1)
        self.builds_on_nothing = False
        if self.retained:
            for state in self.retained[max(self.retained)].subtasks:
                self.uploader.start_from((state.operator, state.subtask), [state], True, max(self.retained))

    @rule(subtask=st.integers(0, SUBTASKS - 1), size=st.integers(0, 2 * SMALL), shared=st.booleans())
    def new_file(self, subtask: int, size: int, shared: bool) -> None:
        self.names += 1
        kind = "sst" if shared else "log"
        self.live[subtask][f"{self.names:06d}.{kind}"] = self.names.to_bytes(4, "big") * (size // 4) + b"x" * (size % 4)

    @precondition(lambda self: any(self.live))
    @rule(data=st.data())
    def compaction(self, data: st.DataObject) -> None:
        """Any number of a subtask's files go."""
        files = data.draw(st.sampled_from([files for files in self.live if files]))
        for name in data.draw(st.sets(st.sampled_from(sorted(files)))):
            del files[name]

    @precondition(lambda self: self.coordinator.should_trigger(self.clock, 1, forced=True))
    @rule(completes=st.booleans())
    def checkpoint(self, completes: bool) -> None:
        self.clock += 1
        number = self.coordinator.trigger(self.clock, self.clock, batch=1).id
        if len(self.coordinator.pending()) > 1 or self.builds_on_nothing:
            self.uploaded_twice.add(number)
        self.taken[number] = [dict(files) for files in self.live]
        snapshots = []
        for subtask, files in enumerate(self.live):
            folder = self.root / f"op-{subtask}" / f"chk-{number}"
            folder.mkdir(parents=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
            listed = [
                (n, str(folder / n), len(c), self.identities.get(f"{subtask}/{n}", f"{subtask}/{n}"), n.endswith("sst"))
                for n, c in files.items()
            ]
            groups = range(subtask * 4, subtask * 4 + 4)
            snapshots.append(
                SubtaskSnapshot(subtask, groups, "rocksdb", True, SnapshotReport("count", listed, [], 0, 1, 1), 0.0)
            )
        for ack in self.uploader.upload(number, snapshots):
            self.coordinator.acknowledge(number, "count", ack.state.subtask, ack)
        shutil.rmtree(self.root / "op-0" / f"chk-{number}")
        if completes:
            self.complete(number)

    @precondition(lambda self: self.coordinator.ready())
    @rule(data=st.data())
    def complete_one(self, data: st.DataObject) -> None:
        self.complete(data.draw(st.sampled_from(self.coordinator.ready())))

    @precondition(lambda self: self.coordinator.ready() and self.retained)
    @rule(data=st.data())
    def task_manager_is_replaced_while_a_checkpoint_completes(self, data: st.DataObject) -> None:
        """The new one starts from the files of the checkpoint before, and then hears that this one is complete."""

        def meanwhile() -> None:
            self.task_manager_is_replaced()
            self.live = [dict(files) for files in self.taken[max(self.retained)]]

        self.complete(data.draw(st.sampled_from(self.coordinator.ready())), meanwhile)
        self.builds_on_nothing = True

    def complete(self, number: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        plan = self.coordinator.prepare_completion(number, self.clock, shape=SHAPE, source=SourcePosition(0, {}))
        meanwhile()
        decision = self.coordinator.confirm_completion(number, self.clock)
        self.retained[number] = plan.metadata
        self.builds_on_nothing = False
        for gone in decision.dropped:
            del self.retained[gone]
        replaced = {f.identity: f.handle for _s, f in all_files(plan.metadata) if f.shared and f.handle is not None}
        for _ in range(2):  # a message may come twice
            self.uploader.completed(number, replaced if plan.duplicates else {})
            self.uploader.forget_older(number)
        self.storage.delete([handle.path for handle in decision.delete])

    @precondition(lambda self: self.coordinator.ready())
    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.coordinator.ready()))
        decision = self.coordinator.fail(number, "declined", self.clock)
        self.uploader.aborted(number)
        self.storage.delete([handle.path for handle in decision.delete])

    @rule()
    def task_manager_is_replaced(self) -> None:
        decision = self.coordinator.fail_all("lost", self.clock)
        self.storage.delete([handle.path for handle in decision.delete])
        self.uploader.close()
        self.new_uploader()
        # Its slots start from the newest checkpoint: they know files by the identities that it names.
        if self.retained:
            for state, file in all_files(self.retained[max(self.retained)]):
                self.identities[f"{state.subtask}/{file.name}"] = file.identity

    @invariant()
    def retained_checkpoints_are_whole(self) -> None:
        for number, metadata in getattr(self, "retained", {}).items():
            for state, file in all_files(metadata):
                expected = self.taken[number][state.subtask][file.name]
                handle = file.handle
                if handle is None:
                    assert file.inline == expected
                    assert len(expected) <= INLINE
                else:
                    assert self.storage.read_range(handle.path, handle.offset, handle.size) == expected
            assert verify_files(self.storage, dict(keyed_files(metadata.subtasks)).values(), threads=1) == {}

    @invariant()
    def nothing_else_is_stored(self) -> None:
        if hasattr(self, "coordinator") and not self.coordinator.ready():
            named = {h.path for metadata in self.retained.values() for _key, h in keyed_files(metadata.subtasks)}
            assert {file.path for file in self.storage.list()} == named

    @invariant()
    def what_is_put_together_is_mostly_needed(self) -> None:
        """At every checkpoint that uploaded nothing for the second time; the next one puts those right."""
        for metadata in getattr(self, "retained", {}).values():
            needed: dict[str, list[FileHandle]] = {}
            for _key, handle in keyed_files(metadata.subtasks):
                if handle.whole:
                    assert handle.size < SMALL
                    needed.setdefault(handle.path, []).append(handle)
            for handles in needed.values():
                amplification = handles[0].whole / max(1, sum(handle.size for handle in handles))
                # Of what was uploaded twice, the later checkpoint is rewritten to the files of the first.
                assert amplification <= self.settings.max_amplification or metadata.checkpoint_id in self.uploaded_twice

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.uploader.close()
            shutil.rmtree(self.root)


TestUploads = Uploads.TestCase
TestUploads.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def snapshot(folder: Path, sizes: dict[str, int], subtask: int = 0) -> SubtaskSnapshot:
    folder.mkdir(exist_ok=True)
    files = []
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)
        files.append((name, str(folder / name), size, f"id-{subtask}/{name}", True))
    return SubtaskSnapshot(subtask, range(4), "rocksdb", True, SnapshotReport("count", files, [], 0, 1, 1), 0.0)


def test_all_slots_of_a_task_manager_share_one_file(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "durable"))
    uploader = SnapshotUploader(storage, "visits", upload_settings())
    acks = uploader.upload(
        1, [snapshot(tmp_path / f"slot-{n}", {"1.sst": 50_000, "2.sst": 3_000_000}, n) for n in range(8)]
    )
    assert len(list(storage.list())) == 1 + 8
    together = {ack.state.files[0].handle.path for ack in acks if ack.state.files[0].handle is not None}
    assert len(together) == 1
    assert {ack.checkpointed_bytes for ack in acks} == {3_050_000}
    uploader.close()


def test_an_upload_that_is_given_up_ends_early_and_leaves_nothing(tmp_path: Path) -> None:
    class GivesUp(LocalStorage):
        def upload(self, source: Path, path: str) -> None:
            super().upload(source, path)
            uploader.aborted(1)

    storage = GivesUp(str(tmp_path / "durable"))
    uploader = SnapshotUploader(storage, "visits", upload_settings(small_bytes=0), threads=1)
    with pytest.raises(CheckpointError, match="checkpoint 1 was given up"):
        uploader.upload(1, [snapshot(tmp_path / "slot", {f"{n}.sst": 10 for n in range(20)})])
    assert list(storage.list()) == []
    uploader.close()


def test_checkpoints_that_are_given_up_while_storage_hangs_do_not_pile_up(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    switch.touch()
    storage = FaultyStorage(
        f"faulty+file://{tmp_path}/durable", {"fail_pattern": "^upload", "fail_mode": "hang", "switch": str(switch)}
    )
    uploader = SnapshotUploader(storage, "visits", upload_settings(small_bytes=0), threads=2)
    with ThreadPoolExecutor(8) as pool:
        uploads = [
            pool.submit(uploader.upload, number, [snapshot(tmp_path, {"a.sst": 1000, "b.sst": 1000})])
            for number in range(1, 9)
        ]
        wait_until(lambda: len(uploader._running) == 8 and uploader._pool._work_queue.qsize() == 14)
        for number in range(1, 9):
            uploader.aborted(number)
        # At most two have an upload that runs, and must wait for it.
        wait_until(lambda: sum(upload.done() for upload in uploads) >= 6)
        switch.unlink()
        for upload in uploads:
            with pytest.raises(CheckpointError, match="given up"):
                upload.result(10)
    assert list(storage.list()) == []


@pytest.mark.parametrize("mode", ["before", "unknown", "after"])
def test_an_upload_that_fails_before_or_after_it_happened_leaves_nothing(tmp_path: Path, mode: str) -> None:
    storage = FaultyStorage(
        f"faulty+file://{tmp_path}/durable", {"fail_pattern": "^(upload|write)", "fail_mode": mode, "fail_times": "1"}
    )
    uploader = SnapshotUploader(storage, "visits", upload_settings(small_bytes=0), threads=2)
    files = {"a.sst": 1000, "b.sst": 1000}
    with pytest.raises(StorageError, match="fails on purpose"):
        uploader.upload(1, [snapshot(tmp_path, files)])
    assert list(storage.list()) == []
    (ack,) = uploader.upload(2, [snapshot(tmp_path, files)])
    assert {file.path for file in storage.list()} == {handle.path for handle in ack.uploaded}


def test_an_upload_of_the_generation_before_leaves_the_next_ones_records_alone(tmp_path: Path) -> None:
    """Checkpoint ids may repeat between generations, and an upload may hang in storage for long."""
    gates = {"before": threading.Event(), "after": threading.Event()}
    hanging: list[str] = []

    class Hangs(LocalStorage):
        def upload(self, source: Path, path: str) -> None:
            hanging.append(source.parent.name)
            assert gates[source.parent.name].wait(30)
            super().upload(source, path)

    storage = Hangs(str(tmp_path / "durable"))
    uploader = SnapshotUploader(storage, "visits", upload_settings(small_bytes=0))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(uploader.upload, 7, [snapshot(tmp_path / "before", {"1.sst": 10})])
        wait_until(lambda: hanging == ["before"])
        uploader.begin_generation()
        second = pool.submit(uploader.upload, 7, [snapshot(tmp_path / "after", {"2.sst": 10})])
        wait_until(lambda: hanging == ["before", "after"])
        gates["before"].set()
        with pytest.raises(CheckpointError, match="checkpoint 7 was given up"):
            first.result()
        gates["after"].set()
        (ack,) = second.result()
    assert [handle.path for handle in ack.uploaded] == [file.path for file in storage.list()]
    assert uploader.identities() == {"id-0/2.sst"}
    uploader.close()


def test_a_task_manager_that_gets_a_subtask_while_a_checkpoint_completes_does_not_build_on_the_one_before(
    tmp_path: Path,
) -> None:
    """The checkpoint that completes has compacted the files of the one before away, and they are deleted with it."""
    storage = LocalStorage(str(tmp_path / "durable"))
    coordinator = CheckpointCoordinator(interval=1.0, subtasks=[("count", 0)], num_retained=1)
    shape = JobShape("visits", 1, 1, 4, ("count",))
    before, after = (SnapshotUploader(storage, "visits", upload_settings(), threads=1) for _ in range(2))

    def take(uploader: SnapshotUploader, *names: str) -> CheckpointMetadata:
        number = coordinator.trigger(0.0, 0.0, 1).id
        for ack in uploader.upload(number, [snapshot(tmp_path / "slot", dict.fromkeys(names, 50_000))]):
            coordinator.acknowledge(number, "count", 0, ack)
        return coordinator.prepare_completion(number, 0.0, shape=shape, source=SourcePosition(0, {})).metadata

    def complete(number: int, uploader: SnapshotUploader) -> None:
        storage.delete([handle.path for handle in coordinator.confirm_completion(number, 0.0).delete])
        uploader.completed(number, {})
        uploader.forget_older(number)

    first = take(before, "1.sst")
    complete(1, before)
    take(before, "2.sst")
    after.start_from(("count", 0), first.subtasks, True, 1)
    complete(2, after)
    third = take(after, "1.sst", "3.sst")
    complete(3, after)
    assert verify_files(storage, dict(keyed_files(third.subtasks)).values(), threads=1) == {}
    assert take(after, "1.sst", "3.sst") == replace(third, checkpoint_id=4)
    for uploader in (before, after):
        uploader.close()


def test_a_full_checkpoint_uploads_what_the_last_one_holds_and_later_ones_build_on_the_new_copies(
    tmp_path: Path,
) -> None:
    storage = LocalStorage(str(tmp_path / "durable"))
    coordinator = CheckpointCoordinator(interval=1.0, subtasks=[("count", 0)], num_retained=1)
    shape = JobShape("visits", 1, 1, 4, ("count",))
    uploader = SnapshotUploader(storage, "visits", upload_settings(), threads=1)

    def take(full: bool) -> tuple[int, set[str]]:
        """How many bytes were uploaded, and the files of the checkpoint."""
        number = coordinator.trigger(0.0, 0.0, 1).id
        (ack,) = uploader.upload(number, [snapshot(tmp_path / "slot", {"1.sst": 50_000, "2.sst": 50_000})], full=full)
        coordinator.acknowledge(number, "count", 0, ack)
        plan = coordinator.prepare_completion(number, 0.0, shape=shape, source=SourcePosition(0, {}))
        storage.delete([handle.path for handle in coordinator.confirm_completion(number, 0.0).delete])
        uploader.completed(number, {})
        files = dict(keyed_files(plan.metadata.subtasks))
        assert verify_files(storage, files.values(), threads=1) == {}
        assert {file.path for file in storage.list()} == {handle.path for handle in files.values()}
        return ack.checkpointed_bytes, {handle.path for handle in files.values()}

    (first, old), (second, same), (third, new), (fourth, still) = take(False), take(False), take(True), take(False)
    assert (first, second, third, fourth) == (100_000, 0, 100_000, 0)
    assert old == same
    assert not old & new
    assert new == still
    uploader.close()
