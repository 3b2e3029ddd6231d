"""The times in Spark's offset log and commit log: the processing time of a batch, and Spark's own watermark.

Private Spark API: the format of the logs is internal. The processing time of a batch is public only in the progress of
a query, which Spark reports after the batch; a batch needs it before.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from strandline.checkpoint.metadata import Milliseconds, SourcePosition, Times
from strandline.decoding import json_decoder
from strandline.errors import CheckpointError
from strandline.runtime.driver.watermarks import WatermarkPlan


class _Offsets(msgspec.Struct, frozen=True):
    """What is used of the second line of an entry of the offset log. The names are Spark's."""

    batchTimestampMs: Milliseconds
    batchWatermarkMs: Milliseconds = 0


class _Commit(msgspec.Struct, frozen=True):
    """What is used of the second line of an entry of the commit log."""

    nextBatchWatermarkMs: Milliseconds = 0


Entry = TypeVar("Entry", _Offsets, _Commit)


def batch_timestamp(folder: Path, batch: int) -> int:
    """The processing time of Spark's batch `batch`; `folder` is Spark's checkpoint folder."""
    path = folder / "offsets" / str(batch)
    try:
        entry = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"Spark's offset log in {folder} has no entry for batch {batch}") from error
    return _decoded(entry, _Offsets, str(path)).batchTimestampMs


def times_of(position: SourcePosition, steps: Iterable[str], plan: WatermarkPlan) -> Times:
    """The times of a restored position; `steps` are the steps of its checkpoint.

    A checkpoint of an earlier release has one watermark for the whole job, in the entries of Spark's logs. Every step
    of its job goes on from that watermark, and every source has reached it.
    """
    if position.times is not None:
        return position.times
    offsets = _entry(position, f"offsets/{position.batch}", _Offsets)
    commit = _entry(position, f"commits/{position.batch}", _Commit)
    before, after = offsets.batchWatermarkMs, commit.nextBatchWatermarkMs
    return Times(
        offsets.batchTimestampMs,
        tuple(tuple(after + delay if after else None for delay in source.delays_ms) for source in plan.sources),
        dict.fromkeys(steps, before) if before else {},
    )


def _entry(position: SourcePosition, name: str, kind: type[Entry]) -> Entry:
    return _decoded(position.files.get(name, b""), kind, f"{name} of the checkpoint's position")


def _decoded(entry: bytes, kind: type[Entry], where: str) -> Entry:
    try:
        return json_decoder(kind).decode(entry.split(b"\n")[1])
    except (IndexError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where}, an entry of Spark's offset log or commit log, is damaged: {error}") from error
