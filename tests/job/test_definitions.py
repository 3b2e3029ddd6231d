"""A job that is written wrongly is told so where it is written. No Spark session runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

import strandline as sl
from strandline.errors import ConfigError, JobDefinitionError, JobFailedError, SchemaError, StrandlineError
from strandline.job.arguments import read_schema
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.runtime.driver.run import Run
from strandline.sinks import SinkContext

OUTPUT = StructType([StructField("n", LongType())])


def job(config: Any = None) -> sl.Job:
    """A job without a Spark session: nothing here reads a DataFrame."""
    return sl.Job("visits", cast(Any, object()), config or sl.Config(checkpoint_dir="ckpt"))


def keyed() -> Any:
    """A keyed stream of such a job, without a type: the calls below are wrong."""
    return sl.KeyedStream(cast(sl.Stream, SimpleNamespace(_job=job(), schema=OUTPUT)), ("n",))


class Keyed(sl.KeyedProcessor):
    def process(self, key: Any, rows: Any, context: sl.ProcessContext) -> Iterator[Any]:
        yield from rows


class Tables(sl.ArrowProcessor):
    def process(self, table: pa.Table, context: sl.ArrowContext) -> pa.Table:
        return table


class Stuck(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from rows

    def close(self) -> None:
        pass


# --- the job -------------------------------------------------------------------------------------


def test_a_mapping_is_no_config() -> None:
    with pytest.raises(ConfigError, match=r"must be a sl\.Config, not dict; write .*sl\.Config\.from_mapping\(\{"):
        job({"checkpoint_dir": "ckpt"})


def test_a_session_in_the_place_of_the_name_is_told_with_the_right_order() -> None:
    with pytest.raises(JobDefinitionError, match=r"is a text, not SimpleNamespace; write sl\.Job\('visits', spark, "):
        sl.Job(cast(Any, SimpleNamespace()), cast(Any, "visits"), sl.Config(checkpoint_dir="ckpt"))


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("writeStream", r"sink\(sl\.ParquetSink\(path\)\) or sink\(sl\.ForeachBatchSink\(function\)\)"),
        ("groupBy", r"key_by\(\.\.\.\)"),
        ("filter", r"transform\(lambda df: df\.filter\(\.\.\.\)\)"),
        ("withColumn", r"transform\(lambda df: df\.withColumn\(\.\.\.\)\)"),
        ("join", r"key_by\(\.\.\.\)\.join\(other\.key_by\(\.\.\.\), \.\.\.\)"),
        ("printSchema", "schema"),
    ],
)
def test_a_stream_translates_the_words_of_a_data_frame(name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"^'Stream' object has no attribute '{name}'; here it is {here}$"):
        getattr(object.__new__(sl.Stream), name)


def test_a_keyed_stream_translates_the_words_of_grouped_data() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'agg'; here it is aggregate\(n=sl\.count\(\), \.\.\.\)$"):
        keyed().agg()
    with pytest.raises(AttributeError, match=r"here it is transform_with_state\(\.\.\., rows=\"pandas\"\)$"):
        keyed().transformWithStateInPandas()


def test_a_name_that_spark_does_not_have_either_is_told_as_python_does() -> None:
    for stream in (object.__new__(sl.Stream), keyed()):
        assert not hasattr(stream, "__deepcopy__")
        with pytest.raises(AttributeError, match=r"object has no attribute 'nonsense'$"):
            cast(Any, stream).nonsense  # noqa: B018


def test_a_stream_shows_its_columns() -> None:
    stream = object.__new__(sl.Stream)
    stream._prototype = cast(Any, SimpleNamespace(schema=OUTPUT))
    assert repr(stream) == "<Stream: n bigint>"


def test_a_job_in_one_line() -> None:
    one = job()
    assert repr(one) == "<Job 'visits': 0 stateful steps, 0 sinks>"
    one._graph.operators.append(cast(Any, object()))
    one._graph.sinks.append(cast(Any, object()))
    assert repr(one) == "<Job 'visits': 1 stateful step, 1 sink>"


@pytest.mark.parametrize("option", ["checkpoint_dir", "changelog_dir", "sink"])
def test_a_storage_whose_client_is_missing_is_refused_where_it_is_named(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    monkeypatch.delitem(sys.modules, "strandline.storage.hdfs", raising=False)
    place = "hdfs://namenode:8020/ckpt"

    def define() -> object:
        if option == "sink":
            return sl.ParquetSink(place).bound(SinkContext("visits", pa.schema([]), "ckpt"))
        return job(sl.Config.from_mapping({"checkpoint_dir": "ckpt", option: place}))

    with pytest.raises(ConfigError, match=r"needs the HDFS client, .*run pip install \"strandline\[hdfs\]\""):
        define()


# --- processors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["process", "process_arrow", "transform_with_state"])
@pytest.mark.parametrize("processor", [Keyed, Tables, Stuck])
def test_a_class_is_not_an_instance(method: str, processor: type) -> None:
    name = processor.__name__
    with pytest.raises(
        JobDefinitionError,
        match=rf"^operator 'p': {name} is a class; pass an instance of it, for example {name}\(\)$",
    ):
        getattr(keyed(), method)(processor, OUTPUT, uid="p")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (Keyed(), r"transform_with_state\(\) was given a KeyedProcessor; call process\(\)$"),
        (Tables(), r"transform_with_state\(\) was given an ArrowProcessor; call process_arrow\(\)$"),
        (len, r"takes an instance of Spark's StatefulProcessor, not <built-in function len>$"),
    ],
)
def test_transform_with_state_names_the_method_for_another_processor(processor: object, message: str) -> None:
    with pytest.raises(JobDefinitionError, match=message):
        keyed().transform_with_state(processor, OUTPUT)


class Forgotten(sl.KeyedProcessor):
    def proces(self, key: Any, rows: Any, context: sl.ProcessContext) -> Iterator[Any]:
        yield from rows


class ForgottenTables(sl.ArrowProcessor):
    pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.process(Forgotten(), OUTPUT), r"Forgotten has .*; write def process\(self, key, rows, context\)$"),
        (lambda k: k.process_arrow(ForgottenTables(), OUTPUT), r"write def process\(self, table, context\)$"),
        (lambda k: k.process(ForgottenTables(), OUTPUT, rows="arrow"), r"ForgottenTables has no process\(\) method"),
    ],
)
def test_a_processor_without_process_is_refused_where_it_is_named(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(JobDefinitionError, match=message):
        call(keyed())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda k: k.transform_with_state(Stuck(), OUTPUT, timeMode="Sometimes"),
            "timeMode='Sometimes'; it must be 'None', 'ProcessingTime' or 'EventTime'$",
        ),
        (
            lambda k: k.process(Stuck(), OUTPUT, time_mode="sometimes"),
            "time_mode='sometimes'; it must be none, processing or event$",
        ),
    ],
)
def test_a_wrong_time_mode_is_named_as_the_user_wrote_it(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(JobDefinitionError, match=message):
        call(keyed())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.deduplicate(ttl="expires"), r"^operator 'deduplicate-0': ttl='expires' is no duration; write one"),
        (lambda k: k.deduplicate(ttl="3 moons"), r"ttl='3 moons' is no duration \(unknown unit 'moons'\); write one"),
        (lambda k: k.window(sl.tumbling("1m"), allowed_lateness="some"), r"^allowed_lateness='some' is no duration; "),
        (lambda k: sl.tumbling("soon"), r"^size='soon' of a window is no duration; write one such as '10s'"),
        (lambda k: k.join(k, within="expires"), r"^operator 'join-0': within='expires' is no duration; write one"),
        (lambda k: k.join(k, within=("-expires", 0)), r"within='expires' is no duration; write one"),
        (lambda k: k.join(k, within=(None, "1h")), r"within=None is no duration; write one"),
        (lambda k: k.join(k, within=("1h",)), r"must have two bounds, such as within=\('0s', '1h'\)$"),
        (
            lambda k: k.process(Keyed(), OUTPUT, output_time="n", output_delay="long"),
            r"output_delay='long' is no duration; write one such as '10s', '5 min' or '1h'$",
        ),
    ],
)
def test_what_is_no_duration_is_named_with_an_example(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(JobDefinitionError, match=message):
        call(keyed())


def test_tables_have_no_event_time_that_could_be_delayed() -> None:
    with pytest.raises(JobDefinitionError, match=r"^operator 'process-0': with rows='arrow' there are no timers"):
        keyed().process(lambda table, _context: table, OUTPUT, rows="arrow", output_delay="5s")


def test_an_output_schema_that_cannot_be_read_names_the_step_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_ddl: str) -> None:
        raise ValueError(
            "\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'lnog'.\n\n== SQL ==\nJVM stacktrace:\n  at org"
        )

    monkeypatch.setattr(StructType, "fromDDL", refuse)
    with pytest.raises(JobDefinitionError) as raised:
        read_schema("visits", "n lnog")
    message = str(raised.value)
    assert message.startswith("operator 'visits': the output schema 'n lnog' cannot be read: [PARSE_SYNTAX_ERROR]")
    assert "\n" not in message
    assert "JVM" not in message
    assert raised.value.__cause__ is None


# --- a run that is over --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "deleted", "ending"),
    [
        ("stopped", False, "goes on from its newest completed checkpoint"),
        ("cancelled", False, "goes on from its newest completed checkpoint"),
        ("cancelled", True, "starts it again"),
    ],
)
def test_a_call_after_the_end_says_how_to_go_on(status: str, deleted: bool, ending: str) -> None:
    config = sl.Config(checkpoint_dir="ckpt", on_cancel="delete")
    run = Run("visits", cast(Any, None), config, cast(Any, None), available_now=False)
    run.status = sl.RunStatus(status)
    run._checkpoints_deleted = deleted
    with pytest.raises(JobFailedError, match=rf"it is {status}; job\.start\(\) {ending}$"):
        run.trigger_checkpoint()


def test_a_query_ends_with_its_timeout_and_names_what_is_wrong_with_it_at_once() -> None:
    step = AggregateOperator("totals", ["n"], OUTPUT, {"count": sl.count()})
    graph = cast(Any, SimpleNamespace(operators=[step]))
    never = Run("visits", cast(Any, None), sl.Config(checkpoint_dir="ckpt"), graph, available_now=False)
    with pytest.raises(StrandlineError, match=r"no answer to query\('totals'\) within 0\.1 s; the run is starting"):
        never.query("totals", None, 7, 0.1)
    with pytest.raises(StrandlineError, match=r"there is no step 'total'; there are: totals$"):
        never.query("total", None, 7, 60)
    with pytest.raises(SchemaError, match=r"key column 'n': expected bigint, got 'seven' \(str\)"):
        never.query("totals", None, "seven", 60)
