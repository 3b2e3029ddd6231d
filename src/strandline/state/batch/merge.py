"""Merges consecutive segments into one: the last change of every key wins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.state.batch.segment import Chunk, read_table
from strandline.state.chunks import CHUNK_ENTRIES, grouped, halved

AT_ONCE_BYTES: Final = 128 << 20
"""How many bytes of segments are merged in memory at once; more segments are merged in several steps."""
_NARROW_BYTES: Final = 1 << 30
"""A table up to this size fits into columns with 32-bit offsets."""
_READERS: Final = 4

_WIDE: Final = pa.schema([pa.field("key", pa.large_binary(), nullable=False), pa.field("value", pa.large_binary())])
"""The schema with 64-bit offsets. Segments that compress well may exceed 2 GB in memory."""


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """The last change of every key, in ascending key order. `tables` are ordered from oldest to newest."""
    if len(tables) == 1:
        return tables[0]
    whole = pa.concat_tables(tables)
    if whole.nbytes > _NARROW_BYTES:
        whole = whole.cast(_WIDE)
    whole = whole.combine_chunks()
    if whole.num_rows < 2:
        return whole
    keys, values = (whole.column(name).chunk(0) for name in ("key", "value"))
    order = pc.sort_indices(keys)  # the sort is stable, so the last of several equal keys is the newest
    keys = keys.take(order)
    last = pa.concat_arrays([pc.not_equal(keys.slice(0, len(keys) - 1), keys.slice(1)), pa.array([True])])
    return pa.table([keys.filter(last), values.take(order.filter(last))], schema=whole.schema)


def merged_changes(
    segments: Sequence[Path], key_groups: range | None = None, at_once_bytes: int = AT_ONCE_BYTES
) -> Iterator[Chunk]:
    """The changes of `segments`, oldest first, as chunks that the caller applies in this order.

    Up to `at_once_bytes` of segments are merged at once. A key may come again in a later chunk. Files are read and
    verified in parallel. Raises `DamagedFileError`.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="read-segments") as pool:
        read = _read_ahead(pool, segments, key_groups)
        for tables in grouped(read, lambda table: int(table.nbytes), at_once_bytes):
            for batch in merge(tables).to_batches(max_chunksize=CHUNK_ENTRIES):
                yield from halved(batch.column(0).to_pylist(), batch.column(1).to_pylist())


def _read_ahead(pool: ThreadPoolExecutor, segments: Iterable[Path], key_groups: range | None) -> Iterator[pa.Table]:
    """The tables of the segments, in order. At most a few of them are read ahead of the consumer."""
    ahead: deque[Future[pa.Table]] = deque()
    for path in segments:
        ahead.append(pool.submit(read_table, path, key_groups))
        if len(ahead) > _READERS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
