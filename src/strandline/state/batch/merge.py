"""Segments that follow each other as one: of every key only the last change counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from strandline.state.batch.segment import Chunk, read_table
from strandline.state.chunks import CHUNK_ENTRIES, grouped, halved

AT_ONCE_BYTES = 128 << 20
"""Segments are merged up to this size in memory; a longer log is merged in several steps."""
NARROW_BYTES = 1 << 30
"""A table up to this size fits into columns whose offsets have 32 bits."""
READERS = 4

_WIDE = pa.schema([pa.field("key", pa.large_binary(), nullable=False), pa.field("value", pa.large_binary())])
"""Columns of more than 2 GB: well compressed segments may be that large in memory."""


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """The last change of every key, in ascending order; later tables hold later changes."""
    if len(tables) == 1:
        return tables[0]
    whole = pa.concat_tables(tables)
    if whole.nbytes > NARROW_BYTES:
        whole = whole.cast(_WIDE)
    whole = whole.combine_chunks()
    if whole.num_rows < 2:
        return whole
    keys, values = (whole.column(name).chunk(0) for name in ("key", "value"))
    order = pc.sort_indices(keys)  # stable: of equal keys, the last one is the newest
    keys = keys.take(order)
    last = pa.concat_arrays([pc.not_equal(keys.slice(0, len(keys) - 1), keys.slice(1)), pa.array([True])])
    return pa.table([keys.filter(last), values.take(order.filter(last))], schema=whole.schema)


def changes(segments: Sequence[Path], key_groups: range | None = None) -> Iterator[Chunk]:
    """What segments, given in their order, change in the end: chunk by chunk, to be applied one after the other.

    Files are read and verified in parallel. Raises `DamagedFileError`.
    """
    with ThreadPoolExecutor(READERS, thread_name_prefix="read-log") as pool:
        read = _read_ahead(pool, segments, key_groups)
        for tables in grouped(read, lambda table: int(table.nbytes), AT_ONCE_BYTES):
            for batch in merge(tables).to_batches(max_chunksize=CHUNK_ENTRIES):
                yield from halved(batch.column(0).to_pylist(), batch.column(1).to_pylist())


def _read_ahead(pool: ThreadPoolExecutor, segments: Iterable[Path], key_groups: range | None) -> Iterator[pa.Table]:
    """The segments in their order; only a few more than are asked for are in memory."""
    ahead: deque[Future[pa.Table]] = deque()
    for path in segments:
        ahead.append(pool.submit(read_table, path, key_groups))
        if len(ahead) > READERS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
