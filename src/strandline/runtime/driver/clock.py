"""The time of every batch, and the batches without rows that fire timers.

Spark sets the time: its offset log names the processing time and the watermark of every batch. Every subtask and every
retry of a batch sees the same time, and a restore brings it back with the position in the sources. If a step has
timers, the query also reads the tick source, which never has rows. Spark runs a batch whenever the number in the tick
source's file changes.

Private Spark API: this module reads entries of Spark's offset log and commit log, whose format is internal. The
watermark is public only in the progress of a query, which Spark reports after the batch; a batch needs it before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from strandline.errors import CheckpointError
from strandline.operators.base import TimeMode
from strandline.runtime.protocol.messages import BatchTime
from strandline.runtime.protocol.slot_calls import NextTimers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Offsets(msgspec.Struct, frozen=True):
    """What is used of the second line of an entry of Spark's offset log. The names are Spark's."""

    batchTimestampMs: int
    batchWatermarkMs: int = 0


class _Commit(msgspec.Struct, frozen=True):
    """What is used of the second line of an entry of Spark's commit log."""

    nextBatchWatermarkMs: int


class Clock:
    """Knows the time of every batch of one generation, and requests a batch when a timer is due."""

    def __init__(self, scratch: Path, modes: frozenset[TimeMode], *, restored: bool) -> None:
        """`scratch` is Spark's checkpoint folder; `modes` are the clocks that the job's steps need."""
        self._scratch = scratch
        self._modes = modes - {"none"}
        self._timers: dict[TimeMode, int | None] = {}
        self._last: int | None = None
        self._unknown = restored
        """Whether some slot's timers are not known. After a restore they are known once a batch has run."""
        self._tick_requested = False

    @property
    def ticks(self) -> Path | None:
        """The file of the tick source; None if no step has timers."""
        return self._scratch / "tick" if self._modes else None

    def of(self, spark_batch: int) -> BatchTime:
        """The time of a batch, from Spark's offset log."""
        facts = self._offsets(spark_batch)
        if facts is None:
            raise CheckpointError(f"Spark's offset log in {self._scratch} has no entry for batch {spark_batch}")
        before = self._offsets(spark_batch - 1)
        return BatchTime(
            facts.batchTimestampMs,
            facts.batchWatermarkMs or None,
            (before.batchWatermarkMs or None) if before is not None else None,
        )

    def committed(self, spark_batch: int, timers: list[NextTimers]) -> None:
        """A batch is committed; `timers` has an entry for every slot."""
        self._timers = {
            mode: min((known for slot in timers if (known := slot.get(mode)) is not None), default=None)
            for mode in self._modes
        }
        self._last = spark_batch
        self._unknown = self._tick_requested = False

    def forget(self) -> None:
        """A slot was replaced, so its timers are not known before the next batch."""
        self._unknown = True

    def tick_if_due(self) -> None:
        """Request a batch if a timer is due and no batch was requested for it already."""
        if self._modes and not self._tick_requested and self._due():
            self.tick()

    def tick(self) -> None:
        """Have Spark run a batch, even if no source has new rows."""
        assert self.ticks is not None
        self._tick_requested = True
        temporary = self.ticks.with_suffix(".new")
        temporary.write_text(str(time.time_ns()))
        temporary.replace(self.ticks)

    def watermark_moved(self) -> bool:
        """Whether the next batch will have a later watermark than the last one, and some step uses event time."""
        upcoming = self._upcoming_watermark()
        if "event" not in self._modes or self._last is None or upcoming is None:
            return False
        return upcoming > (self.of(self._last).watermark_ms or 0)

    def event_timer_due(self) -> bool:
        """Whether the watermark of the next batch will fire an event-time timer."""
        event = self._timers.get("event")
        upcoming = None if event is None else self._upcoming_watermark()
        return event is not None and upcoming is not None and event <= upcoming

    def _due(self) -> bool:
        if self._unknown:
            return True
        processing = self._timers.get("processing")
        if processing is not None and processing <= time.time() * 1000:
            return True
        return self.event_timer_due()

    def _upcoming_watermark(self) -> int | None:
        """The watermark of the next batch; None until Spark has written the commit of the last one."""
        if self._last is None:
            return None
        try:
            lines = (self._scratch / "commits" / str(self._last)).read_bytes().split(b"\n")
            return msgspec.json.decode(lines[1], type=_Commit).nextBatchWatermarkMs
        except (FileNotFoundError, IndexError, *_UNREADABLE):
            return None

    def _offsets(self, spark_batch: int) -> _Offsets | None:
        path = self._scratch / "offsets" / str(spark_batch)
        try:
            return msgspec.json.decode(path.read_bytes().split(b"\n")[1], type=_Offsets)
        except FileNotFoundError:
            return None
        except (IndexError, *_UNREADABLE) as error:
            # A restore fills the folder with what its checkpoint says.
            raise CheckpointError(f"{path}, an entry of Spark's offset log, is damaged: {error}") from error


# --- the source that never has rows ------------------------------------------------------------------


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
        return "strandline-tick"

    def schema(self) -> str:
        return "tick long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _TickReader(Path(self.options["path"]))


class _TickReader(DataSourceStreamReader):
    def __init__(self, path: Path) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, int]:
        return {"tick": 0}

    def latestOffset(self, *_: Any) -> dict[str, int]:
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
