"""`DeltaSink`: rows of a checkpoint and the marker in one commit of the table."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from deltalake import DeltaTable

from strandline.sinks.base import ExactlyOnceSink, SinkContext
from strandline.sinks.delta.access import delta_options, open_table
from strandline.sinks.delta.sink import DeltaSink
from strandline.testing.sink import Row, SinkContract, SinkJob, a_context
from tests.s3 import BUCKET, KEYS
from tests.sinks.delta import reader


def rows_of(table: Path) -> list[Row]:
    if not (table / "_delta_log").exists():
        return []
    found = [(row["user"], row["n"]) for row in reader.read(table).to_pylist()]
    ours = [(row["user"], row["n"]) for row in DeltaTable(table).to_pyarrow_table().to_pylist()]
    assert sorted(found) == sorted(ours)
    return found


class TestAppend(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return DeltaSink(str(tmp_path / "späte Daten #1"))

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        assert isinstance(sink, DeltaSink)
        return rows_of(Path(sink.path))


class TestUpsert(TestAppend):
    upserts = True

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return DeltaSink(str(tmp_path / "table"), mode="upsert")


class TestPartitioned(SinkContract):
    kills = 2

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return DeltaSink(str(tmp_path / "table"), partition_by=["user"])

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        assert isinstance(sink, DeltaSink)
        return rows_of(Path(sink.path))


class TestAppendInAnObjectStore(SinkContract):
    kills = 2

    @pytest.fixture
    def options(self, s3_endpoint: str) -> dict[str, str]:
        return {**KEYS, "endpoint": s3_endpoint}

    @pytest.fixture
    def sink(self) -> ExactlyOnceSink:
        return DeltaSink(f"s3://{BUCKET}/delta-{uuid4().hex}")

    @pytest.fixture
    def job(self, sink: ExactlyOnceSink, options: dict[str, str], tmp_path: Path) -> SinkJob:
        plain = a_context(tmp_path / "checkpoints")
        folder = f"s3://{BUCKET}/checkpoints-{uuid4().hex}"
        context = SinkContext(plain.job, plain.schema, folder, plain.keys, options)
        self.options_of_sink = options
        return SinkJob(sink.bound(context), context)

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        assert isinstance(sink, DeltaSink)
        options = delta_options(sink.path, self.options_of_sink)
        table = open_table(sink.path, options)
        found = table.to_pyarrow_table().to_pylist() if table is not None else []
        return [(row["user"], row["n"]) for row in found]


@pytest.mark.slow
class TestUpsertInAnObjectStore(TestAppendInAnObjectStore):
    upserts = True

    @pytest.fixture
    def sink(self) -> ExactlyOnceSink:
        return DeltaSink(f"s3://{BUCKET}/delta-{uuid4().hex}", mode="upsert")
