"""`ProcessContext`: states, timers, side outputs, batch and time, for per-key user code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pyspark.sql.types import DataType, StructType

from strandline.config.option import DurationLike
from strandline.errors import JobDefinitionError, SchemaError, StrandlineError
from strandline.operators.base import BatchInfo, SubtaskInfo
from strandline.operators.columns.declared import check_key_type
from strandline.operators.process.output_rows import SideOutputs
from strandline.state.coding.ddl import parse_schema
from strandline.state.descriptors import StateDescriptor, StateKind
from strandline.state.handles.folded import AggregatingState, ReducingState
from strandline.state.handles.states import KeyScope, ListState, MapState, ValueState
from strandline.state.handles.timers import Timers
from strandline.state.handles.ttl import (
    ExpiringListState,
    ExpiringMapState,
    ExpiringValueState,
    Expiry,
    TtlUpdate,
    check_update,
    parse_ttl,
)

RESERVED: Final = "__sl_"
"""The prefix of the runtime's own states."""


class ProcessContext:
    """What per-key user code may ask of the runtime.

    Declare states in `open`. Use timers, side outputs, time and batch in `process` and `on_timer`.

    `ttl` is a duration ("1h", seconds, a `timedelta`) by the batch's processing time. A value that is older is never
    returned, and is removed later. `ttl_update` says what restarts the duration: "write", or "read_and_write".
    """

    def __init__(
        self, info: SubtaskInfo, scope: KeyScope, timers: Timers | None = None, sides: SideOutputs | None = None
    ) -> None:
        self._info = info
        self._scope = scope
        self._timers = timers
        self._sides = sides
        self._descriptors: dict[str, StateDescriptor] = {}
        self._expiring: list[tuple[str, Expiry]] = []
        self._opening = True
        self._batch: BatchInfo | None = None

    # --- states ----------------------------------------------------------------------------------

    def value_state(
        self,
        name: str,
        schema: str | DataType,
        ttl: DurationLike | None = None,
        ttl_update: TtlUpdate = "write",
    ) -> ValueState:
        """Declare a state with one row per key."""
        return self._value(name, "value", schema, ttl, ttl_update)

    def list_state(
        self,
        name: str,
        schema: str | DataType,
        ttl: DurationLike | None = None,
        ttl_update: TtlUpdate = "write",
    ) -> ListState:
        """Declare a state with a list of rows per key. With `ttl`, its rows expire one by one."""
        struct, where = self._schema(name, schema), self._where(name)
        descriptor, expiry = self._declare(name, "list", struct, None, ttl, ttl_update)
        if expiry is None:
            return ListState(descriptor, struct, self._scope, where)
        return ExpiringListState(descriptor, struct, self._scope, where, expiry)

    def map_state(
        self,
        name: str,
        key_schema: str | DataType,
        value_schema: str | DataType,
        ttl: DurationLike | None = None,
        ttl_update: TtlUpdate = "write",
    ) -> MapState:
        """Declare a state with a map per key. With `ttl`, its entries expire one by one."""
        keys, values, where = self._schema(name, key_schema), self._schema(name, value_schema), self._where(name)
        for field in keys.fields:
            check_key_type(field.dataType, f"{field.name!r}", where)
        descriptor, expiry = self._declare(name, "map", values, keys, ttl, ttl_update)
        if expiry is None:
            return MapState(descriptor, keys, values, self._scope, where)
        return ExpiringMapState(descriptor, keys, values, self._scope, where, expiry)

    def reducing_state(
        self,
        name: str,
        schema: str | DataType,
        reduce: Callable[[Any, Any], Any],
        ttl: DurationLike | None = None,
        ttl_update: TtlUpdate = "write",
    ) -> ReducingState:
        """Declare a state with one value per key. `reduce(a, b)` combines the value with each one that is added."""
        self._check_functions(name, reduce=reduce)
        return ReducingState(self._value(name, "reducing", schema, ttl, ttl_update), reduce)

    def aggregating_state(
        self,
        name: str,
        accumulator_schema: str | DataType,
        *,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        result: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any] | None = None,
        ttl: DurationLike | None = None,
        ttl_update: TtlUpdate = "write",
    ) -> AggregatingState:
        """Declare a state with one accumulator per key.

        `create()` returns an empty accumulator, `add(accumulator, value)` returns the next one, and `get` returns
        `result(accumulator)`.
        """
        self._check_functions(name, create=create, add=add, result=result, **({"merge": merge} if merge else {}))
        value = self._value(name, "aggregating", accumulator_schema, ttl, ttl_update)
        return AggregatingState(value, create, add, result, merge)

    # --- timers and side outputs -----------------------------------------------------------------

    def register_timer(self, timestamp_ms: int) -> None:
        """Call `on_timer` for the current key when the operator's clock reaches `timestamp_ms`.

        A key has one timer for the same time. A timer that is due already fires at the end of this batch if it is
        registered in `process`, and in the next batch if it is registered in `on_timer`.
        """
        self._own_timers().register(timestamp_ms)

    def delete_timer(self, timestamp_ms: int) -> None:
        """Delete the current key's timer for that time, if there is one."""
        self._own_timers().delete(timestamp_ms)

    def list_timers(self) -> list[int]:
        """The times of the current key's timers, ascending. In `on_timer`, the timer that fires is among them."""
        return self._own_timers().times()

    def emit(self, output: str, row: Any) -> None:
        """Send a row to the side output of that name."""
        scope = self._scope
        if scope.index < 0:
            raise StrandlineError(
                f"operator {self._info.uid!r}: emit({output!r}) was called outside of process() and on_timer(); "
                "call it in one of them"
            )
        if self._sides is None:
            raise StrandlineError(
                f"operator {self._info.uid!r} has no side output {output!r}; name it in side_outputs=, with its schema"
            )
        self._sides.emit(output, row, scope.values[scope.index])

    # --- batch and time --------------------------------------------------------------------------

    @property
    def batch_id(self) -> int:
        """The number of the batch that is being processed."""
        return self._current().batch_id

    @property
    def processing_time(self) -> int:
        """The batch's processing time in milliseconds since the epoch, the same for every subtask and every retry."""
        return self._current().processing_time_ms

    @property
    def watermark(self) -> int | None:
        """The batch's watermark in milliseconds since the epoch; None if the job has no event time."""
        return self._current().watermark_ms

    @property
    def subtask(self) -> int:
        """The number of this subtask; -1 in the driver, where a copy is opened to find the declared states."""
        return self._info.subtask

    # --- for the operator ------------------------------------------------------------------------

    def _current(self) -> BatchInfo:
        if self._batch is None:
            raise StrandlineError(f"operator {self._info.uid!r}: there is no batch outside of process() and on_timer()")
        return self._batch

    def _own_timers(self) -> Timers:
        if self._timers is None:
            raise StrandlineError(
                f"operator {self._info.uid!r} has no clock for timers; "
                'pass time_mode="processing" or time_mode="event" where the step is defined'
            )
        return self._timers

    def _value(
        self, name: str, kind: StateKind, schema: str | DataType, ttl: DurationLike | None, ttl_update: TtlUpdate
    ) -> ValueState:
        struct, where = self._schema(name, schema), self._where(name)
        descriptor, expiry = self._declare(name, kind, struct, None, ttl, ttl_update)
        if expiry is None:
            return ValueState(descriptor, struct, self._scope, where)
        return ExpiringValueState(descriptor, struct, self._scope, where, expiry)

    def _declare(
        self,
        name: str,
        kind: StateKind,
        schema: StructType,
        key_schema: StructType | None,
        ttl: DurationLike | None,
        ttl_update: TtlUpdate,
    ) -> tuple[StateDescriptor, Expiry | None]:
        if not self._opening:
            raise StrandlineError(
                f"operator {self._info.uid!r}: state {name!r} was declared outside of open(); declare every state there"
            )
        if name in self._descriptors:
            raise JobDefinitionError(f"operator {self._info.uid!r} declares the state {name!r} twice")
        if name.startswith(RESERVED):
            raise JobDefinitionError(
                f"{self._where(name)}: names that begin with {RESERVED!r} are reserved; choose another name"
            )
        on_read = check_update(ttl_update, self._where(name))
        ttl_ms = None if ttl is None else parse_ttl(ttl, self._where(name))
        keys = None if key_schema is None else key_schema.json()
        descriptor = self._descriptors[name] = StateDescriptor(name, kind, schema.json(), keys, ttl_ms)
        if ttl_ms is None:
            return descriptor, None
        expiry = Expiry(ttl_ms, on_read)
        self._expiring.append((name, expiry))
        return descriptor, expiry

    def _schema(self, name: str, schema: str | DataType) -> StructType:
        try:
            return parse_schema(schema)
        except SchemaError as error:
            raise SchemaError(f"{self._where(name)}: {error}") from None

    def _check_functions(self, name: str, **functions: object) -> None:
        for argument, function in functions.items():
            if not callable(function):
                raise JobDefinitionError(f"{self._where(name)}: {argument}= must be a function, not {function!r}")

    def _where(self, name: str) -> str:
        return f"state {name!r} of operator {self._info.uid!r}"
