"""The job's log in storage: of two drivers, one goes on and the other learns why it may not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.job_log import JobLog, decode_entry
from strandline.errors import (
    AlreadyExistsError,
    CheckpointError,
    DirectoryNotOursError,
    FencedError,
    StorageError,
    UnknownOutcomeError,
)
from strandline.runtime.driver.restore.job_log import KEPT_ENTRIES, JobLogStore
from strandline.storage import JobPaths, StoredFile, open_storage
from strandline.storage.local import LocalStorage
from strandline.storage.retries import Retries
from tests.examples import examples

PATHS = JobPaths("visits")
TRIES = 5
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where it exists, hundreds of entries need not wait for a disk."""


class UnsureStorage(LocalStorage):
    """Says now and then that it cannot tell whether a create worked, before or after doing it."""

    def __init__(self, url: str, *doubts: str) -> None:
        super().__init__(url)
        self.doubts = list(doubts)

    def create(self, path: str, data: bytes) -> None:
        doubt = self.doubts.pop(0) if self.doubts else "none"
        if doubt != "before":
            try:
                super().create(path, data)
            except AlreadyExistsError:
                if doubt == "none":
                    raise
        if doubt != "none":
            raise UnknownOutcomeError(f"{path}: the connection broke")


@pytest.fixture
def storage() -> Iterator[LocalStorage]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        yield LocalStorage(root)


def log_store(storage: LocalStorage, **options: Any) -> JobLogStore:
    return JobLogStore(storage, PATHS, retries=Retries(TRIES, first_pause=0), **options)


def driver(storage: LocalStorage, kept_entries: int = KEPT_ENTRIES) -> JobLogStore:
    """A driver that has just started."""
    store = log_store(storage, kept_entries=kept_entries)
    store.load()
    store.take_over()
    return store


def complete(store: JobLogStore, number: int | None = None) -> JobLog:
    number = store.job_log.next_checkpoint_id if number is None else number
    retained = store.job_log.retained
    return store.complete(number, PATHS.metadata(number), number * 10, (number,), retained)


def try_after(store: JobLogStore, generation: int) -> JobLog:
    """Restart a driver that ran `generation` last."""
    while not store.try_take_over(store.job_log.resume(), generation):
        store.load()
    return store.job_log


def whole_log(storage: LocalStorage) -> JobLog:
    """All entries, each of which must follow from the ones before it."""
    return JobLog.replay(decode_entry(storage.read(file.path), file.path) for file in storage.list(PATHS.log_dir))


def test_a_job_starts_goes_on_and_is_found_again(storage: LocalStorage) -> None:
    first = driver(storage)
    assert (first.job_log.generation, first.job_log.latest) == (1, None)
    complete(first)
    complete(first)
    second = driver(storage)
    assert second.job_log.generation == 2
    assert second.job_log.latest is not None
    assert (second.job_log.latest.checkpoint_id, second.job_log.retained, second.job_log.dropped) == (2, (2,), (1,))


def test_a_driver_that_was_taken_over_can_do_nothing_more(storage: LocalStorage) -> None:
    first = driver(storage)
    complete(first)
    first.check_not_fenced()
    second = driver(storage)
    before = {file.path: storage.read(file.path) for file in storage.list()}
    for attempt in (first.check_not_fenced, lambda: complete(first), first.forget_all):
        with pytest.raises(FencedError, match=r"'visits'.*generation 2 .*generation 1, stops"):
            attempt()
    assert {file.path: storage.read(file.path) for file in storage.list()} == before
    complete(second)


def test_an_entry_that_another_thread_of_the_driver_writes_meanwhile_is_no_fence(tmp_path: Path) -> None:
    """The supervisor looks for a fence while the checkpoint thread has created an entry, and has not noted it yet."""

    class Watched(LocalStorage):
        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if first.job_log.generation:  # not the takeover itself
                first.check_not_fenced()
                looks.append(path)

    looks: list[str] = []
    first = log_store(Watched(str(tmp_path)))
    first.load()
    first.take_over()
    complete(first)
    assert len(looks) == 1
    driver(LocalStorage(str(tmp_path)))
    with pytest.raises(FencedError):
        first.check_not_fenced()


def test_a_restart_goes_on_with_its_own_generation_only(storage: LocalStorage) -> None:
    first = driver(storage)
    assert try_after(first, 1).generation == 2
    second = driver(storage)
    with pytest.raises(FencedError, match="generation 3"):
        try_after(first, 2)
    first.load()
    with pytest.raises(FencedError, match="generation 3"):
        try_after(first, 2)
    complete(second)


