"""The tick source: a stream without rows. Spark runs a batch whenever the number in its file changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    class _AvailableNow:
        """What a source must be, so that Spark does not put all rows of all sources into one batch."""
else:
    from strandline.pyspark_releases import trigger_available_now

    _AvailableNow = trigger_available_now()


TICK_SOURCE = "strandline-tick"


def tick_rows(spark: SparkSession, ticks: Path, schema: StructType) -> DataFrame:
    """A stream with the given schema and no rows. Spark runs a batch whenever the number in file `ticks` changes."""
    from pyspark.sql import functions as F

    spark.dataSource.register(TickSource)
    frame = spark.readStream.format(TickSource.name()).option("path", str(ticks)).load()
    return frame.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in schema.fields))


class TickSource(DataSource):
    """A Python data source without rows. Its offset is the number in a local file of the driver."""

    @classmethod
    def name(cls) -> str:
        return TICK_SOURCE

    def schema(self) -> str:
        return "tick long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _TickReader(Path(self.options["path"]))


class _TickReader(DataSourceStreamReader, _AvailableNow):
    """Ticks that come while a run with `available_now` drains its sources are read when it starts its query again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"tick": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._now()

    def latestOffset(self, *_: Any) -> dict[str, int]:
        return self._last or self._now()

    def _now(self) -> dict[str, int]:
        try:
            return {"tick": int(self._path.read_text())}
        except FileNotFoundError:
            return {"tick": 0}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return iter(())

    def stop(self) -> None:
        """Ends the process of the reader when the query has closed its connection.

        PySpark would report the end of the connection over that very connection, and print a BrokenPipeError.
        """
        if isinstance(sys.exception(), EOFError):
            os._exit(0)
