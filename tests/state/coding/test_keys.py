"""Key groups cover subtasks without a gap; key bytes tell keys apart and never run into each other."""

from __future__ import annotations

import math
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError, SchemaError
from strandline.state.coding.keys import KeyEncoder, bytes_list, key_group_range, state_prefix, subtask_of

GROUP = "__kg"

COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "byte": (pa.int8(), st.integers(-128, 127)),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "long": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "string": (pa.string(), st.text(st.sampled_from(["a", "b", "\0", "é"]), max_size=3)),
    "binary": (pa.binary(), st.binary(max_size=3)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC), min_value=datetime(1900, 1, 1))),
    "decimal": (pa.decimal128(6, 2), st.decimals(-9999, 9999, places=2)),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats() | st.sampled_from([0.0, -0.0, math.nan])),
    "array": (pa.list_(pa.int32()), st.lists(st.integers(0, 2), max_size=2)),
    "struct": (
        pa.struct([("a", pa.float64()), ("b", pa.string())]),
        st.builds(
            lambda a, b: {"a": a, "b": b}, st.sampled_from([0.0, -0.0, math.nan, 1.0]), st.text("ab", max_size=2)
        ),
    ),
}


def same_for_spark(value: Any) -> Any:
    """A hashable stand-in under which two values are equal exactly when Spark groups them together."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple(same_for_spark(item) for item in value.values())
    if isinstance(value, list):
        return tuple(map(same_for_spark, value))
    return value


def encode(schema: pa.Schema, rows: list[tuple[Any, ...]], groups: list[int] | None = None) -> Any:
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(schema)]
    columns.append(pa.array(groups or [0] * len(rows), pa.int32()))
    batch = pa.RecordBatch.from_arrays(columns, names=[*schema.names, GROUP])
    return KeyEncoder(schema, schema.names, GROUP).encode(batch)


@st.composite
def keyed_rows(draw: st.DrawFn) -> tuple[pa.Schema, list[tuple[Any, ...]]]:
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3))
    schema = pa.schema([(f"c{at}", COLUMNS[name][0]) for at, name in enumerate(names)])
    row = st.tuples(*(st.none() | COLUMNS[name][1] for name in names))
    return schema, draw(st.lists(row, min_size=1, max_size=12))


@settings(deadline=None)
@given(keyed_rows())
def test_keys_are_equal_in_bytes_exactly_when_spark_calls_them_equal(drawn: Any) -> None:
    schema, rows = drawn
    stored = encode(schema, rows).stored("s")
    for one, first in zip(rows, stored, strict=True):
        for other, second in zip(rows, stored, strict=True):
            assert (first == second) == (same_for_spark(list(one)) == same_for_spark(list(other)))


@settings(deadline=None)
@given(keyed_rows())
def test_no_key_is_the_beginning_of_another(drawn: Any) -> None:
    schema, rows = drawn
    distinct = set(encode(schema, rows).stored("s"))
    assert not any(a != b and b.startswith(a) for a in distinct for b in distinct)


@settings(deadline=None)
@given(keyed_rows(), st.data())
def test_order_is_that_of_stored_keys_and_slices_are_consistent(drawn: Any, data: st.DataObject) -> None:
    schema, rows = drawn
    groups = data.draw(st.lists(st.integers(0, 300), min_size=len(rows), max_size=len(rows)))
    keys = encode(schema, rows, groups)
    stored = keys.stored("name")
    assert [key[:2] for key in stored] == [group.to_bytes(2, "big") for group in groups]
    assert all(key.startswith(state_prefix(group, "name")) for key, group in zip(stored, groups, strict=True))
    order = keys.order()
    assert [stored[at] for at in order] == sorted(stored)
    assert keys.take(order).stored("name") == sorted(stored)
    assert keys.slice(1).stored("name") == stored[1:]
    starts = keys.starts().tolist()
    assert starts == [at for at in range(len(stored)) if at == 0 or stored[at] != stored[at - 1]]
    assert [keys.one(at) == keys.one(0) for at in range(len(keys))] == [key == stored[0] for key in stored]


def test_every_nan_is_one_key_whatever_its_bits() -> None:
    other_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
    column = np.array([math.nan, other_nan, -0.0, 0.0])
    batch = pa.RecordBatch.from_arrays([pa.array(column), pa.array([0] * 4, pa.int32())], names=["x", GROUP])
    first, second, third, fourth = KeyEncoder(batch.schema, ["x"], GROUP).encode(batch).stored("s")
    assert first == second != third == fourth


def test_sliced_input_and_other_text_types_give_the_same_keys() -> None:
    rows = [("a", Decimal("1.5")), (None, None), ("ccc", Decimal("-2"))]
    plain = pa.schema([("s", pa.string()), ("d", pa.decimal128(5, 2))])
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), plain.types, strict=True)]
    group = pa.array([0, 1, 2], pa.int32())
    whole = pa.RecordBatch.from_arrays([*columns, group], names=["s", "d", GROUP])
    large = pa.RecordBatch.from_arrays([columns[0].cast(pa.large_string()), columns[1], group], names=["s", "d", GROUP])
    encoder = KeyEncoder(plain, ["s", "d"], GROUP)
    expected = encoder.encode(whole).stored("s")
    assert encoder.encode(whole.slice(1)).stored("s") == expected[1:]
    assert encoder.encode(large).stored("s") == expected
    assert encoder.encode(pa.Table.from_batches([whole.slice(0, 1), whole.slice(1)])).stored("s") == expected


def test_an_empty_batch_has_no_keys() -> None:
    for kind in (pa.int64(), pa.string(), pa.list_(pa.int32())):
        keys = encode(pa.schema([("x", kind)]), [])
        assert keys.stored("s") == []
        assert keys.starts().tolist() == keys.order().tolist() == []


def test_dates_sort_as_keys_within_a_key_group() -> None:
    days = [(date(1960, 1, 1),), (date(1970, 1, 1),), (date(2020, 5, 5),)]
    stored = encode(pa.schema([("d", pa.date32())]), days).stored("s")
    assert stored == sorted(stored)


def test_an_unknown_key_column_is_refused() -> None:
    with pytest.raises(SchemaError, match="no key column usr"):
        KeyEncoder(pa.schema([("user", pa.string())]), ["usr"], GROUP)


def test_bytes_list_gives_plain_bytes() -> None:
    assert bytes_list(pa.array([b"a", b"", b"b\0"])) == [b"a", b"", b"b\0"]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_ranges_and_subtasks_agree(parallelism: int, max_parallelism: int) -> None:
    if parallelism > max_parallelism:
        with pytest.raises(JobDefinitionError):
            key_group_range(0, parallelism, max_parallelism)
        return
    owners = [subtask_of(group, parallelism, max_parallelism) for group in range(max_parallelism)]
    for subtask in range(parallelism):
        groups = key_group_range(subtask, parallelism, max_parallelism)
        assert [group for group, owner in enumerate(owners) if owner == subtask] == list(groups)
        assert len(groups) >= 1


def test_key_groups_and_subtasks_out_of_range_are_refused() -> None:
    with pytest.raises(JobDefinitionError, match="no subtask 4"):
        key_group_range(4, 4, 128)
    with pytest.raises(JobDefinitionError, match="no key group 128"):
        subtask_of(128, 4, 128)
