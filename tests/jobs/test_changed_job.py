"""A job that is changed and started again: steps and states come and go, rows get more columns."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import strandline as sl
from strandline.errors import IncompatibleCheckpointError
from tests.jobs.durable import check_storage, chk, metadata
from tests.jobs.kills import lose_slot, slot_pid
from tests.jobs.place import Place, running_sums
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.faults]

ROWS = [[(f"user{n % 7}", n * 10 + batch) for n in range(9)] for batch in range(8)]
ROWS[0] = [*ROWS[0], ("once", 5)]
FIRST_OUTPUT, SECOND_OUTPUT = "user string, n long, s long", "user string, n long, s long, top long, recent long"


class First(sl.KeyedProcessor):
    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long, s long")
        self.old = context.list_state("old", "x long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s = n + 1, s + row.x
            self.old.append_value(row.x)
        self.total.update((n, s))
        yield (*key, n, s)


class Second(sl.KeyedProcessor):
    """Has one column more, and another state."""

    columns = "n long, top long, s long"

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", self.columns)
        self.recent = context.value_state("recent", "long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n, top, s = self.total.get() or (0, None, 0)
        recent = self.recent.get() or 0
        for row in rows:
            n, s, recent = n + 1, s + row.x, recent + 1
            top = row.x if top is None else max(top, row.x)
        self.total.update((n, top, s))
        self.recent.update(recent)
        yield (*key, n, s, top, recent)


class NotNull(Second):
    columns = "n long, top long not null, s long"


class Seeded(StatefulProcessor):
    """Counts on from a number that the user gave."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((initialState.n,))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        n = (self.count.get() or (0,))[0] + len(list(rows))
        self.count.update((n,))
        yield Row(user=key[0], n=n)

    def close(self) -> None: ...


class Changing(Place):
    def out(self, name: str) -> Path:
        return self.root / f"out-{name}"

    def first(self, processor: sl.KeyedProcessor | None = None, output: str = FIRST_OUTPUT, **options: Any) -> sl.Job:
        job = self.job(checkpoint_interval="1h", **options)
        keyed = job.source(self.source()).key_by("user")
        keyed.process(processor or First(), output, uid="sums").sink(sl.ParquetSink(str(self.output)))
        keyed.aggregate(n=sl.count(), uid="gone").sink(sl.ParquetSink(str(self.out("gone"))))
        return job

    def second(self, **options: Any) -> sl.Job:
        job = self.job(checkpoint_interval="1h", **options)
        keyed = job.source(self.source()).key_by("user")
        keyed.process(Second(), SECOND_OUTPUT, uid="sums").sink(sl.ParquetSink(str(self.output)))
        keyed.aggregate(n=sl.count(), uid="added").sink(sl.ParquetSink(str(self.out("added"))))
        initial = self.spark.createDataFrame([("user1", 100), ("user2", 200)], "user string, n long")
        seeded = keyed.process(Seeded(), "user string, n long", uid="seeded", initial_state=initial)
        seeded.sink(sl.ParquetSink(str(self.out("seeded"))))
        return job

    def files(self) -> dict[str, int]:
        """Everything durable, with its time of change."""
        folders = (self.checkpoints, self.output, self.out("gone"), self.out("added"), self.out("seeded"))
        return {str(path): path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}


def expected(before: list[list[tuple[str, int]]], after: list[list[tuple[str, int]]]) -> list[tuple[Any, ...]]:
    """What both jobs together must have written for "sums"."""
    state: dict[str, list[Any]] = {}
    for user, x in (row for batch in before for row in batch):
        n, s = state.get(user, [0, 0])[:2]
        state[user] = [n + 1, s + x, None, 0]
    made: list[tuple[Any, ...]] = running_sums([list(batch) for batch in before])
    for batch in after:
        for user, x in batch:
            n, s, top, recent = state.get(user, [0, 0, None, 0])
            state[user] = [n + 1, s + x, x if top is None else max(top, x), recent + 1]
        made += [(user, *state[user]) for user in {user for user, _ in batch}]
    return sorted(made, key=repr)


