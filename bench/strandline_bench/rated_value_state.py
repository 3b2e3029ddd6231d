"""The ValueState workload at a fixed rate: mostly new keys, each with a value that is read, then updated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

import strandline as sl
from strandline.errors import ConfigError
from strandline_bench.events import Int64s
from strandline_bench.rated import Pace, RatedSource, Rows, mixed
from strandline_bench.rated_run import RatedWork
from strandline_bench.value_state import CountAndKeep
from strandline_bench.workload import SEEN, WrongResultError, value_pool

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OLD_EVERY: Final = 10
"""One row in this many has an old key; every other row has a new key."""
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_GATHERED: Final = np.uint64(pow(int(_SPREAD), -1, 1 << 64))


def rated_value_state(value_bytes: int) -> RatedWork:
    """The workload with values of that size."""
    if value_bytes < SEEN:
        raise ConfigError(f"--value-bytes must be at least {SEEN} with --changelog: values are told apart by that much")

    def check(output: Path, rows: int, pace: Pace, who: str) -> None:
        check_kept(output, rows, value_bytes, who)

    return RatedWork("value-state", ValueSource, {"value_bytes": value_bytes}, _keep, check, most_full_bytes=1.3)


def _keep(job: sl.Job, frame: DataFrame) -> sl.Stream:
    return job.source(frame).key_by("key").process(CountAndKeep(), "key long, n long, before string")


class ValueSource(RatedSource):
    """Rows of a key and a value."""

    @classmethod
    def name(cls) -> str:
        return "strandline-bench-value-state"

    def schema(self) -> str:
        return "key long, value string"

    def rows(self) -> Rows:
        return ValueRows(int(self.options["value_bytes"]))


@dataclass(frozen=True, slots=True)
class ValueRows:
    """Keys that are spread over all numbers, so that new ones come between old ones; values of random characters."""

    value_bytes: int

    def batch(self, numbers: Int64s, arrivals_us: Int64s) -> pa.RecordBatch:
        """The rows of these numbers."""
        pool = _pool(self.value_bytes)
        values = pool.take(pa.array(_places(numbers, len(pool))))
        return pa.record_batch({"key": keys_of(origins(numbers)), "value": values})


def origins(numbers: Int64s) -> Int64s:
    """For each row, the number of the first row with the same key; mostly the row itself."""
    earlier = (mixed(numbers) % np.maximum(numbers, 1).astype(np.uint64)).astype(np.int64)
    earlier -= _is_old(earlier)
    return np.where(_is_old(numbers), earlier, numbers)


def keys_of(first_rows: Int64s) -> Int64s:
    """The keys that come first in these rows."""
    keys: Int64s = (first_rows.astype(np.uint64) * _SPREAD).view(np.int64)
    return keys


def origins_of_keys(keys: Int64s) -> Int64s:
    """The rows that these keys come first in."""
    first_rows: Int64s = (keys.astype(np.uint64) * _GATHERED).view(np.int64)
    return first_rows


def check_kept(output: Path, rows: int, value_bytes: int, who: str) -> None:
    """Compare `key, n, before` rows, one per key and batch, with the first `rows` rows of the source.

    Batches may have been cut anywhere, and have no order inside: `n` tells which rows of its key a batch had, and
    `before` is the value of one of those that the batch before it had. Raises `WrongResultError`.
    """
    found = ds.dataset(output, format="parquet").to_table(columns=["key", "n", "before"]).combine_chunks()
    firsts = origins(np.arange(rows))
    counts = np.bincount(firsts, minlength=rows)
    keys, n = origins_of_keys(found.column("key").to_numpy()), found.column("n").to_numpy()
    order = np.lexsort((n, keys))
    keys, n = keys[order], n[order]
    begins = np.diff(keys, prepend=-1) != 0
    ends = np.append(begins[1:], True)[: len(keys)]
    wanted = np.flatnonzero(counts)
    if not np.array_equal(keys[ends], wanted):
        common = len(np.intersect1d(keys[ends], wanted, assume_unique=True))
        raise WrongResultError(
            f"{who}: {np.count_nonzero(ends)} keys were put out, the input has {len(wanted)}, {common} are in both"
        )
    before_n = np.where(begins, 0, np.append(0, n[:-1])[: len(n)])
    wrong = int(np.count_nonzero(n[ends] != counts[wanted]) + np.count_nonzero(n <= before_n))
    if wrong:
        raise WrongResultError(f"{who}: n is wrong for {wrong} of {len(n)} rows")
    wrong = _wrong_values(found.column("before").take(pa.array(order)), keys, before_n, begins, firsts, value_bytes)
    if wrong:
        raise WrongResultError(f"{who}: {wrong} of {len(n)} rows show another value than was in state")


def _wrong_values(
    before: pa.ChunkedArray, keys: Int64s, before_n: Int64s, begins: Int64s, firsts: Int64s, value_bytes: int
) -> int:
    """How many values from state do not occur in the previous batch of their key."""
    pool = _pool(value_bytes)
    heads = pc.utf8_slice_codeunits(pool, 0, SEEN)
    places = pc.fill_null(pc.index_in(before, heads), -1).to_numpy()
    wrong = int(pc.sum(pc.not_equal(before.filter(pa.array(begins)), "")).as_py() or 0)
    later = np.flatnonzero(~begins)
    if not len(later):
        return wrong
    by_key = np.argsort(firsts, kind="stable")
    starts = np.searchsorted(firsts[by_key], keys[later])
    # The batch before had the key's rows from `since` up to `before_n`.
    since = before_n[later - 1]
    sizes = before_n[later] - since
    cuts = np.cumsum(sizes) - sizes
    candidates = np.repeat(starts + since - cuts, sizes) + np.arange(sizes.sum())
    hits = _places(by_key[candidates], len(pool)) == np.repeat(places[later], sizes)
    return wrong + int(np.count_nonzero(~np.logical_or.reduceat(hits, cuts)))


def _is_old(numbers: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    old: np.ndarray[tuple[int], np.dtype[np.bool_]] = numbers % OLD_EVERY == OLD_EVERY - 1
    return old


def _places(numbers: Int64s, size: int) -> Int64s:
    """Where in the pool the values of these rows are."""
    return (mixed(numbers) % np.uint64(size)).astype(np.int64)


@cache
def _pool(value_bytes: int) -> pa.StringArray:
    return value_pool(np.random.default_rng(7), value_bytes)
