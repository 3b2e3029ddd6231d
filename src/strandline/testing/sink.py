"""The contract of a sink, as tests that every exactly-once sink must pass.

A subclass says how to make the sink and how to read its target:

    class TestMySink(SinkContract):
        @pytest.fixture
        def sink(self, tmp_path: Path) -> ExactlyOnceSink:
            return MySink(tmp_path / "target")

        def rows(self, sink: ExactlyOnceSink) -> list[tuple[str, int]]:
            return read_all(sink)
"""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.job_log import CheckpointRef, JobLog, Start
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile, SourcePosition
from strandline.errors import FencedError, MarkerMovedError, SinkAheadError, SinkFilesMissingError
from strandline.sinks.base import ExactlyOnceSink, SinkCommit, SinkContext, SinkStart, SinkTakeover, SinkTarget
from strandline.sinks.marked import MarkedTarget
from strandline.sinks.positions import with_positions
from strandline.storage import JobPaths, Storage, open_storage
from strandline.storage.retries import Retries
from strandline.testing.sink_rows import Row, after, check_rows

JOB = "visits"
SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
KILLS = 6
"""How often a driver is killed while it publishes."""


def a_context(checkpoint_dir: Path, keys: tuple[str, ...] = ("user",), job: str = JOB) -> SinkContext:
    """What a sink is told in these tests."""
    return SinkContext(job, SCHEMA, str(checkpoint_dir), keys)


@dataclass
class SinkJob:
    """A job with one sink and no state: its log, its checkpoints, and what its drivers do to the target."""

    sink: ExactlyOnceSink
    context: SinkContext
    log: JobLog = field(default_factory=JobLog)
    newest: CheckpointMetadata | None = None
    steps: list[str] = field(default_factory=list)
    """What was done so far, in words, for the messages of tests that fail."""

    def start(
        self,
        restore: CheckpointMetadata | None = None,
        *,
        repeat_rows: bool = False,
        recover: bool = True,
    ) -> SinkDriver:
        """A driver takes the job over: from its newest checkpoint, or from an older one that the user names."""
        target = self.sink.target(self.context)
        restored = restore or self.newest
        begins = f"from checkpoint {restored.checkpoint_id}" if restored is not None else "without a checkpoint"
        self.steps.append(f"a driver starts {begins}{', with repeat_rows' if repeat_rows else ''}")
        start = self.log.resume()
        if restore is not None:
            ref = CheckpointRef(
                restore.checkpoint_id, JobPaths(self.context.job).metadata(restore.checkpoint_id), restore.batch_id
            )
            start = Start(ref, (restore.checkpoint_id,), (), takes_sinks=True)
        retries = Retries(2, first_pause=0)
        above = target.check(SinkStart(restored, self.log, retries, start.takes_sinks, repeat_rows))
        start = replace(start, generation_above=max(start.generation_above, above))
        self.log = self.log.apply(self.log.takeover_entry("driver", time.time(), f"nonce-{time.time_ns()}", start))
        self.newest = restored
        self.steps.append(f"it is generation {self.log.generation}")
        driver = SinkDriver(self, target, self.log)
        if recover:
            driver.recover()
        return driver


