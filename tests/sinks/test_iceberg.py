"""`IcebergSink`: the data files of a checkpoint and the marker in one snapshot."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from pyiceberg.catalog import Catalog, load_catalog

from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.iceberg.sink import IcebergSink
from strandline.testing.sink import Row, SinkContract
from strandline_bench.targets import unreferenced_files
from tests.iceberg_java import IcebergJava

TABLE = "sales.visits"


def sql_catalogue(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalogue.db", "warehouse": f"file://{folder}/warehouse"}


def opened(sink: IcebergSink) -> Catalog:
    assert not isinstance(sink.catalog, str)
    properties = dict(sink.catalog)
    return load_catalog(properties.pop("name", "default"), **properties)


def read(sink: IcebergSink) -> list[Row]:
    catalogue = opened(sink)
    if not catalogue.table_exists(sink.table):
        return []
    rows = catalogue.load_table(sink.table).scan().to_arrow()
    return list(zip(rows["user"].to_pylist(), rows["n"].to_pylist(), strict=True))


class TestAppend(SinkContract):
    kills = 3

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return IcebergSink(TABLE, sql_catalogue(tmp_path))

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        assert isinstance(sink, IcebergSink)
        return read(sink)

    def left(self, sink: ExactlyOnceSink) -> list[str]:
        assert isinstance(sink, IcebergSink)
        return list(unreferenced_files(opened(sink).load_table(sink.table)))


class TestPartitioned(TestAppend):
    kills = 1

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return IcebergSink(TABLE, sql_catalogue(tmp_path), partition_by=["user"])


class TestUpsert(TestAppend):
    upserts = True
    kills = 2

    @pytest.fixture
    def sink(self, tmp_path: Path) -> ExactlyOnceSink:
        return IcebergSink(TABLE, sql_catalogue(tmp_path), mode="upsert")


class TestRestAppend(TestAppend):
    kills = 2

    @pytest.fixture
    def sink(self, iceberg_java: IcebergJava) -> ExactlyOnceSink:
        return IcebergSink(f"ns{uuid4().hex[:8]}.visits", iceberg_java.catalogue)


class TestRestUpsert(TestRestAppend):
    upserts = True
    kills = 1

    @pytest.fixture
    def sink(self, iceberg_java: IcebergJava) -> ExactlyOnceSink:
        return IcebergSink(f"ns{uuid4().hex[:8]}.visits", iceberg_java.catalogue, mode="upsert")
