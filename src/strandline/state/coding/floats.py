"""Gives equal floating-point numbers equal bytes.

A task manager needs the bytes of keys, but not Spark's types: this module does not import them, which takes long.
"""

from __future__ import annotations

import math
from typing import Any


def canonical_floats(value: Any) -> Any:
    """`value` with one form of NaN and without negative zeros, at any depth, so that equal values have equal bytes."""
    if isinstance(value, float):
        return math.nan if value != value else value + 0.0
    if isinstance(value, tuple):
        return tuple(map(canonical_floats, value))
    if isinstance(value, list):
        return list(map(canonical_floats, value))
    if isinstance(value, dict):
        return {canonical_floats(key): canonical_floats(item) for key, item in value.items()}
    return value
