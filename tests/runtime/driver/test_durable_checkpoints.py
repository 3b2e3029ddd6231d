"""Each step of a completion can be repeated, and a driver that was taken over completes and deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from strandline.checkpoint.decisions import CompletionPlan
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, SinkFile
from strandline.errors import CheckpointError, FencedError, StorageError
from strandline.runtime.driver.durable_checkpoints import PUBLISH_TRIES, DurableCheckpoints
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.runtime.driver.restore.takeover import Claim
from strandline.storage import JobPaths
from strandline.storage.local import LocalStorage
from tests.factories import checkpoint_metadata

PATHS = JobPaths("visits")
FILE = SinkFile("out", "_staged/part-1", "part-1", rows=1, size=4)


class Unsteady(LocalStorage):
    """Fails the next calls of `rename` and `delete`."""

    failures = 0

    def rename(self, source: str, target: str) -> None:
        self._fail()
        super().rename(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        self._fail()
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
        self.store = JobLogStore(self.storage, PATHS)
        self.store.load()
        self.store.take_over()
        self.pauses: list[float] = []
        claim = Claim(self.storage, PATHS, self.store, {"out": self.sink}, None)
        self.durable = DurableCheckpoints(claim, sleep=self.pauses.append)

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
    with pytest.raises(CheckpointError, match="another driver"):
        driver.durable.write_metadata(checkpoint_metadata(1, batch_id=6))
    assert driver.storage.read(PATHS.metadata(1)) == before


def test_a_driver_that_was_taken_over_completes_and_deletes_nothing(driver: Driver, tmp_path: Path) -> None:
    driver.complete(checkpoint_metadata(1))
    Driver(tmp_path)
    with pytest.raises(FencedError):
        driver.complete(checkpoint_metadata(2))
    with pytest.raises(FencedError):
        driver.durable.delete_all([1], [])
    assert driver.storage.exists(PATHS.metadata(1))


def test_publishing_is_tried_again_and_then_fails(driver: Driver) -> None:
    driver.sink.write(FILE.staged, b"rows")
    driver.sink.failures = PUBLISH_TRIES
    with pytest.raises(StorageError):
        driver.durable.publish([FILE])
    assert len(driver.pauses) == PUBLISH_TRIES - 1
    driver.sink.failures = PUBLISH_TRIES - 1
    driver.durable.publish([FILE])
    driver.durable.publish(iter([FILE]))
    assert driver.sink.read(FILE.final) == b"rows"


def test_a_deletion_that_fails_leaves_orphans_and_raises_nothing(driver: Driver) -> None:
    path = f"{PATHS.root}/shared/one"
    driver.storage.write(path, b"state")
    handle = FileHandle(path, 5, "crc32:00000000")
    driver.storage.failures = 1
    driver.durable.delete_files([handle])
    assert driver.storage.exists(path)
    driver.durable.delete_files([handle])
    assert not driver.storage.exists(path)


def test_after_all_checkpoints_are_deleted_the_job_begins_anew(driver: Driver) -> None:
    driver.complete(checkpoint_metadata(1))
    driver.durable.delete_all([1], [])
    assert not driver.storage.exists(PATHS.metadata(1))
    assert (driver.store.load().latest, driver.store.load().retained) == (None, ())
