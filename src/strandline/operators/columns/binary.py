"""Binary columns as offsets and bytes, for numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]


def binary_content(column: Any) -> tuple[Int64s, Any]:
    """The offsets of a binary or string column, beginning with 0, and its bytes."""
    wide = column.cast(pa.binary()).cast(pa.large_binary())
    _, starts, data = wide.buffers()
    if len(wide) == 0 or data is None:
        return np.zeros(len(wide) + 1, np.int64), pa.py_buffer(b"")
    offsets = np.frombuffer(starts, np.int64, len(wide) + 1, wide.offset * 8)
    first = int(offsets[0])
    return offsets - first, data.slice(first, int(offsets[-1]) - first)


def binary_spans(data: Any, offsets: Int64s) -> Any:
    """A binary column: row i has the bytes of `data` from `offsets[i]` to `offsets[i + 1]`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), data or pa.py_buffer(b"")]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers).cast(pa.binary())


def binary_pieces(data: Any, begins: Int64s, ends: Int64s, valid: npt.NDArray[np.bool_] | None = None) -> Any:
    """A binary column: row i has the bytes of `data` from `begins[i]` to `ends[i]`, and is null where not `valid`.

    The pieces must be in ascending order and must not overlap.
    """
    count = len(begins)
    # One array covers all bytes: every second element is a row of the column, the others are the gaps between them.
    offsets = np.zeros(2 * count + 1, np.int64)
    offsets[0:-1:2] = begins
    offsets[1::2] = ends
    offsets[-1] = ends[-1] if count else 0
    spans = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, pa.py_buffer(offsets), data])
    places = pa.array(np.arange(0, 2 * count, 2), mask=None if valid is None else ~valid)
    return spans.take(places).cast(pa.binary())


def binary_from(column: Any, start: int) -> Any:
    """The values of a binary column without their first `start` bytes."""
    offsets, data = binary_content(column)
    return binary_pieces(data, offsets[:-1] + start, offsets[1:])
