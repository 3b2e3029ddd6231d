"""The generated input of a benchmark, and its expected results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from strandline.errors import StrandlineError

SCHEMA: Final = "key long, x long, value string"
HOT_KEYS: Final = 4
"""How many keys are hot where keys are skewed, as the hot auctions of Nexmark."""
SEEN: Final = 16
"""How many characters of the value that was in state an output row shows."""
_FIRST_SECOND: Final = 1_700_000_000
_ALPHABET: Final = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)


class WrongResultError(StrandlineError):
    """A benchmark's output is not what a batch computation over its input gives."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of input; a streaming query that takes one file a batch reads them by `number`."""

    number: int
    path: Path
    rows: int


def value_pool(rng: np.random.Generator, value_bytes: int) -> pa.StringArray:
    """A pool of random strings; rows take their values from it."""
    size = max(256, min(1 << 16, (16 << 20) // max(value_bytes, 1)))
    characters = _ALPHABET[rng.integers(0, 64, size * value_bytes, dtype=np.uint8)]
    offsets = np.arange(size + 1, dtype=np.int32) * value_bytes
    return pa.StringArray.from_buffers(size, pa.py_buffer(offsets), pa.py_buffer(characters))


class Workload:
    """Makes input files. Keys are given; the value of a row follows from its key and the file it is in.

    Values are random characters (6 bits each), so that compression cannot make the state much smaller.
    """

    def __init__(self, folder: Path, keys: int, value_bytes: int, seed: int = 7) -> None:
        self.keys = keys
        self._folder = folder
        self._rng = np.random.default_rng(seed)
        self._next = 0
        self._pool = value_pool(self._rng, value_bytes)
        self._heads = pc.utf8_slice_codeunits(self._pool, 0, SEEN)
        folder.mkdir(parents=True, exist_ok=True)

    def uniform(self, rows: int) -> InputFile:
        """A file of rows whose keys are drawn evenly from all keys."""
        return self.of_keys(self._rng.integers(0, self.keys, rows))

    def skewed(self, rows: int, hot: float) -> InputFile:
        """A file of rows of which a share has one of the `HOT_KEYS` keys, and the others any key."""
        keys = self._rng.integers(0, self.keys, rows)
        keys[self._rng.random(rows) < hot] %= HOT_KEYS
        return self.of_keys(keys)

    def distinct(self, count: int) -> InputFile:
        """A file with one row for each of `count` keys, drawn without replacement."""
        return self.of_keys(self._rng.choice(self.keys, count, replace=False))

    def of_keys(self, keys: np.ndarray[Any, np.dtype[np.int64]]) -> InputFile:
        """A file with one row for each entry of `keys`."""
        number, self._next = self._next, self._next + 1
        table = pa.table(self._columns(keys, number))
        path = self._folder / f"part-{number:06d}.parquet"
        # Several row groups, so that a file can be read by several tasks.
        pq.write_table(table, path, row_group_size=max(1, -(-len(keys) // 4)))
        # Spark's file source takes older files first.
        os.utime(path, (_FIRST_SECOND + number, _FIRST_SECOND + number))
        return InputFile(number, path, len(keys))

    def _columns(self, keys: np.ndarray[Any, np.dtype[np.int64]], number: int) -> dict[str, Any]:
        """The columns of file `number`; a workload with more of them adds its own."""
        return {
            "key": keys,
            "x": self._rng.integers(0, 1000, len(keys)),
            "value": self._pool.take(pa.array(self._places(keys, np.full(len(keys), number)))),
        }

    def heads(self, keys: Any, numbers: Any) -> pa.Array:
        """The first characters of the values of `keys` in the files `numbers`; empty where the number is negative."""
        heads = self._heads.take(pa.array(self._places(keys, numbers)))
        return pc.if_else(pa.array(numbers >= 0), heads, "")

    def _places(self, keys: Any, numbers: Any) -> Any:
        mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += numbers.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        return ((mixed >> np.uint64(32)) % np.uint64(len(self._pool))).astype(np.int64)


def offer(files: Iterable[InputFile], folder: Path) -> None:
    """Put files into a folder that a query reads, each at once and whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        os.link(file.path, folder / file.path.name)


class Expected:
    """What a query over some input files must have put out, worked out from the files themselves."""

    def __init__(self, workload: Workload, files: Sequence[InputFile]) -> None:
        size = workload.keys
        self._workload = workload
        self.n = np.zeros(size, np.int64)
        self.s = np.zeros(size, np.int64)
        self.batches = np.zeros(size, np.int64)
        """The number of batches in which a key occurs."""
        self._before = np.full(size, -1, np.int64)
        last = np.full(size, -1, np.int64)
        for file in files:
            table = pq.read_table(file.path, columns=["key", "x"])
            keys = table.column("key").to_numpy()
            counts = np.bincount(keys, minlength=size)
            here = counts > 0
            self.n += counts
            self.s += np.bincount(keys, weights=table.column("x").to_numpy(), minlength=size).astype(np.int64)
            self.batches += here
            self._before[here] = last[here]
            last[here] = file.number

    def check_aggregate(self, output: Path, who: str) -> None:
        """Compare `key, n, s` rows, one per key and batch. Raises `WrongResultError`."""
        final = self._final(output, who)
        self._same(final.column("s").to_numpy(), self.s[self.n > 0], "s", who)

    def check_process(self, output: Path, who: str) -> None:
        """Compare `key, n, before` rows, one per key and batch. Raises `WrongResultError`."""
        final = self._final(output, who)
        keys = np.flatnonzero(self.n)
        wanted = self._workload.heads(keys, self._before[keys])
        wrong = pc.sum(pc.not_equal(final.column("before").combine_chunks(), wanted)).as_py()
        if wrong:
            raise WrongResultError(f"{who}: {wrong} of {len(keys)} keys read another value from state than was written")

    def _final(self, output: Path, who: str) -> pa.Table:
        """The last row of every key, in the order of keys; how many rows there are, and `n`, are checked already."""
        rows = ds.dataset(output, format="parquet").to_table()
        keys = rows.column("key").to_numpy()
        self._same(np.bincount(keys, minlength=len(self.n)), self.batches, "rows put out", who)
        order = np.lexsort((rows.column("n").to_numpy(), keys))
        ends = np.flatnonzero(np.diff(keys[order], append=-1))
        final = rows.take(pa.array(order[ends]))
        self._same(final.column("n").to_numpy(), self.n[self.n > 0], "n", who)
        return final

    @staticmethod
    def _same(found: Any, wanted: Any, what: str, who: str) -> None:
        if len(found) != len(wanted):
            raise WrongResultError(f"{who}: {what} for {len(found)} keys, but the input has {len(wanted)}")
        wrong = int(np.count_nonzero(found != wanted))
        if wrong:
            raise WrongResultError(f"{who}: {what} is wrong for {wrong} of {len(wanted)} keys")
