"""Orphans: what crashes left behind goes, what a checkpoint or a run may need stays."""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.admin.garbage import Garbage, delete_garbage, find_garbage, sort_files
from strandline.checkpoint.batch import batch_id, numbered
from strandline.checkpoint.job_log import Completed, decode_entry, encode_entry
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    StateFile,
    SubtaskState,
    encode,
)
from strandline.errors import CheckpointError, FencedError, IncompatibleCheckpointError, StorageError
from strandline.runtime.driver.restore.job_log import KEPT_ENTRIES, JobLogStore
from strandline.storage import JobPaths, StoredFile
from strandline.storage.local import LocalStorage
from tests.factories import checkpoint_metadata

PATHS = JobPaths("visits")
HOUR = 3600.0
STAGED = f"{PATHS.staged_dir}/0123456789abcdef/rows-of-a-batch-that-was-repeated"


def checkpoint(number: int, *paths: str, job: str = "visits") -> CheckpointMetadata:
    """A checkpoint that refers to the files at `paths`, each of which holds its own path."""
    files = tuple(
        StateFile(
            path.replace("/", "-"), path, True, FileHandle(path, len(path), f"crc32:{zlib.crc32(path.encode()):08x}")
        )
        for path in paths
    )
    subtask = SubtaskState("count", 0, 0, 128, "rocksdb", True, files)
    return checkpoint_metadata(number, job=job, operators=("count",), subtasks=(subtask,))


# --- the decision ----------------------------------------------------------------------------------

NUMBERS = st.integers(0, 6)
DATA = st.one_of(
    st.sampled_from("abcd").map(PATHS.shared),
    st.builds(PATHS.exclusive, NUMBERS, st.sampled_from("ab")),
    NUMBERS.map(PATHS.metadata),
    st.sampled_from("ab").map(lambda name: f"{PATHS.staged_dir}/0123456789abcdef/{name}"),
    st.builds(PATHS.epochs, st.integers(0, 2), NUMBERS),
    st.sampled_from([f"{PATHS.shared_dir}/.tmp-1", f"{PATHS.log_dir}/.tmp-2", f"{PATHS.epochs_dir}/1/.tmp-3"]),
)
OTHER = st.sampled_from(
    [
        PATHS.log_entry(3),
        PATHS.run_entry(7, "ab12"),
        PATHS.history_part(7, "ab12", 3, whole=True),
        PATHS.history_log("ab12", "driver"),
        "visits/notes.txt",
        "visits/chk-x/a",
        "visits/chk-1",
        "visits2/shared/a",
        "other/shared/.tmp-1",
        "visits/sharedx/a",
        "visits/epochs/1/notes.txt",
        "visits/unknown/a",
    ]
)
TIMES = st.integers(0, 20).map(float)


@given(
    files=st.dictionaries(st.one_of(DATA, OTHER), TIMES),
    retained=st.dictionaries(NUMBERS, st.lists(DATA, max_size=4), max_size=3),
    last=NUMBERS,
    live_since=st.one_of(TIMES, st.sampled_from([math.inf, -math.inf])),
    now=TIMES,
    min_age=TIMES,
    extended=st.none() | st.builds(batch_id, st.integers(0, 2), st.integers(-1, 6)),
)
def test_a_file_is_an_orphan_only_if_no_checkpoint_refers_to_it_and_no_run_can_come_to_need_it(
    files: dict[str, float],
    retained: dict[int, list[str]],
    last: int,
    live_since: float,
    now: float,
    min_age: float,
    extended: int | None,
) -> None:
    listing = [StoredFile(path, 1, modified) for path, modified in files.items()]
    found = sort_files(
        listing,
        [checkpoint(number, *paths) for number, paths in retained.items()],
        paths=PATHS,
        last_checkpoint_id=last,
        live_since=live_since,
        now=now,
        min_age=min_age,
        extended=extended,
    )
    referenced = {path for paths in retained.values() for path in paths} | {PATHS.metadata(n) for n in retained}
    orphans = {file.path for file in found.orphans}
    assert not orphans & referenced
    for path in orphans:
        number = PATHS.parse_metadata(path)
        assert path.startswith("visits/")
        assert files[path] < live_since
        assert files[path] <= now - min_age
        epochs = PATHS.parse_epochs(path)
        if epochs is not None and extended is not None:
            generation, number = numbered(extended)
            assert epochs[0] != generation or epochs[1] <= number
        assert number is None or number <= last
        assert PATHS.parse_log_entry(path) is None
        assert not PATHS.is_history(path)
    # Nothing is lost from view, and what nothing protects is found.
    kept = [file.path for file in (*found.live, *found.young, *found.numbers)]
    assert len(orphans) + len(kept) + found.referenced <= len(files)
    for path, modified in files.items():
        number = PATHS.parse_metadata(path)
        is_data = path.startswith("visits/shared/") or (
            path.startswith("visits/chk-") and path.split("/")[1][4:].isdigit() and path.count("/") == 2
        )
        if (
            is_data
            and path not in referenced
            and modified < min(live_since, now - min_age)
            and (number is None or number <= last)
        ):
            assert path in orphans


