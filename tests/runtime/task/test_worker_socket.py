"""Delays of TCP between Spark's JVM and a Python worker."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from strandline.runtime.task.worker_socket import pass_on_at_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def answers(spark: SparkSession) -> list[tuple[bool, bool]]:
    """For each of two partitions: whether a task turns the delays off, and whether it can with a default timeout."""

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        off = pass_on_at_once()
        socket.setdefaulttimeout(60)
        try:
            refused = pass_on_at_once()
        finally:
            socket.setdefaulttimeout(None)
        for batch in batches:
            yield pa.record_batch([[off] * batch.num_rows, [refused] * batch.num_rows], names=["off", "refused"])

    rows: DataFrame = spark.range(0, 2, 1, 2).mapInArrow(ask, "off boolean, refused boolean")
    return [(row.off, row.refused) for row in rows.collect()]


@pytest.mark.spark
def test_a_task_turns_off_the_delays_of_its_connection_to_the_jvm(spark: SparkSession) -> None:
    assert answers(spark) == [(True, False)] * 2
    assert answers(spark) == [(True, False)] * 2  # by workers that have had a task before


def test_outside_of_a_task_there_is_nothing_to_turn_off() -> None:
    assert not pass_on_at_once()
