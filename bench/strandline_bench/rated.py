"""A streaming source whose rows arrive at a fixed rate. A row is computed from its number, so it can be read again.

A gate, a small file in the driver's file system, says since when rows arrive and how many there will be. It is opened
once the job runs, and opened wider for more rows. A query that is started again finds it as it was.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from strandline_bench.events import Int64s

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

BURST_ROWS: Final = 250_000
"""Rows of a batch if the rows do not wait for their time."""
_CHUNK_ROWS: Final = 65_536


@dataclass(frozen=True, slots=True)
class Pace:
    """When each row arrives, which is its event time as well: row `i` comes `i / rate` seconds after the first."""

    start_us: int
    rate: int

    def arrivals_us(self, numbers: Int64s) -> Int64s:
        """Microseconds since the epoch."""
        arrivals: Int64s = self.start_us + numbers * 1_000_000 // self.rate
        return arrivals

    def arrived(self, now_us: int) -> int:
        """How many rows have arrived."""
        since = now_us - self.start_us
        return 0 if since < 0 else ((since + 1) * self.rate - 1) // 1_000_000 + 1


class Rows(Protocol):
    """What the rows of a workload hold."""

    def batch(self, numbers: Int64s, arrivals_us: Int64s) -> pa.RecordBatch:
        """The rows of these numbers, which arrive at these times."""
        ...


class Gate:
    """Lets rows into the stream."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, rows: int, start_us: int | None = None) -> int:
        """Let `rows` rows in, from `start_us` on, by default from now on; returns when that is."""
        if start_us is None:
            start_us = time.time_ns() // 1_000_000 * 1000
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps([start_us, rows]))
        temporary.replace(self._path)
        return start_us

    def look(self) -> tuple[int, int] | None:
        """The time of the first row, and the number of rows; None while the gate is closed."""
        try:
            start_us, rows = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        return start_us, rows


@dataclass
class RowRange(InputPartition):
    """The rows that one task makes."""

    first: int
    end: int
    start_us: int


class RatedReader(DataSourceStreamReader):
    """Offers the rows that have arrived. If rows are not `paced`, it offers batches of a fixed size without waiting."""

    def __init__(self, rows: Rows, gate: Path, rate: int, paced: bool, parallelism: int) -> None:
        self._rows = rows
        self._gate = Gate(gate)
        self._rate = rate
        self._paced = paced
        self._parallelism = parallelism

    def initialOffset(self) -> dict[str, int]:
        return {"row": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        opened = self._gate.look()
        if opened is None:
            return start
        start_us, rows = opened
        if self._paced:
            there = Pace(start_us, self._rate).arrived(time.time_ns() // 1000)
        else:
            there = start["row"] + BURST_ROWS
        return {"row": max(start["row"], min(rows, there))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        opened = self._gate.look()
        if opened is None:
            return []
        cuts = np.linspace(start["row"], end["row"], self._parallelism + 1).astype(np.int64).tolist()
        return [RowRange(first, last, opened[0]) for first, last in pairwise(cuts) if first < last]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RowRange)
        pace = Pace(partition.start_us, self._rate)
        for first in range(partition.first, partition.end, _CHUNK_ROWS):
            numbers = np.arange(first, min(first + _CHUNK_ROWS, partition.end), dtype=np.int64)
            yield self._rows.batch(numbers, pace.arrivals_us(numbers))


class RatedSource(DataSource):
    """A data source of one workload's rows. `read_rated` gives it its options."""

    @abstractmethod
    def rows(self) -> Rows:
        """What the rows hold, by the source's options."""

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self.options
        return RatedReader(
            self.rows(),
            Path(options["gate"]),
            int(options["rate"]),
            options["paced"] == "true",
            int(options["parallelism"]),
        )


def read_rated(
    spark: SparkSession,
    source: type[RatedSource],
    options: dict[str, int],
    gate: Path,
    rate: int,
    paced: bool,
    parallelism: int,
) -> DataFrame:
    """A streaming DataFrame of a source's rows; `options` are those of the rows."""
    spark.dataSource.register(source)
    reader = spark.readStream.format(source.name()).option("gate", str(gate)).option("rate", rate)
    return reader.option("paced", paced).option("parallelism", parallelism).options(**options).load()


def mixed(numbers: Int64s) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A random-looking number for each number (the last steps of SplitMix64)."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
