"""The offset of the tick source in Spark's offset log."""

from __future__ import annotations

import json

FIRST_TICK = json.dumps({"tick": 0})
"""The line of Spark's offset log for the tick source before its first tick."""


def is_tick(offset: str) -> bool:
    """Whether a line of Spark's offset log belongs to the tick source."""
    try:
        value = json.loads(offset)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() == {"tick"}
