"""A `ParquetSink` keeps the contract of all sinks."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.parquet.sink import ParquetSink
from strandline.testing.sink import Row, SinkContract


class TestParquetSink(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return ParquetSink(str(tmp_path / "out"))

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        files = Path(sink.place).glob("[!._]*.parquet")
        return [(row["user"], row["n"]) for file in files for row in pq.read_table(file).to_pylist()]
