"""Arrow types in PostgreSQL: the columns that hold them, and their values as COPY reads them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from strandline.sinks.tables import Column, json_text

_NAMES: dict[pa.DataType, str] = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.uint8(): "smallint",
    pa.int16(): "smallint",
    pa.uint16(): "integer",
    pa.int32(): "integer",
    pa.uint32(): "bigint",
    pa.int64(): "bigint",
    pa.uint64(): "numeric(20,0)",
    pa.float16(): "real",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.date64(): "date",
    pa.null(): "text",
}
_KINDS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_string, "text"),
    (pa.types.is_large_string, "text"),
    (pa.types.is_binary, "bytea"),
    (pa.types.is_large_binary, "bytea"),
    (pa.types.is_time, "time without time zone"),
    (pa.types.is_nested, "jsonb"),
)
_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
_ALSO = {
    "smallint": ("integer", "bigint", "numeric", "real", "double precision"),
    "integer": ("bigint", "numeric", "double precision"),
    "bigint": ("numeric",),
    "real": ("double precision",),
    "jsonb": ("json",),
}
"""Other types that hold every value of a type."""
_CUT = ("name", '"char"')
"""Types that are strings to PostgreSQL, and of which it cuts off without a word what is too long."""
_FRACTION = {"s": 0, "ms": 3, "us": 6, "ns": 9}
"""How many digits of a second the units of times have."""
_TEXTS = "SEUI"
"""The categories of types whose values are written as texts: strings, enums, user-defined ones (`uuid`, `jsonb`) and
network addresses. Whether a text is a value of the type is seen when it is written."""


def declared(kind: pa.DataType) -> str | None:
    """The type of the column that holds values of an Arrow type in a table of ours; None if there is none."""
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if pa.types.is_duration(kind):
        return "interval" if kind.unit in _UNITS else None
    return _NAMES.get(kind) or next((name for check, name in _KINDS if check(kind)), None)


@dataclass(frozen=True, slots=True)
class PostgresColumn(Column):
    """A column as the catalog describes it. Of a domain, it is the type beneath."""

    category: str
    """PostgreSQL's letter for the kind of type, such as N for numbers."""

    @property
    def base(self) -> str:
        """The type without its parameters, which may be in the middle: `timestamp(3) with time zone`."""
        return re.sub(r"\([^)]*\)", "", self.type)

    @property
    def digits(self) -> tuple[int, int] | None:
        """Of a `numeric(precision, scale)`: its digits, and how many of them are after the point."""
        found = re.fullmatch(r"numeric\((\d+),(-?\d+)\)", self.type)
        return (int(found[1]), int(found[2])) if found else None


def fits(kind: pa.DataType, column: PostgresColumn) -> bool:
    """Whether every value of an Arrow type goes into the column, or, for texts, those that are a value of its type."""
    if pa.types.is_null(kind):
        return True
    if column.digits is not None:
        return _has_digits(kind, *column.digits)
    if column.base in _CUT:
        return False
    base = (declared(kind) or "").partition("(")[0]
    if column.base in (base, *_ALSO.get(base, ())):
        return True
    return (column.category == "S" and base != "bytea") or (
        base == "text" and column.category in _TEXTS and column.base != "bytea"
    )


def rounds(kind: pa.DataType, column: PostgresColumn) -> bool:
    """Whether PostgreSQL rounds values of an Arrow type that fit the column, as a `timestamp(3)` does."""
    found = re.fullmatch(r"(?:timestamp|time|interval)\((\d)\).*", column.type)
    has_unit = pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind)
    return found is not None and has_unit and int(found[1]) < _FRACTION[kind.unit]


def _has_digits(kind: pa.DataType, precision: int, scale: int) -> bool:
    """Whether `numeric(precision, scale)` holds every value. PostgreSQL rounds what has more digits after the point."""
    if pa.types.is_integer(kind):
        return precision - scale >= len(str(2**kind.bit_width))
    return bool(pa.types.is_decimal(kind)) and scale >= kind.scale and precision - scale >= kind.precision - kind.scale


def csv_text(batch: pa.RecordBatch) -> pa.Buffer:
    """The rows as `COPY ... (FORMAT csv)` reads them: texts are in quotation marks, and NULL is nothing at all.

    The time zone of the session must be UTC.
    """
    columns = [_plain(field.name, column) for field, column in zip(batch.schema, batch.columns, strict=True)]
    out = pa.BufferOutputStream()
    plain = pa.RecordBatch.from_arrays(columns, [str(number) for number in range(len(columns))])
    pacsv.write_csv(plain, out, pacsv.WriteOptions(include_header=False, batch_size=max(1, batch.num_rows)))
    return out.getvalue()


def _plain(name: str, column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_nested(kind):
        return pa.array(json_text(name, column), pa.large_string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _hex(column)
    if pa.types.is_timestamp(kind) and kind.tz:
        return column.view(pa.timestamp(kind.unit))  # twenty times as fast as text with a time zone
    if pa.types.is_duration(kind):
        return pc.binary_join_element_wise(column.cast(pa.int64()).cast(pa.string()), _UNITS[kind.unit], " ")
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    return column


def _hex(column: pa.Array) -> pa.Array:
    """Binary values as PostgreSQL's `\\x0123`."""
    column = column.cast(pa.large_binary())
    _valid, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    digits = memoryview(data or b"")[ends[0] : ends[-1]].hex().encode()
    moved = pa.py_buffer(np.ascontiguousarray((ends - ends[0]) * 2))
    texts = pa.LargeStringArray.from_buffers(len(column), moved, pa.py_buffer(digits))
    prefixed = pc.binary_join_element_wise(pa.scalar("\\x", pa.large_string()), texts, pa.scalar("", pa.large_string()))
    return pc.if_else(column.is_valid(), prefixed, pa.scalar(None, pa.large_string()))
