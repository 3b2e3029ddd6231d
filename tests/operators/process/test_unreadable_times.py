"""Times that Python cannot hold: the error names the column, and comes only where user code reads the value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row, StructType

from strandline.errors import SchemaError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, SubtaskInfo
from strandline.operators.columns.row_codec import RowCodec
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.spark.spark_operator import SparkProcessorOperator
from strandline.pyspark_releases import PandasSettings
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema

DAY_US = 86_400_000_000
AFTER, BEFORE = 2_932_897, -719_163
"""The first day of the year 10000 and the last day of the year 0, in days since 1970."""
KINDS = ["timestamp", "timestamp_ntz", "date", "array<timestamp>", "struct<d:date>"]
HOW: dict[str, Any] = {
    "nothing": lambda row: None,
    "by name": lambda row: row.t,
    "by key": lambda row: row["t"],
    "by place": lambda row: row[2],
    "as a slice": lambda row: row[1:],
    "unpacked": lambda row: [*row],
    "as a dict": lambda row: row.asDict(),
}


class Reads(KeyedProcessor):
    def __init__(self, how: str) -> None:
        self.how = how

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        for row in rows:
            HOW[self.how](row)
            yield (row.n,)


class SparkReads(StatefulProcessor):
    def __init__(self, how: str) -> None:
        self.how = how

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            HOW[self.how](row)
            yield Row(n=row.n)

    def close(self) -> None:
        pass


def column(kind: str, days: int) -> Any:
    """A column of that type with an ordinary value, and one that Python cannot hold."""
    in_range, wrong = 0, days
    dates = pa.array([in_range, wrong], pa.int32()).view(pa.date32())
    if kind == "date":
        return dates
    if kind == "struct<d:date>":
        return pa.StructArray.from_arrays([dates], ["d"])
    zone = None if kind == "timestamp_ntz" else "UTC"
    times = pa.array([in_range, wrong * DAY_US], pa.int64()).view(pa.timestamp("us", zone))
    return pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), times) if kind.startswith("array") else times


def run(operator: ProcessOperator, kind: str, days: int, spill: Path) -> list[int]:
    operator.open(SubtaskInfo("job", "step", 0, 1, 4))
    group = pa.array([0, 0], pa.int32())
    columns = [pa.array(["a", "a"]), pa.array([1, 2], pa.int64()), column(kind, days), group]
    rows = pa.RecordBatch.from_arrays(columns, ["k", "n", "t", KEY_GROUP_COLUMN])
    changes = ChangeSet(HeapBackend(), 1 << 20, spill)
    out = list(operator.run(iter([rows]), changes, BatchInfo(1, 0)))
    return [n for part in out for n in part.column(0).to_pylist()]  # type: ignore[union-attr]


def schema(kind: str) -> StructType:
    return parse_schema(f"k string, n long, t {kind}")


@pytest.mark.parametrize("days", [AFTER, BEFORE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_only_a_value_that_is_read_is_an_error(how: str, kind: str, days: int, tmp_path: Path) -> None:
    output = parse_schema("n long")
    for operator in (
        ProcessOperator("step", Reads(how), ["k"], schema(kind), output),
        SparkProcessorOperator(
            "step", SparkReads(how), ["k"], schema(kind), output, rows="row", settings=PandasSettings("Asia/Tokyo")
        ),
    ):
        if how == "nothing":
            assert run(operator, kind, days, tmp_path) == [1, 2]
        else:
            with pytest.raises(
                SchemaError, match=r"key \('a',\), batch 1: the input column 't' has .* Python cannot hold"
            ):
                run(operator, kind, days, tmp_path)


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz", "date"])
def test_keys_and_frames_are_always_read(kind: str, tmp_path: Path) -> None:
    output = parse_schema("n long")
    with pytest.raises(SchemaError, match=r"operator 'step', subtask 0: the key column 't' has the .* years 1 to 9999"):
        run(ProcessOperator("step", Reads("nothing"), ["t"], schema(kind), output), kind, AFTER, tmp_path)
    frames = SparkProcessorOperator("step", SparkReads("nothing"), ["k"], schema(kind), output, rows="pandas")
    with pytest.raises(SchemaError, match=r"subtask 0: the input column 't' has a value that pandas cannot hold"):
        run(frames, kind, AFTER, tmp_path)


def test_a_stored_row_names_the_column() -> None:
    struct = parse_schema("t array<timestamp>")
    rows = pa.RecordBatch.from_arrays([column("array<timestamp>", AFTER)], schema=arrow_schema(struct))
    with pytest.raises(SchemaError, match=r"left side, column 't' has the timestamp 10000-01-01"):
        RowCodec(struct, "left side").encode(rows)


def test_a_text_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    """Spark makes a string of any bytes."""
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    bad = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"a\xc3"))
    rows = pa.RecordBatch.from_arrays(
        [bad, pa.array([1, 2], pa.int64()), bad, pa.array([0, 0], pa.int32())], ["k", "n", "t", KEY_GROUP_COLUMN]
    )
    operator = ProcessOperator("step", Reads("nothing"), ["k"], schema("string"), parse_schema("n long"))
    operator.open(SubtaskInfo("job", "step", 0, 1, 4))
    with pytest.raises(SchemaError, match=r"the key column 'k' has a text that is not valid UTF-8"):
        list(operator.run(iter([rows]), ChangeSet(HeapBackend(), 1 << 20, tmp_path), BatchInfo(1, 0)))
