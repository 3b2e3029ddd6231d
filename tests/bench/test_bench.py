"""The value-state benchmark measures what it says, and fails where results are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strandline.errors import StrandlineError
from strandline_bench.report import percentiles
from strandline_bench.workload import Expected, Workload, WrongResultError

COMMAND = [sys.executable, "-c", "from strandline_bench.cli import app; app()", "value-state"]


@pytest.mark.slow
@pytest.mark.spark
def test_a_small_run_reports_throughput_checkpoints_increments_and_recovery(tmp_path: Path) -> None:
    # In a process of its own: the benchmark starts and stops its own Spark.
    done = subprocess.run(
        [*COMMAND, "--rows", "20000", "--keys", "5000", "--work-dir", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "aggregate: rows" in done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"parameters", "machine", "ours", "peer", "ratios"}
    assert result["parameters"]["batch_rows"] == 5000
    assert result["machine"]["cores"] >= 1
    assert result["peer"] is None
    assert set(result["ours"]) == {"aggregate", "process"}
    for figures in result["ours"].values():
        assert figures["verified"]
        assert figures["throughput"]["rows"] == 15_000
        assert figures["throughput"]["rows_per_s"] > 0
        assert figures["throughput"]["steady_rows_per_s"] > 0
        checkpoints = figures["checkpoints"]
        assert checkpoints["count"] >= 1
        for name in ("barrier_to_completed_ms", "end_to_end_ms", "sync_ms", "async_ms", "checkpointed_bytes"):
            assert 0 < checkpoints[name]["p50"] <= checkpoints[name]["p99.9"] <= checkpoints[name]["max"]
        increments = figures["incremental"]
        assert increments["unchanged"]["checkpointed_bytes"] < increments["unchanged"]["full_bytes"]
        assert increments["touched"]["keys"] == 50
        assert 0 < increments["touched"]["fraction"] < 0.5
        assert figures["recovery"]["ready_s"] > 0
        assert figures["recovery"]["first_rows_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_too_few_keys_are_refused_before_anything_starts() -> None:
    done = subprocess.run([*COMMAND, "--rows", "1000", "--keys", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "keys at least 100" in " ".join(done.stderr.split())


class TestExpectedResults:
    """A result that is not what the input leads to is an error."""

    @pytest.fixture
    def expected(self, tmp_path: Path) -> Expected:
        workload = Workload(tmp_path / "files", 100, 20)
        return Expected(workload, [workload.of_keys(np.array([3, 3, 5])), workload.of_keys(np.array([3, 9]))])

    def write(self, folder: Path, keys: list[int], n: list[int], s: list[int]) -> Path:
        folder.mkdir()
        pq.write_table(pa.table({"key": keys, "n": n, "s": s}), folder / "part-0.parquet")
        return folder

    def sums(self, expected: Expected) -> list[int]:
        return [int(expected.s[key]) for key in (3, 5, 9)]

    def test_right_rows_pass(self, expected: Expected, tmp_path: Path) -> None:
        three, five, nine = self.sums(expected)
        output = self.write(tmp_path / "out", [3, 5, 3, 9], [2, 1, 3, 1], [0, five, three, nine])
        expected.check_aggregate(output, "test")

    def test_a_lost_update_is_found(self, expected: Expected, tmp_path: Path) -> None:
        three, five, nine = self.sums(expected)
        output = self.write(tmp_path / "out", [3, 5, 3, 9], [2, 1, 2, 1], [0, five, three, nine])
        with pytest.raises(WrongResultError, match="n is wrong for 1 of 3 keys"):
            expected.check_aggregate(output, "test")

    def test_a_row_put_out_twice_is_found(self, expected: Expected, tmp_path: Path) -> None:
        three, five, nine = self.sums(expected)
        output = self.write(tmp_path / "out", [3, 5, 5, 3, 9], [2, 1, 1, 3, 1], [0, five, five, three, nine])
        with pytest.raises(WrongResultError, match="rows put out is wrong for 1"):
            expected.check_aggregate(output, "test")

    def test_a_wrong_sum_is_found(self, expected: Expected, tmp_path: Path) -> None:
        three, five, nine = self.sums(expected)
        output = self.write(tmp_path / "out", [3, 5, 3, 9], [2, 1, 3, 1], [0, five, three + 1, nine])
        with pytest.raises(WrongResultError, match="s is wrong for 1 of 3 keys"):
            expected.check_aggregate(output, "test")

    def test_a_value_that_was_not_in_state_is_found(self, tmp_path: Path) -> None:
        workload = Workload(tmp_path / "files", 100, 20)
        files = [workload.of_keys(np.array([3])), workload.of_keys(np.array([3]))]
        first = pq.read_table(files[0].path).column("value")[0].as_py()[:16]
        output = tmp_path / "out"
        output.mkdir()
        for before in (first, "something else"):
            table = pa.table({"key": [3, 3], "n": [1, 2], "before": ["", before]})
            pq.write_table(table, output / "part-0.parquet")
            if before == first:
                Expected(workload, files).check_process(output, "test")
        with pytest.raises(StrandlineError, match="1 of 1 keys read another value"):
            Expected(workload, files).check_process(output, "test")


def test_percentiles_are_interpolated_and_empty_without_values() -> None:
    found = percentiles([float(value) for value in range(101)])
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
    assert percentiles([]) == {}
