"""Every operator, in one job on real Spark and real slots, against Spark SQL over the same rows.

An example is a few small files, one a batch, with rows out of order and nulls. On the way the run is cancelled and
started again, and later a slot is killed. What the sinks hold then must be what a batch query says, row for row.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import strandline as sl
from strandline.operators.join.plan import JoinType
from tests.jobs.kills import slot_pids
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.faults]

EXAMPLES = int(os.environ.get("STRANDLINE_SQL_EXAMPLES", "1"))
START = datetime(2026, 1, 1, tzinfo=UTC)
DELAY = 10.0
"""The watermark's delay in seconds; rows are out of order by less, if only by a microsecond."""
ERA = 1000.0
"""After this long there is nothing left of what was remembered for a time."""


# --- the rows ------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An event. Users that begin with ~ only move the watermark, and are left out of all that is compared."""

    file: int
    seq: int
    era: int
    user: str | None
    kind: str
    ts: datetime | None
    x: int | None
    d: float | None
    s: str | None
    m: Decimal | None


SCHEMA = (
    "file int, seq long, era int, user string, kind string, ts timestamp, x long, d double, s string, m decimal(9,2)"
)
ARROW = pa.schema(
    [
        ("file", pa.int32()),
        ("seq", pa.int64()),
        ("era", pa.int32()),
        ("user", pa.string()),
        ("kind", pa.string()),
        ("ts", pa.timestamp("us", "UTC")),
        ("x", pa.int64()),
        ("d", pa.float64()),
        ("s", pa.string()),
        ("m", pa.decimal128(9, 2)),
    ]
)


class Events:
    """Files of events, made by chance; every file's front is at or after the one before it, so no row is late."""

    def __init__(self, chance: random.Random) -> None:
        self.files: list[list[Row]] = []
        self._seq = 0
        for era in range(2):
            front = era * ERA
            if era:
                # The second of these batches begins with a watermark of the new era, whatever comes between them.
                self._mark(era, front)
                self._mark(era, front)
            for _ in range(chance.randint(2, 3)):
                front += chance.choice([0, 0.5, 2, 3, 7])
                count = chance.choice([0, 3, 6, 10])
                self._add([self._row(chance, era, front) for _ in range(count)])

    def end(self) -> list[Row]:
        """One more file, after which every window is over."""
        self._mark(2, 2 * ERA)
        return self.files[-1]

    def _row(self, chance: random.Random, era: int, front: float) -> Row:
        behind = chance.choice([0, 0, 0.5, 1, 2, 4, 5, chance.uniform(0, 9.9), 9.9995, 9.999999])
        return self._made(
            era,
            user=chance.choice(["a", "a", "b", "c", None]),
            kind=chance.choice("LR"),
            ts=None if chance.random() < 0.05 else START + timedelta(seconds=front - behind),
            x=chance.choice([None, -2, 0, 1, 1, 5]),
            d=chance.choice([None, -1.5, 0.25, 3.0, float("nan")]),
            s=chance.choice([None, "", "ä", "one", "two"]),
            m=chance.choice([None, Decimal("-0.01"), Decimal("12.50")]),
        )

    def _mark(self, era: int, second: float) -> None:
        ts = START + timedelta(seconds=second)
        self._add([self._made(era, user="~", kind=kind, ts=ts, x=None, d=None, s=None, m=None) for kind in "LR"])

    def _made(self, era: int, **values: Any) -> Row:
        self._seq += 1
        return Row(file=len(self.files), seq=self._seq, era=era, **values)

    def _add(self, rows: list[Row]) -> None:
        self.files.append(rows)


def write(folder: Path, number: int, rows: list[Row]) -> None:
    """One file, later than those before it: Spark reads files in the order of their times."""
    hidden, path = folder / f".{number}", folder / f"{number:03d}.parquet"
    assert not path.exists()
    pq.write_table(pa.Table.from_pylist([row._asdict() for row in rows], ARROW), hidden)
    moment = START.timestamp() + number
    os.utime(hidden, (moment, moment))
    hidden.rename(path)


# --- the steps -----------------------------------------------------------------------------------------

