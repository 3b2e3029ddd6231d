"""What combining rows before they travel costs a task, and what it saves the slot, without Spark: JSON.

Run it as `python bench/micro_combining.py [--rows N] [--table N] [--only NAME]`. Bids are skewed as in Nexmark: half of
them go to a few hot auctions and come from a few hot bidders. A batch has `--rows` bids, and a task combines tables of
`--table` rows. All figures are CPU seconds of one thread, best of `--repeat`, divided by the number of bids:

- `combine_ns`: the combiner, for each bid;
- `slot_raw_ns` and `slot_combined_ns`: `operator.run` with the bids themselves, and with the combined rows;
- `wire_raw_ns` and `wire_combined_ns`: the rows, written to an Arrow stream and read back, as a stand-in for the way to
  the slot, which takes longer; `bytes_raw` and `bytes_combined` are what it carries for each bid;
- `left`: the combined rows for each bid.

`--sweep` measures evenly distributed keys, more and more of them: it shows where combining stops to pay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strandline.operators.aggregate import functions as agg
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.combining import Combiner
from strandline.operators.windows.specs import SessionWindow, SlidingWindow, WindowSpec
from strandline.operators.windows.window_operator import WindowOperator
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema

INPUT = parse_schema("auction long, bidder long, price long, channel string, one int, t timestamp")
RECORD_BATCH = 10_000
SECONDS = 10
"""How much event time a batch covers."""
AGGREGATES = {"n": agg.count(), "total": agg.sum("price"), "highest": agg.max("price")}


def bids(rows: int) -> pa.Table:
    """A batch of bids: half of them for hot auctions, and three quarters of them by hot bidders."""
    random = np.random.default_rng(7)
    hot_auction = random.integers(0, 4, rows) * 100
    auctions = np.where(random.random(rows) < 0.5, hot_auction, random.integers(0, 20_000, rows))
    bidders = np.where(random.random(rows) < 0.75, random.integers(0, 4, rows) * 100, random.integers(0, 20_000, rows))
    times = np.sort(random.integers(0, SECONDS * 1_000_000, rows)) + random.integers(0, 100_000, rows)
    channel = pa.array([f"channel-{number}" for number in range(8)]).take(pa.array(random.integers(0, 8, rows)))
    return pa.table(
        {
            "auction": auctions,
            "bidder": bidders,
            "price": random.integers(1, 10_000_000, rows),
            "channel": channel,
            "one": np.zeros(rows, np.int32),
            "t": pa.array(times.view("M8[us]"), pa.timestamp("us", "UTC")),
        }
    )


def keyed(rows: pa.Table, key: str) -> pa.Table:
    """The rows with their key group and subtask, as a relay has them."""
    numbers = rows.column(key).to_numpy().astype(np.int64)
    groups = (((numbers + 1) * np.int64(0x5851F42D4C957F2D)) >> 40) % 128
    added = rows.append_column(KEY_GROUP_COLUMN, pa.array(groups, pa.int32()))
    return added.append_column(SUBTASK_COLUMN, pa.array(groups % 2, pa.int32()))


def window(spec: WindowSpec, key: str) -> WindowOperator:
    """A window of bids."""
    return WindowOperator("w", [key], INPUT, spec, "t", AGGREGATES)


STEPS: dict[str, Callable[[], Operator]] = {
    "aggregate per auction": lambda: AggregateOperator("a", ["auction"], INPUT, AGGREGATES),
    "aggregate with an average": lambda: AggregateOperator("a", ["auction"], INPUT, {"mean": agg.avg("price")}),
    "tumbling 10 s, one key": lambda: window(SlidingWindow(10_000, 10_000), "one"),
    "tumbling 10 s per auction": lambda: window(SlidingWindow(10_000, 10_000), "auction"),
    "sliding 10 s by 1 s per auction": lambda: window(SlidingWindow(10_000, 1000), "auction"),
    "session 10 s per bidder": lambda: window(SessionWindow(10_000), "bidder"),
    "session 1 s per bidder": lambda: window(SessionWindow(1000), "bidder"),
}


class Clock:
    """The least CPU time of several runs, for each of the rows."""

    def __init__(self, rows: int, repeat: int) -> None:
        self._rows = rows
        self._repeat = repeat

    def nanoseconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes, divided by the rows."""
        spent = []
        for _ in range(self._repeat):
            started = time.thread_time()
            work()
            spent.append(time.thread_time() - started)
        return round(min(spent) / self._rows * 1e9, 1)


