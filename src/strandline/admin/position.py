"""The position in the sources that a checkpoint holds, as a person reads it.

Private Spark API: a checkpoint holds entries of Spark's offset log and commit log as they are. See
`runtime/driver/restore/position.py`, which writes and restores them.
"""

from __future__ import annotations

import json
from typing import Any

from strandline.checkpoint.metadata import SourcePosition
from strandline.runtime.driver.restore.tick_offset import is_tick

_HEADER = 2
"""How many lines of an entry come before those of the sources."""


def source_offsets(position: SourcePosition) -> list[Any]:
    """Where each source stands, in the order of `job.source(...)`: Spark's offset, as JSON if it is JSON."""
    entry = position.files.get(f"offsets/{position.batch}", b"").decode(errors="replace")
    return [_decoded(line) for line in entry.split("\n")[_HEADER:] if not is_tick(line)]


def watermark_ms(position: SourcePosition) -> int | None:
    """The earliest watermark of a step, in milliseconds since the epoch; None if there is none.

    A checkpoint of an earlier release has the watermark of the job for the next batch.
    """
    if position.times is not None:
        return min(position.times.steps.values(), default=None)
    lines = position.files.get(f"commits/{position.batch}", b"").decode(errors="replace").split("\n")
    commit = _decoded(lines[1]) if len(lines) > 1 else None
    found = commit.get("nextBatchWatermarkMs") if isinstance(commit, dict) else None
    return found if isinstance(found, int) and found > 0 else None


def _decoded(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line
