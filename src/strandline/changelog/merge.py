"""Segments that follow each other as one: of every key only the last change counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from strandline.state.chunks import CHUNK_ENTRIES, halved
from strandline.state.segment import Chunk, read_table

AT_ONCE_BYTES = 64 << 20
"""Segments are merged up to this size, compressed; a longer log is merged in several steps."""
READERS = 4


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """The last change of every key, in ascending order; later tables hold later changes."""
    if len(tables) == 1:
        return tables[0]
    whole = pa.concat_tables(tables).combine_chunks()
    # A stable sort: of equal keys, the last one is the newest.
    whole = whole.take(pc.sort_indices(whole, sort_keys=[("key", "ascending")])).combine_chunks()
    if whole.num_rows < 2:
        return whole
    keys = whole.column("key").chunk(0)
    last = pc.not_equal(keys.slice(0, len(keys) - 1), keys.slice(1))
    return whole.filter(pa.concat_arrays([last, pa.array([True])]))


def changes(segments: Sequence[Path], key_groups: range | None = None) -> Iterator[Chunk]:
    """What segments, given in their order, change in the end: chunk by chunk, to be applied one after the other.

    Files are read and verified in parallel. Raises `DamagedFileError`.
    """
    with ThreadPoolExecutor(READERS, thread_name_prefix="read-log") as pool:
        for group in _grouped(segments):
            tables = list(pool.map(lambda path: read_table(path, key_groups), group))
            for batch in merge(tables).to_batches(max_chunksize=CHUNK_ENTRIES):
                yield from halved(batch.column(0).to_pylist(), batch.column(1).to_pylist())


def _grouped(segments: Sequence[Path]) -> Iterator[list[Path]]:
    group: list[Path] = []
    size = 0
    for path in segments:
        length = path.stat().st_size
        if group and size + length > AT_ONCE_BYTES:
            yield group
            group, size = [], 0
        group.append(path)
        size += length
    if group:
        yield group
