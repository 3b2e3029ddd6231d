"""`IcebergSink`: commits that fail, and drivers that are killed or stand still in them, leave no file behind."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.utils.concurrent import ExecutorFactory

from strandline.errors import FencedError, StorageFullError, StrandlineError
from strandline.sinks.iceberg.attempts import Attempt
from strandline.sinks.iceberg.sink import IcebergSink
from strandline.sinks.names import commit_notes
from strandline.storage.base import temporary_name
from strandline.storage.local import LocalStorage
from strandline.testing.sink import JOB, SinkDriver, SinkJob, a_context
from strandline_bench.targets import unreferenced_files

NAME = "sales.visits"
OTHER = "0f0e0d0c-0b0a-4908-8706-050403020100"
Rows = list[tuple[str, int]]


class KilledError(BaseException):
    """The driver ends here: nothing catches this, and nothing of the driver is used afterwards."""


class Steps:
    """The calls by which a driver changes files or the catalogue. Something may happen before or after any of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[str] = []
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

    def then(self, number: int, happens: Callable[[str], None]) -> None:
        """Have something happen so many steps later."""
        self._at = {len(self.taken) + number: happens}

    def nothing(self) -> None:
        """Have nothing happen any more. Returns when no thread of a driver that was killed is at work."""
        self._at, self._on = {}, {}
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
        table = self.table()
        found = table.scan().to_arrow()
        rows = sorted(zip(found["user"].to_pylist(), found["n"].to_pylist(), strict=True))
        assert rows == sorted(dict(self.written).items() if self.mode == "upsert" else self.written)
        assert list(unreferenced_files(table)) == []

    def notes(self) -> list[Path]:
        folder = self.folder / "checkpoints" / commit_notes(JOB, self.job.sink.place)
        return sorted(folder.iterdir()) if folder.exists() else []


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