def measure(operator: Operator, rows: pa.Table, table: int, clock: Clock) -> dict[str, float]:
    """The figures of one step."""
    combiner = operator.combiner()
    assert combiner is not None
    operator.open(SubtaskInfo("bench", operator.uid, 0, 1, 128))
    parts = [rows.slice(begin, table) for begin in range(0, rows.num_rows, table)]
    sent = [part for rows in combined(combiner, parts) for part in rows.drop_columns([SUBTASK_COLUMN]).to_batches()]
    raw = rows.drop_columns([SUBTASK_COLUMN]).to_batches(max_chunksize=RECORD_BATCH)
    ours = bytes_of(sent)
    theirs = bytes_of(raw)
    return {
        "left": round(sum(part.num_rows for part in sent) / rows.num_rows, 4),
        "combine_ns": clock.nanoseconds(lambda: combined(combiner, parts)),
        "slot_raw_ns": clock.nanoseconds(lambda: run(operator, raw)),
        "slot_combined_ns": clock.nanoseconds(lambda: run(operator, sent)),
        "wire_raw_ns": clock.nanoseconds(lambda: read(bytes_of(raw))),
        "wire_combined_ns": clock.nanoseconds(lambda: read(bytes_of(sent))),
        "bytes_raw": round(theirs.size / rows.num_rows, 1),
        "bytes_combined": round(ours.size / rows.num_rows, 1),
    }


def combined(combiner: Combiner, parts: list[pa.Table]) -> list[pa.Table]:
    """The combined rows of all parts."""
    made = [combiner.combine(part, None) for part in parts]
    assert all(some.raw is None for some in made)
    return [some.combined for some in made if some.combined is not None]


def run(operator: Operator, rows: list[pa.RecordBatch]) -> None:
    """One batch, over an empty state."""
    with tempfile.TemporaryDirectory() as spill:
        changes = ChangeSet(HeapBackend(), 1 << 30, Path(spill))
        for _ in operator.run(iter(rows), changes, BatchInfo(1, 0, None, None)):
            pass
        changes.discard()


def bytes_of(rows: list[pa.RecordBatch]) -> pa.Buffer:
    """The rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows[0].schema) as writer:
        for part in rows:
            writer.write_batch(part)
    return sink.getvalue()


def read(stream: pa.Buffer) -> int:
    """Read all rows, as the slot does."""
    return sum(pc.count(part.column(0)).as_py() for part in pa.ipc.open_stream(stream))


def sweep(rows: pa.Table, table: int, clock: Clock) -> dict[str, dict[str, float]]:
    """Running aggregates and sessions over more and more keys."""
    random = np.random.default_rng(11)
    figures = {}
    for share in (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95):
        # So many keys are drawn that about this share of a table's rows are the first of their key.
        keys = next(n for n in np.geomspace(10, 1e8, 400).astype(int) if n * -np.expm1(-table / n) >= share * table)
        drawn = rows.set_column(0, "auction", pa.array(random.integers(0, keys, rows.num_rows)))
        drawn = drawn.set_column(1, "bidder", drawn.column("auction"))
        for name in ("aggregate per auction", "tumbling 10 s per auction", "session 10 s per bidder"):
            some = measure(STEPS[name](), keyed(drawn, "auction"), table, clock)
            before = some["slot_raw_ns"] + some["wire_raw_ns"]
            after = some["combine_ns"] + some["slot_combined_ns"] + some["wire_combined_ns"]
            figures[f"{name}, {share:.0%} left"] = some | {"all_cpu_saved_ns": round(before - after, 1)}
    return figures


def main() -> None:
    """Parse options, measure, print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--table", type=int, default=65_536)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=list(STEPS))
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    rows, clock = bids(args.rows), Clock(args.rows, args.repeat)
    figures: dict[str, Any] = {"rows": args.rows, "table": args.table}
    if args.sweep:
        figures |= sweep(rows, args.table, clock)
    else:
        for name, make in STEPS.items():
            if args.only in (None, name):
                operator = make()
                figures[name] = measure(operator, keyed(rows, operator.key_columns[0]), args.table, clock)
    for name, figure in figures.items():
        print(json.dumps({name: figure}))


if __name__ == "__main__":
    main()
