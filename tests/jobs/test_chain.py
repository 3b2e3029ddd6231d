"""Steps that read other steps get the rows from slot to slot, and nothing of it shows in the results."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

import strandline as sl
from strandline.errors import JobDefinitionError
from tests.jobs.chain import chain, check
from tests.jobs.kafka_place import Rows, some_rows
from tests.jobs.kills import kill_now_and_then, manager_pids, slot_pids
from tests.jobs.place import SCHEMA, Place, write_input
from tests.waiting import wait_until

pytestmark = pytest.mark.spark


class Files:
    """Two folders of input, and all rows that were written into them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.rows: dict[str, Rows] = {"first": [], "second": []}
        for name in self.rows:
            (place.root / name).mkdir()

    def frame(self, name: str) -> DataFrame:
        reader = self._place.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self._place.root / name))

    def write(self, files: int) -> None:
        for name, rows in self.rows.items():
            for _ in range(files):
                number = len(rows)
                rows += (more := some_rows(40, number, users=12))
                write_input(self._place.root / name, f"{number:08d}", more, 1_800_000_000_000_000_000 + number * 10**9)

    def job(self, **options: Any) -> sl.Job:
        return chain(self._place, self.frame("first"), self.frame("second"), **options)

    def check(self) -> None:
        check(self._place, self.rows["first"], self.rows["second"])


@pytest.fixture
def files(place: Place) -> Files:
    return Files(place)


def test_rows_go_from_slot_to_slot_or_through_spark_with_the_same_results(
    place: Place, files: Files, runs: list[sl.JobRun]
) -> None:
    files.write(2)
    runs.append(run := files.job(shuffle="direct").start())
    run.process_all_available()
    files.check()
    run.rescale(3)
    files.write(1)
    run.process_all_available()
    run.stop()

    files.write(1)
    runs.append(run := files.job(shuffle="spark").start(parallelism=1))
    run.process_all_available()
    files.check()
    savepoint = run.stop(savepoint_dir=str(place.root / "savepoints"))
    runs.append(run := files.job(shuffle="direct").start(restore=savepoint))
    files.write(1)
    run.process_all_available()
    run.stop()
    files.check()


@pytest.mark.faults
@pytest.mark.parametrize("changelog", [False, True])
def test_a_lost_slot_costs_a_round_and_no_row(
    place: Place, files: Files, runs: list[sl.JobRun], changelog: bool
) -> None:
    files.write(2)
    job = files.job(shuffle="direct", changelog=changelog, restart_strategy="none", checkpoint_interval="100ms")
    runs.append(run := job.start())
    wait_until(lambda: run.figures().batches >= 1, what="the first batch")
    feeding = threading.Thread(target=files.write, args=(8,))
    feeding.start()
    kill_now_and_then(run, slot_pids, 3, seed=11)
    feeding.join()
    run.process_all_available()
    files.check()
    os.kill(manager_pids(run)[0], signal.SIGKILL)
    files.write(1)
    run.process_all_available()
    run.stop()
    files.check()


def test_a_transform_between_two_steps_needs_spark_and_the_refusal_names_it(place: Place, tmp_path: Path) -> None:
    job = place.job(shuffle="direct")
    counts = job.source(place.source()).key_by("user").aggregate(n=sl.count(), uid="counts")
    often = counts.transform(lambda df: df.filter("n > 10"))
    often.key_by("n").aggregate(users=sl.count(), uid="users").sink(sl.ParquetSink(str(place.output)))
    with pytest.raises(JobDefinitionError, match="a transform stands between the step 'users' and the step before it"):
        job.start()
