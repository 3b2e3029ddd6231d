"""Rows of equal keys come next to each other, in the order of stored keys, however little memory there is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import SchemaError
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import count
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.runtime.slot import key_order
from strandline.runtime.slot.kept_rows import KeptRows, MemoryLimit
from strandline.runtime.slot.key_order import in_key_order
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import KeyEncoder

GROUPS = range(3, 9)
KEYS = {
    "k long": st.integers(-3, 3) | st.none(),
    "k string": st.sampled_from(["", "a", "ab", "a\0", "b"]) | st.none(),
    "k double": st.sampled_from([0.0, -0.0, float("nan"), 1.5]) | st.none(),
    "k struct<a: int>": st.sampled_from([{"a": 1}, {"a": 2}]),
}


def group_of(key: object) -> int:
    """Equal keys have equal groups; some groups have several keys."""
    key = 0.0 if key == 0 else key
    return GROUPS.start + len(repr(key)) % len(GROUPS)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(KEYS)), memory=st.sampled_from([1, 200, 1 << 20]))
def test_equal_keys_are_together_and_their_rows_keep_their_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str, memory: int
) -> None:
    deliveries = data.draw(st.lists(st.lists(st.lists(KEYS[kind], min_size=1, max_size=8), max_size=3), max_size=4))
    operator = AggregateOperator("step", ["k"], parse_schema(f"{kind}, at long"), {"n": count()})
    schema = pa.schema(list(operator._input)).append(pa.field("at", pa.int64()))
    numbers = itertools.count()
    kept = []
    for number, batches in enumerate(deliveries):
        rows = KeptRows(schema, MemoryLimit(memory), tmp_path_factory.mktemp("spill") / f"{number}.arrow")
        for keys in batches:
            columns = [
                pa.array(keys, schema.field("k").type),
                pa.array([group_of(key) for key in keys], pa.int32()),
                pa.array([next(numbers) for _ in keys], pa.int64()),
            ]
            rows.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        rows.seal()
        kept.append(rows)

    found = list(in_key_order(kept, operator, GROUPS, memory))

    assert sorted(at for batch in found for at in batch.column("at").to_pylist()) == list(range(next(numbers)))
    if found:
        whole = pa.concat_batches(found)
        encoded = KeyEncoder(schema, ["k"], KEY_GROUP_COLUMN).encode(whole)
        stored = [encoded.one(row) for row in range(whole.num_rows)]
        assert stored == sorted(stored), "the order of stored keys"
        for _key, same in itertools.groupby(
            zip(stored, whole.column("at").to_pylist(), strict=True), lambda one: one[0]
        ):
            places = [at for _key, at in same]
            assert places == sorted(places), "the order of arrival"
    for rows in kept:
        rows.discard()


def test_rows_of_several_key_groups_that_no_column_can_hold_are_taken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_order, "_MOST_BYTES", 600)
    operator = AggregateOperator("totals", ["k"], parse_schema("k long"), {"n": count()})
    rows = KeptRows(operator._input, MemoryLimit(1 << 20), tmp_path / "spill.arrow")
    groups = list(GROUPS) * 20
    rows.append(pa.RecordBatch.from_arrays([pa.array(groups), pa.array(groups, pa.int32())], schema=rows.schema))
    rows.seal()
    found = pa.concat_batches(list(in_key_order([rows], operator, GROUPS, 1 << 20)))
    assert found.column("k").to_pylist() == sorted(groups)
    rows.discard()


def test_rows_of_one_key_group_that_no_column_can_hold_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_order, "_MOST_BYTES", 100)
    operator = AggregateOperator("totals", ["k"], parse_schema("k long"), {"n": count()})
    rows = KeptRows(operator._input, MemoryLimit(10), tmp_path / "spill.arrow")
    rows.append(pa.RecordBatch.from_arrays([pa.array([1] * 50), pa.array([4] * 50, pa.int32())], schema=rows.schema))
    rows.seal()
    with pytest.raises(SchemaError, match=r"operator totals: .* bound the batches .*shuffle='spark'"):
        list(in_key_order([rows], operator, GROUPS, 10))
    rows.discard()
    assert list(tmp_path.iterdir()) == []


def test_rows_of_spark_and_rows_of_another_step_may_differ_in_what_is_null_and_in_time_zones(tmp_path: Path) -> None:
    operator = AggregateOperator("step", ["k"], parse_schema("k string, t timestamp, s array<int>"), {"n": count()})
    kept = []
    for number, (zone, nullable) in enumerate([("Europe/Berlin", False), ("UTC", True)]):
        schema = pa.schema(
            [
                pa.field("k", pa.string(), nullable=nullable),
                pa.field("t", pa.timestamp("us", zone), nullable=nullable),
                pa.field("s", pa.list_(pa.field("element", pa.int32(), nullable=nullable)), nullable=nullable),
                pa.field(KEY_GROUP_COLUMN, pa.int32(), nullable=nullable),
            ]
        )
        rows = KeptRows(schema, MemoryLimit(1 << 20), tmp_path / f"{number}.arrow")
        columns = [pa.array([value] * 2, field.type) for value, field in zip(["a", 7, [1], 4], schema, strict=True)]
        rows.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        kept.append(rows)
    found = pa.concat_batches(list(in_key_order(kept, operator, GROUPS, 1 << 20)))
    assert found.num_rows == 4
    assert set(found.column("t").cast(pa.int64()).to_pylist()) == {7}
