"""Encodes state values as bytes: row by row for user code, column by column for vectorised operators."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, StructType

from strandline.errors import SchemaError
from strandline.state.coding.floats import canonical_floats
from strandline.state.coding.values import MisfitError, check_for, python_type, rounds, shown

_encode: Final = msgspec.msgpack.Encoder().encode
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_REFUSED: Final = (msgspec.ValidationError, TypeError, ValueError, OverflowError, NotImplementedError)
"""Errors of msgspec for a value that it cannot encode, or that does not decode according to the schema."""
_ARRAY_32: Final = b"\xdd"


class ValueCodec:
    """Encodes one row of a state, checked against the state's schema.

    A row of one column is a plain value; `encode` also accepts a tuple of one. `where` names the state in errors. With
    `canonical`, equal values always have equal bytes, which map keys need.
    """

    __slots__ = (
        "_canonical",
        "_checks",
        "_decode",
        "_decode_rows",
        "_exact",
        "_names",
        "_plain",
        "_single",
        "_tuple_is_row",
        "where",
    )

    def __init__(self, schema: StructType, where: str, canonical: bool = False) -> None:
        if not schema.fields:
            raise SchemaError(f"{where}: its schema has no column")
        self.where = where
        row: Any = python_type(schema, nullable=False)
        self._decode = msgspec.msgpack.Decoder(row).decode
        self._decode_rows = msgspec.msgpack.Decoder(list[row]).decode
        self._names = schema.fieldNames()
        self._checks = [check_for(f.dataType, f.nullable and not canonical) for f in schema.fields]
        self._exact = not rounds(schema, canonical)
        self._canonical = canonical
        self._single = len(schema.fields) == 1
        only = schema.fields[0].dataType
        # Whether a tuple of one may be the value itself. The plain value of an array is a list, so a tuple is a row.
        self._plain = isinstance(only, StructType) and len(only.fields) == 1
        self._tuple_is_row = isinstance(only, ArrayType)

    def as_rows(self) -> None:
        """From now on, accept and return rows of one column only as tuples of one."""
        self._single = False

    def encode(self, value: Any) -> bytes:
        """The bytes of `value`. Raises `SchemaError`, which names the column that does not fit."""
        if self._single and (self._plain or not isinstance(value, tuple) or len(value) != 1):
            value = self._as_row(value)
        if self._exact:
            try:
                # A value that decodes to an equal value fits the schema. This is faster than to check each field.
                data = _encode(value)
                if self._decode(data) == value:
                    return data
            except _REFUSED:
                pass
        return self._encode_checked(value)

    def decode(self, data: bytes) -> Any:
        """The value of `data`: a tuple, or the plain value for one column."""
        try:
            row = self._decode(data)
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        return row[0] if self._single else row

    def decode_list(self, data: bytes) -> list[Any]:
        """The values whose bytes were put together by `join`."""
        try:
            rows = self._decode_rows(data)
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        return [row[0] for row in rows] if self._single else rows

    @staticmethod
    def join(encoded: list[bytes]) -> bytes:
        """The bytes of a list of encoded values."""
        return b"".join((_ARRAY_32, len(encoded).to_bytes(4, "big"), *encoded))

    def _as_row(self, value: Any) -> Any:
        if not isinstance(value, tuple):
            return (value,)
        if not self._plain or len(value) != 1:
            return value if self._tuple_is_row else (value,)
        try:
            self._checks[0](value)
        except MisfitError:
            return value
        return (value,)

    def _encode_checked(self, value: Any) -> bytes:
        names = self._names
        if isinstance(value, dict) and not self._single:
            unknown = [name for name in value if name not in names]
            if unknown:
                raise SchemaError(f"{self.where}: no column {unknown[0]!r}; there are {', '.join(names)}")
            value = tuple(map(value.get, names))
        if not isinstance(value, tuple | list):
            raise SchemaError(
                f"{self.where}: expected a tuple of {len(names)} values ({', '.join(names)}), got {shown(value)}"
            )
        if len(value) != len(names):
            raise SchemaError(
                f"{self.where}: expected {len(names)} values ({', '.join(names)}), got {len(value)}: {shown(value)}"
            )
        row = []
        for name, check, item in zip(names, self._checks, value, strict=True):
            try:
                row.append(check(item))
            except MisfitError as misfit:
                raise SchemaError(f"{self.where}: column {name + misfit.path!r}: {misfit}") from None
        try:
            return _encode(canonical_floats(tuple(row)) if self._canonical else tuple(row))
        except _REFUSED as error:
            raise SchemaError(f"{self.where}: cannot store {shown(value)}: {error}") from error

    def _unreadable(self, error: Exception) -> SchemaError:
        return SchemaError(
            f"{self.where}: a stored value does not fit the declared schema ({error}): "
            "declare the schema that it was written with, or use another state name"
        )


class ColumnCodec:
    """Encodes rows of Arrow columns without a Python loop over values.

    A row is a header of fixed width, followed by the content of the columns of variable width. For each column the
    header holds a null flag and the value, or the length of the content if the width is variable.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        fields: list[tuple[str, str]] = []
        self._variable: list[int] = []
        for at, field in enumerate(schema):
            fields.append((f"n{at}", "u1"))
            if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
                self._variable.append(at)
                fields.append((f"v{at}", "<u4"))
            else:
                fields.append((f"v{at}", f"V{_width(field.type)}"))
        self._header = np.dtype(fields)

    def encode(self, rows: pa.RecordBatch) -> list[bytes]:
        """The bytes of every row of `rows`, whose columns are those of the schema."""
        if rows.num_rows == 0:
            return []
        if self._variable:
            values: list[bytes] = self.encode_array(rows).to_pylist()
            return values
        encoded: list[bytes] = self._headers(rows)[0].view(f"V{self._header.itemsize}").tolist()
        return encoded

    def encode_array(self, rows: pa.RecordBatch) -> Any:
        """The bytes of every row of `rows` as an Arrow binary array."""
        header, contents = self._headers(rows)
        width = self._header.itemsize
        fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(header), [None, pa.py_buffer(header)])
        joined = fixed.cast(pa.binary())
        return pc.binary_join_element_wise(joined, *contents, pa.scalar(b"", pa.binary())) if contents else joined

    def _headers(self, rows: pa.RecordBatch) -> tuple[npt.NDArray[Any], list[Any]]:
        """The header of every row, and the contents of the columns of variable width."""
        header = np.zeros(rows.num_rows, self._header)
        contents = []
        for at, column in enumerate(rows.columns):
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            header[f"n{at}"] = valid
            if at in self._variable:
                content = column.cast(pa.binary())
                content = pc.fill_null(content, b"") if content.null_count else content
                header[f"v{at}"] = pc.binary_length(content).to_numpy(zero_copy_only=False)
                contents.append(content)
            else:
                header[f"v{at}"] = _raw(column)
                if column.null_count:
                    header[f"v{at}"][~valid] = b""
        return header, contents

    def decode(self, values: list[bytes]) -> pa.RecordBatch:
        """The rows whose encoded form is `values`. Raises `SchemaError` if they were encoded with another schema."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        return self._decode(b"".join(values), np.cumsum(lengths) - lengths, lengths)

    def decode_array(self, values: Any) -> pa.RecordBatch:
        """Like `decode`, for an Arrow array of type large binary without nulls."""
        offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
        data = values.buffers()[2]
        return self._decode(data if data is not None else b"", offsets[:-1], np.diff(offsets))

    def _decode(self, data: Any, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> pa.RecordBatch:
        count, width = len(starts), self._header.itemsize
        everything = np.frombuffer(data, np.uint8)
        if self._variable:
            if count and lengths.min() < width:
                raise self._unreadable()
            header = everything[starts[:, None] + np.arange(width)].view(self._header).reshape(count)
        else:
            if (lengths != width).any():
                raise self._unreadable()
            first = int(starts[0]) if count else 0
            header = everything[first : first + count * width].view(self._header)
        columns: dict[int, Any] = {}
        if self._variable:
            edges = np.empty((count, len(self._variable) + 1), np.int64)
            edges[:, 0] = starts + width
            for place, at in enumerate(self._variable):
                edges[:, place + 1] = edges[:, place] + header[f"v{at}"]
            if not np.array_equal(edges[:, -1], starts + lengths):
                raise self._unreadable()
            for place, at in enumerate(self._variable):
                columns[at] = self._contents(data, edges[:, place], edges[:, place + 1], header[f"n{at}"], at)
        for at, field in enumerate(self.schema):
            if at not in columns:
                columns[at] = _from_raw(field.type, header[f"n{at}"], header[f"v{at}"])
        return pa.RecordBatch.from_arrays([columns[at] for at in range(len(self.schema))], schema=self.schema)

    def _contents(
        self, data: Any, begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64], valid: npt.NDArray[Any], at: int
    ) -> Any:
        # An array over all bytes, in which every second element belongs to the column. The others are the gaps.
        count = len(begin)
        offsets = np.zeros(2 * count + 1, np.int64)
        offsets[0:-1:2] = begin
        offsets[1::2] = end
        offsets[-1] = end[-1] if count else 0
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        spans = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 2 * count, buffers)
        places = pa.array(np.arange(0, 2 * count, 2), mask=valid == 0)
        try:
            return spans.take(places).cast(self.schema.field(at).type)
        except pa.ArrowInvalid as error:  # not UTF-8
            raise self._unreadable() from error

    def _unreadable(self) -> SchemaError:
        return SchemaError(
            f"stored values do not have the columns {', '.join(self.schema.names)}: "
            "they were written with another schema; give the step another uid"
        )


def _width(kind: pa.DataType) -> int:
    if pa.types.is_boolean(kind):
        return 1
    try:
        return int(kind.bit_width) // 8
    except ValueError as error:
        raise SchemaError(f"columns of type {kind} cannot be stored as accumulators") from error


def _raw(column: Any) -> npt.NDArray[Any]:
    """The values of a column of fixed width as untyped bytes."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    width = _width(column.type)
    return np.frombuffer(column.buffers()[1], f"V{width}", len(column), column.offset * width)


def _from_raw(kind: pa.DataType, flags: npt.NDArray[Any], raw: npt.NDArray[Any]) -> Any:
    valid = flags != 0
    bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    stored = pa.uint8() if pa.types.is_boolean(kind) else kind
    array = pa.Array.from_buffers(stored, len(raw), [bitmap, pa.py_buffer(np.ascontiguousarray(raw))])
    return array if stored is kind else array.cast(kind)
