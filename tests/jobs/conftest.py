"""Folders and runs per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import strandline as sl
from tests.jobs.place import Place


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path, spark)


@pytest.fixture
def runs() -> Iterator[list[sl.JobRun]]:
    """Runs put here are cancelled when the test ends, however it ends."""
    started: list[sl.JobRun] = []
    yield started
    for run in started:
        if run.status not in ("finished", "stopped", "cancelled", "failed"):
            run.cancel()
