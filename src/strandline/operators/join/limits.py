"""How much a join works on, and stores in one entry, at a time."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.operators.timed.expiry_index import READ_KEYS


@dataclass(frozen=True, slots=True)
class JoinLimits:
    """Bounds of the steps of a join."""

    largest_slice: int = 1 << 17
    smallest_slice: int = 16
    slice_bytes: int = 64 << 20
    """How many rows are joined at a time. Slices shrink while more than `slice_bytes` of state are read for them."""
    output_rows: int = 1 << 16
    """How many rows a record batch of output has at most."""
    chunk_bytes: int = 32 << 10
    """The rows of a side that take more bytes than this in one head are moved to a chunk."""
    read_keys: int = READ_KEYS
    """How many expired heads are read from the expiry index at a time."""
    least_bucket_us: int = 1_000_000
    """The least length of a bucket, in microseconds. Stored keys depend on it, so a job must not change it."""


DEFAULT_LIMITS = JoinLimits()
