"""Savepoints: made while a job runs, or with its end; restored elsewhere, and after everything else is gone."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import strandline as sl
from strandline.admin.cli.main import app
from strandline.errors import CheckpointError, CheckpointNotFoundError, ConfigError, DamagedFileError
from strandline.runtime.driver.restore.savepoints import open_savepoint
from tests.jobs.place import Place, running_sums

pytestmark = pytest.mark.spark

RANDOM = random.Random(5)
ROWS = [[(f"user{RANDOM.randrange(40)}", RANDOM.randrange(100)) for _ in range(60)] for _ in range(8)]


def feed(place: Place, run: sl.JobRun, batches: list[list[tuple[str, int]]]) -> None:
    for batch in batches:
        place.write(batch)
    run.process_all_available()


def test_a_savepoint_moves_between_backends_parallelisms_and_folders(place: Place, runs: list[sl.JobRun]) -> None:
    run = place.sums(parallelism=3, checkpoint_interval="1h", snapshot_compression="zstd").start()
    runs.append(run)
    with pytest.raises(CheckpointError, match="nothing to make a savepoint of"):
        run.savepoint(place.root / "early")
    feed(place, run, ROWS[:2])
    with pytest.raises(ConfigError, match="format='fast'"):
        run.savepoint(place.root / "sp", format="fast")  # type: ignore[arg-type]
    path = Path(run.savepoint(place.root / "sp"))
    assert path.parent == place.root / "sp"
    assert path.name.startswith("savepoint-visits-")
    (taken,) = [one for one in run.checkpoints() if one.kind == "savepoint"]
    assert (taken.status, taken.path) == ("completed", str(path))
    place.write(ROWS[2])  # the job goes on after it
    run.process_all_available()
    run.cancel()
    assert place.rows() == running_sums(ROWS[:3])

    # Moved elsewhere, with the checkpoints gone, into another backend at another parallelism.
    moved = path.rename(place.root / "elsewhere")
    shutil.rmtree(place.checkpoints)
    run = place.sums(state_backend="heap", parallelism=2).start(restore=moved)
    runs.append(run)
    feed(place, run, ROWS[3:4])
    assert place.rows() == running_sums(ROWS[:4]), "rows after the savepoint are withdrawn and made again"
    back = run.stop(savepoint_dir=place.root / "sp")
    assert back is not None
    run = place.sums(state_backend="rocksdb", parallelism=3).start(restore=f"{back}/_metadata")
    runs.append(run)
    feed(place, run, ROWS[4:5])
    run.cancel()
    assert place.rows() == running_sums(ROWS[:5])

    # What is damaged, claimed or not there is refused before anything is touched.
    with pytest.raises(CheckpointError, match="stays yours"):
        place.sums().start(restore=back, claim_mode="claim")
    largest = max(Path(back).iterdir(), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1])
    with pytest.raises(DamagedFileError, match=largest.name):
        place.sums().start(restore=back)
    largest.write_bytes(content)
    shown = CliRunner().invoke(app, ["savepoint", back, "--json"])
    facts = json.loads(shown.stdout)
    assert (facts["job"], facts["format"], facts["parallelism"]) == ("visits", "canonical", 2)
    assert facts["full_bytes"] == sum(facts["operators"].values()) > 0
    assert "canonical savepoint of job visits" in CliRunner().invoke(app, ["savepoint", back]).stdout
    gone = CliRunner().invoke(app, ["savepoint", "--dispose", back])
    assert "Savepoint disposed" in gone.stdout
    assert not Path(back).exists()
    with pytest.raises(CheckpointNotFoundError, match="not the path of a checkpoint or savepoint"):
        place.sums().start(restore=back)
    run = place.sums().start()
    runs.append(run)
    feed(place, run, ROWS[5:6])
    assert place.rows() == running_sums(ROWS[:6])


@pytest.mark.parametrize("changelog", [pytest.param(False, marks=pytest.mark.slow), True])
def test_native_savepoints_beside_checkpoints(place: Place, runs: list[sl.JobRun], changelog: bool) -> None:
    run = place.sums(changelog=changelog, checkpoint_interval="100ms").start()
    runs.append(run)
    feed(place, run, ROWS[:1])
    made: list[str] = []

    def make() -> None:
        made.extend(run.savepoint(place.root / "sp", format="native") for _ in range(3))

    maker = threading.Thread(target=make)
    maker.start()
    feed(place, run, ROWS[1:4])
    maker.join()
    with pytest.raises(CheckpointError, match="no savepoint can be written to /dev/null"):
        run.stop(savepoint_dir="/dev/null")
    assert run.status == "running"  # a directory that cannot be written costs the job nothing
    made.append(str(run.stop(savepoint_dir=place.root / "sp", format="native")))
    assert place.rows() == running_sums(ROWS[:4])
    assert len({*made}) == 4
    for path in (made[0], made[-1]):
        _storage, metadata = open_savepoint(path, {})
        assert all(state.incremental for state in metadata.subtasks)
        covered = metadata.source.batch + 1
        home = place.root / f"from-{Path(path).name}"
        home.mkdir()
        other = Place(home, place.spark)
        job = sl.Job("other", place.spark, other.config(parallelism=5))
        stream = job.source(place.source()).key_by("user").process(place.processor(), place.OUTPUT, uid="sums")
        stream.sink(sl.ParquetSink(str(other.output)))
        run = job.start(restore=path)
        runs.append(run)
        feed(place, run, ROWS[4:5])
        run.cancel()
        assert Counter(other.rows()) == Counter(running_sums(ROWS[:5])) - Counter(running_sums(ROWS[:covered]))
        (place.input / f"{place._written - 1:05d}.parquet").unlink()
