"""Decodes stored keys into key columns: the inverse of `KeyEncoder`, a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strandline.errors import JobDefinitionError
from strandline.operators.columns.binary import binary_content, binary_pieces
from strandline.state.coding.keys import float_bits_in_order

Bytes = npt.NDArray[np.uint8]


class KeyDecoder:
    """Decodes keys of plain types. Raises `JobDefinitionError` for nested types, which cannot be read back."""

    def __init__(self, where: str, schema: pa.Schema, key_columns: Sequence[str]) -> None:
        self._types = [schema.field(name).type for name in key_columns]
        for name, kind in zip(key_columns, self._types, strict=True):
            if pa.types.is_nested(kind):
                raise JobDefinitionError(
                    f"{where}: the key column {name!r} has the nested type {kind}; windows take keys of plain types. "
                    "Key by its fields, or by its to_json()"
                )

    def decode(self, keys: Any) -> list[Any]:
        """The key columns of an array of encoded keys."""
        offsets, content = binary_content(keys)
        data = np.frombuffer(content, np.uint8)
        at = offsets[:-1].copy()
        columns = []
        for kind in self._types:
            if pa.types.is_string(kind) or pa.types.is_binary(kind):
                column, at = _text(kind, content, data, at)
            else:
                valid = data[at] != 0
                width = 0 if pa.types.is_null(kind) else max(1, kind.bit_width // 8)
                column = _fixed(kind, valid, data[(at + 1)[:, None] + np.arange(width)])
                at = at + 1 + width
            columns.append(column)
        return columns


def _text(kind: pa.DataType, content: Any, data: Bytes, at: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    sizes = np.ascontiguousarray(data[at[:, None] + np.arange(4)]).view(">u4").ravel().astype(np.int64)
    begin = at + 4
    end = begin + np.maximum(sizes - 1, 0)
    return binary_pieces(content, begin, end, sizes != 0).cast(kind), end


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
