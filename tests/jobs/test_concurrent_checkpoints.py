"""Checkpoints whose uploads take long or fail: the job works on, checkpoints overlap, and storage stays tidy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

import strandline as sl
from strandline.admin.inspection import JobFolder
from strandline.checkpoint.metadata import CheckpointMetadata, all_files
from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import CheckpointError, StorageError, StrandlineError
from strandline.runtime.protocol.coordinator_calls import Decline
from strandline.runtime.protocol.messages import SnapshotReport
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.state.backends.factory import RestoredFile, open_backend
from strandline.storage import open_storage
from strandline.storage.checksums import checksum
from tests.jobs.place import Place, Sum, running_sums
from tests.runtime.taskmanager.changelog.host import upload_settings
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

Rows = list[tuple[str | None, int]]

MANY: Rows = [(f"user-{i}", i) for i in range(10_000)]
CRAWL = 100
"""Bytes per second at which no upload ends before the test says so."""


FEW: Rows = [(f"user-{i}", 1) for i in range(50)]
"""The same every time: Spark takes files of one millisecond in any order."""


ONE_FILE_EACH = {"checkpoint_interval": "1h", "restart_strategy": "none", "small_file_threshold": 0}
"""Small files are not put together, so that the tests can speak of single ones."""


class Faults:
    """A job of `place` on a storage with faults, which the test switches on and off."""

    def __init__(self, place: Place, rate: int | None = None, **options: str) -> None:
        self.place = place
        self._rate = place.root / "rate"
        if rate is not None:
            self.set_rate(rate)
            options["bytes_per_second"] = str(self._rate)
        self.switch = place.root / "faults-on"
        self.journal = place.root / "journal"
        self._options = {"switch": str(self.switch), "journal": str(self.journal), **options}
        self._threads = ThreadPoolExecutor(4)
        self.folder = place.checkpoints / "visits"

    def start(self, **options: object) -> sl.JobRun:
        config = self.place.config(**{**ONE_FILE_EACH, **options}).replace(
            checkpoint_dir=f"faulty+file://{self.place.checkpoints}", storage_options=self._options
        )
        job = sl.Job("visits", self.place.spark, config)
        stream = job.source(self.place.source()).key_by("user")
        stream.process(Sum(), "user string, n long, s long", uid="sums").sink(sl.ParquetSink(str(self.place.output)))
        return job.start()

    def set_rate(self, bytes_per_second: int) -> None:
        changed = self._rate.with_suffix(".new")
        changed.write_text(str(bytes_per_second))
        changed.replace(self._rate)

    def on(self) -> None:
        self.switch.touch()

    def off(self) -> None:
        self.switch.unlink()

    def trigger(self, run: sl.JobRun) -> Future[CheckpointStats]:
        """Trigger a checkpoint, and return when it is in progress."""
        before = {checkpoint.id for checkpoint in run.checkpoints()}
        taken = self._threads.submit(run.trigger_checkpoint)
        wait_until(lambda: {c.id for c in run.checkpoints()} - before, what="the barrier")
        return taken

    def calls(self, operation: str) -> list[str]:
        """The paths of shared files that were given to a storage operation, in every process of the run."""
        calls = [line.split(" ", 1) for line in self.journal.read_text().splitlines()]
        return [path for name, path in calls if name == operation and "/shared/" in path]

    def stored(self) -> set[str]:
        return {f"visits/shared/{path.name}" for path in (self.folder / "shared").glob("*")}

    def retained(self) -> list[CheckpointMetadata]:
        (job,) = JobFolder.find(str(self.folder))
        facts = job.checkpoints()
        assert [fact.problem for fact in facts] == [None] * len(facts)
        return [job.metadata(fact.id) for fact in facts]

    def referenced(self) -> set[str]:
        files = (file for metadata in self.retained() for _state, file in all_files(metadata))
        return {file.handle.path for file in files if file.handle is not None and file.shared}

    def is_tidy(self) -> bool:
        """Every stored file belongs to a retained checkpoint, and the other way round."""
        return self.stored() == self.referenced()

    def read(self, metadata: CheckpointMetadata) -> int:
        """Restore a checkpoint from what is stored, every file checked; returns how many entries its state has."""
        entries = 0
        for state in metadata.subtasks:
            folder = self.place.root / f"read-{metadata.checkpoint_id}-{state.subtask}"
            folder.mkdir()
            files = []
            for file in state.files:
                local = folder / file.name
                if file.handle is None:
                    local.write_bytes(file.inline or b"")
                else:
                    local = self.place.checkpoints / file.handle.path
                    assert local.stat().st_size == file.handle.size
                    assert checksum(local) == file.handle.checksum
                files.append(RestoredFile(file.name, local, file.identity, file.shared))
            backend = open_backend("rocksdb", folder / "db", restored_files=files)
            entries += sum(1 for _ in backend.scan(b""))
            backend.close()
        return entries

    def close(self) -> None:
        self.switch.unlink(missing_ok=True)
        self._threads.shutdown()


@pytest.fixture
def faults(place: Place) -> Iterator[Faults]:
    faults = Faults(place, rate=CRAWL)
    yield faults
    faults.close()


def batches_done(run: sl.JobRun, count: int) -> None:
    wait_until(lambda: run.figures().batches >= count, what=f"batch {count}")


def statuses(run: sl.JobRun) -> list[str]:
    return [checkpoint.status for checkpoint in run.checkpoints()]


def ended(checkpoint: CheckpointStats) -> float:
    return checkpoint.trigger_time + checkpoint.end_to_end_ms / 1000


def test_batches_are_committed_while_a_checkpoint_uploads(place: Place, runs: list[sl.JobRun], faults: Faults) -> None:
    place.write(MANY)
    faults.on()
    run = faults.start()
    runs.append(run)
    batches_done(run, 1)
    taken = faults.trigger(run)
    for _ in range(3):
        place.write(FEW)
    batches_done(run, 4)
    assert statuses(run) == ["in_progress"]
    assert place.rows() == []
    faults.off()
    stats = taken.result(timeout=30)
    assert place.rows() == running_sums([MANY])  # what came after the barrier is not covered yet
    assert stats.sync_ms < stats.async_ms
    run.process_all_available()
    assert place.rows() == running_sums([MANY, FEW, FEW, FEW])
    assert faults.is_tidy()


def test_the_rate_of_uploads_shows_in_the_figures(place: Place, runs: list[sl.JobRun]) -> None:
    rate = 60_000
    faults = Faults(place, rate=rate)
    place.write(MANY)
    faults.on()
    run = faults.start(parallelism=1)
    runs.append(run)
    batches_done(run, 1)
    taken = faults.trigger(run)
    place.write(FEW)
    batches_done(run, 2)
    stats = taken.result(timeout=60)
    (stored,) = faults.retained()
    uploaded = sum(file.handle.size for _state, file in all_files(stored) if file.handle is not None)
    assert uploaded > 50_000
    assert stats.async_ms >= 1000 * uploaded / rate
    assert stats.end_to_end_ms >= stats.async_ms > stats.sync_ms
    faults.close()


def test_overlapping_checkpoints_upload_the_same_file_twice_and_one_copy_survives(
    place: Place, runs: list[sl.JobRun], faults: Faults
) -> None:
    place.write(MANY)
    faults.on()
    run = faults.start(max_concurrent_checkpoints=2, num_retained=2)
    runs.append(run)
    batches_done(run, 1)
    first = faults.trigger(run)
    place.write(FEW)
    batches_done(run, 2)
    second = faults.trigger(run)
    assert statuses(run) == ["in_progress", "in_progress"]
    faults.set_rate(60_000)  # in the order in which they were asked for, so the first checkpoint is complete first
    one, two = first.result(timeout=30), second.result(timeout=30)
    assert (one.id, two.id) == (1, 2)
    assert two.checkpointed_bytes > one.checkpointed_bytes  # all of the first one's files again, and the new ones

    wait_until(faults.is_tidy, what="the end of the duplicates")
    uploads = faults.calls("upload")
    assert len(uploads) == len(set(uploads)), "two uploads had one name"
    older, newer = faults.retained()
    files_of = [
        {(state.subtask, file.identity): file.handle for state, file in all_files(metadata) if file.shared}
        for metadata in (older, newer)
    ]
    common = files_of[0].keys() & files_of[1].keys()
    assert len(common) == len(files_of[0]) == 2
    assert all(files_of[0][key] == files_of[1][key] for key in common)
    duplicates = set(uploads) - faults.referenced()
    assert len(duplicates) == len(common)
    # A deletion is noted after the file is gone.
    wait_until(lambda: len(faults.calls("delete")) >= len(duplicates), what="the note of the deletions")
    assert Counter(faults.calls("delete")) == Counter(duplicates)
    assert [faults.read(metadata) for metadata in (older, newer)] == [len(MANY), len(MANY)]

    place.write(FEW)
    run.process_all_available()
    third = run.checkpoints()[-1]
    assert third.checkpointed_bytes < one.checkpointed_bytes / 5  # it builds on the surviving copies
    assert faults.referenced() >= {handle.path for handle in files_of[0].values() if handle is not None}
    assert place.rows() == running_sums([MANY, FEW, FEW])
    wait_until(faults.is_tidy, what="the end of what was dropped")


def test_only_one_checkpoint_at_a_time_unless_more_are_allowed(
    place: Place, runs: list[sl.JobRun], faults: Faults
) -> None:
    place.write(MANY)
    faults.on()
    run = faults.start(checkpoint_interval="100ms")
    runs.append(run)
    for _ in range(3):
        place.write(FEW)
    batches_done(run, 4)
    assert statuses(run) == ["in_progress"]
    faults.off()
    run.process_all_available()
    completed = run.checkpoints()
    assert {checkpoint.status for checkpoint in completed} == {"completed"}
    for before, after in pairwise(completed):
        assert after.trigger_time >= ended(before) - 0.001


@pytest.mark.slow
@pytest.mark.parametrize("concurrent", [1, 2])
def test_the_minimum_pause_separates_the_end_of_one_checkpoint_from_the_start_of_the_next(
    place: Place, runs: list[sl.JobRun], concurrent: int
) -> None:
    faults = Faults(place, rate=100_000)
    pause = 0.7
    place.write(FEW)
    faults.on()
    run = faults.start(checkpoint_interval="100ms", min_pause=pause, max_concurrent_checkpoints=concurrent)
    runs.append(run)
    for number in range(1, 200):
        place.write(FEW)
        if statuses(run).count("completed") >= 3:
            break
        batches_done(run, number)
    taken = [checkpoint for checkpoint in run.checkpoints() if checkpoint.status == "completed"]
    assert len(taken) >= 3
    for before, after in pairwise(taken):
        assert after.trigger_time >= ended(before) + pause - 0.001
    faults.close()


def test_a_failed_checkpoint_leaves_no_file_behind_and_the_run_goes_on(place: Place, runs: list[sl.JobRun]) -> None:
    """Of two subtasks, one uploads its file and the other cannot."""
    faults = Faults(place, fail_pattern=r"^upload .*\.sst$", fail_times="1")
    place.write(MANY)
    run = faults.start(tolerable_failed_checkpoints=1)
    runs.append(run)
    batches_done(run, 1)
    faults.on()
    with pytest.raises(CheckpointError, match="fails on purpose"):
        run.trigger_checkpoint()
    wait_until(lambda: faults.stored() == set(), what="the end of the failed checkpoint's uploads")
    (failed,) = run.checkpoints()
    assert failed.status == "failed"
    assert failed.failure is not None
    assert "fails on purpose" in failed.failure
    assert run.status == "running"

    place.write(FEW)
    run.process_all_available()
    completed = run.checkpoints()[-1]
    assert (completed.id, completed.status) == (2, "completed")
    assert completed.checkpointed_bytes >= completed.full_bytes  # nothing of the failed one could be referred to
    assert faults.is_tidy()
    assert place.rows() == running_sums([MANY, FEW])
    assert run.figures().restarts == 0
    faults.close()


def test_what_a_subtask_uploaded_before_it_failed_is_deleted_by_the_task_manager(tmp_path: Path) -> None:
    """The coordinator never hears of these files."""
    options = {"fail_pattern": r"^upload .*-c\.sst$", "journal": str(tmp_path / "journal")}
    storage = open_storage(f"faulty+file://{tmp_path}/durable", options)
    uploader = SnapshotUploader(storage, "visits", upload_settings(small_bytes=0), threads=2)
    files = []
    for name in ("a.sst", "b.sst", "c.sst", "d.sst"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
        files.append((name, str(tmp_path / name), 5000, f"id/{name}", True))
    report = SnapshotReport("sums", files, [], 0, 1.0, 1.0)
    with pytest.raises(StorageError, match="fails on purpose"):
        uploader.upload(1, [SubtaskSnapshot(0, range(128), "rocksdb", True, report, 0.0)])
    assert list(storage.list()) == []
    calls = (tmp_path / "journal").read_text()
    assert calls.count("upload visits/shared/") >= 3

    whole = SnapshotReport("sums", [file for file in files if file[0] != "c.sst"], [], 0, 1.0, 1.0)
    (ack,) = uploader.upload(2, [SubtaskSnapshot(0, range(128), "rocksdb", True, whole, 0.0)])
    assert [handle.path for handle in ack.uploaded] == [file.handle.path for file in ack.state.files if file.handle]
    assert {file.path for file in storage.list()} == {handle.path for handle in ack.uploaded}
    assert len(ack.uploaded) == 3  # nothing of the first attempt is referred to
    uploader.close()


def test_a_decline_after_all_have_acknowledged_does_not_undo_a_completion(place: Place, runs: list[sl.JobRun]) -> None:
    """A task manager whose acknowledgement arrived, but not the answer to it, declines."""
    faults = Faults(place, rate=CRAWL, slow_pattern="^create .*/_metadata$")
    place.write(MANY)
    faults.on()
    run = faults.start()
    runs.append(run)
    batches_done(run, 1)
    taken = faults.trigger(run)
    wait_until(lambda: len(faults.calls("upload")) == 2, what="the uploads")
    generation = run._run._generations.current
    assert generation is not None
    coordinator = generation.checkpoints._coordinator
    wait_until(lambda: [pending.completing for pending in coordinator.pending()] == [True], what="the completion")
    generation._cluster.decline(Decline(1, 1, "no answer", slot_lost=False))
    faults.off()
    assert taken.result(timeout=30).status == "completed"
    assert faults.is_tidy()
    assert [faults.read(metadata) for metadata in faults.retained()] == [len(MANY)]
    faults.close()


def test_deletions_that_fail_leave_orphans_and_nothing_else(place: Place, runs: list[sl.JobRun]) -> None:
    faults = Faults(place, fail_pattern="^delete ")
    place.write(FEW)
    faults.on()
    run = faults.start()
    runs.append(run)
    run.process_all_available()
    place.write(FEW)
    run.process_all_available()
    assert statuses(run) == ["completed", "completed"]
    assert run.trigger_checkpoint().status == "completed"
    assert run.status == "running"
    assert (faults.folder / "chk-1" / "_metadata").exists()
    assert [metadata.checkpoint_id for metadata in faults.retained()] == [3]
    assert faults.stored() >= faults.referenced()
    assert place.rows() == running_sums([FEW, FEW])
    faults.close()


def test_more_failed_checkpoints_than_tolerated_end_the_run_and_spare_what_is_retained(
    place: Place, runs: list[sl.JobRun]
) -> None:
    faults = Faults(place, fail_pattern=r"^upload .*\.sst$")
    place.write(MANY)
    run = faults.start()
    runs.append(run)
    run.process_all_available()
    faults.on()
    place.write(FEW)
    batches_done(run, 2)
    with pytest.raises(StrandlineError, match="1 in a row, 0 tolerated"):
        run.trigger_checkpoint()
    with pytest.raises(StrandlineError, match="1 in a row, 0 tolerated"):
        run.await_termination(timeout=30)
    assert run.status == "failed"
    wait_until(faults.is_tidy, what="the end of the failed checkpoint's uploads")
    assert [faults.read(metadata) for metadata in faults.retained()] == [len(MANY)]
    faults.close()

    again = faults.start()
    runs.append(again)
    again.process_all_available()
    assert place.rows() == running_sums([MANY, FEW])


def test_each_of_three_retained_checkpoints_can_be_read(place: Place, runs: list[sl.JobRun], faults: Faults) -> None:
    run = faults.start(num_retained=3)
    runs.append(run)
    users = 0
    for number in range(5):
        place.write([(f"user-{users + i}", i) for i in range(1000)])
        users += 1000
        run.process_all_available()
        assert statuses(run) == ["completed"] * (number + 1)
    wait_until(
        lambda: sorted(path.name for path in faults.folder.glob("chk-*")) == ["chk-3", "chk-4", "chk-5"],
        what="the end of older checkpoints",
    )
    retained = faults.retained()
    assert [metadata.checkpoint_id for metadata in retained] == [3, 4, 5]
    assert [faults.read(metadata) for metadata in retained] == [3000, 4000, 5000]
    wait_until(faults.is_tidy, what="the end of what was dropped")
