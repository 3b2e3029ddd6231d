"""Event times of a timestamp column as numpy numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def micros(column: Any) -> npt.NDArray[np.int64]:
    """A timestamp column as microseconds since the epoch; a null becomes 0."""
    numbers = column.view(pa.int64())
    values: npt.NDArray[np.int64] = (pc.fill_null(numbers, 0) if numbers.null_count else numbers).to_numpy()
    return values


def whole_millis(times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Times in microseconds, rounded up to milliseconds: the first watermark that has reached each time."""
    return -(-times_us // 1000)
