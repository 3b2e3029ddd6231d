"""What a run has worked through: rows per source and step, batch by batch, and Spark's report on each batch.

The batch function says what was committed. Spark's report on the batch comes a little later: only Spark knows how many
rows its sources gave, and where they stand.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from strandline.runtime.driver.figures import SourceFigures, StateMemory, StepFigures
from strandline.runtime.driver.sink_progress import SinkProgress
from strandline.runtime.driver.slot_samples import SlotSample
from strandline.runtime.driver.source_watch import Silence
from strandline.runtime.protocol.figures import ChangelogFigures
from strandline.runtime.protocol.messages import BatchTime
from strandline.runtime.protocol.slot_calls import OperatorFigures, RowCounts

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

KEPT_REPORTS = 100
"""How many reports `recent` gives, as many as Spark keeps."""
KEPT_BATCHES = 10_000
"""For how many batches it is known what they counted. A run that goes back further counts some rows again."""
REALTIME_SOURCE = "Kafka, in real time"
"""The description of a stream in real time."""
RATE_SECONDS = 60.0
"""Over how many seconds rates are computed."""


@dataclass(frozen=True, slots=True)
class StreamRead:
    """What an epoch has read of one stream."""

    rows: int
    end: Any
    """Where the stream stands, in the form of Spark's offsets."""


@dataclass(frozen=True, slots=True)
class BatchWork:
    """A committed batch: when it ran, by `time.monotonic`, and the rows of each step."""

    batch: int
    spark_batch: int | None
    """Its number in Spark's query; None for a batch of a drain, on which Spark does not report."""
    time: BatchTime
    began: float
    ended: float
    steps: Mapping[str, RowCounts]
    written_rows: int
    """Rows in Parquet files."""
    reads: Mapping[int, int] = field(default_factory=dict)
    """How often the batch read each source. One that is missing was read at each of its places; see `SourceReads`."""
    read: Mapping[int, StreamRead] = field(default_factory=dict)
    """What an epoch has read of each stream. Spark does not report on epochs."""

    @property
    def watermark_ms(self) -> int | None:
        """The earliest watermark of a step in the batch."""
        return min((one.watermark_ms for one in self.time.steps.values() if one.watermark_ms is not None), default=None)

    def watermark_of(self, step: str) -> int | None:
        """The watermark of a step in the batch."""
        return self.time.of(step).watermark_ms


