"""A file source that has read many files: its log is durable once, and a restore has all of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import strandline as sl
from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.checkpoint.metadata import file_paths
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.storage import JobPaths
from strandline.storage.local import LocalStorage
from tests.jobs.durable import is_data
from tests.jobs.place import Place

pytestmark = pytest.mark.spark

PATHS = JobPaths("visits")
USERS = 7


class Files:
    """Writes input files with one row each, and compares the counts in the output with their number."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.count = 0

    def start(self, restore: str | None = None) -> sl.JobRun:
        job = sl.Job("visits", self.place.spark, self.place.config(checkpoint_interval="1h"))
        stream = job.source(self.place.source(per_batch=400)).key_by("user")
        stream.process(self.place.processor(), self.place.OUTPUT, uid="sums").sink(
            sl.ParquetSink(str(self.place.output))
        )
        return job.start(restore=restore) if restore is not None else job.start()

    def feed(self, run: sl.JobRun, count: int) -> None:
        for _ in range(count):
            self.place.write([(f"user{self.count % USERS}", self.count)])
            self.count += 1
        run.process_all_available()
        expected = Counter(f"user{n % USERS}" for n in range(self.count))
        counts: dict[str, int] = {}
        for user, n, _sum in self.place.rows():
            counts[user] = max(n, counts.get(user, 0))
        assert counts == expected


def test_every_file_is_read_once_though_no_checkpoint_contains_the_list_of_files(
    place: Place, runs: list[sl.JobRun], tmp_path: Path
) -> None:
    files, storage = Files(place), LocalStorage(str(place.checkpoints))
    run = files.start()
    runs.append(run)
    files.feed(run, 800)
    first = {file.path for file in storage.list(PATHS.shared_dir) if file.path.endswith("-source")}
    assert first
    for _ in range(10):  # Spark compacts its log at the tenth entry
        files.feed(run, 1)
    later = {file.path for file in storage.list(PATHS.shared_dir) if file.path.endswith("-source")}
    assert later == first
    newest = JobLogStore(storage, PATHS).load().latest
    assert newest is not None
    metadata = read_metadata(storage, PATHS, newest.checkpoint_id, ())
    assert any(name.endswith(".compact") for log in metadata.source.logs for name, _length in log.entries)
    assert sum(len(data) for data in metadata.source.files.values()) < 10_000
    savepoint = run.savepoint(str(tmp_path / "savepoints"))
    files.feed(run, 1)
    run.stop()

    run = files.start()
    runs.append(run)
    files.feed(run, 1)
    run.stop()

    run = files.start(restore=savepoint)
    runs.append(run)
    files.feed(run, 1)
    run.stop()

    delete_garbage(storage, find_garbage(storage, "visits", now=2e9, min_age=0, take_over=True))
    store = JobLogStore(storage, PATHS)
    kept = (*store.load().retained, *store.released())
    needed = {PATHS.metadata(number) for number in kept}
    for number in kept:
        needed |= file_paths(read_metadata(storage, PATHS, number, ()))
    assert {file.path for file in storage.list("visits") if is_data(file.path)} == needed
