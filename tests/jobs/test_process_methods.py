"""The three methods for user code: `process`, `process_arrow` and `transform_with_state`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import GroupedData, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import strandline as sl
from strandline.errors import JobDefinitionError
from tests.jobs.place import Place, Sum, running_sums

pytestmark = pytest.mark.spark

OUTPUT = "user string, n long, s long"
ROWS: list[list[tuple[str | None, int]]] = [[("a", 1), ("b", 2), ("a", 3)], [("b", 4), ("c", 5)]]


class ArrowSum(sl.ArrowProcessor):
    """Counts and sums per user, table by table."""

    def open(self, context: sl.ArrowContext) -> None:
        self.total = context.value_state("total", "n long, s long")

    def process(self, table: pa.Table, context: sl.ArrowContext) -> pa.Table:
        keys = context.keys()
        before = self.total.get_many(keys).to_pylist()
        grouped = table.group_by("user", use_threads=False).aggregate([("x", "count"), ("x", "sum")]).to_pylist()
        new = {row["user"]: (row["x_count"], row["x_sum"]) for row in grouped}
        values = [
            {"n": (old["n"] or 0) + new[user][0], "s": (old["s"] or 0) + new[user][1]}
            for old, user in zip(before, keys["user"].to_pylist(), strict=True)
        ]
        after = pa.Table.from_pylist(values, pa.schema([("n", pa.int64()), ("s", pa.int64())]))
        self.total.put_many(keys, after)
        return after.add_column(0, "user", keys["user"])


class SparkSum(StatefulProcessor):
    """Counts and sums per user, as it is written for Spark."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "n long, s long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            n, s = n + 1, s + row.x
        self.total.update((n, s))
        yield Row(user=key[0], n=n, s=s)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.total.update((initialState.n, initialState.s))

    def close(self) -> None:
        pass


