"""How much per-key user code is given, and gives back, at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The number of rows in a chunk of input, and in a record batch of output.

    A chunk has `first_chunk` rows to begin with, then between `smallest_chunk` and `largest_chunk`. It takes memory for
    its rows and for the state values that are read for them. Chunks shrink while they take more than `chunk_bytes`, and
    grow while they take less than a quarter of that.
    """

    first_chunk: int = 1024
    smallest_chunk: int = 16
    largest_chunk: int = 32_768
    chunk_bytes: int = 32 << 20
    output_rows: int = 8192


DEFAULT_LIMITS = ProcessLimits()
