"""Going on from a checkpoint that the user names, and from an older one when the newest is damaged."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

import strandline as sl
from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedFileError,
    SinkFilesMissingError,
)
from strandline.storage.local import LocalStorage
from tests.jobs.durable import chk, files_of, metadata
from tests.jobs.place import Place, running_sums
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

ROWS = [[(f"user{n % 7}", n * 10 + batch) for n in range(9)] for batch in range(5)]
BY_HAND: dict[str, Any] = {"checkpoint_interval": "1h", "num_retained": 3}


def feed(place: Place, run: sl.JobRun, batches: list[list[tuple[str, int]]]) -> None:
    """One file, one batch and one checkpoint each."""
    for rows in batches:
        place.write(rows)
        run.process_all_available()


def checkpoints(place: Place, count: int) -> None:
    run = place.sums(**BY_HAND).start()
    feed(place, run, ROWS[:count])
    run.cancel()


def test_no_claim_goes_on_from_an_older_checkpoint_and_never_touches_it(place: Place, runs: list[sl.JobRun]) -> None:
    checkpoints(place, 3)
    assert place.rows() == running_sums(ROWS[:3])
    origin = files_of(place, chk(place, 1))

    # A run that ends before its first checkpoint: the next start goes back there again, not to a newer one, whose rows
    # have been withdrawn.
    place.sums(**BY_HAND).start(restore=chk(place, 1)).cancel()
    assert place.rows() == running_sums(ROWS[:1])
    run = place.sums(**BY_HAND).start()
    runs.append(run)
    assert run.figures().generation == 3
    feed(place, run, ROWS[3:4])
    assert place.rows() == running_sums(ROWS[:4])
    first = run.checkpoints()[0]
    assert first.id > 3
    assert first.checkpointed_bytes == first.full_bytes
    assert files_of(place, chk(place, 1)) == origin
    own = files_of(place, chk(place, first.id))
    assert not own.keys() & origin.keys()
    feed(place, run, ROWS[4:])
    run.cancel()

    # It is the user's now: gc leaves it alone, removes the checkpoints that the job went back behind, and, once the
    # user has deleted it, what nobody needs any more.
    storage = LocalStorage(str(place.checkpoints))

    def collect() -> None:
        delete_garbage(storage, find_garbage(storage, "visits", now=2e9, min_age=0, take_over=True))

    collect()
    assert files_of(place, chk(place, 1)) == origin
    assert not chk(place, 3).exists()
    shutil.rmtree(chk(place, 1))
    collect()
    assert not [path for path in origin if path.exists()]

    run = place.sums(**BY_HAND).start()
    runs.append(run)
    run.process_all_available()
    assert place.rows() == running_sums(ROWS)


def test_claim_builds_on_the_checkpoint_and_drops_it_in_the_end(place: Place, runs: list[sl.JobRun]) -> None:
    checkpoints(place, 3)
    origin = files_of(place, chk(place, 2))
    run = place.sums(checkpoint_interval="1h", num_retained=1).start(
        restore=chk(place, 2) / "_metadata", claim_mode="claim"
    )
    runs.append(run)
    stats = run.trigger_checkpoint()
    assert stats.checkpointed_bytes < stats.full_bytes
    taken = metadata(chk(place, stats.id))
    assert taken.properties == {
        "owner": "visits",
        "restored_from": str(chk(place, 2) / "_metadata"),
        "claim_mode": "claim",
    }
    needed = files_of(place, chk(place, stats.id))
    assert needed.keys() & origin.keys()
    wait_until(lambda: not chk(place, 2).exists(), what="the end of the claimed checkpoint")
    run.process_all_available()
    assert place.rows() == running_sums(ROWS[:3])


def test_a_checkpoint_starts_another_job_in_another_folder(place: Place, runs: list[sl.JobRun]) -> None:
    checkpoints(place, 3)
    copied = place.root / "elsewhere"
    shutil.copytree(place.checkpoints, copied)
    shutil.rmtree(place.checkpoints)
    place.output = place.root / "fresh"
    job = sl.Job("other", place.spark, place.config(**BY_HAND))
    processed = job.source(place.source()).key_by("user").process(place.processor(), place.OUTPUT, uid="sums")
    processed.sink(sl.ParquetSink(str(place.output)))
    run = job.start(restore=copied / "visits" / "chk-2")
    runs.append(run)
    run.process_all_available()
    shutil.rmtree(copied)
    feed(place, run, ROWS[3:])
    before = running_sums(ROWS[:2])
    assert sorted([*before, *place.rows()], key=repr) == running_sums(ROWS)
    (restored,) = [c for c in run.checkpoints() if c.status == "completed"][:1]
    assert restored.id == 3
    assert metadata(chk(place, 3, "other")).generation > 1


def damage_metadata(place: Place, folder: Path) -> str:
    data = bytearray((folder / "_metadata").read_bytes())
    data[-1] ^= 1
    (folder / "_metadata").write_bytes(data)
    return f"{folder / '_metadata'} is damaged: its checksum is wrong"


def own_file(place: Place, folder: Path) -> Path:
    """A state file of the checkpoint that the older ones do not have."""
    older = files_of(place, chk(place, 1))
    return next(path for path in files_of(place, folder) if path not in older and path.name != "_metadata")


def flip_a_byte(place: Place, folder: Path) -> str:
    path = own_file(place, folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return f"{path} is damaged"


def lose_a_file(place: Place, folder: Path) -> str:
    path = own_file(place, folder)
    path.unlink()
    return f"{path} is missing"


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(damage_metadata, marks=pytest.mark.slow),
        flip_a_byte,
        pytest.param(lose_a_file, marks=pytest.mark.slow),
    ],
)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    place: Place, runs: list[sl.JobRun], caplog: pytest.LogCaptureFixture, harm: Callable[[Place, Path], str]
) -> None:
    checkpoints(place, 2)
    what = harm(place, chk(place, 2))
    with caplog.at_level(logging.WARNING):
        run = place.sums(**BY_HAND).start()
        runs.append(run)
    (warning,) = [r.getMessage() for r in caplog.records if "goes back to checkpoint 1" in r.getMessage()]
    assert what in warning
    feed(place, run, ROWS[2:3])
    assert place.rows() == running_sums(ROWS[:3])


def test_rows_that_cannot_be_taken_back_forbid_an_automatic_fallback(place: Place) -> None:
    def collect(rows: DataFrame, _batch: int) -> None:
        rows.collect()

    def job() -> sl.Job:
        made = place.job(**BY_HAND)
        stream = made.source(place.source()).key_by("user").process(place.processor(), place.OUTPUT, uid="sums")
        stream.sink(sl.ForeachBatchSink(collect))
        return made

    run = job().start()
    feed(place, run, ROWS[:2])
    run.cancel()
    lose_a = next(path for path in files_of(place, chk(place, 2)) if path not in files_of(place, chk(place, 1)))
    lose_a.write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"ForeachBatchSink.* cannot take back .*restore='.*chk-1'") as caught:
        job().start()
    assert str(lose_a) in str(caught.value)
    run = job().start(restore=chk(place, 1))
    run.process_all_available()
    run.cancel()


def test_what_cannot_be_restored_is_refused_before_anything_is_touched(place: Place) -> None:
    checkpoints(place, 3)
    before = {path: path.read_bytes() for path in place.checkpoints.rglob("*") if path.is_file()}
    copied = place.root / "copy"
    shutil.copytree(place.checkpoints, copied)
    job = place.sums(**BY_HAND)
    with pytest.raises(CheckpointNotFoundError, match="not the path of a checkpoint"):
        job.start(restore=place.checkpoints)
    with pytest.raises(CheckpointNotFoundError, match=r"chk-9/_metadata is missing.*checkpoints ls"):
        job.start(restore=chk(place, 9))
    with pytest.raises(CheckpointError, match="claim_mode='claim' is for checkpoints in the job's own folder"):
        job.start(restore=copied / "visits" / "chk-2", claim_mode="claim")
    with pytest.raises(ConfigError, match="claim_mode='steal': use 'no_claim' or 'claim'"):
        job.start(restore=chk(place, 1), claim_mode="steal")  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in place.checkpoints.rglob("*") if path.is_file()} == before
    job.start(restore=chk(place, 1)).cancel()
    with pytest.raises(CheckpointError, match=r"checkpoint 3 cannot be restored.*went back.*Can be restored: 1\."):
        job.start(restore=chk(place, 3))


def test_rows_that_were_withdrawn_are_missed_before_anything_is_touched(place: Place, runs: list[sl.JobRun]) -> None:
    """A job goes back to a savepoint, and then forward to a checkpoint after it, whose rows have been withdrawn."""
    run = place.sums(**BY_HAND).start()
    feed(place, run, ROWS[:1])
    savepoint = run.savepoint(str(place.root / "savepoints"))
    feed(place, run, ROWS[1:3])
    newest = run.checkpoints()[-1].id
    run.cancel()
    place.sums(**BY_HAND).start(restore=savepoint).cancel()
    assert place.rows() == running_sums(ROWS[:1])
    # Without the local folder, which the task manager of the cancelled run may still be tidying.
    durable = [path for folder in place.root.iterdir() if folder.name != "local" for path in folder.rglob("*")]
    before = {path: path.read_bytes() for path in durable if path.is_file()}
    with pytest.raises(SinkFilesMissingError, match=f"checkpoint {newest} .*cannot be restored.*went back behind it"):
        place.sums(**BY_HAND).start(restore=chk(place, newest))
    assert {path: path.read_bytes() for path in before} == before
    run = place.sums(**BY_HAND).start()
    runs.append(run)
    run.process_all_available()
    assert place.rows() == running_sums(ROWS[:3])
