"""`IcebergSink`: commits that fail, and drivers that are killed or stand still in them, leave no file behind."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.utils.concurrent import ExecutorFactory

from strandline.errors import FencedError, StorageFullError, StorageRefusedError, StrandlineError
from strandline.sinks.iceberg.attempts import Attempt, DataNames
from strandline.sinks.iceberg.sink import IcebergSink
from strandline.sinks.names import commit_notes
from strandline.storage.base import temporary_name
from strandline.storage.local import LocalStorage
from strandline.testing.sink import JOB, SinkDriver, SinkJob, a_context
from strandline_bench.targets import unreferenced_files

NAME = "sales.visits"
OTHER = "0f0e0d0c-0b0a-4908-8706-050403020100"
KILLS = 4
"""At how many steps of a commit, which a seed picks, something happens in the short form of a test."""
FAR = 1 << 40
Rows = list[tuple[str, int]]


class KilledError(BaseException):
    """The driver ends here: nothing catches this, and nothing of the driver is used afterwards."""


class Steps:
    """The calls by which a driver changes files or the catalogue. Something may happen before or after any of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[str] = []
        self.count = 0
        """How many steps there were between the last calls of `at` and `nothing`."""
        self._at: dict[int, Callable[[str], None]] = {}
        self._on: dict[str, Callable[[str], None]] = {}
        self._dead = False
        for method in ("write", "upload", "delete", "delete_unfinished", "rename"):
            self._watch(monkeypatch, LocalStorage, method)
        self._watch(monkeypatch, PyArrowFileIO, "new_output")
        self._watch(monkeypatch, SqlCatalog, "commit_table")
        monkeypatch.setattr(
            SqlCatalog, "_write_metadata", staticmethod(self._watched("write_metadata", SqlCatalog._write_metadata))
        )

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        monkeypatch.setattr(owner, method, self._watched(method, getattr(owner, method)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self._step(f"before {name}")
            answer = call(*arguments, **options)
            self._step(f"after {name}")
            return answer

        return watched

    def _step(self, name: str) -> None:
        if self._dead:
            raise KilledError
        self.taken.append(name)
        happens = self._at.pop(len(self.taken), None) or self._on.pop(name, None)
        if happens is not None:
            happens(name)

    def at(self, number: int, happens: Callable[[str], None]) -> None:
        """Have something happen at the step with this number, counted from now."""
        self.taken = []
        self._at = {number: happens}

    def on(self, name: str, happens: Callable[[str], None]) -> None:
        """Have something happen at the next step of this kind, such as `after upload`."""
        self._on = {name: happens}

    def nothing(self) -> None:
        """Have nothing happen any more. Returns when no thread of a driver that was killed is at work."""
        self._at, self._on = {}, {}
        self.count = len(self.taken)
        ExecutorFactory.get_or_create().shutdown(wait=True)
        ExecutorFactory._instance = None
        self._dead = False

    def kill(self, _step: str = "") -> None:
        """The driver dies, with all its threads."""
        self._dead = True
        raise KilledError


def fail(step: str) -> None:
    if step.removeprefix("before ").removeprefix("after ") in ("new_output", "commit_table", "write_metadata"):
        raise OSError(errno.EIO, f"the disk fails {step}")
    raise StorageFullError(f"the disk is full {step}")


@dataclass
class Place:
    """A table, and a job that writes into it."""

    folder: Path
    mode: str = "upsert"
    partition_by: tuple[str, ...] = ("user",)
    properties: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        folder = self.folder
        self.catalog = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalogue.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        sink = IcebergSink(
            NAME,
            self.catalog,
            mode=self.mode,  # type: ignore[arg-type]
            partition_by=list(self.partition_by),
            properties=dict(self.properties),
        )
        context = a_context(folder / "checkpoints")
        self.job = SinkJob(sink.bound(context), context)
        self.written: Rows = []

    def table(self) -> Table:
        return load_catalog("default", **self.catalog).load_table(NAME)

    def stage(self, driver: SinkDriver) -> Any:
        """Stage rows for several files, complete a checkpoint that covers them, and return it."""
        n = len(self.written)
        rows = [(user, n + at) for at, user in enumerate("abc")]
        driver.stage(rows[:2], rows[2:])
        self.written += rows
        return driver.complete()

    def check(self) -> None:
        """The table has the rows, and its folder the files of its snapshots, and nothing else."""
        self.check_rows()
        assert list(unreferenced_files(self.table())) == []

    def check_rows(self) -> None:
        """The table has the rows."""
        found = self.table().scan().to_arrow()
        rows = sorted(zip(found["user"].to_pylist(), found["n"].to_pylist(), strict=True))
        assert rows == sorted(dict(self.written).items() if self.mode == "upsert" else self.written)

    def append_theirs(self) -> None:
        """Another writer adds a row."""
        row = (f"theirs{len(self.written)}", -1)
        self.table().append(pa.table({"user": [row[0]], "n": [row[1]]}))
        self.written.append(row)

    def expire(self) -> None:
        """All snapshots but the current one expire."""
        table = self.table()
        old = [one.snapshot_id for one in table.snapshots() if one.snapshot_id != table.metadata.current_snapshot_id]
        table.maintenance.expire_snapshots().by_ids(old).commit()

    def partition(self, *, by_user: bool) -> None:
        """The table is partitioned anew."""
        with self.table().update_spec() as update:
            if by_user:
                update.add_field("user", IdentityTransform(), "user")
            else:
                update.remove_field("user")

    def data_folder(self) -> Path:
        return Path(self.table().location().removeprefix("file://"), "data")

    def notes(self) -> list[Path]:
        folder = self.folder / "checkpoints" / commit_notes(JOB, self.job.sink.place)
        return sorted(folder.iterdir()) if folder.exists() else []


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.fixture(params=["append", "upsert"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.param)


Sweep = Callable[[Callable[[int], bool]], None]


@pytest.fixture(params=["some", pytest.param("all", marks=pytest.mark.slow)])
def sweep(request: pytest.FixtureRequest, steps: Steps) -> Sweep:
    """A function that calls its argument with numbers of steps, at which something is to happen.

    The argument says whether something did. A short form takes a few steps, which a seed picks.
    """

    def every(call: Callable[[int], bool]) -> None:
        number = 1
        while call(number):
            number += 1
        assert number > 16

    def some(call: Callable[[int], bool]) -> None:
        assert not call(FAR)
        assert steps.count >= 10
        seed = random.randrange(1 << 30)
        print(f"seed {seed}")
        happened = [call(number) for number in sorted(random.Random(seed).sample(range(1, steps.count + 1), KILLS))]
        assert any(happened)

    return every if request.param == "all" else some


def killed(place: Place, steps: Steps, step: str, driver: SinkDriver | None = None) -> SinkDriver:
    """A driver that is killed at this step of a commit. Its note on the commit is there."""
    driver = driver or place.job.start()
    metadata = place.stage(driver)
    steps.on(step, steps.kill)
    with pytest.raises(KilledError):
        driver.publish(metadata)
    steps.nothing()
    assert place.notes()
    return driver


def killed_before_its_commit(place: Place, steps: Steps) -> tuple[Path, Attempt]:
    """The note of a driver that was killed when it had written files, and the attempt that it describes."""
    killed(place, steps, "after new_output")
    (note,) = place.notes()
    return note, msgspec.json.decode(note.read_bytes(), type=Attempt)


def test_a_driver_that_is_killed_at_any_step_of_a_commit_leaves_nothing_behind(
    place: Place, steps: Steps, sweep: Sweep
) -> None:
    drivers = [place.job.start()]

    def killed_at(number: int) -> bool:
        metadata = place.stage(drivers[-1])
        steps.at(number, steps.kill)
        try:
            drivers[-1].publish(metadata)
        except KilledError:
            steps.nothing()
            drivers.append(place.job.start())
            place.check()
            return True
        steps.nothing()
        return False

    sweep(killed_at)
    place.check()
    place.job.start()
    assert place.notes() == []


def test_a_driver_that_is_killed_while_it_clears_up_leaves_that_to_the_next(
    tmp_path: Path, steps: Steps, sweep: Sweep
) -> None:
    place = Place(tmp_path)
    driver = [place.job.start()]

    def killed_at(number: int) -> bool:
        killed(place, steps, "after write_metadata", driver[0])
        steps.at(number, steps.kill)
        try:
            driver[0] = place.job.start()
        except KilledError:
            steps.nothing()
            driver[0] = place.job.start()
            place.check()
            return True
        steps.nothing()
        return False

    sweep(killed_at)
    place.check()
    place.job.start()
    assert place.notes() == []


def test_a_commit_that_fails_at_any_step_leaves_nothing_behind_while_the_job_goes_on(
    place: Place, steps: Steps, sweep: Sweep
) -> None:
    driver = place.job.start()

    def failed_at(number: int) -> bool:
        metadata = place.stage(driver)
        steps.at(number, fail)
        happened = False
        try:
            driver.publish(metadata)
        except StrandlineError:
            happened = True
            driver.publish(metadata)
        happened = happened or len(steps.taken) >= number
        steps.nothing()
        driver.publish(place.stage(driver))  # ends what the one before has left open
        place.check()
        return happened

    sweep(failed_at)
    assert place.notes() == []


def test_a_driver_that_stands_still_in_a_commit_deletes_what_it_writes_when_it_wakes_up(
    place: Place, steps: Steps, sweep: Sweep
) -> None:
    driver = [place.job.start()]

    def frozen_at(number: int) -> bool:
        old, happened = driver[0], []
        metadata = place.stage(old)

        def take_over(_step: str) -> None:
            happened.append(True)
            driver[0] = place.job.start()

        steps.at(number, take_over)
        try:
            old.publish(metadata)
        except FencedError:
            assert happened
        except StrandlineError:  # such as: a file that it has just written is gone
            with pytest.raises(FencedError):
                old.publish(metadata)
        steps.nothing()
        place.check()
        return bool(happened)

    sweep(frozen_at)
    for _ in range(2):
        place.job.start()
    assert place.notes() == []


def test_what_a_driver_writes_after_it_stood_still_is_deleted_if_it_is_killed_then(
    tmp_path: Path, steps: Steps, sweep: Sweep
) -> None:
    place = Place(tmp_path)
    driver = [place.job.start()]

    def killed_at(number: int) -> bool:
        old, happened = driver[0], []
        metadata = place.stage(old)

        def take_over(_step: str) -> None:
            driver[0] = place.job.start()
            steps.at(number, die)

        def die(_step: str) -> None:
            happened.append(True)
            steps.kill()

        steps.at(3, take_over)  # its note is written, and no file
        try:
            old.publish(metadata)
        except KilledError:
            steps.nothing()
            driver[0] = place.job.start()
        except StrandlineError:  # such as: a file that it has just written is gone
            with pytest.raises(FencedError):
                old.publish(metadata)
        steps.nothing()
        place.check()
        return bool(happened)

    sweep(killed_at)
    for _ in range(2):
        place.job.start()
    assert place.notes() == []


@pytest.mark.parametrize("step", ["before commit_table", "after write_metadata"])
def test_a_commit_that_loses_against_another_writer_leaves_nothing_behind(
    place: Place, steps: Steps, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = place.job.start()
    driver.publish(place.stage(driver))
    metadata = place.stage(driver)

    def lose(_step: str) -> None:
        place.append_theirs()
        if len(place.written) < 9:
            steps.on(step, lose)

    steps.on(step, lose)
    listed = []

    def listing(storage: LocalStorage, *_arguments: Any, **_options: Any) -> Any:
        listed.append(storage.url)
        return iter(())

    with monkeypatch.context() as patch:
        for method in ("list", "unfinished"):
            patch.setattr(LocalStorage, method, listing)
        driver.publish(metadata)
    assert listed == []  # a driver knows what it has written
    assert len(place.written) == 9
    place.check()
    assert place.notes() == []


def test_manifests_that_were_merged_are_not_left_behind(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path, "append", (), (("commit.manifest.min-count-to-merge", "2"),))
    driver = place.job.start()
    for _ in range(3):
        driver.publish(place.stage(driver))
    place.check()
    killed(place, steps, "after commit_table", driver)
    place.job.start()
    place.check()


def test_rows_that_are_staged_while_the_table_is_partitioned_anew_leave_no_file_behind(
    tmp_path: Path, steps: Steps, sweep: Sweep
) -> None:
    place = Place(tmp_path, "append", ())
    driver = [place.job.start()]

    def killed_at(number: int) -> bool:
        metadata = place.stage(driver[0])
        place.partition(by_user=place.table().spec().is_unpartitioned())
        steps.at(number, steps.kill)
        try:
            driver[0].publish(metadata)
        except KilledError:
            steps.nothing()
            driver[0] = place.job.start()
            place.check()
            return True
        steps.nothing()
        return False

    sweep(killed_at)
    place.check()


@pytest.mark.parametrize("ends", ["killed", "said to have lost", "without an answer", "not cleared up"])
def test_files_that_got_their_final_names_before_the_table_was_partitioned_anew_are_deleted(
    tmp_path: Path, steps: Steps, ends: str
) -> None:
    place = Place(tmp_path, "append", ())
    driver = place.job.start()
    metadata = place.stage(driver)
    steps.on("before commit_table", fail)
    with pytest.raises(StrandlineError):
        driver.publish(metadata)
    renamed = {file.final for file in metadata.sink_files}
    folder = place.data_folder()
    assert renamed <= {path.name for path in folder.iterdir()}
    place.partition(by_user=True)

    def lost(_step: str) -> None:
        raise CommitFailedException

    def always_fail(step: str) -> None:
        steps.on(step, always_fail)
        fail(step)

    happens = {
        "killed": steps.kill,
        "said to have lost": lost,
        "without an answer": fail,
        "not cleared up": always_fail,
    }
    steps.on("before delete" if ends == "not cleared up" else "after commit_table", happens[ends])
    if ends in ("killed", "without an answer"):
        with pytest.raises(KilledError if ends == "killed" else StrandlineError):
            driver.publish(metadata)
    else:
        driver.publish(metadata)
    steps.nothing()
    if ends == "killed":
        for _ in range(2):
            driver = place.job.start()
    if ends in ("without an answer", "not cleared up"):
        assert place.notes()
        driver.publish(metadata)
        driver.publish(place.stage(driver))
    assert not renamed & {path.name for path in folder.iterdir()}
    place.check()
    assert place.notes() == []


def test_a_clean_up_that_fails_after_a_commit_does_not_fail_the_commit(
    place: Place, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = place.job.start()
    metadata = place.stage(driver)
    steps.on("before write_metadata", fail)
    with pytest.raises(StrandlineError):
        driver.publish(metadata)

    def gone(*_arguments: Any) -> None:
        raise OSError(errno.EIO, "the catalogue fails")

    with monkeypatch.context() as patch:
        steps.on("after commit_table", lambda _step: patch.setattr(SqlCatalog, "load_table", gone))
        driver.publish(metadata)
    assert len(place.notes()) == 1
    place.check_rows()
    driver.publish(place.stage(driver))
    assert place.notes() == []
    place.check()


# --- what the table says --------------------------------------------------------------------------


def killed_after_its_commit(place: Place, steps: Steps) -> None:
    """A driver's commit took effect, and its note on it is still there."""
    driver = place.job.start()
    driver.publish(place.stage(driver))
    killed(place, steps, "after commit_table", driver)


def test_files_of_a_commit_that_took_effect_stay_when_its_snapshot_has_expired(place: Place, steps: Steps) -> None:
    killed_after_its_commit(place, steps)
    place.append_theirs()
    place.expire()
    driver = place.job.start()
    assert place.notes() == []
    driver.publish(place.stage(driver))
    place.check_rows()


def test_a_table_of_version_1_whose_snapshots_have_no_numbers(
    tmp_path: Path, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path, properties=(("format-version", "1"),))
    driver = place.job.start()
    assert place.table().metadata.format_version == 1
    driver.publish(place.stage(driver))
    for step, told in (("after commit_table", False), ("after write_metadata", True)):
        killed(place, steps, step, driver)
        driver = place.job.start()
        place.check_rows()
        assert place.notes() == []
        assert ("of version 1" in caplog.text) == told  # it is not known that nobody will need the files


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_commit_that_comes_late_after_a_rollback_finds_its_files(tmp_path: Path, steps: Steps, version: str) -> None:
    place = Place(tmp_path, "append", properties=(("format-version", version),))
    frozen = place.job.start()
    frozen.publish(place.stage(frozen))
    rows = place.table().scan().to_arrow().num_rows
    metadata = place.stage(frozen)

    def meanwhile(_step: str) -> None:
        snapshot = place.table().current_snapshot()
        assert snapshot is not None
        place.job.start()  # takes the job over, publishes, and finds what the frozen one has written
        place.table().manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()

    steps.on("before commit_table", meanwhile)
    with contextlib.suppress(StrandlineError):  # version 2 refuses it: its number is too low
        frozen.publish(metadata)
    assert place.table().scan().to_arrow().num_rows in (rows, 2 * rows)


def test_a_commit_to_another_branch_meanwhile_is_no_refusal(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path, "append")
    driver = place.job.start()
    driver.publish(place.stage(driver))
    table = place.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_branch(snapshot.snapshot_id, "audit").commit()
    theirs = table.scan().to_arrow()
    metadata = place.stage(driver)
    steps.on("before commit_table", lambda _step: place.table().append(theirs, branch="audit"))
    driver.publish(metadata)
    assert place.table().scan().to_arrow().num_rows == 2 * theirs.num_rows


def test_files_of_a_commit_stay_when_the_table_was_rolled_back_behind_it(place: Place, steps: Steps) -> None:
    killed_after_its_commit(place, steps)
    table = place.table()
    later = table.current_snapshot()
    assert later is not None
    assert later.parent_snapshot_id is not None
    table.manage_snapshots().rollback_to_snapshot(later.parent_snapshot_id).commit()
    place.job.start()  # writes the rows of its checkpoint once more
    assert place.notes() == []
    assert place.table().scan(snapshot_id=later.snapshot_id).to_arrow().num_rows == (3 if place.mode == "upsert" else 6)
    place.check()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"table": OTHER}, "made anew"),
        ({"data": "/"}, "other folders"),
        ({"sequence": 1 << 40}, "has not come to"),
        ({}, "older than"),
    ],
    ids=repr,
)
def test_files_of_a_commit_of_which_the_table_does_not_tell_stay_and_the_log_says_why(
    tmp_path: Path, steps: Steps, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], why: str
) -> None:
    place = Place(tmp_path)
    note, attempt = killed_before_its_commit(place, steps)
    note.write_text(json.dumps({**json.loads(note.read_text()), **changed}))
    written = [path for path in place.data_folder().iterdir() if attempt.is_data(path.name)]
    for path in written:
        os.utime(path, (1, 1))
    with caplog.at_level(logging.WARNING):
        place.job.start()
    assert why in caplog.text
    assert attempt.commit in caplog.text
    assert place.notes() == []
    assert all(path.exists() for path in written)


