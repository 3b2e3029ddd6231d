"""The benchmark of sinks measures each beside another writer, reports every figure, and finds wrong results."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from strandline.errors import ConfigError
from strandline_bench import sinks

OPTIONS = "--rows 600 --batch-rows 200 --sink sqlite --sink parquet --sink delta --json"


@pytest.mark.slow
@pytest.mark.spark
def test_sinks_and_other_writers_are_measured_and_verified(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "strandline.admin.cli.main",
            "bench",
            "sinks",
            *OPTIONS.split(),
            "--work-dir",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    result = json.loads(done.stdout)
    assert set(result) == {"parameters", "machine", "sinks", "verified"}
    assert list(result["sinks"]) == ["sqlite", "parquet", "delta"]
    for figures in result["sinks"].values():
        assert set(figures) == {"ours", "peer", "ratio"}
        assert figures["ours"]["checkpoints"] >= 1
        assert figures["ours"]["barrier_to_visible_ms"]["p50"] >= figures["ours"]["commit_ms"]["p50"]
        assert figures["ratio"] == pytest.approx(
            figures["ours"]["rows_per_s"] / figures["peer"]["rows_per_s"], abs=0.006
        )
    page = io.StringIO()
    sinks.show(result, Console(file=page, width=160))
    assert "Spark's file sink" in page.getvalue()


def test_a_row_that_is_missing_or_changed_changes_the_sums() -> None:
    whole = pa.table({"key": [1, 2], "x": [3, 4], "value": ["ab", "c"]})
    assert sinks._sums(whole) == (2, 3, 7, 3)
    assert sinks._sums(whole.slice(1)) != sinks._sums(whole)
    assert sinks._sums(whole.set_column(2, "value", pa.array(["a", "c"]))) != sinks._sums(whole)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="two batches"):
        sinks.Parameters(rows=100, batch_rows=100)
    with pytest.raises(ConfigError, match="known are parquet"):
        sinks.Parameters(only=("mysql",))
    with pytest.raises(
        ConfigError, match="parquet has no upserts: those that have are delta, iceberg, sqlite, postgres"
    ):
        sinks.Parameters(mode="upsert", peer=False)
    with pytest.raises(ConfigError, match="give --no-peer"):
        sinks.Parameters(mode="upsert", only=("sqlite",))


def test_a_table_of_upserts_has_the_newest_row_of_each_key() -> None:
    files = [
        pa.table({"key": [1, 2, 2], "x": [3, 4, 5], "value": ["a", "b", "c"]}),
        pa.table({"key": [1, 1], "x": [6, 7], "value": ["d", "e"]}),
    ]

    def wrong(*rows: tuple[int, int, str]) -> str:
        keys, xs, values = zip(*rows, strict=True)
        return sinks.wrong_upserts(pa.table({"key": keys, "x": xs, "value": values}), files)

    assert wrong((1, 7, "e"), (2, 4, "b")) == wrong((2, 5, "c"), (1, 6, "d")) == ""
    assert wrong((1, 3, "a"), (2, 5, "c")) == "1 rows are not the newest of their key, such as that of 1"
    assert wrong((1, 7, "d"), (2, 5, "c")) == "1 rows are not the newest of their key, such as that of 1"
    assert wrong((1, 7, "e")) == "found 1 rows of 1 keys, expected one for each of 2"
    assert wrong((1, 7, "e"), (1, 6, "d")) == "found 2 rows of 1 keys, expected one for each of 2"
