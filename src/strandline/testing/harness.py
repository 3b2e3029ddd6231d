"""Runs a processor without Spark, batch by batch, with a clock that the test controls."""

from __future__ import annotations

import copy
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from strandline.config.option import DurationLike, parse_duration
from strandline.errors import StrandlineError
from strandline.operators.base import KEY_GROUP_COLUMN, TIME_MODES, BatchInfo, SideRows, SubtaskInfo, TimeMode
from strandline.operators.columns.row_reader import column_reader, iterate_rows, row_factory
from strandline.operators.columns.row_writer import RowWriter
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.operators.process.process_context import ProcessContext
from strandline.operators.process.process_operator import ProcessOperator
from strandline.operators.spark.spark_operator import SparkProcessorOperator, SparkRows
from strandline.pyspark_releases import PandasSettings
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import EncodedKeys
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.query import encode_key, read_state, read_timers
from strandline.state.handles.states import KeyScope
from strandline.state.handles.timers import TimerService
from strandline.state.handles.ttl import DEFAULT_SWEEP, SweepBudget

_KEY_GROUPS: Final = 128
_BATCH_MEMORY: Final = 64 << 20


class ProcessorHarness:
    """Runs a processor with the real operator, change set and heap backend, but without Spark.

        with ProcessorHarness(
            CountVisits(), input_schema="user string, at timestamp", key="user", output_schema="user string, n long",
            time_mode="processing",
        ) as h:
            assert h.process([("ann", None), {"user": "bob"}]) == [("ann", 1), ("bob", 1)]
            assert h.state("visits", "ann") == 1
            assert h.timers("ann") == [3_600_000]
            h.restart()
            assert sorted(h.advance_processing_time("1h")) == [("ann", 0), ("bob", 0)]

    Processing time begins at 0, and there is no watermark yet. Every call of `process` and `advance_...` is one batch.
    It is committed unless `commit=False` simulates its loss; then the next call repeats the batch with its own rows.

    Spark's `StatefulProcessor` runs as well, in the flavour that `rows` names. Output is always returned as rows.
    `initial_schema`, `time_zone` and `spark_conf` (settings of the session, by their names) apply only to such a
    processor; `side_outputs` and `sweep_budget` only to a `KeyedProcessor`. The other arguments have the names, the
    values and the defaults of `KeyedStream.process`; `event_time` is its `time`.
    """

    def __init__(
        self,
        processor: KeyedProcessor | StatefulProcessor,
        *,
        input_schema: str | StructType,
        key: str | Sequence[str],
        output_schema: str | StructType,
        time_mode: str = "none",
        timer_service: TimerService = "heap",
        event_time: str | None = None,
        late: str = "drop",
        side_outputs: Mapping[str, str | StructType] | None = None,
        output_time: str | None = None,
        output_delay: DurationLike = 0,
        rows: SparkRows = "row",
        initial_schema: str | StructType | None = None,
        time_zone: str = "UTC",
        spark_conf: Mapping[str, str] = MappingProxyType({}),
        sweep_budget: SweepBudget = DEFAULT_SWEEP,
        limits: ProcessLimits = DEFAULT_LIMITS,
    ) -> None:
        keys = [key] if isinstance(key, str) else key
        schemas = parse_schema(input_schema), parse_schema(output_schema)
        output_delay_ms = round(parse_duration(output_delay) * 1000)
        self.operator: ProcessOperator
        if isinstance(processor, KeyedProcessor):
            self.operator = ProcessOperator(
                "test",
                processor,
                keys,
                *schemas,
                time_mode=cast(TimeMode, TIME_MODES.get(time_mode.lower(), time_mode)),
                timer_service=timer_service,
                event_time=event_time,
                late=late,
                side_outputs=side_outputs,
                output_time=output_time,
                output_delay_ms=output_delay_ms,
                sweep_budget=sweep_budget,
                limits=limits,
            )
        else:
            self.operator = SparkProcessorOperator(
                "test",
                processor,
                keys,
                *schemas,
                rows=rows,
                time_mode=time_mode,
                timer_service=timer_service,
                event_time=event_time,
                late=late,
                output_time=output_time,
                output_delay_ms=output_delay_ms,
                initial_schema=None if initial_schema is None else parse_schema(initial_schema),
                settings=PandasSettings.of(spark_conf.get, time_zone),
                limits=limits,
            )
        self._processing_time_ms = 0
        self._watermark_ms: int | None = None
        self.late_rows = 0
        """The number of late rows so far."""
        self._late_watermark_ms: int | None = None
        self._batch_id = 1
        self._backend = HeapBackend()
        self._spill = tempfile.TemporaryDirectory(prefix="strandline-harness-")
        struct = self.operator.input_struct
        self._key_struct = StructType([struct[name] for name in self.operator.key_columns])
        self._sides: dict[str, list[Any]] = {name: [] for name in self.operator.side_outputs}
        self._info = SubtaskInfo("test", "test", 0, 1, _KEY_GROUPS)
        self._pristine = _copied(self.operator.processor)
        self.operator.open(self._info)

    @property
    def processor(self) -> KeyedProcessor:
        """The running processor. After a restart it is a fresh copy of the processor that was passed in."""
        return self.operator.processor

    @property
    def processing_time_ms(self) -> int:
        """The processing time of the next batch, in milliseconds. A test may set it, but not to an earlier time."""
        return self._processing_time_ms

    @processing_time_ms.setter
    def processing_time_ms(self, to_ms: int) -> None:
        before = self._processing_time_ms
        if to_ms < before:
            raise StrandlineError(f"processing time never goes back: it is at {before} and cannot move to {to_ms}")
        self._processing_time_ms = to_ms

    @property
    def watermark_ms(self) -> int | None:
        """The watermark of the next batch, in milliseconds. A test may set it, but not to an earlier time."""
        return self._watermark_ms

    @watermark_ms.setter
    def watermark_ms(self, to_ms: int | None) -> None:
        before = self._watermark_ms
        if before is not None and (to_ms is None or to_ms < before):
            raise StrandlineError(f"a watermark never goes back: it is at {before} and cannot move to {to_ms}")
        self._watermark_ms = to_ms

    @property
    def next_timer_ms(self) -> int | None:
        """The time at which the operator asks for a batch without rows, on its own clock."""
        return self.operator.next_timer_ms

    def process(self, rows: Iterable[Any], commit: bool = True) -> list[Any]:
        """Run one batch of `rows` (tuples, Rows, lists or dicts, in any order of keys) and return the output rows."""
        given = list(rows)
        return self._run([self._sorted(given, self.operator.input_struct)] if given else [], commit)

    def process_initial(self, rows: Iterable[Any]) -> None:
        """Pass the initial state to a `StatefulProcessor`, as a separate batch before the first one."""
        operator = self.operator
        if not isinstance(operator, SparkProcessorOperator) or operator.initial_struct is None:
            raise StrandlineError("only a StatefulProcessor with an initial_schema takes an initial state")
        self._run([self._sorted(list(rows), operator.initial_struct)], True, operator.run_initial)

    def advance_processing_time(self, by: int | str | timedelta, commit: bool = True) -> list[Any]:
        """Advance time by `by`, milliseconds or a duration like "10s", run an empty batch and return its output."""
        before = self._processing_time_ms
        self.processing_time_ms = before + (by if isinstance(by, int) else round(parse_duration(by) * 1000))
        made = self._run([], commit)
        if not commit:
            self._processing_time_ms = before
        return made

    def advance_watermark(self, to_ms: int, commit: bool = True) -> list[Any]:
        """Move the watermark to `to_ms`, run an empty batch and return its output. Later rows up to it are late."""
        before = self._watermark_ms
        self.watermark_ms = to_ms
        made = self._run([], commit)
        if not commit:
            self._watermark_ms = before
        return made

    def state(self, name: str, key: Any) -> Any:
        """The content of a state for a key: a value or None, a list, a dict, or an accumulator."""
        return read_state(self._backend, self._declared(name), self._encoded(key), self.processing_time_ms)

    def set_state(self, name: str, key: Any, content: Any) -> None:
        """Replace the content of a state for a key, in the form in which `state` returns it."""
        declared = self._declared(name)
        changes = ChangeSet(self._backend, _BATCH_MEMORY, Path(self._spill.name))
        scope = KeyScope()
        write = _writer(declared, ProcessContext(self._info, scope))
        scope.begin(changes, self._batch_id, self.processing_time_ms)
        encoded = self._encoded(key)
        groups = np.frombuffer(encoded[:2], np.uint8).reshape(1, 2)
        scope.load(EncodedKeys(groups, None, pa.array([encoded[2:]], pa.binary())))
        scope.index = 0
        try:
            write(content)
            scope.flush()
            for keys, values in changes.chunks():
                self._backend.apply(keys, values)
        finally:
            changes.discard()

    def delete_state(self, name: str, key: Any) -> None:
        """Remove the content of a state for a key."""
        empty: dict[str, Any] = {"list": [], "map": {}}
        self.set_state(name, key, empty.get(self._declared(name).kind))

    def timers(self, key: Any) -> list[int]:
        """The times of a key's timers, ascending."""
        return read_timers(self._backend, self._encoded(key))

    def side(self, name: str) -> list[Any]:
        """All rows that went to a side output so far."""
        if name not in self._sides:
            raise StrandlineError(f"there is no side output {name!r} among {', '.join(self._sides) or 'none'}")
        return list(self._sides[name])

    def restart(self) -> None:
        """Close the processor and open a fresh copy of it on the same state, as after a recovery."""
        if self._pristine is None:
            raise StrandlineError("the processor cannot be copied (copy.deepcopy), so it cannot be restarted")
        self.operator.close()
        self.operator.processor = copy.deepcopy(self._pristine)
        self.operator.open(self._info)

    def close(self) -> None:
        """Close the processor. May be called more than once."""
        self.operator.close()
        self._backend.close()
        self._spill.cleanup()

    def __enter__(self) -> ProcessorHarness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _declared(self, name: str) -> StateDescriptor:
        states = {state.name: state for state in self.operator.states()}
        if name not in states:
            raise StrandlineError(f"there is no state {name!r}; the processor declared {', '.join(states) or 'none'}")
        return states[name]

    def _run(self, rows: list[pa.RecordBatch], commit: bool, run: Callable[..., Any] | None = None) -> list[Any]:
        operator = self.operator
        changes = ChangeSet(self._backend, _BATCH_MEMORY, Path(self._spill.name))
        batch = BatchInfo(self._batch_id, self.processing_time_ms, self.watermark_ms, self._late_watermark_ms)
        made: list[Any] = []
        sides: dict[str, list[Any]] = {name: [] for name in self._sides}
        try:
            for out in (run or operator.run)(iter(rows), changes, batch):
                if isinstance(out, SideRows):
                    sides[out.name] += _rows(out.rows, operator.side_outputs[out.name])
                else:
                    made += _rows(out, operator.output_struct)
            if commit:
                for keys, values in changes.chunks():
                    self._backend.apply(keys, values)
                self._batch_id += 1
                self._late_watermark_ms = self.watermark_ms
                self.late_rows += operator.late_rows
                for name, found in sides.items():
                    self._sides[name] += found
        finally:
            changes.discard()
        return made

    def _sorted(self, rows: list[Any], struct: StructType) -> pa.RecordBatch:
        """The rows as Spark sends them: grouped by key, with keys in the order of their first row."""
        writer = RowWriter(struct, arrow_schema(struct), "the test's input")
        batch = writer.build(rows, lambda at: f"of row {at}")
        values = list(zip(*[batch.column(name).to_pylist() for name in self.operator.key_columns], strict=True))
        keys = [self._encoded(value) for value in values]
        first = {key: at for at, key in reversed(list(enumerate(keys)))}
        order = sorted(range(len(keys)), key=lambda at: first[keys[at]])
        groups = pa.array([int.from_bytes(key[:2], "big") for key in keys], pa.int32())
        return batch.append_column(pa.field(KEY_GROUP_COLUMN, pa.int32()), groups).take(pa.array(order))

    def _encoded(self, key: Any) -> bytes:
        values = key if isinstance(key, tuple) else (key,)
        encoded = encode_key(self._key_struct, values, 0)
        return (zlib.crc32(encoded) % _KEY_GROUPS).to_bytes(2, "big") + encoded[2:]


