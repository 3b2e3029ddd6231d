"""How rows become messages."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

import strandline as sl
from strandline.errors import ConfigError, JobDefinitionError, UserCodeError
from strandline.sinks.base import SinkContext
from strandline.sinks.kafka.messages import MessageForm, MessageStager
from strandline.sinks.kafka.sink import KafkaSink
from strandline.testing.sink import a_context

NOON = datetime(2024, 1, 2, 12, 0, 0, 123456)
ROWS = pa.RecordBatch.from_arrays(
    [
        pa.array(["alice", None, ""]),
        pa.array([1, None, 3], pa.int64()),
        pa.array([0.5, float("nan"), None]),
        pa.array([NOON.replace(tzinfo=UTC), None, NOON.replace(tzinfo=UTC)], pa.timestamp("us", "Europe/Berlin")),
        pa.array([{"a": 1, "b": [float("inf")]}, None, {"a": None, "b": None}]),
    ],
    names=["user", "n", "x", "ts", "nested"],
)
CONTEXT = SinkContext("visits", ROWS.schema, "/tmp", ("user",))


def made(sink: KafkaSink, rows: pa.RecordBatch = ROWS, keys: tuple[str, ...] = ("user",)) -> list[dict[str, Any]]:
    context = replace(CONTEXT, schema=rows.schema, keys=keys)
    stager = sink.bound(context).stager(context)
    assert isinstance(stager, MessageStager)
    copy = pickle.loads(cloudpickle.dumps(stager))  # type: ignore[no-untyped-call]
    return list(copy.form.messages(rows).to_pylist())


def a_sink(**options: Any) -> KafkaSink:
    return KafkaSink(**{"bootstrap_servers": "broker:9092", "topic": "topic", **options})


def test_a_value_is_an_object_of_all_columns_and_the_key_that_of_the_step() -> None:
    first, second, third = made(a_sink())
    assert first["key"] == b"alice"
    assert json.loads(first["value"]) == {
        "user": "alice",
        "n": 1,
        "x": 0.5,
        "ts": "2024-01-02T12:00:00.123456Z",
        "nested": {"a": 1, "b": ["Infinity"]},
    }
    assert second["key"] is None
    assert json.loads(second["value"]) == {"user": None, "n": None, "x": "NaN", "ts": None, "nested": None}
    assert third["key"] == b""
    assert json.loads(third["value"])["nested"] == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([True]), "true"),
        (pa.array([-(2**63)]), "-9223372036854775808"),
        (pa.array([1], pa.int8()), "1"),
        (pa.array([1.5], pa.float32()), "1.5"),
        (pa.array([1e300]), "1e300"),
        (pa.array([float("-inf")]), '"-Infinity"'),
        (pa.array([Decimal("12345678901234567890.123456789")]), "12345678901234567890.123456789"),
        (pa.array(['Zoë "\\\n\x00😀']), '"Zoë \\"\\\\\\n\\u0000😀"'),
        (pa.array([b"\x00\xff"]), '"AP8="'),
        (pa.array([date(2024, 2, 29)]), '"2024-02-29"'),
        (pa.array([NOON], pa.timestamp("us")), '"2024-01-02T12:00:00.123456"'),
        (pa.array([[NOON]], pa.list_(pa.timestamp("us"))), '["2024-01-02T12:00:00.123456"]'),
        (
            pa.array([[NOON.replace(tzinfo=UTC)]], pa.list_(pa.timestamp("us", "Europe/Berlin"))),
            '["2024-01-02T12:00:00.123456Z"]',
        ),
        (pa.array([time(1, 2, 3)]), '"01:02:03"'),
        (pa.array([timedelta(seconds=90)]), '"PT90S"'),
        (pa.array([[]], pa.list_(pa.int64())), "[]"),
        (pa.array([[("k", float("nan")), ("l", None)]], pa.map_(pa.string(), pa.float64())), '{"k":"NaN","l":null}'),
        (pa.array([[(7, "x")]], pa.map_(pa.int64(), pa.string())), '{"7":"x"}'),
        (pa.array([[(date(2024, 1, 1), 1)]], pa.map_(pa.date32(), pa.int64())), '{"2024-01-01":1}'),
        (pa.array([None]), "null"),
    ],
)
def test_every_type_has_its_form(column: pa.Array, text: str) -> None:
    rows = pa.RecordBatch.from_arrays([column], names=['a "name"'])
    (message,) = made(a_sink(), rows, keys=())
    assert message["value"].decode() == f'{{"a \\"name\\"":{text}}}'
    (message,) = made(a_sink(value=['a "name"']), rows, keys=())
    assert message["value"].decode() == f'{{"a \\"name\\"":{text}}}'


def test_one_column_is_taken_as_it_is_and_null_is_a_tombstone() -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b"]), pa.array([b"\x00", None]), pa.array([{"n": 1}, None]), pa.array([1, None])],
        names=["text", "bytes", "struct", "number"],
    )
    assert made(a_sink(key="text", value="bytes"), rows) == [
        {"key": b"a", "value": b"\x00"},
        {"key": b"b", "value": None},
    ]
    assert [row["value"] for row in made(a_sink(value="struct"), rows, ())] == [b'{"n":1}', None]
    assert [row["value"] for row in made(a_sink(value="number"), rows, ())] == [b"1", None]


def test_several_columns_are_an_object_and_no_key_is_possible() -> None:
    message = made(a_sink(key=["user", "n"], value=["n"]))[0]
    assert message == {"key": b'{"user":"alice","n":1}', "value": b'{"n":1}'}
    assert made(a_sink(value=["n"]), keys=("user", "n"))[0]["key"] == b'{"user":"alice","n":1}'
    assert "key" not in made(a_sink(key=[]))[0]
    assert "key" not in made(a_sink(), keys=())[0]


def test_headers_partition_and_time_come_from_columns_that_are_not_in_the_value() -> None:
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([1, 2]),
            pa.array([[("trace", b"\x01"), ("empty", None)], None], pa.map_(pa.string(), pa.binary())),
            pa.array([2, None], pa.int32()),
            pa.array([NOON, None], pa.timestamp("us")),
        ],
        names=["n", "headers", "partition", "ts"],
    )
    sink = a_sink(headers="headers", partition="partition", timestamp="ts")
    first, second = made(sink, rows, ())
    assert json.loads(first["value"]) == {"n": 1, "ts": "2024-01-02T12:00:00.123456"}
    assert first["headers"] == [("trace", b"\x01"), ("empty", None)]
    assert first["partition"] == 2
    assert first["timestamp"] == int(NOON.replace(tzinfo=UTC).timestamp() * 1000)
    assert (second["headers"], second["partition"], second["timestamp"]) == (None, -1, 0)


def test_headers_may_be_a_struct() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([{"a": "x", "b": 7, "c": None}])], names=["n", "h"])
    assert made(a_sink(headers="h"), rows, ())[0]["headers"] == [("a", b"x"), ("b", b"7"), ("c", None)]


@pytest.mark.parametrize("number", [-2, 1 << 31, -(1 << 40)])
def test_a_partition_that_no_topic_has_is_an_error_before_the_row_is_staged(number: int) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array([None, number], pa.int64())], names=["n", "p"])
    for sink in (a_sink(partition="p"), a_sink(value="n", partitioner=lambda rows: rows.column("p"))):
        with pytest.raises(UserCodeError, match=rf"partition=: .*{number}"):
            made(sink, rows, ())


def test_functions_make_keys_values_and_partitions() -> None:
    sink = a_sink(
        key=lambda rows: rows.column("user"),
        value=sl.per_row(lambda row: f"{row['user']}={row['n']}" if row["n"] else None),
        partitioner=lambda rows: [0, 1, None],
    )
    assert made(sink) == [
        {"value": b"alice=1", "key": b"alice", "partition": 0},
        {"value": None, "key": None, "partition": 1},
        {"value": b"=3", "key": b"", "partition": -1},
    ]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda _rows: 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda _rows: [b"x"], "returned 1 values for 3 rows"),
        (lambda _rows: [1, 2, 3], "must return a list or an Arrow array of large_binary"),
        (lambda _rows: None, "must return a list"),
    ],
)
def test_a_wrong_function_is_an_error_of_user_code(function: Any, words: str) -> None:
    with pytest.raises(UserCodeError, match=r"job 'visits': KafkaSink\('topic'\): the function of value= .*") as raised:
        made(a_sink(value=function))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": "nobody"}, "key: there is no column 'nobody'; the rows have"),
        ({"value": ["n", "nobody"]}, "value: there is no column 'nobody'"),
        ({"value": []}, "no column is left for the value"),
        ({"headers": "n"}, "headers='n': give a column of type MAP<STRING, BINARY>"),
        ({"partition": "user"}, "partition='user': string is no integer"),
        ({"timestamp": "user"}, "timestamp='user': give a timestamp"),
        ({"partition": "n", "partitioner": len}, "give partition= or a function as partitioner="),
        ({"delivery": "twice"}, "delivery='twice': use 'exactly_once' or 'at_least_once'"),
        ({"marker_topic": "topic"}, "marker_topic='topic': give another topic"),
        ({"cluster": "a b"}, "cluster='a b': give a name without spaces"),
        (
            {"bootstrap_servers": ["a:1", "b:1"]},
            "bootstrap_servers=['a:1', 'b:1']: give one text, host:port,host:port,",
        ),
    ],
)
def test_a_sink_that_does_not_fit_the_rows_is_refused_where_the_job_is_defined(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobDefinitionError) as raised:
        a_sink(**options).bound(CONTEXT)
    assert words in str(raised.value)


def test_a_type_without_a_form_is_refused() -> None:
    schema = pa.schema([("span", pa.month_day_nano_interval())])
    with pytest.raises(JobDefinitionError, match=r"the column .span. of type .* has no form in JSON"):
        a_sink().bound(replace(CONTEXT, schema=schema, keys=()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": {"acks": "1"}}, "options= has 'acks', which the sink sets itself"),
        ({"options": {"transactional.id": "x"}}, "use transactional_id="),
        ({"options": {"no.such": "x"}}, 'options=: No such configuration property: "no.such"'),
        ({"options": {"kafka.linger.ms": "5"}}, "without Spark's prefix 'kafka.'"),
        ({"options": {"linger.ms": "soon"}}, "Invalid value"),
        ({"options": {"ssl.ca.location": "/none", "security.protocol": "ssl"}}, "ssl.ca.location failed"),
        ({"partitioner": "best"}, "partitioner='best': Invalid value"),
    ],
)
def test_a_wrong_option_is_refused_where_the_job_is_defined(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        a_sink(**options).bound(CONTEXT)
    assert words in str(raised.value)


def test_no_password_is_shown(tmp_path: Path) -> None:
    options = {"sasl.password": "hunter22", "sasl.username": "me", "sasl.mechanisms": "PLAIN"}
    options["security.protocol"] = "SASL_PLAINTEXT"
    context = a_context(tmp_path)
    for delivery in ("exactly_once", "at_least_once"):
        sink = KafkaSink("b:1", "t", options=options, delivery=delivery).bound(context)
        assert "hunter22" not in repr(sink) + repr(sink.stager(context)) + sink.place
    exact = KafkaSink("b:1", "t", options=options).bound(context)
    assert b"hunter22" not in cloudpickle.dumps(exact.stager(context))  # type: ignore[no-untyped-call]


def test_names_follow_from_job_and_topic() -> None:
    sink = a_sink().bound(CONTEXT)
    assert (sink.transactional_id, sink.marker_topic) == ("strandline/visits/topic", "strandline-visits-topic")
    assert sink.place == "kafka:broker:9092/topic"
    assert a_sink(cluster="prod").place == "kafka:prod/topic"
    odd = a_sink().bound(replace(CONTEXT, job="job ä" * 80))
    assert odd.marker_topic is not None
    assert len(odd.marker_topic) == 249
    assert odd.marker_topic.startswith("strandline-job__job__")


def test_the_form_of_a_bound_sink_is_that_of_the_sink() -> None:
    form = MessageForm("here", None, None).bound(ROWS.schema)
    assert form.value == ROWS.schema.names
