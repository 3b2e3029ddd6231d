"""Decodes stored keys into key columns: the inverse of `KeyEncoder`, a column at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strandline.errors import JobDefinitionError, SchemaError
from strandline.operators.columns.binary import binary_content, binary_pieces
from strandline.state.coding.keys import float_bits_in_order

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

_decode: Final = msgspec.msgpack.Decoder().decode
_AS_TEXT: Final[tuple[tuple[Callable[[pa.DataType], bool], Any], ...]] = (
    (pa.types.is_date, date),
    (pa.types.is_timestamp, datetime),
    (pa.types.is_duration, timedelta),
    (pa.types.is_decimal, Decimal),
)


class KeyDecoder:
    """Decodes keys of plain types. Raises `JobDefinitionError` for nested types unless `nested` allows them.

    Nested values are decoded one by one, which is slow. Two nested values that are equal as keys may differ in the form
    of NaN and zero, and the decoder returns the form that is stored.
    """

    def __init__(self, where: str, schema: pa.Schema, key_columns: Sequence[str], nested: bool = False) -> None:
        self._types = [schema.field(name).type for name in key_columns]
        for name, kind in zip(key_columns, self._types, strict=True):
            if pa.types.is_nested(kind) and not nested:
                raise JobDefinitionError(
                    f"{where}: the key column {name!r} has the nested type {kind}; windows take keys of plain types. "
                    "Key by its fields, or by its to_json()"
                )

    def decode(self, keys: Any) -> list[Any]:
        """The key columns of an array of encoded keys."""
        return self.decode_front(keys)[0]

    def decode_front(self, keys: Any) -> tuple[list[Any], Int64s]:
        """The key columns of an array of bytes that begin with an encoded key, and the length of each key.

        Raises `SchemaError` if the bytes do not begin with such a key.
        """
        offsets, content = binary_content(keys)
        data = np.frombuffer(content, np.uint8)
        at, ends = offsets[:-1].copy(), offsets[1:]
        columns = []
        for kind in self._types:
            nested = pa.types.is_nested(kind)
            if nested or pa.types.is_string(kind) or pa.types.is_binary(kind):
                column, at = _text(pa.binary() if nested else kind, content, data, at, ends)
                column = _revived(column, kind) if nested else column
            else:
                width = 0 if pa.types.is_null(kind) else max(1, kind.bit_width // 8)
                _check_within(at + 1 + width, ends)
                valid = data[at] != 0
                column = _fixed(kind, valid, data[(at + 1)[:, None] + np.arange(width)])
                at = at + 1 + width
            columns.append(column)
        return columns, at - offsets[:-1]


def _text(kind: pa.DataType, content: Any, data: Bytes, at: Int64s, ends: Int64s) -> tuple[Any, Int64s]:
    _check_within(at + 4, ends)
    sizes = np.ascontiguousarray(data[at[:, None] + np.arange(4)]).view(">u4").ravel().astype(np.int64)
    begin = at + 4
    end = begin + np.maximum(sizes - 1, 0)
    _check_within(end, ends)
    try:
        return binary_pieces(content, begin, end, sizes != 0).cast(kind), end
    except pa.ArrowInvalid as error:  # not UTF-8
        raise _unreadable() from error


def _check_within(places: Int64s, ends: Int64s) -> None:
    if (places > ends).any():
        raise _unreadable()


def _unreadable() -> SchemaError:
    return SchemaError("a stored key does not have the key columns of its step: it was written with other columns")


def _revived(column: Any, kind: pa.DataType) -> Any:
    """Values of a nested type from the bytes that `KeyEncoder` made of them."""
    try:
        values = [None if one is None else _revive(_decode(one), kind) for one in column.to_pylist()]
        return pa.array(values, kind)
    except (msgspec.MsgspecError, pa.ArrowException, TypeError, ValueError, KeyError) as error:
        raise _unreadable() from error


def _revive(value: Any, kind: pa.DataType) -> Any:
    """A value of msgpack as a value of Arrow. Dates, decimals and the like are texts in msgpack."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _revive(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(_revive(one, kind.key_type), _revive(other, kind.item_type)) for one, other in value]
    if pa.types.is_list(kind):
        return [_revive(one, kind.value_type) for one in value]
    for is_kind, wanted in _AS_TEXT:
        if is_kind(kind):
            return msgspec.convert(value, wanted, strict=False)
    return value


def _fixed(kind: pa.DataType, valid: npt.NDArray[np.bool_], raw: Bytes) -> Any:
    """Values from big-endian bytes that sort in the order of the values."""
    count, width = raw.shape
    if pa.types.is_null(kind):
        return pa.nulls(count)
    bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(pa.uint8(), count, [bitmap, pa.py_buffer(raw.copy())]).cast(kind)
    # `KeyEncoder` flips the sign bit and writes the most significant byte first.
    flipped = raw.copy()
    flipped[:, 0] ^= 0x80
    little = np.ascontiguousarray(flipped[:, ::-1])
    if pa.types.is_floating(kind):
        little = float_bits_in_order(little.view(f"<i{width}").ravel())
    return pa.Array.from_buffers(kind, count, [bitmap, pa.py_buffer(little)])
