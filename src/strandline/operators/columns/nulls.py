"""Which rows of a column are not null, as numpy masks."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt


def is_valid(column: Any) -> npt.NDArray[np.bool_]:
    """Which rows of the column are not null."""
    if not column.null_count:
        return np.ones(len(column), np.bool_)
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def all_valid(columns: list[Any]) -> npt.NDArray[np.bool_]:
    """Which rows are not null in any of the columns."""
    return reduce(np.logical_and, map(is_valid, columns))
