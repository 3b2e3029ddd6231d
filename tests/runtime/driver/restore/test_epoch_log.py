"""Files of epochs in storage: a write that returns has won, whatever storage does, and the chain is read by names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition, SubtaskState
from strandline.errors import (
    AlreadyExistsError,
    CheckpointError,
    FencedError,
    NewerFormatError,
    StorageError,
    UnknownOutcomeError,
)
from strandline.runtime.driver.restore.epoch_log import EpochChain, EpochLog
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.storage import JobPaths, Storage, StoredFile, open_storage
from strandline.storage.local import LocalStorage
from strandline.storage.retries import Retries
from tests.factories import checkpoint_metadata

PATHS = JobPaths("visits")


def driver(storage: Storage) -> JobLogStore:
    store = JobLogStore(storage, PATHS, retries=Retries(4, first_pause=0))
    store.load()
    store.take_over()
    return store


def epoch_log(storage: Storage) -> EpochLog:
    return EpochLog(storage, PATHS, driver(storage))


def write(epochs: EpochLog, first: int, last: int | None = None, generation: int = 1) -> list[str]:
    """Write some epochs; returns the names of the segments that checkpoints get."""
    last = first if last is None else last
    batches = [batch_id(generation, number) for number in range(first, last + 1)]
    made = epochs.write(
        batches[0] - 1,
        batches[-1],
        SourcePosition(last, {}),
        [("count", 0, batch, f"changes of {batch}".encode()) for batch in batches],
        [("count", None, 0, batches[-1], b"rows")],
    )
    return [file.name for _operator, _subtask, file in made]


def a_checkpoint(number: int) -> CheckpointMetadata:
    state = SubtaskState("count", 0, 0, 128, "rocksdb", True, ())
    return checkpoint_metadata(1, batch_id=batch_id(1, number), operators=("count",), subtasks=(state,))


def a_chain(storage: Storage, number: int) -> EpochChain:
    """What extends a checkpoint that covers this epoch."""
    store = JobLogStore(storage, PATHS, retries=Retries(2, first_pause=0))
    found = EpochChain(storage, PATHS, store, a_checkpoint(number))
    found.read_on()
    return found


def last(found: EpochChain) -> int | None:
    return found.files[-1].entry.batch - batch_id(1, 0) if found.files else None


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path))


def test_the_segments_of_epochs_are_parts_of_their_file(storage: LocalStorage) -> None:
    epochs = epoch_log(storage)
    batches = [batch_id(1, number) for number in (0, 1, 2)]
    segments = [("count", n, batch, f"{n} in {batch}".encode()) for batch in batches for n in range(2)]
    made = epochs.write(batches[0] - 1, batches[-1], SourcePosition(2, {}), segments, [])
    assert [(operator, subtask) for operator, subtask, _file in made] == [one[:2] for one in segments]
    for (_operator, _subtask, file), segment in zip(made, segments, strict=True):
        assert file.handle is not None
        assert file.handle.path == f"visits/epochs/1/{0:020d}"
        assert file.handle.part is not None
        part = file.handle.part
        assert storage.read_range(file.handle.path, part.start, len(part)) == segment[3]
        assert len(storage.read(file.handle.path)) == file.handle.stored_size


def test_a_chain_begins_behind_the_checkpoint_and_goes_on_later(storage: LocalStorage) -> None:
    epochs = epoch_log(storage)
    for first, end in ((0, 0), (1, 3), (4, 4)):
        write(epochs, first, end)
    assert (last(a_chain(storage, -1)), last(a_chain(storage, 0)), last(a_chain(storage, 3))) == (4, 4, 4)
    assert last(a_chain(storage, 4)) is None
    assert last(a_chain(storage, 2)) is None, "a checkpoint ends where a file ends"
    found = a_chain(storage, 0)
    assert [rows[3:] for rows in found.rows] == [(batch_id(1, 3), b"rows"), (batch_id(1, 4), b"rows")]
    write(epochs, 5)
    found.read_on()
    assert last(found) == 5
    assert len(found.rows) == 3


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("operation", ["create .*/epochs/", "exists .*/log", "list .*/log"])
def test_a_write_survives_errors_that_pass(storage: LocalStorage, operation: str, mode: str) -> None:
    driver(storage)
    options = {"fail_pattern": operation, "fail_mode": mode, "fail_times": "3"}
    faulty = open_storage(f"faulty+{Path(storage.url).as_uri()}", options)
    write(epoch_log(faulty), 0, generation=2)
    found = JobPaths("visits").epochs(2, 0)
    assert storage.exists(found)


def test_a_write_whose_outcome_stays_unknown_is_an_error(storage: LocalStorage) -> None:
    class Unsure(LocalStorage):
        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if "epochs" in path:
                raise UnknownOutcomeError("the connection broke")

        def read(self, path: str) -> bytes:
            if "epochs" in path:
                raise StorageError("the connection broke")
            return super().read(path)

    epochs = epoch_log(Unsure(storage.url))
    with pytest.raises(StorageError):
        write(epochs, 0)
    assert epochs.covered(batch_id(1, 0)) == [PATHS.epochs(1, 0)], "somebody has to delete it"
    assert last(a_chain(storage, -1)) == 0


def test_a_driver_that_was_taken_over_learns_it_after_its_write(storage: LocalStorage) -> None:
    epochs = epoch_log(storage)
    write(epochs, 0)
    driver(storage)
    with pytest.raises(FencedError, match="generation 2"):
        write(epochs, 1)


def test_a_takeover_has_seen_the_epoch_or_its_writer_is_fenced(storage: LocalStorage) -> None:
    """The other driver comes at any moment of the write."""

    class Watched(LocalStorage):
        moment = 0
        calls = 0

        def _pass(self) -> None:
            self.calls += 1
            if self.calls == self.moment:
                driver(storage)
                seen.append(last(a_chain(storage, -1)))

        def create(self, path: str, data: bytes) -> None:
            self._pass()
            super().create(path, data)
            self._pass()

        def exists(self, path: str) -> bool:
            self._pass()
            return super().exists(path)

        def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
            self._pass()
            return super().list(prefix, after)

    outcomes = set()
    for moment in range(1, 6):
        seen: list[int | None] = []
        for file in list(storage.list()):
            storage.delete([file.path])
        watched = Watched(storage.url)
        epochs = epoch_log(watched)
        watched.calls, watched.moment = 0, moment
        try:
            write(epochs, 0)
            durable = True
        except FencedError:
            durable = False
        assert not (durable and seen == [None])
        outcomes.add((durable, *seen))
    assert {(False, None), (False, 0), (True,)} <= outcomes


def test_the_fence_is_seen_though_listings_are_late(storage: LocalStorage, tmp_path: Path) -> None:
    class Late(LocalStorage):
        def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
            return (file for file in super().list(prefix, after) if file.path == PATHS.log_entry(0))

    epochs = EpochLog(Late(storage.url), PATHS, driver(Late(storage.url)))
    write(epochs, 0)
    driver(storage)
    with pytest.raises(FencedError):
        write(epochs, 1)


def test_a_file_with_another_content_is_not_replaced(storage: LocalStorage) -> None:
    epochs = epoch_log(storage)
    storage.write(PATHS.epochs(1, 0), b"another")
    with pytest.raises(CheckpointError, match="exists with another content"):
        write(epochs, 0)
    assert storage.read(PATHS.epochs(1, 0)) == b"another"
    driver(storage)
    with pytest.raises(FencedError):
        write(epochs, 0)


def test_a_second_write_of_the_same_epochs_is_the_first_one(storage: LocalStorage) -> None:
    class Twice(LocalStorage):
        """The client of the storage sends a request again whose answer was lost."""

        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if "epochs" in path:
                raise AlreadyExistsError(path)

    assert write(epoch_log(Twice(storage.url)), 0, 1)
    assert last(a_chain(storage, -1)) == 1


def test_files_that_a_checkpoint_covers_are_told_until_they_are_forgotten(storage: LocalStorage) -> None:
    epochs = epoch_log(storage)
    for first, end in ((0, 0), (1, 3), (4, 4)):
        write(epochs, first, end)
    files = [PATHS.epochs(1, number) for number in (0, 1, 4)]
    assert epochs.covered(batch_id(1, 2)) == files[:1]
    assert epochs.covered(batch_id(1, 3)) == files[:2]
    epochs.forget(files[:1])
    assert epochs.covered(batch_id(1, 9)) == files[1:]


@pytest.mark.parametrize("part", [b"changes of", b"rows", b"SLEP"])
def test_a_damaged_file_ends_the_chain_with_a_warning(
    storage: LocalStorage, part: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = epoch_log(storage)
    for number in range(3):
        write(epochs, number)
    path = PATHS.epochs(1, 1)
    storage.write(path, storage.read(path).replace(part, part[::-1]))
    with caplog.at_level(logging.WARNING):
        found = a_chain(storage, -1)
        found.read_on()
    assert last(found) == 0
    assert len(found.rows) == 1
    [told] = [record.getMessage() for record in caplog.records]
    assert f"epochs from {batch_id(1, 1)} on cannot be restored" in told


def test_a_later_release_is_not_taken_for_damage(storage: LocalStorage) -> None:
    write(epoch_log(storage), 0)
    path = PATHS.epochs(1, 0)
    data = storage.read(path)
    storage.write(path, data[:5] + b"\x09" + data[6:])
    with pytest.raises(NewerFormatError):
        a_chain(storage, -1)


@pytest.mark.parametrize("every", [1, 2, 3, 1000])
def test_the_chain_is_read_whatever_is_listed(storage: LocalStorage, every: int) -> None:
    class Late(LocalStorage):
        def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
            return (file for number, file in enumerate(super().list(prefix, after)) if number % every == every - 1)

    epochs = epoch_log(storage)
    for number in range(40):
        write(epochs, number)
    write(epochs, 40, 45)
    found = a_chain(Late(storage.url), 3)
    assert [one.entry.batch - batch_id(1, 0) for one in found.files] == [*range(4, 40), 45]
    assert len(found.rows) == 37


def test_reading_the_chain_survives_errors_that_pass(storage: LocalStorage) -> None:
    epochs = epoch_log(storage)
    for number in range(30):
        write(epochs, number)
    options = {"fail_pattern": "^(read|list) .*/epochs/", "fail_every": "3"}
    faulty = open_storage(f"faulty+{Path(storage.url).as_uri()}", options)
    found = EpochChain(faulty, PATHS, JobLogStore(faulty, PATHS, retries=Retries(8, first_pause=0)), a_checkpoint(-1))
    found.read_on()
    assert last(found) == 29