def _writer(state: StateDescriptor, context: ProcessContext) -> Callable[[Any], None]:
    """A function that replaces the content of a state for the current key of `context`."""
    schema, ttl = parse_schema(state.schema), None if state.ttl_ms is None else timedelta(milliseconds=state.ttl_ms)
    match state.kind:
        case "value" | "reducing" | "aggregating":
            return context.value_state(state.name, schema, ttl).update
        case "list":
            return context.list_state(state.name, schema, ttl).put
        case "map":
            entries = context.map_state(state.name, parse_schema(state.key_schema or ""), schema, ttl)

            def replace(content: Mapping[Any, Any]) -> None:
                entries.clear()
                for key, value in content.items():
                    entries.put(key, value)

            return replace
        case _:
            raise StrandlineError(f"state {state.name!r} is of kind {state.kind}, which a test cannot set")


def _rows(batch: pa.RecordBatch, schema: StructType) -> list[Any]:
    columns = [column_reader(field.dataType)(batch.column(at)) for at, field in enumerate(schema.fields)]
    return list(iterate_rows(columns, row_factory(schema)))


def _copied(processor: KeyedProcessor) -> KeyedProcessor | None:
    try:
        return copy.deepcopy(processor)
    except Exception:  # noqa: BLE001  # only a restart needs the copy, and says so
        return None