def test_two_that_start_at_once_both_take_over_one_after_the_other(storage: LocalStorage) -> None:
    one, other = log_store(storage), log_store(storage)
    one.load()
    other.load()
    one.take_over()
    other.take_over()
    assert (one.job_log.generation, other.job_log.generation) == (1, 2)
    with pytest.raises(FencedError):
        complete(one)


def test_an_entry_that_could_not_be_read_back_is_not_written(storage: LocalStorage) -> None:
    store = driver(storage)
    beyond = replace(store.job_log.resume(), generation_above=1 << 32)
    with pytest.raises(CheckpointError, match="before it is written"):
        store.try_take_over(beyond, None)
    assert driver(storage).job_log.generation == 2


def test_a_driver_that_begins_the_job_meanwhile_is_no_stranger(storage: LocalStorage) -> None:
    class Late(LocalStorage):
        """Another driver writes the first entry after the log was listed for the first time."""

        def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
            found = super().list(prefix, after)
            if self.exists(PATHS.log_entry(0)):
                return found
            driver(storage)
            return iter(())

    assert log_store(Late(str(storage.root))).load().generation == 1


def test_forgetting_everything_begins_a_generation_without_checkpoints(storage: LocalStorage) -> None:
    store = driver(storage)
    complete(store)
    log = store.forget_all()
    assert (log.generation, log.latest, log.retained, log.dropped) == (2, None, (), (1,))
    assert driver(storage).job_log.next_checkpoint_id == 2


@pytest.mark.parametrize("doubts", [["before"], ["after"], ["before", "after"], ["before"] * 4, ["after"] * 2])
def test_an_unknown_outcome_is_read_back(tmp_path: Path, doubts: list[str]) -> None:
    storage = UnsureStorage(str(tmp_path))
    store = driver(storage)
    storage.doubts = list(doubts)
    complete(store)
    assert whole_log(storage).latest == store.job_log.latest
    storage.doubts = list(doubts)
    assert driver(storage).job_log.generation == whole_log(storage).generation == 2


def test_an_outcome_that_stays_unknown_is_an_error_and_nothing_is_deleted(tmp_path: Path) -> None:
    storage = UnsureStorage(str(tmp_path))
    store = driver(storage)
    storage.doubts = ["before"] * TRIES
    with pytest.raises(UnknownOutcomeError, match="cannot tell whether the log entry was written"):
        complete(store)
    assert whole_log(storage).generation == 1
    complete(store)


def test_a_rival_behind_an_unknown_outcome_is_found(tmp_path: Path) -> None:
    storage = UnsureStorage(str(tmp_path))
    first = driver(storage)
    driver(storage)
    storage.doubts = ["before"]
    with pytest.raises(FencedError):
        complete(first)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_after_a_takeover_only_the_newest_generation_completes(data: st.DataObject) -> None:
    """Two drivers, each step of either at any time, each create perhaps with an unknown outcome."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        storages = [UnsureStorage(root), UnsureStorage(root)]
        stores = [log_store(storage) for storage in storages]
        owner: int | None = None
        begun: set[int] = set()
        completed: list[int] = []
        numbers = count(1)
        for _ in range(data.draw(st.integers(1, 12), label="steps")):
            who = data.draw(st.sampled_from([0, 1]), label="who")
            storages[who].doubts = data.draw(st.lists(st.sampled_from(["before", "after"]), max_size=2), label="doubts")
            match data.draw(st.sampled_from(["take over", "complete", "complete", "check", "load"]), label="what"):
                case "take over":
                    stores[who].take_over()
                    owner = who
                    begun.add(who)
                case "load" if who not in begun:
                    stores[who].load()
                case "complete" if who in begun:
                    number = next(numbers)
                    if owner == who:
                        complete(stores[who], number)
                        completed.append(number)
                    else:
                        with pytest.raises(FencedError):
                            complete(stores[who], number)
                case "check" if who in begun:
                    if owner == who:
                        stores[who].check_not_fenced()
                    else:
                        with pytest.raises(FencedError):
                            stores[who].check_not_fenced()
        if owner is not None:
            log = whole_log(storages[0])
            assert log == stores[owner].job_log
            assert log.last_checkpoint_id == (completed[-1] if completed else 0)


def test_old_entries_are_cut_off(storage: LocalStorage) -> None:
    store = driver(storage)
    for _ in range(KEPT_ENTRIES + 20):
        complete(store)
    assert len(list(storage.list(PATHS.log_dir))) == KEPT_ENTRIES
    assert driver(storage).job_log.next_checkpoint_id == KEPT_ENTRIES + 21


@pytest.fixture
def long_ago(storage: LocalStorage) -> JobLogStore:
    """A driver that was stopped while another one won so many entries that the first driver's next ones are absent."""
    asleep = driver(storage, kept_entries=5)
    awake = driver(storage, kept_entries=5)
    for _ in range(20):
        complete(awake)
    return asleep


