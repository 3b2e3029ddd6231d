"""`PostgresSink`: the contract of a sink, in a real PostgreSQL."""

from __future__ import annotations

import pytest

from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.postgres.sink import PostgresSink
from strandline.testing.sink import Row, SinkContract
from strandline_bench.servers.postgres import Schema


class TestAppend(SinkContract):
    @pytest.fixture
    def sink(self, postgres_schema: Schema) -> ExactlyOnceSink:
        return PostgresSink(postgres_schema.uri, "visits", schema=postgres_schema.name)

    def rows(self, sink: ExactlyOnceSink) -> list[Row]:
        assert isinstance(sink, PostgresSink)
        schema = Schema(sink.schema, sink.read_uri())
        if schema.query("SELECT to_regclass('visits')") == [(None,)]:
            return []
        return schema.query('SELECT "user", n FROM visits')


class TestUpsert(TestAppend):
    upserts = True

    @pytest.fixture
    def sink(self, postgres_schema: Schema) -> ExactlyOnceSink:
        return PostgresSink(postgres_schema.uri, "visits", mode="upsert", schema=postgres_schema.name)