Keyed = sl.KeyedStream
FORMS: dict[str, Callable[[Keyed], sl.Stream]] = {
    "process": lambda keyed: keyed.process(Sum(), OUTPUT),
    "process_arrow": lambda keyed: keyed.process_arrow(ArrowSum(), OUTPUT),
    "process(rows='arrow')": lambda keyed: keyed.process(ArrowSum(), OUTPUT, rows="arrow"),
    "transform_with_state": lambda keyed: keyed.transform_with_state(SparkSum(), OUTPUT, "Append", "None"),
    "process(StatefulProcessor)": lambda keyed: keyed.process(SparkSum(), OUTPUT),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_running_sums_and_the_same_uid(place: Place, form: str) -> None:
    for rows in ROWS:
        place.write(rows)
    job = place.job()
    FORMS[form](job.source(place.source()).key_by("user")).sink(sl.ParquetSink(str(place.output)))
    run = job.start(available_now=True)
    assert run.await_termination(timeout=60)
    assert place.rows() == running_sums(ROWS)
    assert {subtask.operator for subtask in run.checkpoints()[-1].subtasks} == {"process-0"}


def test_transform_with_state_has_the_parameters_of_pyspark() -> None:
    theirs = list(inspect.signature(GroupedData.transformWithState).parameters)
    ours = list(inspect.signature(sl.KeyedStream.transform_with_state).parameters)
    assert ours[: len(theirs)] == theirs


def test_initial_state_may_be_grouped_as_for_spark(place: Place) -> None:
    place.write(ROWS[0])
    before = place.spark.createDataFrame([("a", 100, 1000)], OUTPUT)
    job = place.job()
    keyed = job.source(place.source()).key_by("user")
    sums = keyed.transform_with_state(SparkSum(), OUTPUT, initialState=before.groupBy("user"))
    sums.sink(sl.ParquetSink(str(place.output)))
    assert job.start(available_now=True).await_termination(timeout=60)
    assert place.rows() == [("a", 102, 1004), ("b", 1, 2)]


def test_initial_state_of_other_groups_is_refused(place: Place) -> None:
    keyed = place.job().source(place.source()).key_by("user")
    before = place.spark.createDataFrame([("a", 100, 1000)], OUTPUT)
    with pytest.raises(JobDefinitionError, match="grouped by the key columns user"):
        keyed.transform_with_state(SparkSum(), OUTPUT, initialState=before.groupBy("n"))
    with pytest.raises(JobDefinitionError, match="a batch DataFrame with the key columns user"):
        keyed.transform_with_state(SparkSum(), OUTPUT, initialState=[("a", 1, 2)])  # type: ignore[arg-type]


def test_the_event_time_column_of_the_output_is_the_clock_of_the_next_step(place: Place) -> None:
    source = place.source().withColumn("ts", F.timestamp_millis("x"))
    keyed = place.job().source(source, event_time="ts", watermark_delay="1s").key_by("user")
    timed = keyed.transform_with_state(
        SparkSum(), "user string, at timestamp", timeMode="EventTime", eventTimeColumnName="at"
    )
    timed.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count())
    plain = keyed.transform_with_state(SparkSum(), "user string, at timestamp")
    with pytest.raises(JobDefinitionError, match="eventTimeColumnName='at' needs timeMode='EventTime'"):
        keyed.transform_with_state(SparkSum(), "user string, at timestamp", eventTimeColumnName="at")
    with pytest.raises(JobDefinitionError, match=r"its stream has no event time column\. Name the column with time="):
        plain.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count())
    with pytest.raises(
        JobDefinitionError,
        match="eventTimeColumnName='user': the time column 'user' is of type string, not a timestamp",
    ):
        keyed.transform_with_state(SparkSum(), OUTPUT, eventTimeColumnName="user")
    with pytest.raises(JobDefinitionError, match="eventTimeColumnName='nn': no column 'nn'; did you mean 'n'"):
        keyed.transform_with_state(SparkSum(), OUTPUT, eventTimeColumnName="nn")


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an ArrowProcessor in process": (lambda k: k.process(ArrowSum(), OUTPUT), r"call process_arrow\(\)"),
    "a KeyedProcessor in process_arrow": (lambda k: k.process_arrow(Sum(), OUTPUT), r"call process\(\)"),
    "a KeyedProcessor as arrow": (lambda k: k.process(Sum(), OUTPUT, rows="arrow"), r"call process\(\)"),
    "a StatefulProcessor in process_arrow": (
        lambda k: k.process_arrow(SparkSum(), OUTPUT),
        r"call transform_with_state\(\)",
    ),
    "a KeyedProcessor in transform_with_state": (
        lambda k: k.transform_with_state(Sum(), OUTPUT),
        r"was given a KeyedProcessor; call process\(\)",
    ),
    "an ArrowProcessor in transform_with_state": (
        lambda k: k.transform_with_state(ArrowSum(), OUTPUT),
        r"; call process_arrow\(\)",
    ),
    "a class in transform_with_state": (
        lambda k: k.transform_with_state(SparkSum, OUTPUT),
        r"SparkSum is a class; pass an instance of it, for example SparkSum\(\)",
    ),
    "a class in process_arrow": (lambda k: k.process_arrow(ArrowSum, OUTPUT), "ArrowSum is a class"),
    "a class in process": (lambda k: k.process(Sum, OUTPUT), "Sum is a class"),
    "a function in process": (lambda k: k.process(len, OUTPUT), "takes an instance of a KeyedProcessor"),
    "another output mode": (
        lambda k: k.transform_with_state(SparkSum(), OUTPUT, "Complete"),
        "outputMode='Complete' is not supported; use 'Append' or 'Update'",
    ),
    "another time mode": (
        lambda k: k.transform_with_state(SparkSum(), OUTPUT, "Append", "Sometimes"),
        "timeMode='Sometimes'; it must be 'None', 'ProcessingTime' or 'EventTime'",
    ),
    "tables for a StatefulProcessor": (
        lambda k: k.transform_with_state(SparkSum(), OUTPUT, rows="arrow"),
        "gets rows='row' or 'pandas', not 'arrow'",
    ),
    "timers with tables": (
        lambda k: k.process(ArrowSum(), OUTPUT, rows="arrow", time_mode="event"),
        "with rows='arrow' there are no timers",
    ),
    "initial state of a KeyedProcessor": (
        lambda k: k.process(Sum(), OUTPUT, initial_state=object()),
        "initial_state is for Spark's StatefulProcessor",
    ),
    "frames for a KeyedProcessor": (lambda k: k.process(Sum(), OUTPUT, rows="pandas"), "gets rows='row', not"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_processor_in_the_wrong_method_is_told_the_right_one(place: Place, wrong: str) -> None:
    call, message = WRONG[wrong]
    with pytest.raises(JobDefinitionError, match=rf"operator 'process-0': .*{message}"):
        call(place.job().source(place.source()).key_by("user"))
