"""Each step of a completion can be repeated, and a driver that was taken over completes and deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from strandline.checkpoint.decisions import CompletionPlan
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, SinkFile
from strandline.errors import FencedError, StorageError
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints, MetadataTakenError
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.runtime.driver.restore.takeover import Claim
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.sinks.parquet.target import ParquetTarget
from strandline.storage import JobPaths
from strandline.storage.local import LocalStorage
from strandline.storage.retries import Retries
from tests.factories import checkpoint_metadata

PATHS = JobPaths("visits")
TRIES = 4
FILE = SinkFile("out", "_staged/part-1", "part-1", rows=1, size=4)


class Unsteady(LocalStorage):
    """Fails the next calls of `create` and `rename`, before or after they take effect, or all of `delete`."""

    failures = 0
    outcome = "before"
    delete_failures = False

    def create(self, path: str, data: bytes) -> None:
        if self.outcome == "after" and self.failures:
            super().create(path, data)
        self._fail()
        super().create(path, data)

    def rename(self, source: str, target: str) -> None:
        self._fail()
        super().rename(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        if self.delete_failures:
            raise StorageError("storage deletes nothing")
        super().delete(paths)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageError("storage is away")


class Driver:
    """A driver that has just taken the job over."""

    def __init__(self, root: Path) -> None:
        self.storage = Unsteady(str(root / "checkpoints"))
        self.sink = Unsteady(str(root / "out"))
        self.store = JobLogStore(self.storage, PATHS, retries=Retries(TRIES, first_pause=0), kept_entries=3)
        self.store.load()
        self.store.take_over()
        claim = Claim(self.storage, PATHS, self.store, {"out": ParquetTarget(self.sink, "out", PATHS.job)}, None)
        self.durable = DurableCheckpoints(claim)
        self.commits = SinkCommits(claim)

    def complete(self, metadata: CheckpointMetadata) -> None:
        self.durable.write_metadata(metadata)
        self.durable.win_log_entry(CompletionPlan(metadata, (), (metadata.checkpoint_id,), ()))


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def test_a_checkpoint_exists_once_its_log_entry_is_won(driver: Driver) -> None:
    driver.durable.write_metadata(checkpoint_metadata(1))
    assert driver.store.load().latest is None
    driver.complete(checkpoint_metadata(1))
    latest = driver.store.load().latest
    assert latest is not None
    assert f"{driver.storage.url}/{latest.metadata_path}" == driver.durable.location(1)
    assert driver.storage.exists(latest.metadata_path)


def test_metadata_of_another_driver_is_not_overwritten(driver: Driver) -> None:
    driver.durable.write_metadata(checkpoint_metadata(1, batch_id=5))
    driver.durable.write_metadata(checkpoint_metadata(1, batch_id=5))
    before = driver.storage.read(PATHS.metadata(1))
    with pytest.raises(MetadataTakenError, match="another driver"):
        driver.durable.write_metadata(checkpoint_metadata(1, batch_id=6))
    assert driver.storage.read(PATHS.metadata(1)) == before


def test_a_driver_that_was_taken_over_completes_and_deletes_nothing(driver: Driver, tmp_path: Path) -> None:
    driver.complete(checkpoint_metadata(1))
    Driver(tmp_path)
    with pytest.raises(FencedError):
        driver.complete(checkpoint_metadata(2))
    with pytest.raises(FencedError):
        driver.durable.delete_all([1], [])
    driver.durable.tidy_up([FileHandle(PATHS.metadata(1), 5, "crc32:00000000")], [1])
    assert driver.storage.exists(PATHS.metadata(1))


def test_publishing_is_tried_again_and_then_fails(driver: Driver) -> None:
    driver.sink.write(FILE.staged, b"rows")
    driver.sink.failures = TRIES
    with pytest.raises(StorageError):
        driver.commits.publish(checkpoint_metadata(1, sink_files=(FILE,)))
    driver.sink.failures = TRIES - 1
    driver.commits.publish(checkpoint_metadata(1, sink_files=(FILE,)))
    driver.commits.publish(checkpoint_metadata(1, sink_files=(FILE,)))
    assert driver.sink.read(FILE.final) == b"rows"


@pytest.mark.parametrize("outcome", ["before", "after"])
def test_metadata_and_log_entry_survive_passing_errors_whatever_took_effect(driver: Driver, outcome: str) -> None:
    driver.storage.outcome = outcome
    driver.storage.failures = TRIES - 1
    driver.durable.write_metadata(checkpoint_metadata(1))
    driver.storage.failures = TRIES - 1
    driver.durable.win_log_entry(CompletionPlan(checkpoint_metadata(1), (), (1,), ()))
    assert driver.storage.failures == 0 or outcome == "after"
    assert driver.store.load().retained == (1,)


def test_trimming_the_log_fails_nothing_and_is_made_up_for(driver: Driver) -> None:
    for number in range(1, 8):
        driver.durable.write_metadata(checkpoint_metadata(number))
        driver.storage.delete_failures = number in (4, 5, 6)
        driver.durable.win_log_entry(CompletionPlan(checkpoint_metadata(number), (), (number,), ()))
    assert len(list(driver.storage.list(PATHS.log_dir))) == 3


def test_what_cannot_be_deleted_is_deleted_with_the_next_ones(driver: Driver) -> None:
    paths = [f"{PATHS.root}/shared/{name}" for name in ("one", "two")]
    for path in paths:
        driver.storage.write(path, b"state")
    one, two = (FileHandle(path, 5, "crc32:00000000") for path in paths)
    driver.complete(checkpoint_metadata(1))
    driver.storage.delete_failures = True
    driver.durable.tidy_up([one], [1])
    assert driver.storage.exists(one.path)
    assert driver.storage.exists(PATHS.metadata(1))
    driver.storage.delete_failures = False
    driver.durable.tidy_up([two])
    assert not driver.storage.exists(one.path)
    assert not driver.storage.exists(two.path)
    assert not driver.storage.exists(PATHS.metadata(1))


def test_after_all_checkpoints_are_deleted_the_job_begins_anew(driver: Driver) -> None:
    driver.complete(checkpoint_metadata(1))
    driver.durable.delete_all([1], [])
    assert not driver.storage.exists(PATHS.metadata(1))
    assert (driver.store.load().latest, driver.store.load().retained) == (None, ())
