"""The rate-driven benchmark: rows follow from their numbers, latencies are exact, and wrong results are found."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import ConfigError
from strandline_bench import changelog, plot
from strandline_bench.cli import app
from strandline_bench.rated import BURST_ROWS, Gate, Pace, RatedReader, Rows
from strandline_bench.rated_run import Mode, Settings, Timeline, covering, latencies_ms
from strandline_bench.rated_value_state import ValueRows, check_kept, keys_of, origins, origins_of_keys
from strandline_bench.rated_window import SLIDE_MS, WINDOW_MS, WindowRows, check_windows, drawn_keys
from strandline_bench.workload import SEEN, WrongResultError
from tests.examples import examples

START_US = 1_700_000_000_123_000


# --- the source ----------------------------------------------------------------------------------------


@given(st.integers(1, 3_000_000), st.integers(0, 10_000_000))
def test_a_row_has_arrived_exactly_from_its_time_on(rate: int, number: int) -> None:
    pace = Pace(START_US, rate)
    arrival = int(pace.arrivals_us(np.array([number]))[0])
    assert pace.arrived(arrival) > number
    assert pace.arrived(arrival - 1) <= number
    assert pace.arrived(START_US - 1) == 0


class TestReader:
    def reader(self, gate: Path, rows: Rows, rate: int = 1000, paced: bool = True) -> RatedReader:
        return RatedReader(rows, gate, rate, paced, parallelism=3)

    def all_rows(self, reader: RatedReader, first: int, end: int) -> pa.Table:
        parts = reader.partitions({"row": first}, {"row": end})
        return pa.Table.from_batches([batch for part in parts for batch in reader.read(part)])

    def test_nothing_comes_before_the_gate_is_opened(self, tmp_path: Path) -> None:
        reader = self.reader(tmp_path / "gate", WindowRows(10))
        assert reader.latestOffset(reader.initialOffset(), None) == {"row": 0}

    def test_rows_arrive_with_time_and_no_more_than_were_let_in(self, tmp_path: Path) -> None:
        gate = Gate(tmp_path / "gate")
        reader = self.reader(tmp_path / "gate", WindowRows(10))
        now = time.time_ns() // 1000
        gate.open(50_000, now - 2_000_000)
        assert 2000 <= reader.latestOffset({"row": 0}, None)["row"] < 50_000
        gate.open(500, now - 2_000_000)
        assert reader.latestOffset({"row": 0}, None) == {"row": 500}
        gate.open(600, now - 2_000_000)
        assert reader.latestOffset({"row": 500}, None) == {"row": 600}

    def test_rows_that_do_not_wait_come_in_bursts(self, tmp_path: Path) -> None:
        Gate(tmp_path / "gate").open(BURST_ROWS + 7)
        reader = self.reader(tmp_path / "gate", WindowRows(10), paced=False)
        assert reader.latestOffset({"row": 0}, None) == {"row": BURST_ROWS}
        assert reader.latestOffset({"row": BURST_ROWS}, None) == {"row": BURST_ROWS + 7}

    @pytest.mark.parametrize("rows", [ValueRows(40), WindowRows(10)], ids=["value-state", "window"])
    def test_rows_are_the_same_however_they_are_cut(self, rows: Rows, tmp_path: Path) -> None:
        Gate(tmp_path / "gate").open(1_000_000, START_US)
        whole = self.all_rows(self.reader(tmp_path / "gate", rows), 0, 100_000)
        again = self.reader(tmp_path / "gate", rows)
        cuts = (0, 1, 2, 70_001, 70_001, 100_000)
        parts = [self.all_rows(again, first, end) for first, end in pairwise(cuts) if first < end]
        assert pa.concat_tables(parts).equals(whole)
        assert again.partitions({"row": 5}, {"row": 5}) == []

    def test_event_times_are_those_of_arrival(self, tmp_path: Path) -> None:
        Gate(tmp_path / "gate").open(1_000_000, START_US)
        rows = self.all_rows(self.reader(tmp_path / "gate", WindowRows(10), rate=3), 5, 9)
        assert rows.column("ts").cast(pa.int64()).to_pylist() == [START_US + n * 1_000_000 // 3 for n in range(5, 9)]
        assert rows.column("ms").to_pylist() == [(START_US + n * 1_000_000 // 3) // 1000 for n in range(5, 9)]


def test_nine_of_ten_keys_are_new_and_the_others_came_before() -> None:
    firsts = origins(np.arange(100_000))
    assert len(np.unique(firsts)) == 90_000
    later = firsts != np.arange(100_000)
    assert (firsts[later] < np.arange(100_000)[later]).all()
    assert (origins(firsts) == firsts).all()
    keys = keys_of(firsts)
    assert (origins_of_keys(keys) == firsts).all()
    assert 0.45 < np.mean(np.sort(np.unique(keys)) < 0) < 0.55


def test_values_differ_and_have_their_size() -> None:
    values = ValueRows(100).batch(np.arange(1000), np.arange(1000)).column("value")
    assert {len(value) for value in values.to_pylist()} == {100}
    assert len(set(values.to_pylist())) > 950


# --- what must come out --------------------------------------------------------------------------------


def written(folder: Path, columns: dict[str, list[Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "part-0.parquet")
    return folder


class TestKeptValues:
    """A simple model of the job: batches cut anywhere, rows of a batch in any order."""

    def output(self, rows: int, cuts: list[int], seed: int) -> dict[str, list[Any]]:
        made = ValueRows(40).batch(np.arange(rows), np.arange(rows)).to_pylist()
        rng = np.random.default_rng(seed)
        state: dict[int, tuple[int, str]] = {}
        output: list[tuple[int, int, str]] = []
        edges = [0, *sorted(cuts), rows]
        for first, end in pairwise(edges):
            before: dict[int, str] = {}
            for at in rng.permutation(np.arange(first, end)):
                key, value = made[at]["key"], made[at]["value"]
                n, old = state.get(key, (0, ""))
                before.setdefault(key, old)
                state[key] = (n + 1, value)
            output += [(key, state[key][0], old[:SEEN]) for key, old in before.items()]
        rng.shuffle(output)
        return {
            name: list(column) for name, column in zip(("key", "n", "before"), zip(*output, strict=True), strict=True)
        }

    @settings(max_examples=examples(25), deadline=None)
    @given(st.lists(st.integers(0, 400), max_size=6), st.integers(0, 5))
    def test_right_rows_pass_wherever_batches_are_cut(self, cuts: list[int], seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            check_kept(written(Path(folder) / "out", self.output(400, cuts, seed)), 400, 40, "test")

    def wrong(self, tmp_path: Path, **changes: Any) -> None:
        columns = self.output(400, [100, 200, 300], 1)
        at = columns["n"].index(2)
        for name, value in changes.items():
            columns[name][at] = value
        check_kept(written(tmp_path / "out", columns), 400, 40, "test")

    def test_a_lost_update_is_found(self, tmp_path: Path) -> None:
        with pytest.raises(WrongResultError, match="n is wrong"):
            self.wrong(tmp_path, n=1)

    def test_a_value_of_another_row_is_found(self, tmp_path: Path) -> None:
        other = ValueRows(40).batch(np.array([399]), np.array([0])).column("value")[0].as_py()[:SEEN]
        with pytest.raises(WrongResultError, match=r"1 of .* rows show another value"):
            self.wrong(tmp_path, before=other)

    def test_a_value_where_there_was_none_is_found(self, tmp_path: Path) -> None:
        columns = self.output(400, [200], 1)
        columns["before"][columns["n"].index(1)] = "x" * SEEN
        with pytest.raises(WrongResultError, match="show another value"):
            check_kept(written(tmp_path / "out", columns), 400, 40, "test")

    def test_a_lost_row_is_found(self, tmp_path: Path) -> None:
        columns = self.output(400, [200], 1)
        with pytest.raises(WrongResultError, match="keys were put out, the input has 369"):
            check_kept(written(tmp_path / "out", columns), 410, 40, "test")

    def test_a_row_put_out_twice_is_found(self, tmp_path: Path) -> None:
        columns = {name: [*column, column[0]] for name, column in self.output(400, [200], 1).items()}
        with pytest.raises(WrongResultError, match="n is wrong"):
            check_kept(written(tmp_path / "out", columns), 400, 40, "test")


class TestWindows:
    pace = Pace(START_US, 40)
    rows, keys = 700, 30

    def output(self) -> dict[str, list[int]]:
        """One window at a time, in plain Python."""
        numbers = np.arange(self.rows)
        times = [us // 1000 for us in self.pace.arrivals_us(numbers).tolist()]
        counts: Counter[tuple[int, int]] = Counter()
        for key, ms in zip(drawn_keys(numbers, self.keys).tolist(), times, strict=True):
            for start in range(0, WINDOW_MS, SLIDE_MS):
                counts[key, ms // SLIDE_MS * SLIDE_MS - start] += 1
        closed = {window: n for window, n in counts.items() if window[1] + WINDOW_MS <= times[-1]}
        return {
            "key": [key for key, _start in closed],
            "window_start": [start for _key, start in closed],
            "n": list(closed.values()),
        }

    def check(self, folder: Path, columns: dict[str, Any]) -> None:
        check_windows(written(folder / "out", columns), self.rows, self.keys, self.pace, "test")

    def test_right_windows_pass_as_numbers_and_as_timestamps(self, tmp_path: Path) -> None:
        columns: dict[str, Any] = self.output()
        assert len(columns["n"]) > 300
        assert max(columns["n"]) > 1
        self.check(tmp_path, columns)
        starts = pa.array(columns["window_start"], pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
        self.check(tmp_path, {**columns, "window_start": starts})

    def test_a_wrong_count_is_found(self, tmp_path: Path) -> None:
        columns = self.output()
        columns["n"][3] += 1
        with pytest.raises(WrongResultError, match="n is wrong for 1 of"):
            self.check(tmp_path, columns)

    @pytest.mark.parametrize("change", ["lost", "twice"])
    def test_a_window_that_is_lost_or_there_twice_is_found(self, change: str, tmp_path: Path) -> None:
        columns = {
            name: column[1:] if change == "lost" else [*column, column[0]] for name, column in self.output().items()
        }
        with pytest.raises(WrongResultError, match="windows were put out"):
            self.check(tmp_path, columns)


# --- the figures ---------------------------------------------------------------------------------------


def checkpoint(number: int, batch: int, end: float, duration_ms: float = 5.0) -> CheckpointStats:
    return CheckpointStats(
        id=number,
        status="completed",
        kind="checkpoint",
        batch_id=first_batch(3) + batch,
        trigger_time=end - duration_ms / 1000,
        end_to_end_ms=duration_ms,
        sync_ms=1.0,
        async_ms=1.0,
        start_delay_ms=0.0,
        alignment_ms=0.0,
        alignment_bytes=0,
        barrier_to_completed_ms=duration_ms,
        checkpointed_bytes=10,
        full_bytes=100,
    )


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.data())
def test_latency_is_from_arrival_to_the_first_checkpoint_that_covers_the_row(
    sizes: list[int], data: st.DataObject
) -> None:
    pace = Pace(START_US, 10)
    rows = sum(sizes)
    ends = dict(enumerate(np.cumsum(sizes).tolist()))
    # Some batches have no checkpoint of their own; the last one has.
    batches = sorted({*data.draw(st.sets(st.sampled_from(sorted(ends)))), len(sizes) - 1})
    taken = [checkpoint(at, batch, START_US / 1e6 + 100 + at) for at, batch in enumerate(batches)]
    found = latencies_ms(np.arange(rows), pace, *covering(taken, ends))
    for number in range(rows):
        first = next(at for at, batch in enumerate(batches) if ends[batch] > number)
        assert found[number] == pytest.approx((100 + first - number / 10) * 1000, abs=1.0)


def measured(p50: float, p99: float, full: float, ready_s: float, rows_per_s: float) -> dict[str, Any]:
    """The figures of a mode, in the form in which a run gives them."""
    spread = {"p50": p50, "p90": p99, "p99": p99, "p99.9": p99, "max": p99}
    sizes = dict.fromkeys(spread, full)
    return {
        "start_s": 1.0,
        "records": 1000,
        "seconds": 10.0,
        "rows_per_s": rows_per_s,
        "lag_s": 0.5,
        "checkpoints": {
            "completed": 20,
            "failed": 0,
            "barrier_to_completed_ms": spread,
            "end_to_end_ms": spread,
            "checkpointed_bytes": sizes,
            "full_bytes": sizes,
            "full_bytes_after_warm_up": sizes,
        },
        "row_latency_ms": spread,
        "batch_ms": spread,
        "changelog": None,
        "recovery": {"ready_s": ready_s, "first_rows_s": ready_s + 1, "all": []},
        "verified": True,
    }


class TestComparison:
    modes: dict[Mode, dict[str, Any]] = {
        "on": measured(20.0, 90.0, 2.6e6, 1.1, 980.0),
        "off": measured(100.0, 300.0, 2e6, 1.0, 1000.0),
    }

    def test_ratios_are_of_the_mode_with_the_changelog_to_the_one_without(self) -> None:
        found = changelog.ratios(self.modes)
        assert found["checkpoint_p99_ms"] == 0.3
        assert found["full_bytes_p99"] == 1.3
        assert found["recovery_ready_s"] == 1.1
        assert found["rows_per_s"] == 0.98
        assert changelog.ratios({"off": self.modes["off"]}) == {}

    def test_bars_say_what_is_met(self) -> None:
        paced = Settings(rate=100)
        assert all(bar["met"] for bar in changelog.bars(self.modes, paced, 1.3).values())
        tight = changelog.bars(self.modes, paced, 1.2)
        assert [name for name, bar in tight.items() if not bar["met"]] == ["full_bytes_p99 ratio"]
        fast = changelog.bars(self.modes, Settings(rate=100, paced=False), 1.3)
        assert fast == {"rows_per_s ratio": {"value": 0.98, "at_least": 0.9, "met": True}}

    def page(self, modes: dict[Mode, dict[str, Any]]) -> str:
        work = {
            "options": {},
            "modes": modes,
            "ratios": changelog.ratios(modes),
            "bars": changelog.bars(modes, Settings(rate=100), 1.3),
        }
        text = io.StringIO()
        changelog.show({"workloads": {"value-state": work}}, Console(file=text, width=140))
        return text.getvalue()

    def test_tables_show_both_modes_side_by_side(self) -> None:
        page = self.page(self.modes)
        assert "changelog on / off" in page
        assert "90.0 / 300.0" in page
        assert "≤ 0.333" in page

    def test_tables_of_one_mode_need_no_other(self) -> None:
        page = self.page({"off": self.modes["off"]})
        assert "changelog off" in page
        assert "changelog on" not in page


def test_a_picture_has_every_workload_and_mode(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = Timeline([0.5, 1.0, 1.5], [12.0, 300.0, 20.0], [10, 20, 30])
    plot.draw({"entries": {"on": line, "off": line}, "window": {"off": line}}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --- the commands --------------------------------------------------------------------------------------


def test_the_warm_up_is_at_most_half_of_the_run() -> None:
    assert Settings(rate=10, seconds=20).warm_up == 10
    assert Settings(rate=10, seconds=300).warm_up == 60
    with pytest.raises(ConfigError, match="--seconds"):
        Settings(rate=10, seconds=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("value-state --changelog off --rows 5", "--rows is for the workload on files"),
        ("value-state --plot a.png", "--plot is for the rate-driven workload"),
        ("value-state --changelog off --value-bytes 3", "--value-bytes must be at least 16"),
        ("value-state --changelog off --plot a.pdf", "ends in .png"),
        ("window --changelog off --plot no/such/a.png", "no such folder"),
        ("window --keys 0", "--keys must be at least 1"),
        ("window --seconds 0", "--seconds"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments: str, message: str) -> None:
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


COMMAND = [sys.executable, "-c", "from strandline_bench.cli import app; app()"]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("arguments", "works", "records"),
    [
        ("value-state --rate 2000 --seconds 2", ["value-state"], 4000),
        ("value-state --rate 0 --seconds 1", ["value-state"], 50_000),
        ("window --rate 500 --seconds 2 --keys 100 --operator entries", ["entries"], 1000),
        ("window --rate 500 --seconds 2 --keys 100 --operator window", ["window"], 1000),
    ],
)
def test_a_small_run_is_measured_and_verified(arguments: str, works: list[str], records: int, tmp_path: Path) -> None:
    # In a process of its own: the benchmark starts and stops its own Spark.
    (tmp_path / "work").mkdir()
    places = ["--work-dir", str(tmp_path / "work"), "--plot", str(tmp_path / "a.png")]
    done = subprocess.run(
        [*COMMAND, *arguments.split(), "--changelog", "off", "--json", *places],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "work").iterdir()) == []
    assert (tmp_path / "a.png").stat().st_size > 10_000
    result = json.loads(done.stdout)
    paced = result["parameters"]["paced"]
    assert result["parameters"]["warm_up"] == result["parameters"]["seconds"] / 2
    assert list(result["workloads"]) == works
    work = result["workloads"][works[0]]
    assert list(work["modes"]) == ["off"]
    assert work["ratios"] == work["bars"] == {}
    figures = work["modes"]["off"]
    assert figures["verified"]
    assert figures["records"] == records
    assert figures["rows_per_s"] > 0
    assert figures["changelog"] is None
    checkpoints = figures["checkpoints"]
    assert checkpoints["completed"] >= 1
    assert checkpoints["failed"] == 0
    for name in ("barrier_to_completed_ms", "end_to_end_ms", "checkpointed_bytes", "full_bytes"):
        assert 0 < checkpoints[name]["p50"] <= checkpoints[name]["p99"] <= checkpoints[name]["max"]
    assert len(figures["recovery"]["all"]) == 3
    assert 0 < figures["recovery"]["ready_s"] < figures["recovery"]["first_rows_s"]
    assert bool(figures["row_latency_ms"]) == paced
    assert (figures["lag_s"] is not None) == paced