def test_truncation_does_not_let_a_sleeper_complete(storage: LocalStorage, long_ago: JobLogStore) -> None:
    with pytest.raises(FencedError, match="generation 2"):
        complete(long_ago)
    with pytest.raises(FencedError, match="generation 2"):
        long_ago.check_not_fenced()
    newest = driver(storage)
    assert (newest.job_log.generation, newest.job_log.last_checkpoint_id) == (3, 20)


def test_truncation_does_not_let_a_sleeper_forget_everything(storage: LocalStorage, long_ago: JobLogStore) -> None:
    with pytest.raises(FencedError, match="generation 2"):
        long_ago.forget_all()
    assert driver(storage).job_log.last_checkpoint_id == 20


def test_a_sleeper_that_takes_over_goes_on_from_the_newest_entry(storage: LocalStorage, long_ago: JobLogStore) -> None:
    """It may be the next driver, but not in the past: there it would restore, and withdraw, by an old checkpoint."""
    log = long_ago.take_over()
    assert (log.generation, log.last_checkpoint_id) == (3, 20)
    complete(long_ago)
    assert driver(storage).job_log.last_checkpoint_id == 21


def test_a_folder_that_is_not_ours_is_refused(storage: LocalStorage) -> None:
    storage.write("visits/holiday.jpg", b"")
    with pytest.raises(DirectoryNotOursError, match=r"holiday\.jpg.*no log"):
        JobLogStore(storage, PATHS).load()


def test_a_probe_that_a_first_start_left_does_not_hinder_the_next_one(storage: LocalStorage) -> None:
    """The driver was killed between the probe and its deletion, or the storage lists a deleted file for a while."""
    storage.create(PATHS.probe("0123456789abcdef"), b"probe")
    assert log_store(storage).load() == JobLog()
    storage.write(PATHS.shared("thesis-probe.txt"), b"mine")
    with pytest.raises(DirectoryNotOursError, match="thesis-probe"):
        log_store(storage).load()


def test_a_history_without_a_log_does_not_hinder_a_start_but_strangers_in_it_do(storage: LocalStorage) -> None:
    storage.write(PATHS.run_entry(7, "ab12"), b"{}")
    storage.write(PATHS.history_log("ab12", "driver"), b"")
    assert log_store(storage).load() == JobLog()
    storage.write(f"{PATHS.history_dir}/of-art.txt", b"mine")
    with pytest.raises(DirectoryNotOursError, match="of-art"):
        log_store(storage).load()


def test_strangers_beside_a_log_do_not_matter(storage: LocalStorage) -> None:
    store = driver(storage)
    storage.write("visits/log/readme.txt", b"")
    storage.write("other-job/data", b"")
    complete(store)
    assert driver(storage).job_log.last_checkpoint_id == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"junk"])
def test_a_damaged_entry_is_an_error_that_names_it(storage: LocalStorage, content: bytes) -> None:
    driver(storage)
    storage.write(PATHS.log_entry(0), content)
    with pytest.raises(CheckpointError, match=r"00000000000000000000\.json.*damaged"):
        JobLogStore(storage, PATHS).load()


def test_an_entry_under_another_number_is_an_error(storage: LocalStorage) -> None:
    driver(storage)
    storage.write(PATHS.log_entry(4), storage.read(PATHS.log_entry(0)))
    with pytest.raises(CheckpointError, match="says that it is entry 0"):
        JobLogStore(storage, PATHS).load()


def test_reading_the_log_survives_errors_that_pass(tmp_path: Path) -> None:
    JobLogStore(LocalStorage(str(tmp_path)), PATHS).take_over()
    options = {"fail_pattern": "^(list|read) ", "fail_times": "3"}
    failing = open_storage(f"faulty+file://{tmp_path}", options)
    assert JobLogStore(failing, PATHS, retries=Retries(first_pause=0.0)).load().generation == 1
    failing = open_storage(f"faulty+file://{tmp_path}", options)
    with pytest.raises(StorageError, match="fails on purpose"):
        JobLogStore(failing, PATHS, retries=Retries(tries=3, first_pause=0.0)).load()
