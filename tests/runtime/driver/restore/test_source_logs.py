"""A checkpoint refers to the log of a file source, and does not contain it, however long the log is."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.metadata import SourcePosition, source_files
from strandline.errors import CheckpointError, DamagedFileError
from strandline.runtime.driver.restore.position import capture
from strandline.runtime.driver.restore.source_logs import LONGEST_REST, SourceLogs, uploader, with_logs
from strandline.storage import JobPaths
from strandline.storage.local import LocalStorage
from strandline.storage.retries import Retries
from tests.examples import examples

PATHS = JobPaths("visits")
COMPACT_EVERY = 10


class Spark:
    """Writes the log of a file source as Spark does: every tenth entry repeats all before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[list[str]] = []
        for name in ("sources/0", "offsets"):
            (folder / name).mkdir(parents=True)

    def batch(self, files: int) -> int:
        number = len(self.lines)
        self.lines.append(
            [f'{{"path":"file:///in/{number:06d}-{n:06d}.json","batchId":{number}}}' for n in range(files)]
        )
        compacted = number % COMPACT_EVERY == COMPACT_EVERY - 1
        entries = self.lines if compacted else self.lines[-1:]
        text = "\n".join(["v1", *(line for some in entries for line in some)])
        (self.folder / "sources/0" / (f"{number}.compact" if compacted else str(number))).write_text(text)
        (self.folder / f"offsets/{number}").write_text(f'v1\n{{}}\n{{"logOffset":{number}}}')
        return number

    def entries(self, number: int) -> dict[str, bytes]:
        """What Spark needs to go on after a batch."""
        last = (number + 1) // COMPACT_EVERY * COMPACT_EVERY - 1
        names = [*([f"{last}.compact"] if last >= 0 else []), *map(str, range(last + 1, number + 1))]
        return {f"sources/0/{name}": (self.folder / "sources/0" / name).read_bytes() for name in names}


class Driver:
    """What a driver does with the logs of its sources."""

    def __init__(self, root: Path) -> None:
        self.storage = LocalStorage(str(root / "checkpoints"))
        self.spark = Spark(root / "scratch")
        self.uploaded_bytes = 0
        self.begin(None)

    def begin(self, confirmed: SourcePosition | None) -> None:
        upload = uploader(self.storage, PATHS, Retries())
        self.logs = SourceLogs(self.spark.folder, {}, upload, confirmed)

    def store(self, number: int) -> SourcePosition:
        position, uploaded = self.logs.store(capture(self.spark.folder, number))
        assert {handle.path for handle in uploaded} <= {handle.path for _key, handle in source_files(position)}
        lengths = {piece.handle.path: piece.length for log in position.logs for piece in log.pieces}
        self.uploaded_bytes += sum(lengths[handle.path] for handle in uploaded)
        return position

    def restored(self, position: SourcePosition) -> dict[str, bytes]:
        files = with_logs(self.storage, position).files
        return {name: data for name, data in files.items() if name.startswith("sources")}


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


@settings(max_examples=examples(40), deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.sampled_from([0, 1, 30, 400, 3000]), st.sampled_from(["no", "fails", "completes", "completes"])),
        min_size=1,
        max_size=40,
    ),
    restart=st.integers(0, 40),
    owned=st.booleans(),
)
def test_whatever_was_read_and_whenever_checkpoints_were_taken_spark_gets_its_log_back(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[int, str]], restart: int, owned: bool
) -> None:
    root = tmp_path_factory.mktemp("logs")
    driver = Driver(root)
    completed: SourcePosition | None = None
    for n, (files, checkpoint) in enumerate(batches):
        number = driver.spark.batch(files)
        if checkpoint != "no":
            position = driver.store(number)
            assert driver.restored(position) == driver.spark.entries(number)
            assert all(len(log.rest) <= LONGEST_REST for log in position.logs)
            if checkpoint == "completes":
                driver.logs.confirm(position)
                completed = position
        if n == restart:
            driver.begin(completed if owned else None)
    if completed is not None:
        total = sum(len(line) + 1 for some in driver.spark.lines for line in some)
        pieces = max((len(log.pieces) for log in completed.logs), default=0)
        assert pieces <= 1 + math.log2(max(1, total / LONGEST_REST) + 1)
    shutil.rmtree(root)


def test_a_short_log_is_part_of_the_position_and_nothing_is_uploaded(driver: Driver) -> None:
    for _ in range(12):
        number = driver.spark.batch(3)
    position = driver.store(number)
    assert not position.logs
    assert driver.restored(position) == driver.spark.entries(number)
    assert not list(driver.storage.list())


def test_a_long_log_is_uploaded_a_few_times_and_not_with_every_checkpoint(driver: Driver) -> None:
    for _ in range(300):
        number = driver.spark.batch(100)
        position = driver.store(number)
        driver.logs.confirm(position)
    total = sum(len(line) + 1 for some in driver.spark.lines for line in some)
    assert driver.restored(position) == driver.spark.entries(number)
    assert driver.uploaded_bytes < 8 * total  # 300 checkpoints with the whole log would be 150 times as much


def test_a_savepoint_contains_the_whole_log(driver: Driver) -> None:
    number = driver.spark.batch(5000)
    position, uploaded = driver.logs.store(capture(driver.spark.folder, number), whole=True)
    assert (position.logs, uploaded) == ((), [])
    assert driver.restored(position) == driver.spark.entries(number)


def test_a_log_that_spark_rewrote_otherwise_is_uploaded_anew(driver: Driver) -> None:
    for _ in range(9):
        driver.logs.confirm(driver.store(driver.spark.batch(1000)))
    driver.spark.lines.sort(reverse=True)
    number = driver.spark.batch(1000)
    position = driver.store(number)
    assert driver.restored(position) == driver.spark.entries(number)


def test_an_entry_that_spark_has_deleted_meanwhile_fails_the_checkpoint(driver: Driver) -> None:
    position = capture(driver.spark.folder, driver.spark.batch(1000))
    (driver.spark.folder / "sources/0/0").unlink()
    with pytest.raises(CheckpointError, match="sources/0/0"):
        driver.logs.store(position)


def test_a_small_file_cannot_announce_a_long_piece(driver: Driver) -> None:
    position = driver.store(driver.spark.batch(5000))
    (log,) = position.logs
    huge = tuple(msgspec.structs.replace(piece, length=1 << 40) for piece in log.pieces)
    crafted = msgspec.structs.replace(position, logs=(msgspec.structs.replace(log, pieces=huge),))
    with pytest.raises(DamagedFileError, match="cannot hold"):
        with_logs(driver.storage, crafted)


def test_a_log_that_could_be_compressed_too_well_is_stored_as_it_is(driver: Driver) -> None:
    (driver.spark.folder / "sources/0/0").write_text("v1" + "\n{}" * 1_000_000)
    (driver.spark.folder / "offsets/0").write_text('v1\n{}\n{"logOffset":0}')
    position = driver.store(0)
    (piece,) = position.logs[0].pieces
    assert piece.handle.size == piece.length
    assert driver.restored(position) == driver.spark.entries(0)


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_piece_is_noticed(driver: Driver, damage: str) -> None:
    position = driver.store(driver.spark.batch(5000))
    path = position.logs[0].pieces[0].handle.path
    data = driver.storage.read(path)
    if damage == "missing":
        driver.storage.delete([path])
    else:
        driver.storage.write(path, data[:-5] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedFileError, match=path):
        with_logs(driver.storage, position)
