"""`strandline chaos realtime`: what its oracle sees, and a sample of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strandline.pyspark_releases import has_realtime
from strandline_bench.chaos.realtime_job import BUCKETS, EACH, RealtimePlace
from strandline_bench.servers.kafka import KafkaBroker
from strandline_bench.targets import ParquetTarget
from tests.jobs.place import CONNECTOR


def told(place: RealtimePlace, each: list[Any], buckets: list[Any]) -> list[str]:
    """What the oracle says of the Parquet files; the other outputs of the job are not there."""
    for table, columns, rows in (
        (EACH, ("key", "n", "s", "bucket"), each),
        (BUCKETS, ("bucket", "n"), buckets),
    ):
        folder = place.folder / "parquet" / table
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(dict(zip(columns, zip(*rows, strict=True), strict=True))), folder / "rows.parquet")
    return [problem for problem in place.output_problems() if problem.startswith(ParquetTarget.__name__)]


def test_the_oracle_reads_the_topic_and_sees_missing_and_doubled_rows(tmp_path: Path, kafka: KafkaBroker) -> None:
    place = RealtimePlace(tmp_path, 3, False, kafka.servers)
    place.make()
    place.write(1)
    place.flush()
    each, buckets = (sorted(one.elements()) for one in place.emitted())
    assert len(each) == len(buckets) == place.files() * len(place.rows_of(0))
    counts = Counter(key for number in range(place.files()) for key, _x in place.rows_of(number))
    assert Counter(row[0] for row in each) == counts
    assert told(place, each, buckets) == []
    assert "each: 1 of" in told(place, each[1:], buckets)[0]
    assert "each: 1 rows are wrong or twice" in told(place, [*each, each[0]], buckets)[0]
    assert "buckets: 1 of" in told(place, each, buckets[:-1])[0]


@pytest.mark.spark
@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CONNECTOR.is_dir(), reason="Spark's connector is missing: run `bash scripts/get_kafka.sh`")
@pytest.mark.skipif(not has_realtime(), reason="Spark 4.3 is the first with a real-time mode for Python")
def test_a_sample_of_the_rounds_counts_every_row_once(tmp_path: Path) -> None:
    """As its users start it."""
    command = [sys.executable, "-m", "strandline.admin.cli.main", "chaos", "realtime"]
    ended = subprocess.run(
        [*command, "--minutes", "0.15", "--seed", "7", "--work-dir", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    result = json.loads(ended.stdout)
    assert result["problems"] == []
    assert result["rounds"] == 1
    assert sum(result["faults"].values()) >= 1
    assert result["rows"] >= 60
    assert list(tmp_path.iterdir()) == []
