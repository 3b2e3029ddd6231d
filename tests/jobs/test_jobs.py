"""What a user sees of a job that runs undisturbed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import strandline as sl
from tests.jobs.place import Place, Sum, running_sums
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

BATCHES: list[list[tuple[str | None, int]]] = [
    [("a", 1), ("b", 2), ("a", 3)],
    [("b", 4), ("c", 5), (None, 6)],
    [("a", 7), (None, 8)],
]


def test_keyed_state_lives_through_batches_and_restarts(place: Place, runs: list[sl.JobRun]) -> None:
    place.write(BATCHES[0])
    place.write(BATCHES[1])
    run = place.sums().start()
    runs.append(run)
    run.process_all_available()
    assert place.rows() == running_sums(BATCHES[:2])
    assert run.status == "running"
    run.stop()
    assert run.status == "stopped"

    place.write(BATCHES[2])
    again = place.sums().start()
    runs.append(again)
    again.process_all_available()
    assert place.rows() == running_sums(BATCHES)
    again.stop()


def test_available_now_ends_by_itself_with_everything_visible(place: Place) -> None:
    for batch in BATCHES:
        place.write(batch)
    run = place.sums().start(available_now=True)
    assert run.await_termination(timeout=60)
    assert run.status == "finished"
    assert place.rows() == running_sums(BATCHES)
    assert run.processes() == sl.RunProcesses()


def test_every_reader_sees_the_same_rows(place: Place) -> None:
    place.write(BATCHES[0])
    run = place.sums().start(available_now=True)
    run.await_termination(timeout=60)
    expected = running_sums(BATCHES[:1])
    assert place.rows() == expected
    assert sorted(map(tuple, place.spark.read.parquet(str(place.output)).collect())) == expected
    frame = pd.read_parquet(place.output)
    assert sorted(frame.itertuples(index=False, name=None)) == expected
    with duckdb.connect() as database:
        found = database.execute(f"select * from read_parquet('{place.output}/*.parquet')").fetchall()
    assert sorted(found) == expected


def test_rows_stay_hidden_until_a_checkpoint_covers_them(place: Place, runs: list[sl.JobRun]) -> None:
    place.write(BATCHES[0])
    run = place.sums(checkpoint_interval="1h").start()
    runs.append(run)
    wait_until(lambda: run.figures().batches == 1, what="the first batch")
    assert place.rows() == []
    with duckdb.connect() as database:
        found = database.execute(f"select count(*) from read_parquet('{place.output}/**/*.parquet')").fetchall()
    assert found == [(0,)]
    assert [file.name for file in place.output.glob("**/*.parquet")] == ["empty-visits.parquet"]
    assert run.trigger_checkpoint().status == "completed"
    assert place.rows() == running_sums(BATCHES[:1])


def test_an_idle_source_does_not_hold_rows_back(place: Place, runs: list[sl.JobRun]) -> None:
    place.write(BATCHES[0])
    run = place.sums(checkpoint_interval="1s").start()
    runs.append(run)
    wait_until(lambda: run.figures().batches == 1, what="the first batch")
    wait_until(place.rows, what="the rows of the last batch")
    assert place.rows() == running_sums(BATCHES[:1])


def test_cancel_takes_no_last_checkpoint_and_a_restart_makes_the_rows_again(
    place: Place, runs: list[sl.JobRun]
) -> None:
    place.write(BATCHES[0])
    run = place.sums(checkpoint_interval="1h").start()
    wait_until(lambda: run.figures().batches == 1, what="the first batch")
    run.cancel()
    assert run.status == "cancelled"
    assert place.rows() == []
    again = place.sums().start()
    runs.append(again)
    again.process_all_available()
    assert place.rows() == running_sums(BATCHES[:1])


def test_transform_union_and_two_stateful_steps(place: Place, runs: list[sl.JobRun]) -> None:
    other = place.root / "in2"
    other.mkdir()
    place.write([("a", 1), ("b", 2), ("A", 3)])
    place.spark.createDataFrame([("b", 10), ("c", 20)], "user string, x long").coalesce(1).write.mode("append").parquet(
        str(other)
    )
    job = place.job()
    first = job.source(place.source()).transform(lambda df: df.withColumn("user", F.lower("user")))
    second = job.source(place.spark.readStream.schema("user string, x long").parquet(str(other)))
    per_user = first.union(second).key_by("user").aggregate(n=sl.count(), s=sl.sum("x"), uid="per-user")
    per_user.sink(sl.ParquetSink(str(place.output)))
    (
        per_user.transform(lambda df: df.withColumn("size", F.when(F.col("s") > 5, "big").otherwise("small")))
        .key_by("size")
        .process(Changes(), "size string, users long", uid="per-size")
        .sink(sl.ParquetSink(str(place.root / "sizes")))
    )
    run = job.start()
    runs.append(run)
    run.process_all_available()
    last: dict[str, tuple[int, int]] = {}
    for user, n, s in place.rows():
        last[user] = max(last.get(user, (0, 0)), (n, s))
    assert last == {"a": (2, 4), "b": (2, 12), "c": (1, 20)}
    sizes = place.rows(place.root / "sizes")
    assert max(n for size, n in sizes if size == "big") >= 2
    assert sum(1 for _ in place.rows()) == sum(
        {size: max(n for s, n in sizes if s == size) for size, _ in sizes}.values()
    )


class Changes(sl.KeyedProcessor):
    def open(self, context: Any) -> None:
        self.seen = context.value_state("seen", "n long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n = (self.seen.get() or 0) + sum(1 for _ in rows)
        self.seen.update(n)
        yield (*key, n)


def test_list_and_map_state(place: Place, runs: list[sl.JobRun]) -> None:
    class Baskets(sl.KeyedProcessor):
        def open(self, context: Any) -> None:
            self.items = context.list_state("items", "x long")
            self.counts = context.map_state("counts", "x long", "n long")

        def process(self, key: Any, rows: Any, context: Any) -> Any:
            for row in rows:
                self.items.append_value(row.x)
                self.counts.put(row.x, (self.counts.get(row.x) or 0) + 1)
            yield (
                *key,
                ",".join(map(str, self.items.get())),
                ",".join(f"{k}:{v}" for k, v in sorted(self.counts.items())),
            )

    place.write([("a", 1), ("a", 2)])
    place.write([("a", 1)])
    job = place.job()
    stream = job.source(place.source()).key_by("user").process(Baskets(), "user string, items string, counts string")
    stream.sink(sl.ParquetSink(str(place.output)))
    run = job.start()
    runs.append(run)
    run.process_all_available()
    assert sorted(place.rows())[-1][0] == "a"
    assert {row[2] for row in place.rows()} == {"1:1,2:1", "1:2,2:1"}
    assert sorted(max((row[1] for row in place.rows()), key=len).split(",")) == ["1", "1", "2"]


@pytest.mark.parametrize(
    ("backend", "incremental"),
    [
        pytest.param("heap", False, marks=pytest.mark.slow),
        ("rocksdb", True),
        pytest.param("rocksdb", False, marks=pytest.mark.slow),
    ],
)
def test_aggregates_equal_a_batch_computation(place: Place, backend: str, incremental: bool) -> None:
    rows: list[list[tuple[str | None, int]]] = [
        [(f"u{i % 13}", i * 7 % 101 - 50) for i in range(k, k + 200)] for k in (0, 100, 500)
    ]
    for batch in rows:
        place.write(batch)

    def start() -> sl.JobRun:
        job = place.job(state_backend=backend, incremental=incremental)
        totals = (
            job.source(place.source())
            .key_by("user")
            .aggregate(n=sl.count(), s=sl.sum("x"), lo=sl.min("x"), hi=sl.max("x"), m=sl.avg("x"))
        )
        totals.sink(sl.ParquetSink(str(place.output)))
        return job.start(available_now=True)

    start().await_termination(timeout=60)
    more: list[tuple[str | None, int]] = [(f"u{i}", 1000 + i) for i in range(5, 20)]
    place.write(more)
    start().await_termination(timeout=60)
    everything = place.spark.createDataFrame([row for batch in [*rows, more] for row in batch], "user string, x long")
    expected = everything.groupBy("user").agg(F.count("*"), F.sum("x"), F.min("x"), F.max("x"), F.avg("x"))
    last = (
        place.spark.read.parquet(str(place.output))
        .groupBy("user")
        .agg(F.max_by(F.struct("n", "s", "lo", "hi", "m"), "n").alias("v"))
    )
    assert sorted(map(tuple, last.select("user", "v.*").collect())) == sorted(map(tuple, expected.collect()))


def _writes_nothing(rows: DataFrame, batch_id: int) -> None:
    pass


def _takes_one(rows: DataFrame, batch_id: int) -> None:
    rows.take(1)
    assert not rows.isEmpty()


@pytest.mark.parametrize("function", [_writes_nothing, pytest.param(_takes_one, marks=pytest.mark.slow)])
def test_a_function_that_reads_little_or_nothing_does_not_hold_state_back(
    place: Place, runs: list[sl.JobRun], function: Any
) -> None:
    for batch in BATCHES:
        place.write(batch)
    seen: dict[int, list[Any]] = {}

    def record(rows: DataFrame, batch_id: int) -> None:
        seen[batch_id] = sorted(map(tuple, rows.collect()), key=repr)

    job = place.job()
    stream = job.source(place.source()).key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
    stream.sink(sl.ForeachBatchSink(function))
    run = job.start()
    run.process_all_available()
    run.stop()
    # The state that was built while nobody looked is all there for a function that does look.
    place.write([("a", 100), ("b", 100)])
    job = place.job()
    stream = job.source(place.source()).key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
    stream.sink(sl.ForeachBatchSink(record))
    again = job.start()
    runs.append(again)
    again.process_all_available()
    assert list(seen.values()) == [[("a", 4, 111), ("b", 3, 106)]]


def test_a_function_that_writes_twice_gets_the_same_rows_and_state_advances_once(
    place: Place, runs: list[sl.JobRun]
) -> None:
    class Restless(Sum):
        """Yields something else every time it is run."""

        def process(self, key: Any, rows: Any, context: Any) -> Any:
            for user, n, _s in super().process(key, rows, context):
                yield (user, n, time.time_ns())

    for batch in BATCHES:
        place.write(batch)
    evaluations: list[list[Any]] = []

    def twice(rows: DataFrame, batch_id: int) -> None:
        evaluations.append(sorted(map(tuple, rows.collect()), key=repr))
        assert rows.count() == len(evaluations[-1])
        evaluations.append(sorted(map(tuple, rows.collect()), key=repr))

    job = place.job()
    stream = job.source(place.source()).key_by("user").process(Restless(), "user string, n long, s long")
    stream.sink(sl.ForeachBatchSink(twice)).sink(sl.ParquetSink(str(place.output)))
    run = job.start()
    runs.append(run)
    run.process_all_available()
    assert len(evaluations) == 6
    assert evaluations[0::2] == evaluations[1::2]
    flat = sorted((row for rows in evaluations[0::2] for row in rows), key=repr)
    assert place.rows() == flat
    assert not list(place.output.glob("_strandline/*.staged"))  # only the first evaluation staged files
    assert sorted((row[:2] for row in flat), key=repr) == sorted((row[:2] for row in running_sums(BATCHES)), key=repr)


def test_two_sinks_and_two_functions_on_different_streams(place: Place, runs: list[sl.JobRun]) -> None:
    for batch in BATCHES:
        place.write(batch)
    seen: dict[str, list[Any]] = {"rows": [], "sums": []}
    job = place.job(spark_checkpoint_dir=str(place.root / "spark"))
    source = job.source(place.source())
    sums = source.key_by("user").process(Sum(), "user string, n long, s long")
    file_systems: set[str | None] = set()

    def collect(rows: DataFrame, _batch: int) -> None:
        seen["rows"].extend(map(tuple, rows.collect()))
        file_systems.add(rows.sparkSession.conf.get("fs.file.impl", None))

    source.sink(sl.ForeachBatchSink(collect))
    sums.sink(sl.ForeachBatchSink(lambda rows, _id: seen["sums"].extend(map(tuple, rows.take(1)))))
    sums.sink(sl.ParquetSink(str(place.output))).sink(sl.ParquetSink(str(place.root / "copy")))
    run = job.start()
    runs.append(run)
    run.process_all_available()
    assert sorted(seen["rows"], key=repr) == sorted((row for batch in BATCHES for row in batch), key=repr)
    assert len(seen["sums"]) == 3
    assert place.rows() == place.rows(place.root / "copy") == running_sums(BATCHES)
    # Spark's logs have no files with checksums, and the user's functions get the user's settings.
    logs = [path.name for path in place.root.glob("spark/*/*/*") if path.parent.name in ("offsets", "commits")]
    assert logs
    assert [name for name in logs if name.endswith(".crc")] == []
    assert file_systems == {None}
    assert place.spark.conf.get("fs.file.impl", None) is None


def test_a_rate_source_is_counted_without_gaps(place: Place, runs: list[sl.JobRun]) -> None:
    job = place.job()
    rate = place.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load()
    totals = (
        job.source(rate.selectExpr("value % 10 as k", "value")).key_by("k").aggregate(n=sl.count(), hi=sl.max("value"))
    )
    totals.sink(sl.ParquetSink(str(place.output)))
    run = job.start()
    runs.append(run)
    wait_until(lambda: len(place.rows()) >= 30, what="three batches of rows")
    run.stop()
    for _k, n, hi in place.rows():
        assert hi // 10 + 1 == n


def test_a_data_source_written_in_python_feeds_a_job(place: Place, runs: list[sl.JobRun]) -> None:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Reader(DataSourceStreamReader):
        def initialOffset(self) -> dict[str, int]:
            return {"at": 0}

        def latestOffset(self, *args: Any) -> dict[str, int]:
            self.at = min(getattr(self, "at", 0) + 50, 200)
            return {"at": self.at}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
            return [InputPartition((start["at"], end["at"]))]

        def read(self, partition: InputPartition) -> Any:
            start, end = partition.value
            return iter([(f"u{i % 3}", i) for i in range(start, end)])

    class Numbers(DataSource):
        @classmethod
        def name(cls) -> str:
            return "numbers"

        def schema(self) -> str:
            return "user string, x long"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader()

    place.spark.dataSource.register(Numbers)
    job = place.job()
    stream = (
        job.source(place.spark.readStream.format("numbers").load())
        .key_by("user")
        .process(Sum(), "user string, n long, s long")
    )
    stream.sink(sl.ParquetSink(str(place.output)))
    run = job.start()
    runs.append(run)
    wait_until(lambda: sum({u: n for u, n, _ in sorted(place.rows())}.values()) == 200, what="all rows")
    last = {u: (n, s) for u, n, s in sorted(place.rows())}
    assert last == {f"u{r}": (len(range(r, 200, 3)), sum(range(r, 200, 3))) for r in range(3)}


def test_a_batch_larger_than_its_memory_spills(place: Place) -> None:
    rows: list[tuple[str | None, int]] = [(f"user-{i % 20_000}", i) for i in range(40_000)]
    place.write(rows)
    run = place.sums(batch_memory="64kb").start(available_now=True)
    run.await_termination(timeout=60)
    assert place.rows() == running_sums([rows])


def test_checkpoints_say_how_much_they_uploaded_and_how_long_they_took(place: Place, runs: list[sl.JobRun]) -> None:
    place.write([(f"user-{i}", i) for i in range(20_000)])
    run = place.sums(checkpoint_interval="1h").start()
    runs.append(run)
    run.process_all_available()
    first = run.checkpoints()[-1]
    assert first.status == "completed"
    assert first.full_bytes > 100_000
    assert first.checkpointed_bytes >= first.full_bytes
    assert len(first.subtasks) == 2
    assert first.path is not None
    assert Path(first.path).exists()
    assert first.end_to_end_ms >= first.barrier_to_completed_ms > 0
    unchanged = run.trigger_checkpoint()
    assert unchanged.checkpointed_bytes < first.full_bytes / 10
    place.write([(f"user-{i}", i) for i in range(200)])
    run.process_all_available()
    changed = run.checkpoints()[-1]
    assert changed.checkpointed_bytes < changed.full_bytes / 5
    assert [c.id for c in run.checkpoints()] == [1, 2, 3]
    folder = place.checkpoints / "visits"
    wait_until(lambda: [path.name for path in folder.glob("chk-*")] == ["chk-3"], what="the end of older checkpoints")


def test_every_batch_may_have_a_checkpoint_of_its_own(place: Place, runs: list[sl.JobRun]) -> None:
    for batch in BATCHES:
        place.write(batch)
    run = place.sums(checkpoint_interval="1h", checkpoint_every_batch=True).start()
    runs.append(run)
    wait_until(lambda: run.figures().batches == 3, what="three batches")
    wait_until(lambda: len(place.rows()) == len(running_sums(BATCHES)), what="all rows")
    # Rows become visible a moment before their checkpoint is noted as completed.
    wait_until(lambda: [c.status for c in run.checkpoints()] == ["completed"] * 3, what="three completed checkpoints")


def test_nothing_is_left_of_a_run_that_ended(place: Place) -> None:
    local = place.root / "local"
    place.write(BATCHES[0])
    run = place.sums(local_dir=str(local)).start()
    run.process_all_available()
    pids = run.processes().pids
    assert len(pids) == 3
    run.stop()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of all processes")
    wait_until(lambda: not list(local.glob("strandline-*/visits/*")), what="the end of local files")


def test_a_wall_clock_that_is_set_back_stops_no_checkpoints(
    place: Place, runs: list[sl.JobRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place.sums(checkpoint_interval="200ms").start()
    runs.append(run)
    place.write([("ann", 1)])
    run.process_all_available()
    taken, right = len(run.checkpoints()), time.time
    monkeypatch.setattr(time, "time", lambda: right() - 3600)
    place.write([("ann", 2)])
    wait_until(lambda: [one.status for one in run.checkpoints()][taken:] == ["completed"], what="a checkpoint")
    assert place.rows() == [("ann", 1, 1), ("ann", 2, 3)]