@dataclass(frozen=True, slots=True)
class Shape:
    """What the progress of a generation needs to know about the job."""

    generation: int
    parallelism: int
    restored_batch: int
    """The batch that the generation goes on from."""
    places: tuple[int, ...]
    """The source of each place at which the plan reads one; see `Graph.source_places`."""
    steps_of_functions: frozenset[str] = frozenset()
    """The steps whose output goes to the function of a sink."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """What the state takes up, as the slots said last."""

    steps: Mapping[str, OperatorFigures] = field(default_factory=dict)
    memory: StateMemory = field(default_factory=StateMemory)
    changelog: ChangelogFigures | None = None


@dataclass(slots=True)
class _Counted:
    """What one batch added to the counts."""

    work: BatchWork
    rows_out: int
    rows_in: Counter[int] = field(default_factory=Counter)
    """By source; empty until Spark reports."""


class RunProgress:
    """Counts rows over all generations of a run, and keeps the last reports. Safe to use from several threads."""

    def __init__(self, job: str, on_report: Callable[[dict[str, Any]], None] = lambda _report: None) -> None:
        """`on_report` is called with every report. It must not wait."""
        self._job = job
        self._on_report = on_report
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.sinks = SinkProgress()
        """What the sinks have got."""
        self.silence: Silence | None = None
        """The source for which the query waits; None if it does not wait for long."""
        self._shape = Shape(0, 0, -1, ())
        self._batches: deque[_Counted] = deque(maxlen=KEPT_BATCHES)
        self._unreported: dict[int, _Counted] = {}
        """Batches of this generation that Spark has not reported yet, by Spark's number."""
        self._rows_in: Counter[int] = Counter()
        self._rows_out = 0
        self._steps: dict[str, RowCounts] = {}
        self._sources: dict[int, SourceFigures] = {}
        self._reports: deque[dict[str, Any]] = deque(maxlen=KEPT_REPORTS)
        self._sizes = StateSizes()
        self._slots: dict[int, SlotSample] = {}
        """What each slot of this generation said last."""
        self._last: BatchWork | None = None

    # --- what happens ------------------------------------------------------------------------------

    def begin(self, shape: Shape, steps: Sequence[str]) -> None:
        """A generation begins. What earlier ones counted after its start is computed again, so it is taken off."""
        with self._lock:
            self._shape = shape
            self._unreported = {}
            self._slots = {}
            self._steps = {uid: self._steps.get(uid, RowCounts()) for uid in steps}
            while self._batches and self._batches[-1].work.batch > shape.restored_batch:
                void = self._batches.pop()
                self._rows_in.subtract(void.rows_in)
                self._rows_out -= void.rows_out
                for uid, counts in void.work.steps.items():
                    self._steps[uid] = self._steps.get(uid, RowCounts()).minus(counts)

    def committed(self, work: BatchWork) -> None:
        """A batch is committed."""
        with self._lock:
            passed_on = self._shape.steps_of_functions
            given = sum(counts.rows_out for uid, counts in work.steps.items() if uid in passed_on)
            counted = _Counted(work, work.written_rows + given)
            self._batches.append(counted)
            report = self._note_read(counted) if work.read else None
            if work.spark_batch is not None:
                self._unreported[work.spark_batch] = counted
            self._last = work
            self._rows_out += counted.rows_out
            for uid, counts in work.steps.items():
                self._steps[uid] = self._steps.get(uid, RowCounts()).plus(counts)
        if report is not None:
            self._on_report(report)

    def reported(self, generation: int, spark: Mapping[str, Any]) -> None:
        """Spark has reported on a batch of a generation, in the form of its `StreamingQueryProgress.json`."""
        with self._lock:
            ours = generation == self._shape.generation
            counted = self._unreported.pop(spark["batchId"], None) if ours else None
            if counted is None:
                return  # the generation is over, a batch of ours failed, or Spark had nothing to do
            sources = self._read_sources(spark, counted)
            report = self._report(spark, counted, sources)
            self._reports.append(report)
        self._on_report(report)

    def sampled(
        self, generation: int, samples: Sequence[SlotSample], budget: int, changelog: ChangelogFigures | None
    ) -> None:
        """Slots have given their figures. If one is missing, the sizes stay as they were."""
        with self._lock:
            if generation != self._shape.generation:
                return
            self._slots |= {sample.index: sample for sample in samples}
            if len(samples) < self._shape.parallelism and self._sizes.steps:
                return
            slots = [sample.figures for sample in samples]
            steps: dict[str, OperatorFigures] = {}
            for slot in slots:
                for uid, figures in slot.operators.items():
                    steps[uid] = _added(steps[uid], figures) if uid in steps else figures
            memory = StateMemory(
                executor_budget_bytes=budget,
                slot_budget_bytes=min((slot.budget_bytes for slot in slots), default=0),
                used_bytes=sum(slot.used_bytes for slot in slots),
                most_used_bytes=max((slot.used_bytes for slot in slots), default=0),
            )
            self._sizes = StateSizes(steps, memory, changelog)

    # --- what is known -------------------------------------------------------------------------------

    @property
    def waits_for_report(self) -> bool:
        """Whether a committed batch has not been reported yet."""
        return bool(self._unreported)

    @property
    def rows(self) -> int:
        """Rows that were read from the sources."""
        with self._lock:
            return self._rows_in.total()

    @property
    def rows_out(self) -> int:
        """Rows that were given to the sinks."""
        return self._rows_out

    @property
    def last(self) -> BatchWork | None:
        """The last committed batch."""
        return self._last

    @property
    def sizes(self) -> StateSizes:
        """What the state takes up."""
        return self._sizes

    def slots(self) -> list[SlotSample]:
        """What each slot of the current generation said last, by its number."""
        with self._lock:
            return [sample for _index, sample in sorted(self._slots.items())]

    def sources(self) -> tuple[SourceFigures, ...]:
        """The sources, in the order of `job.source(...)`."""
        with self._lock:
            return tuple(
                msgspec.structs.replace(source, rows=self._rows_in[number])
                for number, source in sorted(self._sources.items())
            )

    def steps(self) -> dict[str, StepFigures]:
        """The stateful steps."""
        with self._lock:
            return {uid: self._step(uid, counts) for uid, counts in self._steps.items()}

    def rates(self, now: float) -> tuple[float, float]:
        """Rows in and rows out per second, over the batches that ended in the last minute before `now`."""
        with self._lock:
            recent: list[_Counted] = []
            for counted in reversed(self._batches):
                # A batch that takes longer than a minute counts until the next one has taken as long.
                took = counted.work.ended - counted.work.began
                if now - counted.work.ended > max(RATE_SECONDS, took if not recent else 0.0):
                    break
                recent.append(counted)
            if not recent:
                return 0.0, 0.0
            seconds = max(now - recent[-1].work.began, 1e-3)
            read = sum(counted.rows_in.total() for counted in recent)
            return read / seconds, sum(counted.rows_out for counted in recent) / seconds

    def recent(self) -> list[dict[str, Any]]:
        """The last reports, oldest first."""
        with self._lock:
            return list(self._reports)

    # --- how ---------------------------------------------------------------------------------------

    def _step(self, uid: str, counts: RowCounts) -> StepFigures:
        size = self._sizes.steps.get(uid, _NO_STATE)
        return StepFigures(
            counts.rows_in,
            counts.rows_out,
            counts.late_rows,
            self._last.watermark_of(uid) if self._last is not None else None,
            size.state_bytes,
            size.memory_bytes,
            size.estimated_keys,
            counts.bytes_in,
            counts.bytes_out,
        )

    def _note_read(self, counted: _Counted) -> dict[str, Any]:
        """Count what an epoch has read. Returns a report on it, in the form of Spark's."""
        work = counted.work
        seconds = max(work.ended - work.began, 1e-6)

        def figures(rows: int) -> dict[str, Any]:
            return dict(zip(_ROW_FIELDS, (rows, rows / seconds, rows / seconds), strict=True))

        sources = []
        for number, read in sorted(work.read.items()):
            counted.rows_in[number] = read.rows
            self._rows_in[number] += read.rows
            before = self._sources.get(number)
            self._sources[number] = SourceFigures(REALTIME_SOURCE, 0, read.end, None)
            start = before.offset if before is not None else None
            told = {"description": REALTIME_SOURCE, "startOffset": start, "endOffset": read.end, "latestOffset": None}
            sources.append({**told, **figures(read.rows)})
        spark = {
            "timestamp": _iso(work.time.processing_ms),
            "durationMs": {"triggerExecution": round(seconds * 1000)},
            **figures(counted.rows_in.total()),
        }
        report = self._report(spark, counted, sources)
        self._reports.append(report)
        return report

    def _read_sources(self, spark: Mapping[str, Any], counted: _Counted) -> list[dict[str, Any]]:
        """Count the rows of each source once, and note where it stands. Returns Spark's facts, corrected."""
        found = []
        for number, told in zip(dict.fromkeys(self._shape.places), spark["sources"], strict=False):
            reads = counted.work.reads.get(number, self._shape.places.count(number))
            rows = round(told["numInputRows"] / reads)
            counted.rows_in[number] = rows
            self._rows_in[number] += rows
            end, latest = told.get("endOffset"), told.get("latestOffset")
            behind = offsets_behind(end, latest)
            self._sources[number] = SourceFigures(told["description"], 0, end, behind)
            found.append(_corrected(told, rows))
        return found

    def _report(self, spark: Mapping[str, Any], counted: _Counted, sources: list[dict[str, Any]]) -> dict[str, Any]:
        work, shape = counted.work, self._shape
        event_time = dict(spark.get("eventTime") or {})
        if work.watermark_ms is not None:
            event_time["watermark"] = _iso(work.watermark_ms)
        return {
            "name": self._job,
            "generation": shape.generation,
            "batchId": work.batch,
            "timestamp": spark["timestamp"],
            "batchDuration": spark.get("batchDuration", round((work.ended - work.began) * 1000)),
            **{name: _corrected(spark, counted.rows_in.total())[name] for name in _ROW_FIELDS},
            "durationMs": dict(spark["durationMs"]),
            "eventTime": event_time,
            "stateOperators": [
                self._state_operator(uid, work.steps[uid], work) for uid in self._steps if uid in work.steps
            ],
            "sources": sources,
            "sink": {"description": "Strandline", "numOutputRows": counted.rows_out},
        }

    def _state_operator(self, uid: str, counts: RowCounts, work: BatchWork) -> dict[str, Any]:
        size = self._sizes.steps.get(uid, _NO_STATE)
        return {
            "operatorName": uid,
            "numRowsTotal": size.estimated_keys,
            "memoryUsedBytes": size.memory_bytes,
            "numRowsDroppedByWatermark": counts.late_rows,
            "numShufflePartitions": self._shape.parallelism,
            "numStateStoreInstances": self._shape.parallelism,
            "customMetrics": {
                "numRowsInput": counts.rows_in,
                "numRowsOutput": counts.rows_out,
                "stateBytes": size.state_bytes,
                "watermarkMs": work.watermark_of(uid),
            },
        }


