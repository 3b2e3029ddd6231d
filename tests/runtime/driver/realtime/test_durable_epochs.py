"""The thread that makes epochs durable, with a real epoch log on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.metadata import SourcePosition, last_batch
from strandline.errors import FencedError, SlotLostError, StorageError, StrandlineError, UserCodeError
from strandline.runtime.driver.realtime.durable_epochs import MOST_EPOCHS, DecidedEpoch, DurableEpochs
from strandline.runtime.driver.realtime.staged_rows import StagedRows
from strandline.runtime.driver.restore.epoch_log import EpochLog
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.runtime.protocol.slot_calls import EpochSegment
from strandline.storage import JobPaths
from strandline.storage.local import LocalStorage
from strandline.storage.retries import Retries

PATHS = JobPaths("visits")
RETRIES = Retries(2, first_pause=0.001)


class Gate(LocalStorage):
    """A storage whose creation of files of epochs waits until it is let through, or fails."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.fails = False

    def create(self, path: str, data: bytes) -> None:
        if PATHS.parse_epochs(path) is not None:
            self.reached.set()
            self.open.wait(30)
            if self.fails:
                raise StorageError("the storage is gone")
        super().create(path, data)


class Driver:
    """A driver's epochs, and what it hears of them."""

    def __init__(self, storage: LocalStorage, *, log: bool = True) -> None:
        self.storage = storage
        self.store = JobLogStore(storage, PATHS, retries=RETRIES)
        self.store.load()
        self.store.take_over()
        self.heard: list[str] = []
        self.failed: list[StrandlineError] = []
        self.durable = DurableEpochs(
            EpochLog(storage, PATHS, self.store) if log else None,
            StagedRows("visits", {}, RETRIES, lambda _batch, _files: None),
            self.failed.append,
        )
        self.durable.start()

    def add(self, number: int, **others: Any) -> None:
        self.durable.add(
            DecidedEpoch(
                self.id(number),
                lambda: SourcePosition(number, {}),
                [(0, EpochSegment("count", b"changes", "/local"))],
                done=lambda: self.heard.append(f"durable {number}"),
                **others,
            ),
            never,
        )

    def id(self, number: int) -> int:
        return batch_id(self.store.job_log.generation, number)

    def wait(self, number: int) -> None:
        self.durable.wait(self.id(number), never)

    def files(self) -> list[str]:
        return sorted(file.path.rpartition("/")[2].lstrip("0") for file in self.storage.list(PATHS.epochs_dir))


def never() -> None:
    """Nobody ends."""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def drivers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def driver(gate: Gate, drivers: ExitStack) -> Driver:
    made = Driver(gate)
    drivers.callback(made.durable.close, 5)
    drivers.callback(gate.open.set)
    return made


def test_epochs_that_come_while_storage_is_slow_go_into_one_file(gate: Gate, driver: Driver) -> None:
    gate.open.clear()
    driver.add(0)
    assert gate.reached.wait(10)
    for number in (1, 2, 3):
        driver.add(number)
    assert driver.heard == []
    gate.open.set()
    driver.wait(3)
    assert driver.files() == ["", "1"], "the names are those of the first epochs: 0 and 1"
    segments = driver.durable.take_segments()
    assert [last_batch(one.file) for one in segments] == [driver.id(number) for number in range(4)]
    assert driver.durable.take_segments() == []
    driver.durable.give_back(segments)
    assert (driver.durable.untold, driver.durable.take_segments()) == (4, segments)


def test_whoever_is_to_get_rows_at_least_once_gets_them_before_the_epoch_is_durable(driver: Driver) -> None:
    driver.add(0, call_back=lambda: driver.heard.append(f"called with {driver.files()}"))
    driver.durable.close(10)
    assert driver.heard == ["called with []", "durable 0"]


def test_an_epoch_whose_function_fails_is_not_durable(driver: Driver) -> None:
    def fail() -> None:
        raise UserCodeError("no")

    driver.add(0, call_back=fail)
    with pytest.raises(UserCodeError):
        driver.wait(0)
    assert ([type(error) for error in driver.failed], driver.files()) == ([UserCodeError], [])


def test_storage_that_fails_ends_everything_that_waits(gate: Gate, driver: Driver) -> None:
    gate.fails = True
    driver.add(0)
    with pytest.raises(StorageError, match="is gone"):
        driver.wait(0)
    with pytest.raises(StorageError, match="is gone"):
        driver.add(1)
    assert [type(error) for error in driver.failed] == [StorageError]


def test_a_driver_that_was_taken_over_makes_nothing_durable(gate: Gate, driver: Driver) -> None:
    gate.open.clear()
    driver.add(0)
    assert gate.reached.wait(10)
    other = JobLogStore(LocalStorage(gate.url.removeprefix("file://")), PATHS, retries=RETRIES)
    other.load()
    other.take_over()
    gate.open.set()
    with pytest.raises(FencedError):
        driver.wait(0)
    assert driver.heard == []


def test_so_many_epochs_are_ahead_of_storage_and_no_more(gate: Gate, driver: Driver) -> None:
    gate.open.clear()
    driver.add(0)
    assert gate.reached.wait(10)
    for number in range(1, MOST_EPOCHS + 1):
        driver.add(number)

    def ends() -> None:
        raise SlotLostError("the run ends")

    with pytest.raises(SlotLostError, match="the run ends"):
        driver.durable.add(DecidedEpoch(driver.id(MOST_EPOCHS + 1), lambda: SourcePosition(0, {})), ends)
    gate.open.set()
    driver.wait(MOST_EPOCHS)


def test_what_waits_at_the_end_is_still_written(gate: Gate, driver: Driver) -> None:
    gate.open.clear()
    driver.add(0)
    assert gate.reached.wait(10)
    driver.add(1)
    ending = threading.Thread(target=driver.durable.close, args=(10,))
    ending.start()
    gate.open.set()
    ending.join()
    assert driver.files() == ["", "1"]


def test_without_a_log_epochs_pass_through(gate: Gate, drivers: ExitStack) -> None:
    made = Driver(gate, log=False)
    drivers.callback(made.durable.close, 5)
    made.add(0)
    made.wait(0)
    made.durable.close(5)
    assert (made.heard, made.files(), made.durable.untold) == (["durable 0"], [], 0)