# --- carried out -----------------------------------------------------------------------------------


class Folder:
    """A job's folder made by hand, in which a file is as old as the test says."""

    def __init__(self, root: Path) -> None:
        self.storage = LocalStorage(str(root))
        self.store = JobLogStore(self.storage, PATHS)
        self.now = time.time()

    def take_over(self, hours_ago: float) -> None:
        """Take over in the past: the storage's clock says so, and the driver's clock is later."""
        self.store.take_over()
        self._age(PATHS.log_entry(self.store.job_log.position), hours_ago)
        self.store._began = self.now - hours_ago * HOUR

    def put(self, path: str, hours_ago: float, data: bytes | None = None) -> str:
        self.storage.write(path, path.encode() if data is None else data)
        self._age(path, hours_ago)
        return path

    def half_written(self, path: str, hours_ago: float) -> str:
        (self.storage.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.storage.root / path).write_bytes(b"half")
        self._age(path, hours_ago)
        return path

    def metadata(self, number: int, *paths: str, hours_ago: float = 5) -> str:
        return self.put(PATHS.metadata(number), hours_ago, encode(checkpoint(number, *paths)))

    def complete(self, number: int, *paths: str, retained: tuple[int, ...], dropped: tuple[int, ...] = ()) -> None:
        self.metadata(number, *paths)
        self.store.complete(number, PATHS.metadata(number), number, retained, dropped)

    def _age(self, path: str, hours_ago: float) -> None:
        then = self.now - hours_ago * HOUR
        os.utime(self.storage.root / path, (then, then))

    def find(self, min_age: float = HOUR, take_over: bool = False) -> Garbage:
        return find_garbage(self.storage, "visits", now=self.now, min_age=min_age, take_over=take_over)

    def orphans(self, min_age: float = HOUR, take_over: bool = False) -> set[str]:
        return {file.path for file in self.find(min_age, take_over).files.orphans}

    def left(self) -> set[str]:
        return {p.relative_to(self.storage.root).as_posix() for p in self.storage.root.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Checkpoints 1 (dropped, not all of it deleted), 2 and 3 (retained), and what a crash left of 4."""
    made = Folder(tmp_path)
    made.store.load()
    made.take_over(hours_ago=9)
    for name in "abc":
        made.put(PATHS.shared(name), 8)
    own = made.put(PATHS.exclusive(3, "own"), 7)
    made.complete(1, PATHS.shared("a"), retained=(1,))
    made.complete(2, PATHS.shared("b"), retained=(1, 2))
    made.complete(3, PATHS.shared("b"), PATHS.shared("c"), own, retained=(2, 3), dropped=(1,))
    made.put(PATHS.shared("pending"), 6)
    made.put(PATHS.exclusive(4, "pending"), 6)
    made.put(STAGED, 6)
    made.put("visits/unknown/x", 6)
    made.half_written(f"{PATHS.shared_dir}/.tmp-1", 6)
    made.take_over(hours_ago=4)
    return made


ORPHANS = {
    "visits/chk-1/_metadata",
    "visits/chk-4/pending",
    "visits/shared/.tmp-1",
    "visits/shared/a",
    "visits/shared/pending",
    STAGED,
}


def test_what_dead_generations_left_is_deleted_and_the_retained_checkpoints_stay_whole(folder: Folder) -> None:
    before = folder.left()
    found = folder.find()
    assert {file.path for file in found.files.orphans} == ORPHANS
    assert (found.generation, found.retained) == (2, (2, 3))
    assert found.owner is not None
    assert found.owner.endswith(f"/{os.getpid()}")
    assert folder.left() == before
    steps: list[int] = []
    delete_garbage(folder.storage, found, steps.append)
    assert folder.left() == before - ORPHANS
    assert sum(steps) == len(ORPHANS)
    assert not (folder.storage.root / "visits/chk-4").exists()
    assert not folder.orphans()
    assert folder.find().files.referenced == 5


def test_what_was_modified_since_the_newest_takeover_may_be_a_live_runs_and_is_kept(folder: Folder) -> None:
    live = {
        folder.put(PATHS.shared("new"), 3),
        folder.put(PATHS.exclusive(4, "new"), 2),
        folder.half_written(f"{PATHS.shared_dir}/.tmp-2", 3.5),
        folder.metadata(4, hours_ago=2),
    }
    found = folder.find()
    assert {file.path for file in found.files.orphans} == ORPHANS
    assert {file.path for file in found.files.live} == live


def test_a_file_younger_than_the_minimum_age_is_kept_whoever_wrote_it(folder: Folder) -> None:
    assert folder.orphans(min_age=7 * HOUR) == {"visits/shared/a"}
    assert len(folder.find(min_age=7 * HOUR).files.young) == len(ORPHANS) - 1


def test_taking_over_makes_the_last_runs_uploads_orphans_and_fences_that_run(folder: Folder) -> None:
    new = folder.put(PATHS.shared("new"), 3)
    live = folder.store
    found = folder.find(take_over=True)
    assert {file.path for file in found.files.orphans} == ORPHANS | {new}
    with pytest.raises(FencedError):
        live.complete(4, PATHS.metadata(4), 4, (3, 4), (2,))
    delete_garbage(folder.storage, found)
    assert JobLogStore(folder.storage, PATHS).load().retained == (2, 3)


def test_metadata_that_never_completed_is_kept_until_a_higher_number_has_completed(folder: Folder) -> None:
    never = folder.metadata(4, PATHS.shared("pending"))
    assert never not in folder.orphans()
    assert [file.path for file in folder.find().files.numbers] == [never]
    folder.complete(5, PATHS.shared("c"), retained=(3, 5), dropped=(2,))
    assert {never, PATHS.metadata(2)} < folder.orphans()


def test_a_checkpoint_that_completes_after_the_listing_is_seen_as_referenced(folder: Folder) -> None:
    class Busy(LocalStorage):
        """Completes a checkpoint with a file that was an orphan, as soon as the job's folder has been listed."""

        def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
            files = super().list(prefix, after)
            if prefix == PATHS.root and folder.store.job_log.last_checkpoint_id == 3:
                folder.complete(4, PATHS.shared("pending"), retained=(4,), dropped=(2, 3))
            return files

    found = find_garbage(Busy(folder.storage.url), "visits", now=folder.now, min_age=HOUR)
    assert found.retained == (4,)
    assert PATHS.shared("pending") not in {file.path for file in found.files.orphans}


def test_a_takeover_while_deleting_stops_it(folder: Folder) -> None:
    before = folder.left()
    with pytest.raises(FencedError, match="generation 3"):
        delete_garbage(folder.storage, folder.find(), lambda _count: folder.take_over(0), at_once=2)
    assert len(before - folder.left()) == 2


@pytest.mark.parametrize("age", [3, 0.5])
def test_a_run_knows_when_it_began_however_long_it_lasts(folder: Folder, age: float) -> None:
    """What it began to write after its takeover, 4 hours ago, may still become part of a checkpoint."""
    live = folder.put(PATHS.shared("materialization"), age)
    for number in range(4, 5 + KEPT_ENTRIES):
        folder.complete(number, PATHS.shared("c"), retained=(number,), dropped=(number - 1,))
        folder.storage.delete([PATHS.metadata(number - 1)])
    assert not folder.storage.exists(PATHS.log_entry(4))  # its takeover
    found = folder.find(min_age=0)
    assert [file.path for file in found.files.live] == [live]
    assert PATHS.shared("pending") in {file.path for file in found.files.orphans}
    assert found.owner is not None
    assert found.owner.endswith(f"/{os.getpid()}")


def test_beside_a_long_run_of_an_older_release_nothing_is_an_orphan(folder: Folder) -> None:
    """Its entries do not say when it began, and the entry that did is gone."""
    folder.complete(4, PATHS.shared("c"), retained=(4,), dropped=(2, 3))
    newest = folder.store.job_log.position
    entry = decode_entry(folder.storage.read(PATHS.log_entry(newest)), "newest")
    assert isinstance(entry, Completed)
    older = msgspec.structs.replace(entry, owner="", began=None)
    folder.put(PATHS.log_entry(newest), 1, encode_entry(older))
    assert PATHS.shared("pending") in folder.orphans()
    folder.storage.delete([PATHS.log_entry(4)])
    assert not folder.orphans(min_age=0)


def test_the_clock_of_another_storage_may_be_behind(folder: Folder) -> None:
    other = StoredFile("s3://bucket/changes//" + PATHS.shared("log"), 1, 1000.0)
    found = sort_files([other], [], paths=PATHS, last_checkpoint_id=3, live_since=1000.0 + HOUR, now=1e9, min_age=HOUR)
    assert found.live == (other,)


def test_the_earlier_of_the_two_times_of_a_takeover_counts(folder: Folder) -> None:
    """A log that was copied is as new as the copy, and a driver's clock may be ahead."""
    for path in (folder.storage.root / PATHS.log_dir).iterdir():
        os.utime(path, (folder.now + HOUR, folder.now + HOUR))
    assert folder.find().live_since <= time.time()


@pytest.mark.parametrize("completed", [False, True])
def test_what_a_run_writes_after_the_clock_was_put_back_is_kept(tmp_path: Path, completed: bool) -> None:
    """The clock was three hours ahead when the run began, so all that it writes then is older than the takeover."""
    folder = Folder(tmp_path)
    ahead = 3 * HOUR
    folder.store = JobLogStore(folder.storage, PATHS, clock=lambda: time.time() + ahead)
    folder.store.take_over()
    folder._age(PATHS.log_entry(0), -3)
    folder.store._began = folder.now + ahead
    ahead = 0.0
    written = folder.put(PATHS.shared("b"), -0.01)
    if completed:
        folder.complete(1, PATHS.shared("a"), retained=(1,))
    folder.now += 4 * HOUR if completed else 2 * HOUR
    found = folder.find()
    assert written in {file.path for file in found.files.live}


def test_nothing_is_deleted_if_a_retained_checkpoint_cannot_be_read(folder: Folder) -> None:
    good = folder.storage.read(PATHS.metadata(2))
    damages: list[Callable[[], None]] = [
        lambda: folder.storage.write(PATHS.metadata(2), good[:-1]),
        lambda: folder.storage.delete([PATHS.metadata(2)]),
        lambda: folder.storage.write(PATHS.metadata(2), encode(checkpoint(2, job="clicks"))),
        lambda: folder.storage.write(PATHS.metadata(2), encode(checkpoint(7))),
    ]
    for damage in damages:
        damage()
        with pytest.raises(CheckpointError, match=r"nothing was deleted.*chk-2/_metadata"):
            folder.find()


def test_a_folder_under_another_name_than_its_jobs_is_refused(folder: Folder) -> None:
    (folder.storage.root / "visits").rename(folder.storage.root / "clicks")
    with pytest.raises(IncompatibleCheckpointError, match="belongs to another job"):
        find_garbage(folder.storage, "clicks", now=folder.now, take_over=True)
    assert JobLogStore(folder.storage, JobPaths("clicks")).load().generation == 2


def test_a_temporary_file_that_cannot_be_deleted_is_named(folder: Folder) -> None:
    found = folder.find()
    (folder.storage.root / PATHS.shared_dir / ".tmp-1").unlink()
    (folder.storage.root / PATHS.shared_dir / ".tmp-1").mkdir()
    with pytest.raises(StorageError, match=r"\.tmp-1"):
        delete_garbage(folder.storage, found)
