"""Compares our HyperLogLog sketches with those of the `datasketches` package, in the shapes of work of an operator.

    pip install datasketches
    python bench/micro_sketches.py

A batch of rows is added to the stored sketches of its keys, and the new estimates are read. A sliding window merges the
stored sketches of its panes. Each figure is the CPU time of the best of three runs.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from strandline.operators.aggregate.accumulators import Groups
from strandline.operators.aggregate.hyperloglog import ApproxDistinct

ROWS = 200_000
SHAPES = {"100,000 keys": 100_000, "2,000 keys": 2_000, "20 keys": 20}
PANES = 10


def main() -> None:
    """Print a table of times in milliseconds, and of stored bytes per key."""
    print(f"{'work':34} {'ours, ms':>10} {'theirs, ms':>11} {'ours, B/key':>12} {'theirs, B/key':>14}")
    rng = np.random.default_rng(7)
    for label, keys in SHAPES.items():
        for kind in ("long", "string"):
            batches = [_column(rng.integers(0, 1 << 40, ROWS), kind) for _ in range(3)]
            groups = _groups(rng.integers(0, keys, ROWS), keys)
            ours, our_size = _our_batches(batches, groups)
            theirs, their_size = _their_batches(batches, groups)
            print(
                f"{f'add a batch, {kind}, {label}':34} {ours:10.0f} {theirs:11.0f} {our_size:12.0f} {their_size:14.0f}"
            )
    for keys, values in ((20_000, 10), (1_000, 5_000)):
        ours, theirs = _merges(rng, keys, values)
        print(f"{f'merge {PANES} panes of {values:,}, {keys:,} keys':34} {ours:10.0f} {theirs:11.0f}")


def _our_batches(batches: list[Any], groups: Groups) -> tuple[float, float]:
    sketch = ApproxDistinct("n", "x")
    known = np.ones(len(groups), np.bool_)
    stored = sketch.partial([batches[0]], groups)

    def add() -> list[Any]:
        merged = sketch.combined(stored, sketch.partial([batches[1]], groups), known)
        sketch.shown(merged)
        return merged

    took, merged = _best(add)
    return took, float(merged[0].nbytes) / len(groups)


def _their_batches(batches: list[Any], groups: Groups) -> tuple[float, float]:
    package = importlib.import_module("datasketches")
    kind, edges = package.tgt_hll_type.HLL_8, groups.edges.tolist()
    stored: list[bytes | None] = [None] * len(groups)

    def add(column: Any) -> list[bytes]:
        values = column.take(pa.array(groups.order)).to_pylist()
        made = []
        for group, data in enumerate(stored):
            sketch = package.hll_sketch(12, kind) if data is None else package.hll_sketch.deserialize(data)
            update = sketch.update
            for value in values[edges[group] : edges[group + 1]]:
                update(value)
            made.append(sketch.serialize_compact())
            sketch.get_estimate()
        return made

    stored = list(add(batches[0]))
    took, merged = _best(lambda: add(batches[1]))
    return took, sum(map(len, merged)) / len(groups)


def _merges(rng: np.random.Generator, keys: int, values: int) -> tuple[float, float]:
    package = importlib.import_module("datasketches")
    kind, sketch = package.tgt_hll_type.HLL_8, ApproxDistinct("n", "x")
    pool = min(keys, 200)  # that many different sketches are made, and used again for the other keys
    numbers = rng.integers(0, 1 << 40, pool * values)
    (made,) = sketch.partial([pa.array(numbers)], _groups(np.repeat(np.arange(pool), values), pool))
    ours = made.take(pa.array(np.arange(keys * PANES) % pool))
    theirs = []
    for at in range(pool):
        one = package.hll_sketch(12, kind)
        for number in numbers[at * values : (at + 1) * values].tolist():
            one.update(number)
        theirs.append(one.serialize_compact())
    groups = Groups(np.arange(keys * PANES), np.arange(0, keys * PANES + 1, PANES))

    def merge_theirs() -> list[bytes]:
        merged = []
        for key in range(keys):
            union = package.hll_union(12)
            for pane in range(PANES):
                union.update(package.hll_sketch.deserialize(theirs[(key * PANES + pane) % pool]))
            result = union.get_result(kind)
            merged.append(result.serialize_compact())
            result.get_estimate()
        return merged

    return _best(lambda: sketch.shown(sketch.merge([ours], groups)))[0], _best(merge_theirs)[0]


def _column(numbers: Any, kind: str) -> Any:
    column = pa.array(numbers)
    return column if kind == "long" else column.cast(pa.string())


def _groups(ids: Any, keys: int) -> Groups:
    """Rows by group; groups without a row are left out."""
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    return Groups(order, np.append(starts, len(order)))


def _best(call: Callable[[], Any]) -> tuple[float, Any]:
    """The milliseconds of the fastest of three calls, and what it returned."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        made = call()
        times.append(1000 * (time.process_time() - begin))
    return min(times), made


if __name__ == "__main__":
    main()
