"""The Spark data source `strandline` as Spark calls it, without Spark: options, partitions and filters."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, GreaterThanOrEqual, In, InputPartition, LessThan, Not

import strandline as sl
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.columns.schemas import arrow_schema
from strandline.state.coding.ddl import parse_schema
from strandline.state_reader.spark_source import FilteredStateSource, FilteredStateSourceReader, StateSource
from strandline.storage import open_storage
from tests.runtime.taskmanager.changelog.host import PARALLELISM
from tests.s3 import BUCKET, KEYS
from tests.state_reader.written import Written, group_of

INPUT = parse_schema("user string, n long")
ROWS = [(f"u{at}" if at else None, at % 3) for at in range(20)]


def counts(folder: Path, **options: Any) -> str:
    """The folder of a job that counts rows by user and n."""
    operator = AggregateOperator("counts", ["user", "n"], INPUT, {"count": sl.count()})
    with Written(folder, [operator], **options) as job:
        job.run({"counts": ROWS})
        job.checkpoint()
        return job.job


def read(source: StateSource, filters: list[Filter] | None = None) -> tuple[list[Filter], list[tuple[Any, ...]]]:
    """The filters that are left to Spark, and the rows."""
    schema = source.schema()
    reader = pickle.loads(pickle.dumps(source.reader(schema)))  # Spark sends it to the tasks
    left = list(reader.pushFilters(filters)) if filters is not None else []
    rows = []
    for partition in pickle.loads(pickle.dumps(reader.partitions())):
        for batch in reader.read(partition):
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema == arrow_schema(schema)
            rows += [tuple(row.values()) for row in batch.to_pylist()]
    assert list(reader.read(InputPartition(None))) == []
    return left, rows


def test_storage_options_reach_an_object_store(tmp_path: Path, s3_endpoint: str) -> None:
    options = {"endpoint": s3_endpoint, **KEYS}
    path = counts(tmp_path, storage=open_storage(f"s3://{BUCKET}/{tmp_path.name}", options))
    named = {f"storage.{name}": value for name, value in options.items()}
    _, rows = read(StateSource({"path": path, "operator": "counts", **named}))
    assert len(rows) == len(ROWS)


def test_there_is_a_partition_for_every_subtask(tmp_path: Path) -> None:
    source = StateSource({"path": counts(tmp_path), "changelog_dir": f"{tmp_path}/a, {tmp_path}/b"})
    assert len(source.reader(source.schema()).partitions()) == PARALLELISM


def test_filters_that_are_taken_give_the_rows_that_spark_would_keep(tmp_path: Path) -> None:
    source = FilteredStateSource({"path": counts(tmp_path)})
    user, n, group = ("user",), ("n",), ("key_group",)
    whole = {(one, other, group_of((one, other)), 1) for one, other in ROWS}

    def check(filters: list[Filter], left: list[Filter], keep: Any) -> None:
        still, rows = read(source, filters)
        assert still == left
        assert set(rows) == {row for row in whole if keep(*row)}
        assert len(rows) == len(set(rows))

    check([], [], lambda *_: True)
    check([EqualTo(user, "u4"), EqualTo(n, 1)], [], lambda u, m, *_: (u, m) == ("u4", 1))
    check([EqualNullSafe(user, None), In(n, (0, 1))], [], lambda u, m, *_: u is None and m < 2)
    check([EqualTo(user, "u4")], [EqualTo(user, "u4")], lambda *_: True)
    check([GreaterThanOrEqual(group, 1), LessThan(group, 3)], [], lambda _u, _m, g, _c: 1 <= g < 3)
    check([EqualTo(group, 99)], [], lambda *_: False)
    odd: list[Filter] = [Not(EqualTo(group, 1)), EqualTo(group, None), In(user, ("u1", None)), EqualTo(n, 1 << 80)]
    check(odd, odd, lambda *_: True)
    # A second filter on a key column is left to Spark.
    twice: list[Filter] = [EqualTo(user, "u4"), EqualTo(n, 1), In(n, (1, 2))]
    check(twice, twice[2:], lambda u, m, *_: (u, m) == ("u4", 1))
    assert isinstance(source.reader(source.schema()), FilteredStateSourceReader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a path"),
        ({"path": "/nowhere", "key": "a"}, "no option 'key'; it has path, operator, state, changelog_dir and storage."),
        ({"path": "/nowhere"}, "there is no state to read at /nowhere"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, str], message: str) -> None:
    with pytest.raises(sl.StrandlineError, match=message):
        StateSource(options).schema()
