"""What Kafka holds now: where the partitions of the sources begin and end, and whether a position lies between.

Private Spark API: the classes of the data source API, through which Spark's Kafka source is asked.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strandline.runtime.driver.logical_plans import streams_of
from strandline.runtime.driver.realtime.offsets import Offsets, offsets_of
from strandline.runtime.driver.source_failures import data_lost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """What Kafka holds of one stream."""

    begins: Offsets
    ends: Offsets
    may_lose: bool
    """Whether the source has the option `failOnDataLoss=false`."""


class Topics:
    """Asks Kafka about the sources of one query."""

    def __init__(self, rows: DataFrame, places: Sequence[int], scratch: Path) -> None:
        """`places` has the stream of each place at which the plan of `rows` reads one; `scratch` is a folder."""
        self._spark: Any = rows.sparkSession
        self._jvm: Any = rows.sparkSession.sparkContext._jvm
        self._scratch = scratch
        leaves = dict(zip(places, streams_of(rows), strict=True))
        self._leaves = [leaves[stream] for stream in range(len(leaves))]

    def __len__(self) -> int:
        """How many streams the query reads."""
        return len(self._leaves)

    @property
    def may_lose(self) -> bool:
        """Whether all sources have the option `failOnDataLoss=false`."""
        return all(map(_may_lose, self._leaves))

    def ends(self) -> list[Offsets]:
        """Where each stream ends now."""
        return [held.ends for held in self.held()]

    def held(self) -> list[Held]:
        """What Kafka holds of each stream."""
        return [self._held(leaf) for leaf in self._leaves]

    def _held(self, leaf: Any) -> Held:
        self._spark._get_j_spark_session_class(self._jvm).setActiveSession(
            self._spark._jsparkSession
        )  # Kafka's stream asks for it
        given = self._jvm.java.util.HashMap()
        for name, value in dict(leaf.extraOptions()).items():
            if not name.lower().startswith("starting"):  # it may name partitions, and not those that are new
                given.put(name, value)
        given.put("startingOffsets", "earliest")
        given = self._jvm.org.apache.spark.sql.util.CaseInsensitiveStringMap(given)
        limit = self._jvm.org.apache.spark.sql.connector.read.streaming.ReadLimit.allAvailable()
        folder = self._scratch / "ends" / uuid.uuid4().hex
        stream = leaf.table().newScanBuilder(given).build().toMicroBatchStream(str(folder))
        try:
            first = stream.initialOffset()
            begins, ends = (offsets_of(str(one.json())) for one in (first, stream.latestOffset(first, limit)))
            return Held(begins, ends, _may_lose(leaf))
        finally:
            stream.stop()
            shutil.rmtree(folder, ignore_errors=True)


def _may_lose(leaf: Any) -> bool:
    return str(leaf.extraOptions().getOrDefault("failOnDataLoss", "true")).lower() == "false"


def within(job: str, offsets: Mapping[int, Offsets], held: Sequence[Held]) -> dict[int, Offsets]:
    """The next offsets of some streams, moved to the first row that Kafka still has.

    Without this, each new query would fail there again. Raises `SourceDataLostError` for rows that are gone, if the
    source must not lose any.
    """
    return {stream: _within(job, one, held[stream]) for stream, one in offsets.items()}


def _within(job: str, offsets: Offsets, held: Held) -> Offsets:
    found: Offsets = {}
    for topic, partitions in offsets.items():
        for number, offset in partitions.items():
            begin, end = (one.get(topic, {}).get(number) for one in (held.begins, held.ends))
            where = f"partition {number} of topic {topic!r}"
            if begin is None or end is None:
                lost = f"{where} does not exist any more"
            elif offset < begin:
                lost = f"{where} begins at offset {begin}, and the job has read up to {offset}"
            elif offset > end:
                lost = f"{where} ends at offset {end}, and the job has read up to {offset}: the topic was made anew"
            else:
                found.setdefault(topic, {})[number] = offset
                continue
            if not held.may_lose:
                raise data_lost(f"job {job}", lost)
            log.warning("job %s: %s; it goes on with the first row that is there (failOnDataLoss=false)", job, lost)
            if begin is not None:
                found.setdefault(topic, {})[number] = begin
    return found
