"""The change set: the writes of one attempt at a batch, over a backend that does not change until the commit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Final, cast
from uuid import uuid4

from rocksdict import BlockBasedOptions, DBCompressionType, Options, Rdict, ReadOptions, WriteBatch

from strandline.state.backends.base import StateBackend
from strandline.state.backends.rocksdb_setup import bounded, without_log
from strandline.state.chunks import CHUNK_ENTRIES, chunked, halved
from strandline.state.disk_full import disk_full_error
from strandline.state.key_ranges import prefix_end
from strandline.state.sorted_runs import SortedRuns

_ENTRY_OVERHEAD: Final = 170
"""The overhead of an entry in CPython: the headers of two bytes objects, and a dict slot."""
_PUT: Final = b"\x01"
_DELETED: Final = b"\x00"
_MISSING: Final = cast(bytes, object())
"""Marks "not changed here", where None means "deleted here". Typed as bytes so that look-ups keep their type."""

_ReadMany = Callable[[Sequence[bytes]], list[bytes | None]]
_Entry = tuple[bytes, bytes | None]


class ChangeSet:
    """Reads see the attempt's own writes first. The backend does not change until `chunks` are applied to it.

    Changes stay in memory up to `memory_limit` bytes. Then they move to a scratch database below `spill_dir`, so that a
    batch may be much larger than memory. Only one thread may use a change set at a time.
    """

    __slots__ = ("_backend", "_bytes", "_index", "_indexed", "_limit", "_own", "_scratch", "_spill_dir")

    def __init__(self, backend: StateBackend, memory_limit: int, spill_dir: Path) -> None:
        self._backend = backend
        self._limit = memory_limit
        self._spill_dir = spill_dir
        self._own: dict[bytes, bytes | None] = {}
        self._bytes = 0
        self._index = SortedRuns()
        self._indexed = 0
        self._scratch: _Scratch | None = None

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, including the attempt's own writes, or None."""
        value = self._own.get(key, _MISSING)
        if value is not _MISSING:
            return value
        if self._scratch is not None:
            value = self._scratch.get(key)
            if value is not _MISSING:
                return value
        return self._backend.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, in the same order. Fastest if `keys` are in ascending order."""
        own, scratch = self._own, self._scratch
        if scratch is None and (not own or own.keys().isdisjoint(keys)):
            return self._backend.get_many(keys)
        values = list(map(own.get, keys, repeat(_MISSING)))
        if scratch is not None:
            self._fill(values, keys, scratch.get_many)
        self._fill(values, keys, self._backend.get_many)
        return values

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set `key` to `value`; None deletes it."""
        self._own[key] = value
        self._bytes += len(key) + _ENTRY_OVERHEAD + (len(value) if value else 0)
        if self._bytes > self._limit:
            self._relieve()

    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Put every pair. If a key comes twice, the later value wins."""
        self._own.update(zip(keys, values, strict=True))
        self._bytes += sum(map(len, keys)) + sum(map(len, filter(None, values))) + _ENTRY_OVERHEAD * len(keys)
        if self._bytes > self._limit:
            self._relieve()

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries whose key starts with `prefix`, ascending, as of this call. Later writes are not included."""
        return self.scan_range(prefix, prefix_end(prefix))

    def scan_range(self, start: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """The entries with start <= key < end, ascending, as of this call. Later writes are not included."""
        own = self._own_between(start, end)
        if self._scratch is not None:
            changed = _overlay(iter(own), self._scratch.scan(start, end))
        elif own:
            changed = iter(own)
        else:
            return self._backend.scan(start, end)
        return _present(_overlay(changed, self._backend.scan(start, end)))

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
        """The net changes in ascending key order, in chunks of bounded size. The value None means a delete."""
        if self._scratch is not None:
            self._spill()
            return self._scratch.chunks()
        own = self._own
        keys = sorted(own)
        slices = (keys[at : at + CHUNK_ENTRIES] for at in range(0, len(keys), CHUNK_ENTRIES))
        return (part for chunk in slices for part in halved(chunk, [own[key] for key in chunk]))

    def discard(self) -> None:
        """Drop every change and delete the scratch files. May be called more than once."""
        self._clear_own()
        if self._scratch is not None:
            self._scratch.destroy()
            self._scratch = None

    def __len__(self) -> int:
        """The number of changed keys."""
        if self._scratch is None:
            return len(self._own)
        return len(self._scratch) + self._scratch.count_unknown(list(self._own))

    @property
    def size_bytes(self) -> int:
        """The approximate size of the changes, in memory and on disk."""
        return self._bytes + (self._scratch.size_bytes if self._scratch is not None else 0)

    @property
    def spilled(self) -> bool:
        """Whether changes were moved to disk."""
        return self._scratch is not None

    def _fill(self, values: list[bytes | None], keys: Sequence[bytes], read: _ReadMany) -> None:
        missing = [at for at, value in enumerate(values) if value is _MISSING]
        if missing:
            for at, value in zip(missing, read([keys[at] for at in missing]), strict=True):
                values[at] = value

    def _relieve(self) -> None:
        # `_bytes` counts overwrites every time. The real size decides, so that one hot key never causes a spill.
        own = self._own
        held = sum(map(len, own)) + sum(map(len, filter(None, own.values()))) + _ENTRY_OVERHEAD * len(own)
        self._bytes = held
        if held > self._limit // 2:
            self._spill()

    def _spill(self) -> None:
        if self._scratch is None:
            self._scratch = _Scratch(self._spill_dir, self._limit)
        if self._own:
            self._scratch.write(self._own)
            self._clear_own()

    def _clear_own(self) -> None:
        self._own.clear()
        self._bytes = 0
        self._index.clear()
        self._indexed = 0

    def _own_between(self, start: bytes, end: bytes | None) -> list[_Entry]:
        own = self._own
        fresh = len(own) - self._indexed
        if fresh:
            # A dict keeps insertion order and no single entry is ever removed. So the last entries are those
            # since the last scan, and `put` does not need to maintain the index.
            self._index.add(islice(reversed(own), fresh))
            self._indexed = len(own)
        return [(key, own[key]) for key in self._index.between(start, end)]


class _Scratch:
    """Changes on disk: a RocksDB without a write-ahead log, deleted after the batch. The first byte marks a delete."""

    def __init__(self, parent: Path, memory_limit: int) -> None:
        self._folder = parent / f"spill-{uuid4().hex}"
        parent.mkdir(parents=True, exist_ok=True)
        buffer = min(max(memory_limit // 4, 1 << 20), 64 << 20)
        table = BlockBasedOptions()
        table.set_bloom_filter(10, False)
        options = Options(raw_mode=True)
        options.set_block_based_table_factory(table)
        options.set_write_buffer_size(buffer)
        options.set_max_write_buffer_number(2)
        options.set_compression_type(DBCompressionType.lz4())
        options.set_keep_log_file_num(1)
        self._unlogged = without_log()
        with disk_full_error(parent):
            self._db = Rdict(str(self._folder), options)
        self._count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes) -> bytes | None:
        tagged = cast("bytes | None", self._db.get(key))
        return _MISSING if tagged is None else _untag(tagged)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [_MISSING if tagged is None else _untag(tagged) for tagged in self._tagged(keys)]

    def count_unknown(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` have no entry here."""
        return self._tagged(keys).count(None)

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        keys = sorted(changes)
        with disk_full_error(self._folder.parent):
            for at in range(0, len(keys), CHUNK_ENTRIES):
                chunk = keys[at : at + CHUNK_ENTRIES]
                self._count += self.count_unknown(chunk)
                batch = WriteBatch(raw_mode=True)
                for key in chunk:
                    value = changes[key]
                    tagged = _DELETED if value is None else _PUT + value
                    batch.put(key, tagged)
                    self.size_bytes += len(key) + len(tagged)
                self._db.write(batch, self._unlogged)

    def scan(self, start: bytes, end: bytes | None) -> Iterator[_Entry]:
        # The iterator is created here and not at the first `next`, so that it does not see later writes.
        bounds = bounded(end)
        return _untagged(cast("Iterator[tuple[bytes, bytes]]", self._db.items(from_key=start, read_opt=bounds)), bounds)

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
        return chunked(self.scan(b"", None))

    def destroy(self) -> None:
        self._db.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tagged(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return cast("list[bytes | None]", self._db.get(list(keys))) if keys else []


def _untag(tagged: bytes) -> bytes | None:
    return None if tagged == _DELETED else tagged[1:]


def _untagged(
    items: Iterator[tuple[bytes, bytes]],
    bounds: ReadOptions,  # kept alive, because `items` points into it
) -> Iterator[_Entry]:
    for key, tagged in items:
        yield key, _untag(tagged)


def _overlay(newer: Iterator[_Entry], older: Iterator[_Entry] | Iterator[tuple[bytes, bytes]]) -> Iterator[_Entry]:
    """Merge two ascending streams. If both have a key, the newer entry wins."""
    above, below = next(newer, None), next(older, None)
    while above is not None and below is not None:
        if below[0] < above[0]:
            yield below
            below = next(older, None)
            continue
        if below[0] == above[0]:
            below = next(older, None)
        yield above
        above = next(newer, None)
    if above is not None:
        yield above
        yield from newer
    if below is not None:
        yield below
        yield from older


def _present(entries: Iterator[_Entry]) -> Iterator[tuple[bytes, bytes]]:
    return ((key, value) for key, value in entries if value is not None)
