"""Results of a state lookup: which of the requested keys have a value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_not

import numpy as np
import numpy.typing as npt


def found_mask(values: Sequence[bytes | None]) -> npt.NDArray[np.bool_]:
    """Which values were found, as a mask."""
    return np.fromiter(map(is_not, values, repeat(None)), np.bool_, len(values))


def found_places(values: list[bytes | None]) -> npt.NDArray[np.int64]:
    """Which values were found, as places in the list."""
    missing = values.count(None)
    if missing in (0, len(values)):
        return np.arange(len(values) - missing)
    return np.flatnonzero(found_mask(values))
