"""The benchmarks of restoring, reading and watching state measure what they say, and refuse what cannot be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from strandline.errors import ConfigError
from strandline_bench.rescale import check_peer

BENCH = [sys.executable, "-c", "from strandline_bench.cli import app; app()"]


def result_of(work_dir: Path, *arguments: str) -> dict[str, Any]:
    command = [*BENCH, *arguments, "--keys", "6000", "--repeats", "1", "--work-dir", str(work_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(work_dir.iterdir()) == []
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["verified"]
    return result


@pytest.mark.slow
@pytest.mark.spark
def test_rescaling_is_measured_and_verified(tmp_path: Path) -> None:
    result = result_of(tmp_path, "rescale", "--from", "2", "--to", "3")
    assert result["rescaled"]["durable_bytes"] > result["plain"]["durable_bytes"] > 0
    assert result["ratio"] > 0
    assert result["live"]["parallelism"] == 3
    assert 0 < result["live"]["pause_ms"] <= result["live"]["duration_ms"]
    assert result["live"]["durable_bytes"] == 0
    assert result["spark"]["repartition_ms"] > 0


@pytest.mark.slow
@pytest.mark.spark
def test_recovery_is_measured_and_verified(tmp_path: Path) -> None:
    result = result_of(tmp_path, "recovery", "--storage-rate", "1")
    assert result["local"]["durable_bytes"] == 0 < result["local"]["local_bytes"]
    assert result["remote"]["local_bytes"] == 0 < result["remote"]["durable_bytes"]
    assert result["local"]["duration_ms"] > 0


@pytest.mark.slow
@pytest.mark.spark
def test_reading_state_is_measured_and_verified(tmp_path: Path) -> None:
    result = result_of(tmp_path, "state-reader")
    assert set(result["readers"]) == {"strandline_in_spark", "strandline_read_state", "spark_statestore"}
    assert min(figures["rows_per_s"] for figures in result["readers"].values()) > 0


@pytest.mark.slow
@pytest.mark.spark
def test_the_cost_of_being_seen_is_measured_and_verified(tmp_path: Path) -> None:
    sizes = ["--rows", "30000", "--batch-rows", "10000", "--keys", "1000", "--turns", "1"]
    command = [*BENCH, "observation", *sizes, "--work-dir", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["verified"]
    for figure in ("median_rows_per_s", "median_cpu_s_per_million_rows"):
        assert min(result[figure].values()) > 0
    assert {mode: len(phases) for mode, phases in result["phases"].items()} == {"off": 1, "watched": 1}
    assert result["watcher"]["requests"] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["state-reader", "--keys", "0"], "--keys"),
        (["observation", "--turns", "0"], "--turns"),
        (["rescale", "--from", "3", "--to", "3"], "--from and --to must differ"),
        (["rescale", "--keys", "0"], "--keys"),
        (["recovery", "--storage-rate", "0"], "--storage-rate"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments: list[str], text: str) -> None:
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert text in done.stderr


def test_a_spark_that_cannot_repartition_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SparkSession, "_streamingCheckpointManager", raising=False)
    with pytest.raises(ConfigError, match=r"cannot repartition state.*use --peer none"):
        check_peer()