AGGREGATES: dict[str, tuple[Any, str]] = {
    "n": (sl.count(), "count(*)"),
    "known": (sl.count("x"), "count(x)"),
    "sum_x": (sl.sum("x"), "sum(x)"),
    "sum_d": (sl.sum("d"), "sum(d)"),
    "sum_m": (sl.sum("m"), "sum(m)"),
    "min_x": (sl.min("x"), "min(x)"),
    "min_s": (sl.min("s"), "min(s)"),
    "max_d": (sl.max("d"), "max(d)"),
    "max_ts": (sl.max("ts"), "max(ts)"),
    "avg_x": (sl.avg("x"), "avg(x)"),
    "first_s": (sl.first("s"), "min_by(s, seq)"),
    "last_x": (sl.last("x", ignore_nulls=True), "max_by(x, seq) filter (where x is not null)"),
    "all_s": (sl.collect_list("s"), "sort_array(collect_list(s))"),
    "kinds_x": (sl.approx_count_distinct("x"), "count(distinct x)"),
    "file": (sl.max("file"), "max(file)"),
}
COMPUTED = {name: aggregate for name, (aggregate, _) in AGGREGATES.items()}
EXPRESSIONS = ", ".join(f"{sql} as {name}" for name, (_, sql) in AGGREGATES.items())


class RunningSums(sl.KeyedProcessor):
    """Rows and their sum per user, in a value state; the files it saw, in a map state."""

    OUTPUT = "user string, n long, s long, files long, file int"

    def open(self, context: sl.ProcessContext) -> None:
        self.total = context.value_state("total", "n long, s long")
        self.files = context.map_state("files", "file int", "n long")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> Iterator[Any]:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s, file = n + 1, s + (row.x or 0), row.file
            self.files.put(file, (self.files.get(file) or 0) + 1)
        self.total.update((n, s))
        yield (*key, n, s, len(list(self.files.keys())), file)


class ArrowSums(sl.ArrowProcessor):
    """The same for many users at a time, but for the files."""

    OUTPUT = "user string, n long, s long, file int"

    def open(self, context: sl.ArrowContext) -> None:
        self.total = context.value_state("total", "n long, s long")

    def process(self, table: pa.Table, context: sl.ArrowContext) -> pa.Table:
        made = table.group_by("user", use_threads=False).aggregate([("seq", "count"), ("x", "sum"), ("file", "max")])
        known = self.total.get_many(made)
        n = pc.add(made["seq_count"], pc.fill_null(known["n"], 0))
        s = pc.add(pc.fill_null(made["x_sum"], 0), pc.fill_null(known["s"], 0))
        self.total.put_many(made, pa.table({"n": n, "s": s}))
        return pa.table({"user": made["user"], "n": n, "s": s, "file": made["file_max"]})


class Reminders(sl.KeyedProcessor):
    """Some seconds after a row, on the even second and again a second later, says how many rows there were until then.

    All rows up to a timer's time have come when it fires, so what it says does not depend on the batch it fires in.
    """

    OUTPUT = "user string, ts timestamp, n long"

    def open(self, context: sl.ProcessContext) -> None:
        self.times = context.list_state("times", "us long")

    def process(self, key: Any, rows: Iterator[Any], context: sl.ProcessContext) -> None:
        for row in rows:
            if row.ts is not None:
                us = round(row.ts.timestamp() * 1_000_000)
                self.times.append_value(us)
                due = us // 2_000_000 * 2_000 + 4_000
                context.register_timer(due)
                context.register_timer(due + 500)
                context.delete_timer(due + 500)

    def on_timer(self, key: Any, timestamp: int, context: sl.ProcessContext) -> Iterator[Any]:
        if timestamp % 2_000 == 0:
            context.register_timer(timestamp + 1_000)
        n = sum(us <= timestamp * 1000 for us in self.times.get())
        yield (*key, datetime.fromtimestamp(timestamp / 1000, UTC), n)


def left(frame: DataFrame) -> DataFrame:
    return frame.filter("kind = 'L'").select("user", "ts", "seq")


