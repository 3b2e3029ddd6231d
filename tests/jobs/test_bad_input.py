"""What a user can get wrong, or a disk: each a clear error at the right moment, after which the job can go on."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

import strandline as sl
from strandline.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedFileError,
    DirectoryNotOursError,
    IncompatibleCheckpointError,
    JobDefinitionError,
    MetadataError,
    StorageFullError,
    StrandlineError,
    UnknownOptionError,
    UserCodeError,
)
from tests.jobs.place import SCHEMA, Place, Sum, running_sums

pytestmark = pytest.mark.spark

FIRST: list[tuple[str | None, int]] = [("ann", 1), ("bob", 2), ("ann", 3), ("cid", 4), ("dora", 5)]
SECOND: list[tuple[str | None, int]] = [("bob", 10), ("ann", 20), ("eve", 30)]
THIRD: list[tuple[str | None, int]] = [("ann", 100), ("eve", 200)]


def says(error: BaseException, *words: str) -> None:
    text = str(error)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


def run_once(place: Place, rows: list[tuple[str | None, int]]) -> None:
    """A run of one more batch that ends with a completed checkpoint."""
    place.write(rows)
    run = place.sums().start(available_now=True)
    run.await_termination(timeout=120)


def log_entries(place: Place, job: str = "visits") -> list[str]:
    return sorted(path.name for path in (place.checkpoints / job / "log").glob("*.json"))


def metadata_file(place: Place) -> Path:
    return max(
        (place.checkpoints / "visits").glob("chk-*/_metadata"),
        key=lambda path: int(path.parent.name.removeprefix("chk-")),
    )


def sst_file(place: Place) -> Path:
    return max((place.checkpoints / "visits" / "shared").iterdir(), key=lambda path: path.stat().st_size)


# --- what is found while the job is built ------------------------------------------------------------


def test_an_unknown_option_names_the_nearest_one(place: Place) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        place.config().replace(checkpoint_intervall="1s")
    says(caught.value, "checkpoint_intervall", "'checkpoint_interval'")
    with pytest.raises(UnknownOptionError) as caught:
        sl.Config.from_mapping({"checkpoint_dir": "x", "max_paralelism": 4})
    says(caught.value, "max_paralelism", "'max_parallelism'")


def test_a_batch_frame_is_not_a_source(place: Place) -> None:
    with pytest.raises(JobDefinitionError) as caught:
        place.job().source(place.spark.createDataFrame([("ann", 1)], SCHEMA))
    says(caught.value, "'visits'", "batch DataFrame", "readStream")


def test_a_source_that_removes_its_files_is_refused(place: Place) -> None:
    frame = place.spark.readStream.schema(SCHEMA).option("cleanSource", "delete").parquet(str(place.input))
    with pytest.raises(JobDefinitionError) as caught:
        place.job().source(frame)
    says(caught.value, "'visits'", "cleanSource", "before a checkpoint covers them")


STATEFUL: list[tuple[str, Callable[[DataFrame], DataFrame]]] = [
    ("Aggregate", lambda rows: rows.groupBy("user").count()),
    ("Deduplicate", lambda rows: rows.dropDuplicates(["user"])),
    ("Deduplicate", lambda rows: rows.distinct()),
]


@pytest.mark.parametrize(("name", "function"), STATEFUL, ids=["groupBy", "dropDuplicates", "distinct"])
def test_state_that_spark_would_keep_is_refused_in_a_source_and_in_a_transform(
    place: Place, name: str, function: Callable[[DataFrame], DataFrame]
) -> None:
    with pytest.raises(JobDefinitionError) as caught:
        place.job().source(function(place.source()))
    says(caught.value, "'visits'", "source", name, "checkpoints do not cover", "key_by")
    with pytest.raises(JobDefinitionError) as caught:
        place.job().source(place.source()).transform(function)
    says(caught.value, "'visits'", "transform", name, "checkpoints do not cover", "key_by")


def test_an_address_of_another_host_is_refused(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"bind_host='203\.0\.113\.1': the driver cannot listen there"):
        place.sums(bind_host="203.0.113.1").start()
    assert not list(place.checkpoints.rglob("*"))


def test_a_key_that_is_no_column_names_the_nearest_one(place: Place) -> None:
    stream = place.job().source(place.source())
    with pytest.raises(JobDefinitionError) as caught:
        stream.key_by("usr")
    says(caught.value, "'visits'", "'usr'", "did you mean 'user'?")
    with pytest.raises(JobDefinitionError, match="at least one column"):
        stream.key_by()


def test_aggregates_that_cannot_be_computed_are_refused(place: Place) -> None:
    keyed = place.job().source(place.source()).key_by("x")
    with pytest.raises(JobDefinitionError) as caught:
        keyed.aggregate(total=sl.sum("user"), uid="totals")
    says(caught.value, "'totals'", "sum of column 'user'", "string", "number")
    with pytest.raises(JobDefinitionError) as caught:
        keyed.aggregate(total=sl.min("usr"), uid="totals")
    says(caught.value, "'totals'", "'usr'", "'user'")


def test_two_steps_with_one_uid_are_refused(place: Place) -> None:
    keyed = place.job().source(place.source()).key_by("user")
    keyed.aggregate(n=sl.count(), uid="counts")
    with pytest.raises(JobDefinitionError) as caught:
        keyed.aggregate(n=sl.count(), uid="counts")
    says(caught.value, "'visits'", "'counts'", "uid=")


def test_two_sinks_with_one_folder_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = place.job().source(place.source()).key_by("user").aggregate(n=sl.count())
    stream.sink(sl.ParquetSink(str(place.output)))
    monkeypatch.chdir(place.root)
    for same in (str(place.output), f"{place.output}/", "out", f"file://{place.output}"):
        with pytest.raises(JobDefinitionError) as caught:
            stream.sink(sl.ParquetSink(same))
        says(caught.value, "'visits'", "out", "its own folder")


def test_sinks_of_two_kinds_do_not_share_a_folder(place: Place) -> None:
    table = sl.DeltaSink(str(place.output))
    files = sl.ParquetSink(str(place.output))
    inside = sl.ParquetSink(str(place.output / "late"))
    for first, second in ((files, table), (table, files), (table, inside), (inside, table)):
        stream = place.job().source(place.source()).key_by("user").aggregate(n=sl.count())
        stream.sink(first)
        with pytest.raises(JobDefinitionError) as caught:
            stream.sink(second)
        says(caught.value, "'visits'", f"delta:{place.output}", "VACUUM", "its own folder")
    stream = place.job().source(place.source()).key_by("user").aggregate(n=sl.count())
    stream.sink(table).sink(sl.ParquetSink(f"{place.output}-late"))


def test_a_job_without_a_sink_does_not_start(place: Place) -> None:
    job = place.job()
    job.source(place.source()).key_by("user").aggregate(n=sl.count())
    with pytest.raises(JobDefinitionError) as caught:
        job.start()
    says(caught.value, "'visits'", "no sink", ".sink(")
    assert not place.checkpoints.exists()


# --- what is found before a run is taken over ----------------------------------------------------------


def other_uid(place: Place, *uids: str) -> sl.Job:
    job = place.job()
    stream = job.source(place.source()).key_by("user")
    for uid in uids:
        stream.process(Sum(), "user string, n long, s long", uid=uid).sink(
            sl.ParquetSink(str(place.root / f"out-{uid}"))
        )
    return job


@pytest.mark.slow
def test_a_job_of_another_shape_does_not_start_and_does_not_disturb_the_run(
    place: Place, runs: list[sl.JobRun]
) -> None:
    place.write(FIRST)
    healthy = place.sums().start()
    runs.append(healthy)
    healthy.process_all_available()
    before = log_entries(place)

    shapes: list[tuple[sl.Job, list[str]]] = [
        (place.sums(max_parallelism=64), ["'visits'", "max_parallelism=128", "the job 64", "use max_parallelism=128"]),
        (place.sums(parallelism=1), ["'visits'", "parallelism=2", "the job has 1", "start with parallelism=2"]),
        (other_uid(place, "sum"), ["'visits'", "state of 'sums'", "the job has 'sum'", "uid=", "allow_non_restored"]),
    ]
    for job, words in shapes:
        with pytest.raises(IncompatibleCheckpointError) as caught:
            job.start()
        says(caught.value, *words)

    assert log_entries(place) == before, "a start that was refused took the job over"
    place.write(SECOND)
    healthy.process_all_available()
    assert healthy.figures().generation == 1
    assert healthy.figures().restarts == 0
    healthy.stop()
    run_once(place, THIRD)
    assert place.rows() == running_sums([FIRST, SECOND, THIRD])


@pytest.mark.slow
def test_an_aggregate_over_other_columns_is_refused_before_the_takeover(place: Place, runs: list[sl.JobRun]) -> None:
    def job(**aggregates: Any) -> sl.Job:
        job = place.job()
        stream = job.source(place.source()).key_by("user").aggregate(uid="totals", **aggregates)
        stream.sink(sl.ParquetSink(str(place.output)))
        return job

    place.write(FIRST)
    healthy = job(n=sl.count()).start()
    runs.append(healthy)
    healthy.process_all_available()
    before = log_entries(place)
    with pytest.raises(IncompatibleCheckpointError) as caught:
        job(n=sl.count(), most=sl.max("x")).start()
    says(caught.value, "totals", "(count long)", "(count long, max:x long)", "the aggregates that it had")
    assert log_entries(place) == before
    place.write(THIRD)
    healthy.process_all_available()
    assert ("ann", 3) in place.rows()


@pytest.mark.slow
def test_a_checkpoint_of_another_job_is_refused_beside_it_and_in_another_directory(place: Place) -> None:
    run_once(place, FIRST)
    for directory in (place.checkpoints, place.root / "elsewhere"):
        shutil.copytree(place.checkpoints / "visits", directory / "copy")
        before = sorted((directory / "copy" / "log").iterdir())
        job = sl.Job("copy", place.spark, place.config().replace(checkpoint_dir=str(directory)))
        stream = job.source(place.source()).key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
        stream.sink(sl.ParquetSink(str(place.root / "out-copy")))
        with pytest.raises(IncompatibleCheckpointError) as caught:
            job.start()
        says(caught.value, f"{directory}/copy", "'copy'", "visits/chk-", "name")
        assert sorted((directory / "copy" / "log").iterdir()) == before
    run_once(place, SECOND)
    assert place.rows() == running_sums([FIRST, SECOND])


def missing(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00not what it was\xff" * 20)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def last_log_entry(place: Place) -> Path:
    return place.checkpoints / "visits" / "log" / log_entries(place)[-1]


DAMAGE: list[tuple[Callable[[Place], Path], Callable[[Path], None], type[StrandlineError], list[str]]] = [
    (sst_file, missing, DamagedFileError, ["visits", "operator sums", "subtask", "is missing", "Bring the file back"]),
    (
        sst_file,
        truncated,
        DamagedFileError,
        ["visits", "operator sums", "subtask", "bytes instead of", "Bring the file back"],
    ),
    (metadata_file, missing, CheckpointNotFoundError, ["is missing", "Bring the file back", "another job name"]),
    (metadata_file, truncated, MetadataError, ["is truncated", "put the file back"]),
    (metadata_file, flipped, MetadataError, ["is damaged", "checksum", "put the file back"]),
    (metadata_file, garbage, MetadataError, ["is not a metadata file"]),
    (last_log_entry, flipped, CheckpointError, ["job's log", "is damaged", "from a copy"]),
    (last_log_entry, garbage, CheckpointError, ["job's log", "is damaged", "from a copy"]),
]


def test_damage_that_can_be_seen_is_named_before_the_takeover_and_mended_by_a_copy(place: Place) -> None:
    run_once(place, FIRST)
    before = log_entries(place)
    for find, damage, kind, words in DAMAGE:
        path = find(place)
        copy = place.root / "copy"
        shutil.copy2(path, copy)
        damage(path)
        with pytest.raises(kind) as caught:
            place.sums().start()
        says(caught.value, str(path), *words)
        assert log_entries(place) == before, f"{damage.__name__} {path.name}: the start took the job over"
        shutil.copy2(copy, path)
        assert place.rows() == running_sums([FIRST])
    run_once(place, SECOND)
    assert place.rows() == running_sums([FIRST, SECOND])


@pytest.mark.slow
def test_an_sst_with_a_flipped_byte_is_found_by_its_checksum(place: Place) -> None:
    run_once(place, FIRST)
    path = sst_file(place)
    shutil.copy2(path, place.root / "copy")
    flipped(path)
    with pytest.raises(DamagedFileError) as caught:
        place.sums().start()
    says(caught.value, str(path), "visits", "operator sums", "subtask", "is damaged", "crc32:", "bring the file back")
    shutil.copy2(place.root / "copy", path)
    run_once(place, SECOND)
    assert place.rows() == running_sums([FIRST, SECOND])


@pytest.mark.slow
def test_an_older_checkpoint_that_is_damaged_does_not_hold_the_job_up(place: Place, runs: list[sl.JobRun]) -> None:
    run = place.sums(num_retained=3, checkpoint_interval="1h").start()
    runs.append(run)
    for rows in (FIRST, SECOND):
        place.write(rows)
        run.process_all_available()
    run.stop()
    oldest = min((place.checkpoints / "visits").glob("chk-*/_metadata"))
    assert oldest != metadata_file(place)
    garbage(oldest)
    run_once(place, THIRD)
    assert place.rows() == running_sums([FIRST, SECOND, THIRD])


def test_a_folder_that_is_not_a_jobs_is_left_alone(place: Place) -> None:
    precious = place.checkpoints / "visits" / "letters" / "dear.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("do not lose me")
    with pytest.raises(DirectoryNotOursError) as caught:
        place.sums().start()
    says(caught.value, str(place.checkpoints / "visits"), "not empty", "dear.txt", "Choose another checkpoint_dir")
    assert [path for path in place.checkpoints.rglob("*") if path.is_file()] == [precious]
    shutil.rmtree(place.checkpoints)
    run_once(place, FIRST)
    assert place.rows() == running_sums([FIRST])


def test_a_sink_folder_with_other_files_is_refused_and_left_alone(place: Place, runs: list[sl.JobRun]) -> None:
    place.output.mkdir()
    table = pa.table({"user": ["zoe"], "n": [1], "s": [1]})
    pq.write_table(table, place.output / "theirs.parquet")
    with pytest.raises(DirectoryNotOursError) as caught:
        place.sums().start()
    says(caught.value, str(place.output), "'visits'", "'theirs.parquet'", "a folder of its own")
    assert [path.name for path in place.output.rglob("*") if path.is_file()] == ["theirs.parquet"]
    assert not place.checkpoints.exists()

    # The same for a job that has a checkpoint and runs: pointed at such a folder, it is refused and the run goes on.
    theirs, place.output = place.output, place.root / "ours"
    place.write(FIRST)
    healthy = place.sums().start()
    runs.append(healthy)
    healthy.process_all_available()
    ours, place.output = place.output, theirs
    with pytest.raises(DirectoryNotOursError, match=r"theirs\.parquet"):
        place.sums().start()
    place.output = ours
    place.write(SECOND)
    healthy.process_all_available()
    assert healthy.figures().generation == 1
    assert place.rows() == running_sums([FIRST, SECOND])


def test_output_of_an_earlier_life_without_its_checkpoint_is_refused(place: Place) -> None:
    run_once(place, FIRST)
    aside = place.root / "aside"
    place.checkpoints.rename(aside)
    with pytest.raises(DirectoryNotOursError) as caught:
        place.sums().start()
    says(caught.value, str(place.output), "'visits' from another checkpoint_dir", "bring it back")
    assert place.rows() == running_sums([FIRST])
    assert not place.checkpoints.exists(), "so that the checkpoint can be brought back"
    aside.rename(place.checkpoints)
    run_once(place, SECOND)
    assert place.rows() == running_sums([FIRST, SECOND])


# --- what only a slot can find ---------------------------------------------------------------------------


class OtherState(Sum):
    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long, s double")


class OtherKind(Sum):
    def open(self, context: Any) -> None:
        self.total = context.list_state("total", "n long, s long")


class FailsToOpen(Sum):
    def open(self, context: Any) -> None:
        raise LookupError("no model in the registry")


UNFIT: list[tuple[sl.KeyedProcessor, type[StrandlineError], list[str]]] = [
    (OtherState(), IncompatibleCheckpointError, ["operator sums", "'total'", "double", "Declare it as it was"]),
    (OtherKind(), IncompatibleCheckpointError, ["operator sums", "'total'", "list", "Declare it as it was"]),
    (FailsToOpen(), UserCodeError, ["sums", "subtask", "open()", "LookupError: no model in the registry"]),
]


@pytest.mark.slow
def test_a_processor_that_cannot_take_up_the_state_fails_the_start(place: Place) -> None:
    run_once(place, FIRST)
    place.write(SECOND)
    for processor, error, words in UNFIT:
        with pytest.raises(error) as caught:
            place.sums(processor).start()
        says(caught.value, *words)
        assert place.rows() == running_sums([FIRST])
    run_once(place, THIRD)
    assert place.rows() == running_sums([FIRST, SECOND, THIRD])


# --- full disks --------------------------------------------------------------------------------------------


class SmallDisk:
    """A file system of a few megabytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "_ballast"

    def fill(self, leave: int = 0) -> None:
        """Write until nothing is left but `leave` bytes."""
        with self._ballast.open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        os.truncate(self._ballast, max(0, self._ballast.stat().st_size - leave))

    def grow(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=256m", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "small"
    path.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def large_batch(seed: int, keys: int = 30_000) -> list[tuple[str | None, int]]:
    return [(f"user-{seed}-{number:06d}-{'x' * 40}", number) for number in range(keys)]


@pytest.mark.slow
def test_a_full_local_disk_stops_the_run_and_a_larger_one_lets_it_go_on(
    place: Place, runs: list[sl.JobRun], small_disk: SmallDisk
) -> None:
    place.write(FIRST)
    run = place.sums(local_dir=str(small_disk.path), restart_strategy="none").start()
    runs.append(run)
    run.process_all_available()
    small_disk.fill(leave=200_000)
    large = large_batch(1)
    place.write(large)
    with pytest.raises(StorageFullError) as caught:
        run.await_termination(timeout=120)
    says(caught.value, "no space left", str(small_disk.path), "local_dir")
    assert run.status == "failed"
    assert place.rows() == running_sums([FIRST])
    small_disk.grow()
    again = place.sums(local_dir=str(small_disk.path)).start(available_now=True)
    runs.append(again)
    again.await_termination(timeout=120)
    assert place.rows() == running_sums([FIRST, large])


@pytest.mark.slow
def test_a_local_disk_that_is_full_at_the_start_is_named(place: Place, small_disk: SmallDisk) -> None:
    run_once(place, FIRST)
    small_disk.fill()
    with pytest.raises(StorageFullError) as caught:
        place.sums(local_dir=str(small_disk.path)).start()
    says(caught.value, "no space left", str(small_disk.path), "local_dir")
    run_once(place, SECOND)
    assert place.rows() == running_sums([FIRST, SECOND])


def test_a_full_checkpoint_disk_stops_the_run_and_a_larger_one_lets_it_go_on(
    place: Place, runs: list[sl.JobRun], small_disk: SmallDisk
) -> None:
    place.checkpoints = small_disk.path / "ckpt"
    place.write(FIRST)
    run = place.sums(restart_attempts=1, restart_strategy="fixed-delay").start()
    runs.append(run)
    run.process_all_available()
    small_disk.fill(leave=200_000)
    large = large_batch(2)
    place.write(large)
    with pytest.raises(StrandlineError) as caught:
        run.await_termination(timeout=120)
    says(caught.value, "no space left", str(place.checkpoints), "larger disk")
    assert place.rows() == running_sums([FIRST]), "rows that no checkpoint covers are not to be seen"
    small_disk.grow()
    again = place.sums().start(available_now=True)
    runs.append(again)
    again.await_termination(timeout=120)
    assert place.rows() == running_sums([FIRST, large])


@pytest.mark.slow
def test_a_full_sink_disk_stops_the_run_and_a_larger_one_lets_it_go_on(
    place: Place, runs: list[sl.JobRun], small_disk: SmallDisk
) -> None:
    place.output = small_disk.path / "out"
    place.write(FIRST)
    run = place.sums().start()
    runs.append(run)
    run.process_all_available()
    small_disk.fill(leave=50_000)
    large = large_batch(3)
    place.write(large)
    with pytest.raises(StorageFullError) as caught:
        run.await_termination(timeout=120)
    says(caught.value, "no space left", str(place.output), "larger disk")
    assert place.rows() == running_sums([FIRST])
    small_disk.grow()
    again = place.sums().start(available_now=True)
    runs.append(again)
    again.await_termination(timeout=120)
    assert place.rows() == running_sums([FIRST, large])
    assert not list((place.output / "_strandline").glob("*")), "no staged file is left over"
