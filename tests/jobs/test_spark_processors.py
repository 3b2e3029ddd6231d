"""Processors that were written for Spark run unchanged in a job, in both flavours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import strandline as sl
from strandline.errors import JobDefinitionError
from strandline.operators.spark.spark_operator import SparkProcessorOperator
from strandline.pyspark_releases import PandasSettings
from tests.jobs.place import Place, running_sums
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

ROWS = [[(f"user{n % 5}", n * 10 + batch) for n in range(8)] for batch in range(3)]
OUTPUT = "user string, n long, s long"


class SumRows(StatefulProcessor):
    """Counts and sums per user, as one would for transformWithState."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "n long, s long")
        self.initial: list[str] = []

    # Spark's base class declares rows or data frames; a processor is written for one of them.
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # type: ignore[override]
        n, s = self.total.get() or (0, 0)
        assert n != 100 or key[0] in self.initial, "the first rows come to the processor that got the initial state"
        for row in rows:
            n, s = n + 1, s + row.x
        self.total.update((n, s))
        yield Row(user=key[0], n=n, s=s)

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:  # type: ignore[override]
        self.total.update((initialState.n, initialState.s))
        self.initial.append(key[0])

    def close(self) -> None:
        pass


class SumFrames(SumRows):
    """The same for transformWithStateInPandas, with a timer that says good-bye."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:  # type: ignore[override]
        n, s = self.total.get() or (0, 0)
        for frame in rows:
            n, s = n + len(frame), s + int(frame["x"].sum())
        self.total.update((n, s))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield pd.DataFrame({"user": [key[0]], "n": [n], "s": [s]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"user": [f"bye {key[0]}"], "n": [0], "s": [0]})


def start(place: Place, processor: StatefulProcessor, **options: Any) -> sl.JobRun:
    job = place.job()
    stream = job.source(place.source()).key_by("user")
    stream.process(processor, OUTPUT, uid="sums", **options).sink(sl.ParquetSink(str(place.output)))
    return job.start()


def test_the_row_flavour_with_initial_state_and_a_restart(place: Place, runs: list[sl.JobRun]) -> None:
    before = place.spark.createDataFrame([("user0", 100, 1000), ("gone", 7, 7)], "user string, n long, s long")
    for at, rows in enumerate(ROWS):
        run = start(place, SumRows(), initial_state=before if at else before.groupBy("user"))
        runs.append(run)
        place.write(rows)
        run.process_all_available()
        assert run.query("sums", "total", "gone") == (7, 7)
        run.cancel()

    def shifted(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return (row[0], row[1] + 100, row[2] + 1000) if row[0] == "user0" else row

    assert place.rows() == sorted(map(shifted, running_sums(ROWS)), key=repr)


def test_the_pandas_flavour_with_timers_for_keys_without_rows(place: Place, runs: list[sl.JobRun]) -> None:
    run = start(place, SumFrames(), rows="pandas", time_mode="ProcessingTime")
    runs.append(run)
    for rows in ROWS:
        place.write(rows)
    run.process_all_available()
    users = {user for rows in ROWS for user, _x in rows}
    wait_until(lambda: {row[0] for row in place.rows() if row[1] == 0} == {f"bye {u}" for u in users}, what="timers")
    assert [row for row in place.rows() if row[1]] == running_sums(ROWS)


def test_the_settings_of_the_session_reach_the_processor(place: Place) -> None:
    keyed = place.job().source(place.source()).key_by("user")
    keyed.transform_with_state(SumRows(), OUTPUT)
    plain = keyed._stream._job._graph.operators[-1]
    assert isinstance(plain, SparkProcessorOperator)
    assert plain.settings == PandasSettings(str(place.spark.conf.get("spark.sql.session.timeZone")))
    session = place.spark.newSession()
    for name, value in {
        "session.timeZone": "Asia/Tokyo",
        "execution.pandas.convertToArrowArraySafely": "true",
        "execution.pythonUDF.pandas.intToDecimalCoercionEnabled": "true",
        "execution.pythonUDF.pandas.preferIntExtensionDtype": "true",
        "legacy.execution.pandas.groupedMap.assignColumnsByName": "false",
    }.items():
        session.conf.set(f"spark.sql.{name}", value)
    other = sl.Job("other", session, place.config())
    rows = session.readStream.schema("user string, x long").parquet(str(place.input))
    other.source(rows).key_by("user").transform_with_state(SumRows(), OUTPUT)
    operator = other._graph.operators[-1]
    assert isinstance(operator, SparkProcessorOperator)
    assert operator.settings == PandasSettings("Asia/Tokyo", True, True, False, True)


def test_what_does_not_fit_is_refused_when_the_job_is_built(place: Place) -> None:
    keyed = place.job().source(place.source()).key_by("user")
    with pytest.raises(JobDefinitionError, match="rows='row' or 'pandas', not 'arrow'"):
        keyed.process(SumRows(), OUTPUT, rows="arrow")
    with pytest.raises(JobDefinitionError, match="initial_state must be a batch DataFrame with the key columns user"):
        keyed.process(SumRows(), OUTPUT, initial_state=place.spark.range(3))
    with pytest.raises(JobDefinitionError, match="side_outputs= is for a KeyedProcessor"):
        keyed.process(SumRows(), OUTPUT, side_outputs={"more": "x long"})