@dataclass
class SinkDriver:
    """One driver of the job, in one generation. It goes on whether or not another driver has taken over."""

    job: SinkJob
    target: SinkTarget
    log: JobLog
    staged: list[SinkFile] = field(default_factory=list)
    """What no checkpoint covers yet."""
    batches: int = 0

    def recover(self) -> None:
        self.target.claim(self.log)
        takeover = SinkTakeover(self.job.newest, self.log, lambda: None, Retries(2, first_pause=0))
        self.target.recover(takeover)
        self._done("has claimed and recovered the target")

    def _done(self, what: str) -> None:
        self.job.steps.append(f"generation {self.log.generation} {what}")

    @property
    def batch(self) -> int:
        """The last batch."""
        return first_batch(self.log.generation) + self.batches

    def stage(self, *tasks: Sequence[Row]) -> list[SinkFile]:
        """One batch. Each task stages some rows."""
        self.batches += 1
        stager = pickle.loads(pickle.dumps(self.job.sink.stager(self.job.context)))
        files = [
            file
            for partition, rows in enumerate(tasks)
            for file in stager.stage(record_batches(rows), self.batch, partition)
        ]
        self.staged += files
        self._done(f"has staged batch {self.batches}: {sum(map(len, tasks))} rows of {len(tasks)} tasks")
        return files

    def complete(self) -> CheckpointMetadata:
        """A checkpoint is complete: its log entry is won. Nothing is published yet."""
        number = self.log.next_checkpoint_id
        position = self.target.position
        noted = with_positions({}, {self.target.place: position} if position is not None else {})
        metadata = a_checkpoint(self.job.context.job, number, self.log.generation, self.batch, self.staged, noted)
        path = JobPaths(self.job.context.job).metadata(number)
        entry = self.log.completion_entry(number, path, self.batch, time.time(), f"nonce-{number}", (number,), ())
        self.log = self.job.log = self.log.apply(entry)
        self.job.newest = metadata
        self.staged = []
        self._done(f"has completed checkpoint {number}")
        return metadata

    def complete_with(self, batch: int, files: Sequence[SinkFile]) -> CheckpointMetadata:
        """A checkpoint of the newest one and of epochs up to `batch`, whose rows are in `files`, is complete."""
        newest = self.job.newest
        assert newest is not None
        number = self.log.next_checkpoint_id
        metadata = msgspec.structs.replace(
            newest,
            checkpoint_id=number,
            generation=self.log.generation,
            batch_id=batch,
            sink_files=(*newest.sink_files, *files),
        )
        path = JobPaths(self.job.context.job).metadata(number)
        entry = self.log.completion_entry(number, path, batch, time.time(), f"nonce-{number}", (number,), ())
        self.log = self.job.log = self.log.apply(entry)
        self.job.newest = metadata
        self._done(f"has completed checkpoint {number} with epochs of the generation before")
        return metadata

    def publish(self, metadata: CheckpointMetadata) -> None:
        files = tuple(file for file in metadata.sink_files if file.sink == self.target.place)
        self._done(f"publishes checkpoint {metadata.checkpoint_id}")
        self.target.publish(SinkCommit(metadata.checkpoint_id, metadata.batch_id, files, self.log))

    def checkpoint(self, *tasks: Sequence[Row]) -> CheckpointMetadata:
        """A batch, and a checkpoint that covers it."""
        self.stage(*tasks)
        metadata = self.complete()
        self.publish(metadata)
        return metadata