def counts(batches: list[list[tuple[str, int]]], start: dict[str, int]) -> list[tuple[Any, ...]]:
    state, made = dict(start), []
    for batch in batches:
        for user, _ in batch:
            state[user] = state.get(user, 0) + 1
        made += [(user, state[user]) for user in {user for user, _ in batch}]
    return sorted(made, key=repr)


def feed(place: Place, run: sl.JobRun, batches: list[list[tuple[str, int]]]) -> None:
    for rows in batches:
        place.write(rows)
        run.process_all_available()


@pytest.mark.parametrize("changelog", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_changed_job_goes_on_with_what_it_still_has(
    tmp_path: Path, spark: Any, runs: list[sl.JobRun], changelog: bool
) -> None:
    place = Changing(tmp_path, spark)
    options: dict[str, Any] = {"changelog": changelog}
    run = place.first(**options).start()
    runs.append(run)
    feed(place, run, ROWS[:2])
    run.stop()

    # What does not fit is refused, and nothing is touched.
    before = place.files()
    refused = [
        (place.second(**options), ["'gone'", "the job has 'added', 'seeded'", "allow_non_restored_state=True"]),
        (place.first(Second(), SECOND_OUTPUT, **options), ["operator sums", "'old'", "allow_non_restored_state=True"]),
        (place.first(NotNull(), SECOND_OUTPUT, **options), ["operator sums", "'total'", "top long not null"]),
    ]
    for job, texts in refused:
        with pytest.raises(IncompatibleCheckpointError) as caught:
            job.start()
        assert all(text in str(caught.value) for text in texts), caught.value
    assert place.files() == before
    run = place.first(**options).start()
    runs.append(run)
    feed(place, run, ROWS[2:3])
    run.stop()
    gone = place.rows(place.out("gone"))
    assert gone == counts(ROWS[:3], {})

    # A slot dies before the first checkpoint: it is rebuilt from the old job's.
    run = place.second(**options).start(allow_non_restored_state=True)
    runs.append(run)
    assert run.query("sums", "total", "once") == (1, None, 5)
    place.write(ROWS[3])
    wait_until(lambda: run.figures().batches == 1, what="a batch")
    for index in range(2):
        if changelog:
            lose_slot(place, run, index)
        else:
            os.kill(slot_pid(run, index), signal.SIGKILL)
    feed(place, run, ROWS[4:6])
    assert run.figures().replaced_slots == 2
    assert run.figures().restarts == 0
    taken = metadata(chk(place, run.checkpoints()[-1].id))
    assert set(taken.operators) == {state.operator for state in taken.subtasks} == {"sums", "added", "seeded"}
    assert {state["name"] for one in taken.subtasks if one.operator == "sums" for state in one.states} == {
        "total",
        "recent",
    }
    assert run.query("sums", "total", "once") == (1, None, 5)
    run.stop()

    run = place.second(**options).start()
    runs.append(run)
    feed(place, run, ROWS[6:])
    assert run.query("sums", "total", "once") == (1, None, 5)
    run.stop()
    assert place.rows() == expected(ROWS[:3], ROWS[3:])
    assert place.rows(place.out("gone")) == gone
    assert place.rows(place.out("added")) == counts(ROWS[3:], {})
    assert place.rows(place.out("seeded")) == counts(ROWS[3:], {"user1": 100, "user2": 200})
    check_storage(place)


class Steps(Place):
    """A job with every kind of vectorised step, by event time: x is a number of seconds."""

    def out(self, name: str) -> Path:
        return self.root / f"out-{name}"

    def steps(
        self,
        key: str = "user",
        spec: sl.WindowSpec | None = None,
        aggregates: dict[str, Any] | None = None,
        within: str = "20s",
        how: Any = "left",
    ) -> sl.Job:
        job = self.job(checkpoint_interval="1h")
        frame = self.source().withColumn("ts", F.timestamp_seconds("x")).withColumn("place", F.upper("user"))
        rows = job.source(frame, event_time="ts", watermark_delay="0s")
        keyed = rows.key_by(key)
        windows = keyed.window(spec or sl.sliding("10s", "5s"))
        made = windows.aggregate(**(aggregates or {"top": sl.max("x"), "n": sl.count()}), uid="windows")
        made.sink(sl.ParquetSink(str(self.out("windows"))))
        keyed.deduplicate(within=within, uid="first").sink(sl.ParquetSink(str(self.out("first"))))
        right = rows.transform(later).key_by("y" if key == "x" else "other")
        joined = keyed.join(right, how, within=("1s", "3s"), uid="pairs")
        joined.sink(sl.ParquetSink(str(self.out("pairs"))))
        return job

    def shown(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        rows = self.spark.read.parquet(str(self.out(name))).select(*columns).collect()
        return sorted(map(tuple, rows), key=repr)


def later(frame: DataFrame) -> DataFrame:
    return frame.select(F.col("user").alias("other"), F.col("ts").alias("then"), F.col("x").alias("y"))


def test_changed_steps_are_refused_or_carried_over(tmp_path: Path, spark: Any, runs: list[sl.JobRun]) -> None:
    place = Steps(tmp_path, spark)
    run = place.steps().start()
    runs.append(run)
    feed(place, run, [[("a", 1), ("b", 2), ("a", 3)], [("a", 7), ("b", 12)]])
    run.stop()

    # The watermark is at 12. What the state does not hold any more is refused, and nothing is touched.
    folders = (place.checkpoints, *map(place.out, ("windows", "first", "pairs")))
    before = {str(path): path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}
    refused = [
        (place.steps(key="place"), ["operator windows", "the key: user string before, place string now"]),
        (place.steps(key="x"), ["operator windows", "the key: user string before, x bigint now"]),
        (place.steps(spec=sl.sliding("20s", "5s")), ["the size: 10 s before, 20 s now"]),
        (place.steps(spec=sl.tumbling("2s")), ["the size: 10 s before, 2 s now"]),
        (place.steps(spec=sl.session("10s")), ["the kind of step: window before, session now"]),
        (place.steps(aggregates={"n": sl.count(), "s": sl.sum("x")}), ["sum:x has not seen the rows until now"]),
        (place.steps(how="full"), ["operator pairs", "the how: left before, full now"]),
    ]
    for job, texts in refused:
        with pytest.raises(IncompatibleCheckpointError) as caught:
            job.start(allow_non_restored_state=True)
        assert all(text in str(caught.value) for text in [*texts, "another uid"]), caught.value
    after = {str(path): path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}
    assert after == before

    run = place.steps(spec=sl.tumbling("10s"), aggregates={"n": sl.count()}, within="1h", how="inner").start()
    runs.append(run)
    feed(place, run, [[("a", 14), ("b", 15), ("a", 19)], [("c", 60)]])
    run.stop()
    starts = place.shown("windows", "user", F.unix_timestamp("window_start").alias("start"), "n")  # type: ignore[arg-type]
    old = [("a", -5, 2), ("a", 0, 3), ("b", -5, 1), ("b", 0, 1)]
    assert starts == sorted([*old, ("a", 10, 2), ("b", 10, 2)], key=repr)
    assert place.shown("first", "user", "x") == [("a", 1), ("b", 2), ("c", 60)]
    # Rows without a partner came out before the change only: those of 7 and 12 had three seconds to find one.
    assert place.shown("pairs", "user", "x", "y") == sorted(
        [("a", 1, 3), ("a", 3, None), ("a", 7, None), ("b", 2, None), ("b", 12, 15)], key=repr
    )