_NO_STATE = OperatorFigures(0, 0, 0)
_ROW_FIELDS = ("numInputRows", "inputRowsPerSecond", "processedRowsPerSecond")


def _added(one: OperatorFigures, other: OperatorFigures) -> OperatorFigures:
    return OperatorFigures(
        one.state_bytes + other.state_bytes,
        one.memory_bytes + other.memory_bytes,
        one.estimated_keys + other.estimated_keys,
    )


def _corrected(told: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Spark's facts with the right number of rows. Spark counts a source as often as the batch reads it."""
    share = rows / told["numInputRows"] if told["numInputRows"] else 1.0
    rates = {name: (told.get(name) or 0.0) * share for name in _ROW_FIELDS[1:]}
    return {**told, "numInputRows": rows, **rates}


def offsets_behind(end: Any, latest: Any) -> int | None:
    """The sum of the differences between two offsets, which are numbers, or dicts with numbers inside.

    None if Spark does not say where the source's newest offset is, or says it in another form.
    """
    if isinstance(latest, Mapping) and isinstance(end, Mapping):
        parts = [offsets_behind(end.get(name, 0 if isinstance(to, int) else {}), to) for name, to in latest.items()]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None
    if isinstance(latest, int) and isinstance(end, int):
        return max(0, latest - end)
    return None


def _iso(milliseconds: int) -> str:
    try:
        text = datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"  # beyond the years that Python knows
    return text.replace("+00:00", "Z")


ReportMark = tuple[int, str]
"""Which of Spark's reports it is: the batch by Spark's number, and the time of its trigger.

While there are no rows, Spark reports in vain on the batch that would be next. So two reports may have one number.
"""

BEFORE_ALL: ReportMark = (-1, "")


def mark_of(report: Mapping[str, Any]) -> ReportMark:
    """The mark of a report."""
    return report["batchId"], report["timestamp"]


def reports_after(query: StreamingQuery, known: ReportMark) -> list[dict[str, Any]]:
    """Spark's reports after the one with the mark `known`, oldest first.

    Private Spark API: `_jsq`. `recentProgress` of PySpark would convert up to 100 reports, field by field.
    """
    recent = query._jsq.recentProgress()
    found: list[dict[str, Any]] = []
    for index in range(len(recent) - 1, -1, -1):
        if (recent[index].batchId(), recent[index].timestamp()) <= known:
            break
        found.append(json.loads(recent[index].json()))
    return found[::-1]
