"""Binary columns as what they are: bytes, and where each value begins and ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]


def binary_content(column: Any) -> tuple[Int64s, Any]:
    """Where the bytes of a binary or string column begin and end, from 0 on, and the bytes."""
    wide = column.cast(pa.binary()).cast(pa.large_binary())
    _, starts, data = wide.buffers()
    if len(wide) == 0 or data is None:
        return np.zeros(len(wide) + 1, np.int64), pa.py_buffer(b"")
    offsets = np.frombuffer(starts, np.int64, len(wide) + 1, wide.offset * 8)
    first = int(offsets[0])
    return offsets - first, data.slice(first, int(offsets[-1]) - first)


def binary_spans(data: Any, offsets: Int64s) -> Any:
    """A binary column whose rows are the bytes of `data` between `offsets`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), data or pa.py_buffer(b"")]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers).cast(pa.binary())


def binary_pieces(data: Any, begins: Int64s, ends: Int64s, valid: npt.NDArray[np.bool_] | None = None) -> Any:
    """A binary column of pieces of `data` in ascending order, null where not `valid`."""
    count = len(begins)
    # Every second element of one array over all bytes is the column; the others are what lies between.
    offsets = np.zeros(2 * count + 1, np.int64)
    offsets[0:-1:2] = begins
    offsets[1::2] = ends
    offsets[-1] = ends[-1] if count else 0
    spans = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, pa.py_buffer(offsets), data])
    places = pa.array(np.arange(0, 2 * count, 2), mask=None if valid is None else ~valid)
    return spans.take(places).cast(pa.binary())


def binary_from(column: Any, start: int) -> Any:
    """Every value of a binary column without its first `start` bytes."""
    offsets, data = binary_content(column)
    return binary_pieces(data, offsets[:-1] + start, offsets[1:])