def right(frame: DataFrame) -> DataFrame:
    return frame.filter("kind = 'R'").selectExpr("user", "ts as rts", "seq as rseq")


JOINS: tuple[JoinType, ...] = ("inner", "left", "full")


def _join(events: sl.Stream, how: JoinType) -> sl.Stream:
    other = events.transform(right).key_by("user")
    return events.transform(left).key_by("user").join(other, how, within=("-3s", "5s"))


def _joined(how: str) -> str:
    return f"""
        select coalesce(l.user, r.user) as user, ts, seq, rts, rseq
        from (select user, ts, seq from events where kind = 'L') l
        {how} join (select user, ts as rts, seq as rseq from events where kind = 'R') r
        on l.user = r.user and rts between ts - interval 3 seconds and ts + interval 5 seconds"""


def window_time(window: str) -> str:
    """The time of a window. Spark's own function of this name works only on the columns of its own windows."""
    return f"{window}.end - interval 1 microsecond as window_time"


def _windows(window: str) -> str:
    return f"""
        select user, w.start as window_start, w.end as window_end, {window_time("w")}, {EXPRESSIONS}
        from (select *, {window} as w from events) group by user, w"""


def _first(partition: str, where: str = "true") -> str:
    return f"""
        select {", ".join(Row._fields)} from (
            select *, row_number() over (partition by {partition} order by seq) as place from events where {where}
        ) where place = 1"""


STEPS: dict[str, tuple[Callable[[sl.Stream], sl.Stream], str]] = {
    "aggregate": (
        lambda events: events.key_by("user").aggregate(**COMPUTED),
        f"""select t.user, {EXPRESSIONS} from (select distinct user, file as until from events) t
            join (select user as u, * except (user) from events) on u <=> t.user and file <= until
            group by t.user, until""",
    ),
    "tumbling": (
        lambda events: events.key_by("user").window(sl.tumbling("10s")).aggregate(**COMPUTED),
        _windows("window(ts, '10 seconds')"),
    ),
    "sliding": (
        lambda events: events.key_by("user").window(sl.sliding("12s", "5s")).aggregate(**COMPUTED),
        _windows("window(ts, '12 seconds', '5 seconds')"),
    ),
    "session": (
        lambda events: events.key_by("user").window(sl.session("2s")).aggregate(**COMPUTED),
        f"""select user, session_window.start as window_start, session_window.end as window_end,
            {window_time("session_window")}, {EXPRESSIONS}
            from events group by user, session_window(ts, '2 seconds')""",
    ),
    "update": (
        lambda events: events.key_by("user").window(sl.tumbling("10s"), emit="update").aggregate(**COMPUTED),
        f"""with cut as (select *, window(ts, '10 seconds') as w from events)
            select t.user, t.w.start as window_start, t.w.end as window_end, {window_time("t.w")}, {EXPRESSIONS}
            from (select distinct user, w, file as until from cut) t
            join (select user as u, w as v, * except (user, w) from cut) on u <=> t.user and v = t.w and file <= until
            group by t.user, t.w, until""",
    ),
    "deduplicate": (lambda events: events.key_by("user", "x").deduplicate(), _first("user, x")),
    "within": (
        lambda events: events.key_by("user", "x").deduplicate(within="100s"),
        _first("user, x, era", "ts is not null"),
    ),
    **{
        how: (
            partial(_join, how=how),
            _joined(how),
        )
        for how in JOINS
    },
    "process": (
        lambda events: events.key_by("user").process(RunningSums(), RunningSums.OUTPUT),
        """select t.user, count(*) as n, coalesce(sum(x), 0) as s, count(distinct file) as files, until as file
           from (select distinct user, file as until from events) t
           join (select user as u, x, file from events) on u <=> t.user and file <= until
           group by t.user, until""",
    ),
    "arrow": (
        lambda events: events.key_by("user").process(ArrowSums(), ArrowSums.OUTPUT, rows="arrow"),
        """select t.user, count(*) as n, coalesce(sum(x), 0) as s, until as file
           from (select distinct user, file as until from events) t
           join (select user as u, x, file from events) on u <=> t.user and file <= until
           group by t.user, until""",
    ),
    "timers": (
        lambda events: events.key_by("user").process(Reminders(), Reminders.OUTPUT, time_mode="event"),
        """select t.user, due as ts, count(*) as n
           from (select distinct user, explode(array(even, even + interval 1 second)) as due from (
                select user, timestamp_seconds(unix_seconds(ts) div 2 * 2 + 4) as even from events where ts is not null
           )) t join (select user as u, ts from events) on u <=> t.user and ts <= due
           group by t.user, due""",
    ),
}