@pytest.fixture(params=["append", "upsert"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.param)


def numbers(call: Callable[[int], bool]) -> int:
    """Calls with 1, 2 and so on until nothing happens any more, and says how often something did."""
    number = 1
    while call(number):
        number += 1
    return number - 1


def test_a_driver_that_is_killed_at_any_step_of_a_commit_leaves_nothing_behind(place: Place, steps: Steps) -> None:
    drivers = [place.job.start()]

    def killed(number: int) -> bool:
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

    assert numbers(killed) >= 16
    place.check()
    place.job.start()
    assert place.notes() == []


def test_a_driver_that_is_killed_while_it_clears_up_leaves_that_to_the_next(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path)
    driver = [place.job.start()]

    def killed(number: int) -> bool:
        metadata = place.stage(driver[0])
        steps.on("after write_metadata", steps.kill)
        with pytest.raises(KilledError):
            driver[0].publish(metadata)
        steps.nothing()
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

    assert numbers(killed) >= 16
    place.check()
    place.job.start()
    assert place.notes() == []


def test_a_commit_that_fails_at_any_step_leaves_nothing_behind_while_the_job_goes_on(
    place: Place, steps: Steps
) -> None:
    driver = place.job.start()

    def failed(number: int) -> bool:
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

    assert numbers(failed) >= 16
    assert place.notes() == []


def test_a_driver_that_stands_still_in_a_commit_deletes_what_it_writes_when_it_wakes_up(
    place: Place, steps: Steps
) -> None:
    driver = [place.job.start()]

    def frozen(number: int) -> bool:
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

    assert numbers(frozen) >= 16
    for _ in range(2):
        place.job.start()
    assert place.notes() == []


def test_what_a_driver_writes_after_it_stood_still_is_deleted_if_it_is_killed_then(
    tmp_path: Path, steps: Steps
) -> None:
    place = Place(tmp_path)
    driver = [place.job.start()]

    def killed(number: int) -> bool:
        old, happened = driver[0], []
        metadata = place.stage(old)

        def take_over(_step: str) -> None:
            driver[0] = place.job.start()
            steps.then(number, die)

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

    assert numbers(killed) >= 10
    for _ in range(2):
        place.job.start()
    assert place.notes() == []


@pytest.mark.parametrize("step", ["before commit_table", "after write_metadata"])
def test_a_commit_that_loses_against_another_writer_leaves_nothing_behind(
    place: Place, steps: Steps, step: str
) -> None:
    driver = place.job.start()
    driver.publish(place.stage(driver))
    metadata = place.stage(driver)

    def lose(_step: str) -> None:
        place.table().append(pa.table({"user": [f"theirs{len(place.written)}"], "n": [-1]}))
        place.written += [(f"theirs{len(place.written)}", -1)]
        if len(place.written) < 9:
            steps.on(step, lose)

    steps.on(step, lose)
    driver.publish(metadata)
    assert len(place.written) == 9
    place.check()
    assert place.notes() == []


def test_manifests_that_were_merged_are_not_left_behind(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path, "append", (), (("commit.manifest.min-count-to-merge", "2"),))
    driver = place.job.start()
    for _ in range(3):
        driver.publish(place.stage(driver))
    place.check()
    metadata = place.stage(driver)
    steps.on("after commit_table", steps.kill)
    with pytest.raises(KilledError):
        driver.publish(metadata)
    steps.nothing()
    place.job.start()
    place.check()


def test_rows_that_are_staged_while_the_table_is_partitioned_anew_leave_no_file_behind(
    tmp_path: Path, steps: Steps
) -> None:
    place = Place(tmp_path, "append", ())
    driver = [place.job.start()]
    table = place.table()

    def killed(number: int) -> bool:
        metadata = place.stage(driver[0])
        update = place.table().update_spec()
        if number % 2:
            update.add_field("user", IdentityTransform(), "user").commit()
        else:
            update.remove_field("user").commit()
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

    assert numbers(killed) >= 16
    assert table.spec() != place.table().specs()[1]
    place.check()


# --- what the table says --------------------------------------------------------------------------


def killed_after_its_commit(place: Place, steps: Steps) -> SinkDriver:
    """A driver whose commit took effect, and whose note on it is still there."""
    driver = place.job.start()
    driver.publish(place.stage(driver))
    metadata = place.stage(driver)
    steps.on("after commit_table", steps.kill)
    with pytest.raises(KilledError):
        driver.publish(metadata)
    steps.nothing()
    assert place.notes()
    return driver


def test_files_of_a_commit_that_took_effect_stay_when_its_snapshot_has_expired(place: Place, steps: Steps) -> None:
    killed_after_its_commit(place, steps)
    place.table().append(pa.table({"user": ["theirs"], "n": [-1]}))
    place.written += [("theirs", -1)]
    table = place.table()
    old = [one.snapshot_id for one in table.snapshots() if one.snapshot_id != table.metadata.current_snapshot_id]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    driver = place.job.start()
    assert place.notes() == []
    driver.publish(place.stage(driver))
    found = place.table().scan().to_arrow()
    rows = sorted(zip(found["user"].to_pylist(), found["n"].to_pylist(), strict=True))
    assert rows == sorted(dict(place.written).items() if place.mode == "upsert" else place.written)


def test_a_table_of_version_1_whose_snapshots_have_no_numbers(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path, properties=(("format-version", "1"),))
    driver = place.job.start()
    assert place.table().metadata.format_version == 1
    driver.publish(place.stage(driver))
    for step in ("after write_metadata", "after commit_table"):
        metadata = place.stage(driver)
        steps.on(step, steps.kill)
        with pytest.raises(KilledError):
            driver.publish(metadata)
        steps.nothing()
        driver = place.job.start()
        place.check()


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


def test_files_of_a_commit_stay_when_the_table_was_made_anew(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path)
    driver = place.job.start()
    metadata = place.stage(driver)
    steps.on("after new_output", steps.kill)
    with pytest.raises(KilledError):
        driver.publish(metadata)
    steps.nothing()
    (note,) = place.notes()
    attempt = json.loads(note.read_text())
    note.write_text(json.dumps({**attempt, "table": OTHER}))
    place.job.start()
    assert place.notes() == []
    names = [path.name for path in (tmp_path / "warehouse").rglob("*.parquet")]
    assert [name for name in names if attempt["commit"].replace("-", "")[:24] in name]


@pytest.fixture(params=[True, False], ids=["expired", "kept"])
def made_up(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A function that makes up a note for a table with rows, with a live file's numbers. The rows are checked then."""
    place = Place(tmp_path)
    driver = place.job.start()
    for _ in range(2):
        driver.publish(place.stage(driver))
    table = place.table()
    table.append(pa.table({"user": ["theirs"], "n": [-1]}))
    place.written += [("theirs", -1)]
    table = place.table()
    live = next(Path(one.file.file_path) for one in table.scan("user = 'a'").plan_files())
    old = [one.snapshot_id for one in table.snapshots() if one.snapshot_id != table.metadata.current_snapshot_id]
    if request.param:
        table.maintenance.expire_snapshots().by_ids(old).commit()
    table = place.table()
    digits = live.stem[-32:]
    commit = next(
        one.manifest_path.rpartition("/")[2][:36]
        for one in table.current_snapshot().manifests(table.io)  # type: ignore[union-attr]
        if one.manifest_path.rpartition("/")[2].replace("-", "").startswith(digits[:24])
    )
    batch = int(live.stem.rpartition("-")[0].rpartition("-")[2])
    folder = tmp_path / "checkpoints" / commit_notes(JOB, place.job.sink.place)
    folder.mkdir(parents=True, exist_ok=True)

    def make(name: str | None = None, **changed: Any) -> Path:
        table = place.table()
        location = table.location()
        known = Attempt(
            JOB,
            1,
            batch,
            commit,
            1,
            None,
            1,
            0,
            str(table.metadata.table_uuid),
            f"{location}/data",
            f"{location}/metadata",
        )
        note = {field: getattr(known, field) for field in known.__struct_fields__}
        path = folder / f"{name or commit}.json"
        path.write_text(json.dumps({**note, **changed}))
        return path

    yield make
    place.job.start()
    found = place.table().scan().to_arrow()
    rows = sorted(zip(found["user"].to_pylist(), found["n"].to_pylist(), strict=True))
    assert rows == sorted(dict(place.written).items())
    again = place.job.start()
    again.publish(place.stage(again))


@pytest.mark.parametrize(
    "changed",
    [
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
    ],
    ids=repr,
)
def test_a_note_that_was_made_up_harms_nothing(
    made_up: Callable[..., Path], changed: dict[str, Any], tmp_path: Path
) -> None:
    made_up(**changed)
    long_ago = time.time() - 7200
    for path in (tmp_path / "warehouse").rglob("*.*"):
        os.utime(path, (long_ago, long_ago))


def test_a_note_that_is_no_json_stays_and_the_job_goes_on(made_up: Callable[..., Path]) -> None:
    path = made_up()
    path.write_text("{")


def test_half_a_data_file_is_deleted_with_the_others(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path)
    driver = place.job.start()
    metadata = place.stage(driver)
    steps.on("after new_output", steps.kill)
    with pytest.raises(KilledError):
        driver.publish(metadata)
    steps.nothing()
    (note,) = place.notes()
    folder = Path(place.table().location().removeprefix("file://"), "data")
    names = msgspec.json.decode(note.read_bytes(), type=Attempt).data_names()
    half, others = folder / temporary_name(next(names)), folder / temporary_name("part-other.parquet")
    half.touch()
    others.touch()
    place.job.start()
    assert not half.exists()
    assert others.exists()
    others.unlink()
    place.check()


def test_files_that_cannot_be_deleted_are_deleted_by_a_later_start(tmp_path: Path, steps: Steps) -> None:
    place = Place(tmp_path)
    driver = place.job.start()
    metadata = place.stage(driver)
    steps.on("after new_output", steps.kill)
    with pytest.raises(KilledError):
        driver.publish(metadata)
    steps.nothing()
    (note,) = place.notes()
    attempt = json.loads(note.read_text())
    name = f"snap-{attempt['snapshot']}-0-{attempt['commit']}.avro"
    obstacle = Path(place.table().location().removeprefix("file://"), "metadata", name)
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
