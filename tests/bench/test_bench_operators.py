"""The benchmarks of all operators and of growing state run, report every figure, and find wrong results."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from strandline.errors import ConfigError
from strandline_bench import growth, operators
from strandline_bench.cli import app
from strandline_bench.events import (
    APART_MS,
    DELAY_MS,
    GAP_MS,
    LEFT_BELOW,
    SLIDE_MS,
    WINDOW_MS,
    EventWorkload,
    ExpectedEvents,
)
from strandline_bench.operator_entries import ADAPTER, ENTRIES, Entry
from strandline_bench.workload import WrongResultError

BOTH = """
import sys
from strandline_bench.cli import app
app([*"operators --rows 4000 --keys 400 --batches 4 --only window,join,process-arrow".split(),
     *"--peer-rows 40 --json --work-dir".split(), sys.argv[1]], standalone_mode=False)
app([*"growth --keys 400,1200 --batches 3 --batch-rows 100 --json --work-dir".split(), sys.argv[1]],
    standalone_mode=False)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both commands print; in a process of its own, for they start and stop their own Spark."""
    folder = tmp_path_factory.mktemp("bench")
    done = subprocess.run([sys.executable, "-c", BOTH, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(done.stdout)
    return [first, decoder.raw_decode(done.stdout[end:].lstrip())[0]]


@pytest.mark.slow
@pytest.mark.spark
def test_operators_and_their_counterparts_are_measured_and_verified(printed: list[dict[str, Any]]) -> None:
    result = printed[0]
    assert set(result) == {"parameters", "machine", "operators", "skipped"}
    assert result["skipped"] == {}
    found = result["operators"]
    assert list(found) == ["window", "join", "process-arrow"]
    for name, figures in found.items():
        assert set(figures) == {"ours", "peer", "same_input", "ratio", "bar", "met"}
        assert figures["ours"]["verified"]
        assert figures["peer"]["verified"]
        assert figures["same_input"] == (name != "process-arrow")
        assert figures["ours"]["throughput"]["rows"] == 3000
        assert figures["peer"]["throughput"]["rows"] == (40 if name == "process-arrow" else 3000)
        rates = [figures[side]["throughput"]["rows_per_s"] for side in ("ours", "peer")]
        assert figures["ratio"] == pytest.approx(rates[0] / rates[1], rel=0.05, abs=0.006)
        if abs(figures["ratio"] - figures["bar"]) > 0.01:
            assert figures["met"] == (figures["ratio"] > figures["bar"])
    page = io.StringIO()
    operators.show(result, Console(file=page, width=140))
    assert "stream-stream join" in page.getvalue()
    assert "* not the same input" in page.getvalue()


@pytest.mark.slow
@pytest.mark.spark
def test_growth_reports_speed_checkpoints_and_memory_for_every_number_of_keys(printed: list[dict[str, Any]]) -> None:
    result = printed[1]
    assert set(result) == {"parameters", "machine", "sizes", "ratios"}
    assert [size["keys"] for size in result["sizes"]] == [400, 1200]
    for size in result["sizes"]:
        assert size["verified"]
        assert size["checkpoints"] == 2
        assert size["rows_per_s"] > 0
        assert 0 < size["checkpoint_p50_ms"] <= size["checkpoint_p99_ms"]
        assert 0 < size["slots_rss_at_start_bytes"] <= size["slots_rss_bytes"]
        assert size["state_memory_bytes"] == 512 << 20
        assert size["rss_to_state_memory"] > 0
        assert size["checkpointed_bytes"] > 0
    assert result["ratios"][0] == {"keys": 1.0, **dict.fromkeys(growth.FIGURES, 1.0)}
    assert result["ratios"][1]["keys"] == 3.0
    page = io.StringIO()
    growth.show(result, Console(file=page, width=140))
    assert "1,200 keys" in page.getvalue()


def test_every_operator_has_a_name_and_a_bar_of_its_own() -> None:
    bars = {entry.name: entry.bar for entry in ENTRIES}
    assert len(bars) == len(ENTRIES)
    wanted = {"aggregate": 2, "window": 1, "spark-row": 20, "spark-pandas": 10}
    assert {name: bars[name] for name in wanted} == wanted


def test_an_operator_that_needs_a_missing_module_says_so() -> None:
    some = ENTRIES[0]
    entry = Entry(some.name, some.build, some.peer, some.bar, some.check, needs=("json", "no_such_module"))
    assert entry.missing() == "no_such_module"
    assert some.missing() is None
    assert all(ADAPTER in entry.needs for entry in ENTRIES if entry.name.startswith("spark-"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["operators", "--only", "agregate"], "did you mean 'aggregate'?"),
        (["operators", "--batches", "1"], "--batches must be at least 2"),
        (["growth", "--keys", "many"], "give whole numbers"),
        (["growth", "--keys", "1"], "at least 2"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


def test_figures_without_a_peer_have_no_ratio() -> None:
    speed = {"throughput": {"rows": 5000, "rows_per_s": 1234.0}, "verified": True}
    figures = {"ours": speed, "peer": None, "same_input": None, "ratio": None, "bar": 2, "met": None}
    page = io.StringIO()
    result = {"operators": {"aggregate": figures}, "skipped": {"spark-row": "the module x is not installed"}}
    operators.show(result, Console(file=page, width=140))
    assert "1,234" in page.getvalue()
    assert "same input" not in page.getvalue()
    assert "spark-row: skipped, the module x is not installed" in page.getvalue()


def test_growth_finds_state_that_was_lost(tmp_path: Path) -> None:
    workload = EventWorkload(tmp_path / "files", 3, 8)
    files = [workload.of_keys(np.array([0, 1, 2])), workload.of_keys(np.array([1, 1]))]
    pq.write_table(pa.table({"new": [3, 0], "total": [3, 3]}), tmp_path / "right.parquet")
    growth._check(tmp_path / "right.parquet", 3, files)
    pq.write_table(pa.table({"new": [3, 0], "total": [3, 2]}), tmp_path / "wrong.parquet")
    with pytest.raises(WrongResultError, match="add up to 5, not to 6"):
        growth._check(tmp_path / "wrong.parquet", 3, files)


def test_parameters_of_growth_are_checked() -> None:
    with pytest.raises(ConfigError, match="--batches"):
        growth.Parameters(batches=1)


Row = dict[str, Any]


class TestExpectedEvents:
    """Results by event time, against a model in plain Python; a wrong one is an error."""

    @pytest.fixture
    def rows(self, tmp_path: Path) -> list[Row]:
        return [row for file in self.files(tmp_path) for row in pq.read_table(file.path).to_pylist()]

    @pytest.fixture
    def expected(self, rows: list[Row], tmp_path: Path) -> ExpectedEvents:
        return ExpectedEvents(self.files(tmp_path))

    def files(self, folder: Path) -> list[Any]:
        workload = EventWorkload(folder / "files", 200, 8)
        return [workload.uniform(60) for _ in range(8)]

    def check(self, check: Callable[[Path], None], folder: Path, rows: list[Row]) -> None:
        times = [name for name in rows[0] if name in ("ts", "right_ts", "window_start", "window_end")]
        table = pa.Table.from_pylist(rows)
        for name in times:
            column = pa.array([row[name] * 1000 for row in rows], pa.timestamp("us", "UTC"))
            table = table.set_column(table.schema.get_field_index(name), name, column)
        pq.write_table(table, folder / "out.parquet")
        check(folder / "out.parquet")

    def closed(self, rows: list[Row], windows: dict[tuple[int, int, int], list[int]]) -> list[Row]:
        watermark = max(map(milliseconds, rows)) - DELAY_MS
        return [
            {"key": key, "window_start": start, "window_end": end, "n": len(x), "s": sum(x)}
            for (key, start, end), x in windows.items()
            if end <= watermark
        ]

    @pytest.mark.parametrize("slide", [WINDOW_MS, SLIDE_MS])
    def test_wrong_windows_are_found(
        self, expected: ExpectedEvents, rows: list[Row], tmp_path: Path, slide: int
    ) -> None:
        windows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row in rows:
            newest = milliseconds(row) // slide * slide
            for start in range(newest, newest - WINDOW_MS, -slide):
                windows[row["key"], start, start + WINDOW_MS].append(row["x"])
        right = self.closed(rows, windows)
        self.assert_found(lambda output: expected.check_windows(output, slide, "test"), tmp_path, right)

    def test_wrong_sessions_are_found(self, expected: ExpectedEvents, rows: list[Row], tmp_path: Path) -> None:
        sessions: dict[tuple[int, int, int], list[int]] = {}
        for key in {row["key"] for row in rows}:
            own = sorted((milliseconds(row), row["x"]) for row in rows if row["key"] == key)
            while own:
                size = next((at for at in range(1, len(own)) if own[at][0] - own[at - 1][0] > GAP_MS), len(own))
                burst, own = own[:size], own[size:]
                sessions[key, burst[0][0], burst[-1][0] + GAP_MS] = [x for _time, x in burst]
        right = self.closed(rows, sessions)
        self.assert_found(lambda output: expected.check_sessions(output, "test"), tmp_path, right)

    def assert_found(self, check: Callable[[Path], None], folder: Path, right: list[Row]) -> None:
        assert len(right) > 10
        self.check(check, folder, right[::-1])
        with pytest.raises(WrongResultError, match="windows were put out"):
            self.check(check, folder, right[1:])
        with pytest.raises(WrongResultError, match="windows were put out"):
            self.check(check, folder, [*right, right[0]])
        for name, what in (("n", "n"), ("s", "s"), ("window_end", "length")):
            with pytest.raises(WrongResultError, match=f"{what} is wrong for 1 of"):
                self.check(check, folder, [{**right[0], name: right[0][name] + 1}, *right[1:]])

    def test_wrong_first_rows_are_found(self, expected: ExpectedEvents, rows: list[Row], tmp_path: Path) -> None:
        kept: list[Row] = []
        until: dict[int, int] = {}
        for row in rows:
            time = milliseconds(row)
            if until.get(row["key"], 0) < time - DELAY_MS:
                until[row["key"]] = time + DELAY_MS
                kept.append({"key": row["key"], "ts": time})

        def check(output: Path) -> None:
            expected.check_first_rows(output, "test")

        self.check(check, tmp_path, kept)
        with pytest.raises(WrongResultError, match="without a row to be duplicates of"):
            self.check(check, tmp_path, [row for row in kept if row["key"] != kept[0]["key"]])
        with pytest.raises(WrongResultError, match="duplicates of a row"):
            self.check(check, tmp_path, [*kept, kept[0]])
        with pytest.raises(WrongResultError, match=r"1 of .* rows are not in the input"):
            self.check(check, tmp_path, [*kept, {"key": 24, "ts": kept[0]["ts"] + 1}])

    def test_wrong_pairs_are_found(self, expected: ExpectedEvents, rows: list[Row], tmp_path: Path) -> None:
        right = [
            {"key": a["key"], "ts": milliseconds(a), "right_ts": milliseconds(b), "right_x": b["x"]}
            for a in rows
            for b in rows
            if a["key"] == b["key"] and a["x"] < LEFT_BELOW <= b["x"]
            if abs(milliseconds(a) - milliseconds(b)) <= APART_MS
        ]

        def check(output: Path) -> None:
            expected.check_pairs(output, "test")

        assert len(right) > 10
        self.check(check, tmp_path, right)
        with pytest.raises(WrongResultError, match="pairs is wrong for 1"):
            self.check(check, tmp_path, right[1:])
        with pytest.raises(WrongResultError, match="right_x is wrong for 1"):
            self.check(check, tmp_path, [{**right[0], "right_x": right[0]["right_x"] + 1}, *right[1:]])
        with pytest.raises(WrongResultError, match="1 pairs are too far apart"):
            self.check(check, tmp_path, [{**right[0], "ts": right[0]["right_ts"] + APART_MS + 2}, *right[1:]])


def milliseconds(row: Row) -> int:
    time: datetime = row["ts"]
    return round(time.timestamp() * 1000)