# --- the test ------------------------------------------------------------------------------------------


def _job(spark: SparkSession, root: Path) -> sl.Job:
    config = sl.Config(checkpoint_dir=str(root / "ckpt"), checkpoint_interval="500ms", parallelism=2)
    job = sl.Job("steps", spark, config)
    files = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / "in"))
    events = job.source(files, event_time="ts", watermark_delay=DELAY)
    for name, (step, _) in STEPS.items():
        step(events).sink(sl.ParquetSink(str(root / name)))
    return job


def _differences(spark: SparkSession, root: Path) -> dict[str, tuple[list[str], list[str]]]:
    """For each step that is wrong, the rows that are missing and those that should not be there."""
    ours = "coalesce(user, '') not like '~%'"
    spark.read.schema(SCHEMA).parquet(str(root / "in")).filter(ours).createOrReplaceTempView("events")
    texts = []
    for name, (_, query) in STEPS.items():
        expected = spark.sql(query)
        found = spark.read.schema(expected.schema).parquet(str(root / name)).filter(ours)
        if "all_s" in found.columns:
            found = found.withColumn("all_s", F.sort_array("all_s"))
        for which, frame in (("expected", expected), ("found", found)):
            texts.append(frame.selectExpr(f"'{name}' as step", f"'{which}' as which", "to_json(struct(*)) as row"))
    rows: dict[tuple[str, str], Counter[str]] = {}
    for step, which, row in reduce(DataFrame.union, texts).collect():
        rows.setdefault((step, which), Counter())[row] += 1
    differences = {}
    for name in STEPS:
        expected_rows, found_rows = rows.get((name, "expected"), Counter()), rows.get((name, "found"), Counter())
        if expected_rows != found_rows:
            missing, surplus = expected_rows - found_rows, found_rows - expected_rows
            differences[name] = (sorted(missing.elements()), sorted(surplus.elements()))
    return differences


def _batches(run: sl.JobRun) -> int:
    return run.figures().batches


@pytest.fixture(autouse=True)
def _interpreted(spark: SparkSession) -> None:
    """Compiling the many stages of these plans would take longer than running them on a few rows."""
    spark.conf.set("spark.sql.codegen.wholeStage", "false")


@pytest.mark.timeout(120 + 120 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(chance=st.randoms(use_true_random=True))
def test_every_operator_gives_what_sql_gives_across_a_restart_and_the_loss_of_a_slot(
    chance: random.Random, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("steps")
    for name in ("in", *STEPS):
        (root / name).mkdir()
    events = Events(chance)
    for number, rows in enumerate(events.files):
        write(root / "in", number, rows)
    cancelled_after = chance.randint(1, len(events.files))
    killed_after, victim = chance.randint(0, 2), chance.randint(0, 1)
    note(f"{root}: cancelled after {cancelled_after} batches, a slot killed {killed_after} batches later")

    job = _job(spark, root)
    run = job.start()
    try:
        wait_until(lambda: _batches(run) >= cancelled_after, 120, f"batch {cancelled_after}")
        run.cancel()
        run = job.start()
        deadline = time.monotonic() + 5
        while _batches(run) < killed_after and time.monotonic() < deadline:
            time.sleep(0.05)  # between two looks; a run with fewer batches loses its slot all the same
        wait_until(lambda: len(slot_pids(run)) == 2, what="both slots")
        os.kill(slot_pids(run)[victim], signal.SIGKILL)
        write(root / "in", len(events.files), events.end())
        run.process_all_available()
        assert run.figures().replaced_slots >= 1
    finally:
        run.cancel()
    assert _differences(spark, root) == {}
