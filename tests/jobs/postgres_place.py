"""The job that most tests run, with its rows in two tables of PostgreSQL: all changes, and the newest ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import strandline as sl
from tests.jobs.place import Place, Sum


class PostgresPlace(Place):
    def __init__(self, root: Path, spark: SparkSession, uri: str, schema: str) -> None:
        super().__init__(root, spark)
        self._uri = uri
        self._schema = schema

    def sums(self, *_arguments: Any, **options: Any) -> sl.Job:
        job = self.job(**options)
        sums = job.source(self.source()).key_by("user").process(Sum(), self.OUTPUT, uid="sums")
        sums.sink(sl.PostgresSink(self._uri, "changes", schema=self._schema))
        sums.sink(sl.PostgresSink(self._uri, "newest", mode="upsert", schema=self._schema))
        return job