def record_batches(rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    """Some batches with these rows, and one without any."""
    yield pa.RecordBatch.from_pylist([], SCHEMA)
    for at in range(0, len(rows), 2):
        users, numbers = zip(*rows[at : at + 2], strict=True)
        yield pa.RecordBatch.from_arrays([pa.array(users), pa.array(numbers, pa.int64())], schema=SCHEMA)


def marked(target: SinkTarget) -> MarkedTarget:
    """The target, if it has a marker. Else the test is skipped."""
    if not isinstance(target, MarkedTarget):
        pytest.skip("the target has no marker")
    return target


def a_checkpoint(
    job: str, number: int, generation: int, batch: int, files: Iterable[SinkFile], properties: Mapping[str, str]
) -> CheckpointMetadata:
    """A checkpoint without state."""
    return CheckpointMetadata(
        job=job,
        checkpoint_id=number,
        generation=generation,
        batch_id=batch,
        kind="checkpoint",
        parallelism=1,
        max_parallelism=128,
        operators=(),
        subtasks=(),
        source=SourcePosition(0, {}),
        sink_files=tuple(files),
        trigger_time=0.0,
        completed_time=0.0,
        properties=dict(properties),
    )


class SinkContract:
    """To use it, write a subclass `Test...` with a fixture `sink` and a method `rows`."""

    upserts = False
    """Whether the sink keeps the last row of every key instead of all rows."""
    kills = KILLS

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        """A sink whose target is empty, or does not exist yet. The subclass overrides this fixture."""
        raise NotImplementedError("a subclass of SinkContract must give a `sink` fixture")

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        """All rows that a reader of the target sees, in any order."""
        raise NotImplementedError("a subclass of SinkContract must say how its target is read")

    def left(self, sink: ExactlyOnceSink) -> list[str]:
        """What is in the target that no reader will ever see. Override it where that can be told."""
        return []

    @pytest.fixture
    def job(self, sink: ExactlyOnceSink, tmp_path: Path) -> SinkJob:
        context = a_context(tmp_path / "checkpoints")
        return SinkJob(sink.bound(context), context)

    def expected(self, rows: Iterable[Row]) -> list[Row]:
        """What the target must hold after these rows, given in the order in which they were emitted."""
        rows = list(rows)
        return sorted(dict(rows).items() if self.upserts else rows)

    def check(self, job: SinkJob, rows: Iterable[Row]) -> None:
        """The target holds exactly what it must after these rows. Else the error names rows and steps."""
        check_rows(self.rows(job.sink), self.expected(rows), job.steps)

    def check_nothing_waits(self, job: SinkJob, driver: SinkDriver) -> None:
        """All rows that were staged are published or deleted, and nothing is left of commits that failed."""
        waiting = self.waiting(job, driver)
        assert not waiting, f"{len(waiting)} files are still staged, such as {waiting[0]}{after(job.steps)}"
        left = self.left(job.sink)
        assert not left, f"{len(left)} things are left in the target, such as {left[0]}{after(job.steps)}"

    def waiting(self, job: SinkJob, driver: SinkDriver) -> list[str]:
        """What is staged."""
        if isinstance(driver.target, MarkedTarget):
            area = driver.target.staging
            return [file.path for file in area.storage.list(area.folder) if area.job in file.path]
        return [file.path for file in self.staging(job, driver).list() if file.path.endswith(".staged")]

    def staging(self, job: SinkJob, driver: SinkDriver) -> Storage:
        """The storage in which the sink stages rows."""
        target = driver.target
        return target.staging.storage if isinstance(target, MarkedTarget) else open_storage(job.sink.place)

    # --- the contract -----------------------------------------------------------------------------

    def test_rows_become_visible_with_their_checkpoint_and_only_once(self, job: SinkJob) -> None:
        driver = job.start()
        driver.stage([("a", 1), ("b", 2), ("c", 3)], [("d", 4)])
        driver.stage([("a", 5)], [])
        self.check(job, [])
        metadata = driver.complete()
        self.check(job, [])
        for _ in range(2):
            driver.publish(metadata)
            self.check(job, [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("a", 5)])
        driver.checkpoint([("a", 6)])
        self.check(job, [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("a", 5), ("a", 6)])
        self.check_nothing_waits(job, driver)

    def test_a_checkpoint_without_rows_changes_nothing(self, job: SinkJob) -> None:
        driver = job.start()
        driver.checkpoint()
        driver.checkpoint([], [])
        driver.checkpoint([("a", 1)])
        driver.checkpoint()
        job.start().checkpoint([("b", 2)])
        self.check(job, [("a", 1), ("b", 2)])

    def test_the_next_driver_publishes_what_is_complete_and_deletes_what_is_not(self, job: SinkJob) -> None:
        driver = job.start()
        driver.stage([("a", 1)])
        driver.complete()
        driver.stage([("b", 2)])
        again = job.start()
        self.check(job, [("a", 1)])
        self.check_nothing_waits(job, again)
        again.checkpoint([("b", 3)])
        again.recover()
        self.check(job, [("a", 1), ("b", 3)])

    def test_a_checkpoint_may_name_rows_that_an_earlier_one_published(self, job: SinkJob) -> None:
        driver = job.start()
        first = driver.stage([("a", 1)])
        metadata = driver.complete()
        driver.publish(metadata)
        driver.staged = [*first]
        driver.stage([("b", 2)])
        driver.publish(driver.complete())
        self.check(job, [("a", 1), ("b", 2)])
        job.start()
        self.check(job, [("a", 1), ("b", 2)])

    def test_rows_of_durable_epochs_that_a_takeover_stages_are_published_once(self, job: SinkJob) -> None:
        """They are rows of an earlier generation, staged after the target is claimed and before it is recovered."""
        driver = job.start()
        driver.checkpoint([("a", 1)])
        driver.stage([("b", 2)])
        driver.complete()  # not published
        driver.batches += 1
        dies = job.start(recover=False)
        dies.target.claim(dies.log)
        driver.stage([("c", 3)])
        again = job.start(recover=False)
        again.target.claim(again.log)
        driver.staged = []
        driver.batches -= 1
        files = driver.stage([("c", 3), ("a", 4)])
        again.complete_with(driver.batch, files)
        for _ in range(2):
            again.recover()
            self.check(job, [("a", 1), ("b", 2), ("c", 3), ("a", 4)])
            self.check_nothing_waits(job, again)
        again.checkpoint([("d", 5)])
        self.check(job, [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("d", 5)])
        job.start().checkpoint([("e", 6)])
        self.check(job, [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("d", 5), ("e", 6)])

    def test_a_driver_that_was_taken_over_publishes_nothing(self, job: SinkJob) -> None:
        old = job.start()
        old.checkpoint([("a", 1)])
        old.stage([("b", 2)])
        metadata = old.complete()
        before = job.log
        new = job.start()  # publishes the checkpoint
        new.checkpoint([("c", 3)])
        assert new.log.generation > before.generation
        for _ in range(2):
            try:
                old.publish(metadata)  # a sink of files may rename them once more, which changes nothing
            except FencedError:
                assert isinstance(old.target, MarkedTarget)
            self.check(job, [("a", 1), ("b", 2), ("c", 3)])
        new.checkpoint([("d", 4)])
        self.check(job, [("a", 1), ("b", 2), ("c", 3), ("d", 4)])

    def test_a_driver_that_stood_still_in_the_middle_of_a_commit_changes_nothing(self, job: SinkJob) -> None:
        old = job.start()
        old.checkpoint([("a", 1)])
        target = marked(old.target)
        seen = target.committed()
        assert seen is not None
        files = old.stage([("b", 2)])
        old.complete()
        new = job.start()
        marker = msgspec.structs.replace(seen, checkpoint=2, batch=old.batch)
        with pytest.raises((MarkerMovedError, FencedError, SinkFilesMissingError)):
            target.commit(files, marker, seen)
        self.check(job, [("a", 1), ("b", 2)])
        new.checkpoint([("c", 3)])
        with pytest.raises((MarkerMovedError, FencedError)):
            target.commit((), marker, seen)
        self.check(job, [("a", 1), ("b", 2), ("c", 3)])

    def test_a_commit_needs_the_marker_that_was_seen(self, job: SinkJob) -> None:
        driver = job.start()
        target = marked(driver.target)
        driver.checkpoint([("a", 1)])
        found = target.committed()
        assert found is not None
        assert (found.batch, found.checkpoint) == (driver.batch, 1)
        files = driver.stage([("b", 2)])
        for wrong in (None, msgspec.structs.replace(found, batch=found.batch - 1)):
            with pytest.raises(MarkerMovedError):
                target.commit(files, msgspec.structs.replace(found, batch=found.batch + 1), wrong)
            assert target.committed() == found
        self.check(job, [("a", 1)])

    def test_the_job_goes_back_only_where_rows_can_be_taken_back_or_replaced(self, job: SinkJob) -> None:
        driver = job.start()
        first = driver.checkpoint([("a", 1)])
        driver.checkpoint([("a", 2), ("b", 2)])
        target = driver.target
        if not target.can_go_back:
            with pytest.raises(SinkAheadError, match="later batches already"):
                job.start(first)
            self.check(job, [("a", 1), ("a", 2), ("b", 2)])
            assert job.log.generation == driver.log.generation
            again = job.start(first, repeat_rows=True)
            again.checkpoint([("c", 3)])
            self.check(job, [("a", 1), ("a", 2), ("b", 2), ("c", 3)])
        else:
            again = job.start(first)
            again.checkpoint([("a", 2), ("b", 2), ("c", 3)])
            self.check(job, [("a", 1), ("a", 2), ("b", 2), ("c", 3)])
        again.checkpoint([("d", 4)])
        job.start()
        self.check(job, [("a", 1), ("a", 2), ("b", 2), ("c", 3), ("d", 4)])

    def test_the_job_does_not_go_back_while_another_driver_may_still_publish(self, job: SinkJob) -> None:
        driver = job.start()
        if driver.target.can_go_back:
            pytest.skip("the target takes rows back, or replaces them")
        first = driver.checkpoint([("a", 1)])
        driver.stage([("b", 2)])
        second = driver.complete()
        with pytest.raises(SinkAheadError, match="still alive may write them"):
            job.start(first)
        driver.publish(second)
        self.check(job, [("a", 1), ("b", 2)])

    def test_rows_that_come_while_the_job_is_taken_over_to_go_back_are_noticed(self, job: SinkJob) -> None:
        old = job.start()
        target = old.target
        if target.can_go_back or not isinstance(target, MarkedTarget):
            pytest.skip("the target takes rows back, or replaces them")
        first = old.checkpoint([("a", 1)])
        new = job.start(first, recover=False)
        seen = target.committed()
        assert seen is not None
        files = old.stage([("b", 2)])
        target.commit(files, msgspec.structs.replace(seen, checkpoint=2, batch=old.batch), seen)
        with pytest.raises(SinkAheadError, match="got rows of checkpoint 2"):
            new.recover()
        self.check(job, [("a", 1), ("b", 2)])

    def test_rows_that_are_gone_are_missed_before_the_job_is_taken_over(self, job: SinkJob) -> None:
        driver = job.start()
        driver.checkpoint([("a", 1)])
        files = driver.stage([("b", 2)])
        driver.complete()
        generation = job.log.generation
        storage = self.staging(job, driver)
        kept = storage.read(files[0].staged)
        storage.delete([files[0].staged])
        with pytest.raises(SinkFilesMissingError):
            job.start()
        assert job.log.generation == generation
        storage.write(files[0].staged, kept)
        job.start()
        self.check(job, [("a", 1), ("b", 2)])

    def test_a_target_that_lost_rows_is_noticed(self, job: SinkJob) -> None:
        driver = job.start()
        driver.checkpoint([("a", 1)])
        newest = driver.checkpoint([("b", 2)])
        target = marked(driver.target)
        later = with_positions({}, {target.place: newest.batch_id + 1})
        job.newest = msgspec.structs.replace(newest, batch_id=newest.batch_id + 1, properties=later)
        with pytest.raises(SinkFilesMissingError, match="had more rows"):
            job.start()

    def test_a_target_that_goes_back_while_the_job_runs_is_noticed(self, job: SinkJob) -> None:
        """A backup, a rolled back table, or a standby that lacks the last commits."""
        driver = job.start()
        target = marked(driver.target)
        driver.checkpoint([("a", 1)])
        before = target.committed()
        assert before is not None
        driver.checkpoint([("b", 2)])
        target.commit((), before, target.committed())
        driver.stage([("c", 3)])
        with pytest.raises(SinkFilesMissingError, match="has lost rows"):
            driver.publish(driver.complete())
        assert target.committed() == before
        with pytest.raises(SinkFilesMissingError, match="had more rows"):
            job.start()

    def test_rows_of_one_key_keep_their_order(self, job: SinkJob) -> None:
        driver = job.start()
        rows: list[Row] = []
        for batch in range(3):
            tasks = [[(f"k{task}", 100 * batch + n) for n in range(5)] for task in range(2)]
            driver.stage(*tasks)
            rows += [row for task in tasks for row in task]
        driver.publish(driver.complete())
        self.check(job, rows)

    def test_a_driver_that_is_killed_while_it_publishes_loses_and_doubles_nothing(
        self, job: SinkJob, tmp_path: Path
    ) -> None:
        chance = random.Random(11)
        rows: list[Row] = []
        driver = job.start()
        patience = 0.2
        for number in range(self.kills):
            some = [(f"u{chance.randrange(50)}", number * 1000 + n) for n in range(400)]
            driver.stage(some[:200])
            driver.stage(some[200:])
            rows += some
            metadata = driver.complete()
            seconds = chance.uniform(0.0, patience)
            job.steps.append(f"generation {driver.log.generation} is killed {seconds:.3f} s after it began to publish")
            took = publish_and_die(driver, metadata, tmp_path, seconds)
            patience = max(patience, 1.5 * took) if took is not None else patience
            driver = job.start()
            self.check(job, rows)
        self.check_nothing_waits(job, driver)


def publish_and_die(driver: SinkDriver, metadata: CheckpointMetadata, folder: Path, seconds: float) -> float | None:
    """Publish in another process, which is killed after so many seconds. Returns how long it took if it was done."""
    from pyspark import cloudpickle

    work = folder / "publish.pickle"
    work.write_bytes(cloudpickle.dumps((driver.job.sink, driver.job.context, driver.log, metadata)))  # type: ignore[no-untyped-call]
    complaints = folder / "publish.stderr"
    with complaints.open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(work)], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n", complaints.read_text()
        began = time.monotonic()
        try:
            assert child.wait(seconds) == 0, complaints.read_text()
            return time.monotonic() - began
        except subprocess.TimeoutExpired:
            return None
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


_CHILD = """
import pickle, sys
from strandline.sinks.base import SinkCommit
with open(sys.argv[1], "rb") as file:
    sink, context, log, metadata = pickle.load(file)
target = sink.target(context)
target.committed() if hasattr(target, "committed") else None
files = tuple(file for file in metadata.sink_files if file.sink == target.place)
print("ready", flush=True)
target.publish(SinkCommit(metadata.checkpoint_id, metadata.batch_id, files, log))
"""

__all__ = ["Row", "SinkContract", "SinkDriver", "SinkJob", "a_context"]
