"""The time of a batch, and batches that come without rows because it is time for something.

Spark decides what time it is: the offset log of every batch names its processing time and its watermark, which follows
from the rows of earlier batches. Both are the same for every subtask and every retry, and both come back with the
position in the input after a restore. Where a step waits for a time, a source that never has rows joins the query;
Spark runs a batch whenever the number in its file changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from strandline.operators.base import TimeMode
from strandline.runtime.protocol.messages import BatchTime

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

NextTimers = Mapping[TimeMode, int | None]
"""The earliest time, per clock, at which a slot has something to do without rows."""


class Clock:
    """Knows the time of every batch of one generation, and asks for batches when a timer is due."""

    def __init__(self, scratch: Path, modes: frozenset[TimeMode], *, restored: bool) -> None:
        """`scratch` is Spark's checkpoint folder; `modes` are the clocks that the job's steps need."""
        self._scratch = scratch
        self._modes = modes - {"none"}
        self._timers: dict[TimeMode, int | None] = {}
        self._last: int | None = None
        self._unknown = restored
        """Timers of restored state are known only once a batch has run."""
        self._asked = False

    @property
    def ticks(self) -> Path | None:
        """The file of the tick source; None where no step waits for a time."""
        return self._scratch / "tick" if self._modes else None

    def of(self, spark_batch: int) -> BatchTime:
        """The time of a batch, from Spark's offset log."""
        facts = self._offsets(spark_batch)
        before = self._offsets(spark_batch - 1)
        return BatchTime(
            int(facts["batchTimestampMs"]),
            facts["batchWatermarkMs"] or None,
            (before["batchWatermarkMs"] or None) if before else None,
        )

    def committed(self, spark_batch: int, timers: list[NextTimers]) -> None:
        """A batch is done; `timers` is what each slot waits for now."""
        self._timers = {
            mode: min((known for slot in timers if (known := slot.get(mode)) is not None), default=None)
            for mode in self._modes
        }
        self._last = spark_batch
        self._unknown = self._asked = False

    def forget(self) -> None:
        """A slot was replaced: what it waits for is known after the next batch."""
        self._unknown = True

    def tick_if_due(self) -> bool:
        """Ask for a batch without rows if something is due and nothing else is on its way; says whether it did."""
        if not self._modes or self._asked or not self._due():
            return False
        self.tick()
        return True

    def tick(self) -> None:
        """Ask Spark for a batch, with rows or without."""
        assert self.ticks is not None
        self._asked = True
        temporary = self.ticks.with_suffix(".new")
        temporary.write_text(str(time.time_ns()))
        temporary.replace(self.ticks)

    def watermark_moved(self) -> bool:
        """Whether the next batch will have a later watermark than the last one, which some step waits for."""
        upcoming = self._upcoming_watermark()
        if "event" not in self._modes or self._last is None or upcoming is None:
            return False
        return upcoming > (self.of(self._last).watermark_ms or 0)

    def event_timer_due(self) -> bool:
        """Whether something waits for an event time that the next batch's watermark has reached."""
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
        """What the next batch's watermark will be, once Spark has noted that the last one is done."""
        if self._last is None:
            return None
        try:
            text = (self._scratch / "commits" / str(self._last)).read_text()
            return int(json.loads(text.split("\n")[1])["nextBatchWatermarkMs"])
        except (FileNotFoundError, IndexError, ValueError):
            return None

    def _offsets(self, spark_batch: int) -> dict[str, Any]:
        try:
            text = (self._scratch / "offsets" / str(spark_batch)).read_text()
        except FileNotFoundError:
            return {}
        facts: dict[str, Any] = json.loads(text.split("\n")[1])
        return facts


# --- the source that never has rows ------------------------------------------------------------------


def tick_rows(spark: SparkSession, ticks: Path, schema: StructType) -> DataFrame:
    """A stream without rows, of any schema; it has a new batch whenever the number in the file `ticks` changes."""
    from pyspark.sql import functions as F

    spark.dataSource.register(TickSource)
    frame = spark.readStream.format(TickSource.name()).option("path", str(ticks)).load()
    return frame.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in schema.fields))


FIRST_TICK = json.dumps({"tick": 0})
"""The offset of the tick source before its first tick, as it stands in Spark's offset log."""


def is_tick(offset: str) -> bool:
    """Whether a line of Spark's offset log is that of the tick source."""
    try:
        value = json.loads(offset)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"tick"}


class TickSource(DataSource):
    """A Python data source whose offset is the number in a local file of the driver."""

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
