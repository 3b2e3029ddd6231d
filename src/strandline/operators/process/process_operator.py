"""The operator that runs a `KeyedProcessor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, get_args

import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.checkpoint.steps import StepDescription, StepKind
from strandline.errors import JobDefinitionError, StrandlineError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, Output, SubtaskInfo, TimeMode
from strandline.operators.columns.declared import check_time_column
from strandline.operators.columns.described import described_columns
from strandline.operators.columns.row_writer import RowWriter
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.columns.time_columns import with_time_columns
from strandline.operators.process.key_codec import KeyCodec
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.operators.process.output_rows import SideOutputs
from strandline.operators.process.process_context import ProcessContext
from strandline.operators.process.process_subtask import ProcessSubtask
from strandline.operators.rewrite import Rewrite
from strandline.operators.step_change import StepChange
from strandline.operators.timed.late_rows import DROP, check_late, late_side
from strandline.operators.user_code import NOT_BY_USER_CODE, call_failed, opened_copy
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import KeyEncoder
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.states import KeyScope
from strandline.state.handles.timers import TIMERS, TimerService
from strandline.state.handles.ttl import DEFAULT_SWEEP, SweepBudget


class ProcessorMethods(NamedTuple):
    """The names of the methods of user code and of the arguments for its event time, for errors."""

    open: str
    rows: str
    timer: str
    event_mode: str
    output_time: str


class ProcessOperator(Operator):
    """Runs a `KeyedProcessor`: groups rows by key, reads the value states of many keys at once, checks the output.

    `time_mode` is the clock of the timers. `timer_service` says how due timers are found: by an index in memory
    ("heap"), or by a scan of the stored timers ("rocksdb").

    `late` says what happens with `time_mode="event"` to a row whose `event_time` is not after the watermark of the
    batch before. "drop": it is dropped. "keep": `process` gets it like any other row. Any other value is the name of a
    side output, which has the columns of the input, or those of them that `side_outputs` names.

    `output_time` is the output column that carries event time. Output rows may be behind the watermark of the batch
    before by less than `output_delay_ms`. A row that is further behind is an error, because the next step would find it
    late.
    """

    sorted_input = True
    kind: ClassVar[StepKind] = "process"
    methods: ClassVar = ProcessorMethods("open", "process", "on_timer", "time_mode='event'", "output_time")

    def __init__(
        self,
        uid: str,
        processor: KeyedProcessor,
        key_columns: Sequence[str],
        input_schema: StructType,
        output_schema: StructType,
        *,
        time_mode: TimeMode = "none",
        timer_service: TimerService = "heap",
        event_time: str | None = None,
        late: str = DROP,
        side_outputs: Mapping[str, str | StructType] | None = None,
        output_time: str | None = None,
        output_delay_ms: int = 0,
        limits: ProcessLimits = DEFAULT_LIMITS,
        sweep_budget: SweepBudget = DEFAULT_SWEEP,
    ) -> None:
        self.uid = uid
        self.key_columns = tuple(key_columns)
        self.processor = processor
        self.input_struct = input_schema
        self.output_struct = output_schema
        self.input_schema = arrow_schema(input_schema)
        self.output_schema = arrow_schema(output_schema)
        self.time_mode = time_mode
        self.timer_service = timer_service
        self.event_time = event_time
        self.late = late
        self.output_time = self.default_time = output_time
        self.output_delay_ms = output_delay_ms
        self.time_columns = {} if output_time is None else {output_time: output_delay_ms}
        self.limits = limits
        self.sweep_budget = sweep_budget
        self.side_outputs = {name: parse_schema(schema) for name, schema in (side_outputs or {}).items()}
        check_late(late, f"operator {uid!r}")
        self.late_side = late_side(late)
        if self.late_side is not None:
            self.side_outputs.setdefault(self.late_side, with_time_columns(input_schema, {}))
        self._subtask: ProcessSubtask | None = None
        self._check_arguments()

    def check(self) -> list[StateDescriptor]:
        """The states that `open` declares, found in the driver before anything runs.

        A copy of the processor is opened and never closed; its `context.subtask` is -1. Raises `JobDefinitionError` for
        wrong names, schemas and durations, and for a processor that cannot be pickled and so cannot be sent to a slot.
        Raises `UserCodeError` if `open` itself fails.
        """
        context = ProcessContext(SubtaskInfo("", self.uid, -1, 1, 1), KeyScope())
        copy = opened_copy(self.processor, context, self.uid, self._processor_name(), self.methods.open)
        self.deleted_states = self._deleted_by(copy)
        codec = None
        if self.time_mode != "none":
            codec = KeyCodec(self.input_struct, self.key_columns, self.time_mode)
        return _declared(context, codec)

    def open(self, info: SubtaskInfo) -> None:
        """Call the processor's `open`; raises `UserCodeError` if it fails."""
        subtask = self._make_subtask(info)
        try:
            self.processor.open(subtask.context)
        except (StrandlineError, *NOT_BY_USER_CODE):
            raise
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            raise call_failed(info.where, f"{self.methods.open}()", error) from None
        subtask.opened()
        self._subtask = subtask

    def states(self) -> list[StateDescriptor]:
        """The states that `open` declared, and the timers."""
        if self._subtask is None:
            return []
        return _declared(self._subtask.context, self._subtask.key_codec)

    def describe(self) -> StepDescription:
        """The key and the clock of the timers. The states, which user code declares, are described one by one."""
        keys = described_columns(self.input_struct, self.key_columns)
        return StepDescription(self.uid, self.kind, keys, parameters={"time_mode": self.time_mode})

    def carry_over(self, change: StepChange) -> tuple[Rewrite, ...]:
        """A step may get a clock. If it loses its clock, its timers are a state that it does not declare any more."""
        if "none" in (change.before.parameters.get("time_mode"), self.time_mode):
            change.accept("time_mode")
        change.explain("so the times of its timers mean something else", "time_mode")
        return ()

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Call user code once for every key of the batch, in the order of the input, then for every due timer."""
        if self._subtask is None:
            raise StrandlineError(f"operator {self.uid!r} was run before it was opened")
        self.late_rows = 0
        return self._subtask.run(rows, changes, batch)

    def close(self) -> None:
        """Call the processor's `close`."""
        subtask, self._subtask = self._subtask, None
        if subtask is not None:
            try:
                self.processor.close()
            except (StrandlineError, *NOT_BY_USER_CODE):
                raise
            except BaseException as error:  # noqa: BLE001  # user code may raise anything
                raise call_failed(subtask.info.where, "close()", error) from None

    def _make_subtask(self, info: SubtaskInfo) -> ProcessSubtask:
        return ProcessSubtask(self, info)

    def _processor_name(self) -> str:
        return type(self.processor).__name__

    def _deleted_by(self, processor: KeyedProcessor) -> frozenset[str]:
        return frozenset()

    def _check_arguments(self) -> None:
        """Raise here, in the driver, what the first row would raise in a slot."""
        where = f"operator {self.uid!r}"
        KeyEncoder(self.input_schema, self.key_columns, KEY_GROUP_COLUMN)
        RowWriter(self.output_struct, self.output_schema, where)
        SideOutputs(self.side_outputs, where)
        for name, value, allowed in (
            ("time_mode", self.time_mode, get_args(TimeMode)),
            ("timer_service", self.timer_service, get_args(TimerService)),
        ):
            if value not in allowed:
                raise JobDefinitionError(
                    f"{where}: {name}={value!r} is not valid; use {' or '.join(map(repr, allowed))}"
                )
        if self.time_mode != "none":
            KeyCodec(self.input_struct, self.key_columns, self.time_mode)
        if self.event_time is not None:
            check_time_column(self.input_struct, self.event_time, where)
        if self.late != DROP and (self.event_time is None or self.time_mode != "event"):
            raise JobDefinitionError(
                f"{where}: late={self.late!r} needs {self.methods.event_mode}: only by event time are rows late"
            )
        if self.late_side is not None:
            self._check_late_output(self.late_side, where)
        self._check_output_time(where)

    def _check_output_time(self, where: str) -> None:
        if self.output_time is None:
            if self.output_delay_ms:
                raise JobDefinitionError(f"{where}: output_delay= needs output_time=, a timestamp column of the output")
            return
        where = f"{where}: {self.methods.output_time}={self.output_time!r}"
        check_time_column(self.output_struct, self.output_time, where)
        if self.time_mode != "event":
            raise JobDefinitionError(
                f"{where} needs {self.methods.event_mode}: otherwise the processor gets late rows, too, and what it "
                "makes of them would be late for the next step"
            )

    def _check_late_output(self, name: str, where: str) -> None:
        columns = {field.name: field.dataType for field in self.input_struct.fields}
        for field in self.side_outputs[name].fields:
            if columns.get(field.name) != field.dataType:
                raise JobDefinitionError(
                    f"{where}: the side output {name!r} takes late rows, so its columns must be columns of the input; "
                    f"{field.name} {field.dataType.simpleString()} is not"
                )


def _declared(context: ProcessContext, timer_keys: KeyCodec | None) -> list[StateDescriptor]:
    """The states that `open` declared, and the state of the timers if the operator has timers."""
    timers = [StateDescriptor(TIMERS, "timers", timer_keys.schema.json())] if timer_keys is not None else []
    return [*context._descriptors.values(), *timers]