@pytest.mark.parametrize("expired", [True, False])
def test_a_note_that_was_made_up_harms_nothing(tmp_path: Path, *, expired: bool) -> None:
    place = Place(tmp_path)
    driver = place.job.start()
    for _ in range(2):
        driver.publish(place.stage(driver))
    place.append_theirs()
    if expired:
        place.expire()
    table = place.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    live = next(Path(one.file.file_path) for one in table.scan("user = 'a'").plan_files())
    manifests = [one.manifest_path.rpartition("/")[2] for one in snapshot.manifests(table.io)]
    commit = next(one[:36] for one in manifests if one.replace("-", "").startswith(live.stem[-32:-8]))
    known = Attempt(
        JOB,
        1,
        int(live.stem.rpartition("-")[0].rpartition("-")[2]),
        commit,
        1,
        None,
        1,
        0,
        str(table.metadata.table_uuid),
        f"{table.location()}/data",
        f"{table.location()}/metadata",
    )
    made_up: list[dict[str, Any]] = [
        {},
        {"sequence": 0},
        {"sequence": 1 << 40},
        {"name": OTHER},
        {"job": "other"},
        {"job": "../visits"},
        {"commit": "../../x"},
        {"batch": -5},
        {"data": "/"},
        {"metadata": "/"},
        {"table": OTHER},
        {"version": "x"},
        {"rewritten": [live.name]},
        {"rewritten": ["../data/" + live.name]},
        {"rewritten": [live.name.replace("visits", "other")]},
        {"rewritten": ["x"]},
    ]
    if expired:  # of files that are not old, nothing but what refers to them can tell that they are not left over
        long_ago = time.time() - 7200
        for path in (tmp_path / "warehouse").rglob("*.*"):
            os.utime(path, (long_ago, long_ago))
    folder = tmp_path / "checkpoints" / commit_notes(JOB, place.job.sink.place)
    for changed in made_up:
        folder.mkdir(parents=True, exist_ok=True)
        note = msgspec.to_builtins(known) | changed
        path = folder / f"{note.pop('name', commit)}.json"
        path.write_text(json.dumps(note))
        print(changed)
        driver = place.job.start()
        place.check_rows()
        path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{commit}.json").write_text("{")
    driver = place.job.start()
    driver.publish(place.stage(driver))
    place.check_rows()


def test_half_a_data_file_is_deleted_with_the_others(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path)
    _note, attempt = killed_before_its_commit(place, steps)
    folder = place.data_folder()
    half, others = (folder / temporary_name(name) for name in (next(attempt.data_names()), "part-other.parquet"))
    half.touch()
    others.touch()
    place.job.start()
    assert not half.exists()
    assert others.exists()
    others.unlink()
    place.check()


def test_files_that_cannot_be_deleted_are_deleted_by_a_later_start(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path)
    note, attempt = killed_before_its_commit(place, steps)
    name = f"snap-{attempt.snapshot}-0-{attempt.commit}.avro"
    obstacle = place.data_folder().parent / "metadata" / name
    (obstacle / "x").mkdir(parents=True)
    driver = place.job.start()
    driver.publish(place.stage(driver))
    assert place.notes() == [note]
    (obstacle / "x").rmdir()
    obstacle.rmdir()
    place.job.start()
    place.check()
    place.job.start()
    assert place.notes() == []


def test_threads_get_different_names_until_there_are_no_more(tmp_path: Path, steps: Steps) -> None:
    _note, attempt = killed_before_its_commit(Place(tmp_path), steps)
    names = DataNames(attempt)
    with ThreadPoolExecutor(16) as pool:
        given = list(pool.map(lambda _number: names.new(), range(2000)))
    given += [names.new() for _ in range(len(given), 16**4)]
    assert len(set(given)) == 16**4
    assert set(given) == set(names.given)
    assert all(map(attempt.is_data, (min(given), max(given))))
    with pytest.raises(StorageRefusedError, match="more than 65536"):
        names.new()
