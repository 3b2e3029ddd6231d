"""Spark's `StatefulProcessorHandle` on Strandline's states and timers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessorHandle,
    ValueState,
)
from pyspark.sql.types import (
    StructType,
)

from strandline.operators.base import TimeMode
from strandline.operators.process.process_context import ProcessContext
from strandline.operators.spark.errors import SparkCallError, SparkDefinitionError
from strandline.operators.spark.states import SparkListState, SparkMapState, SparkValueState
from strandline.state.coding.ddl import parse_schema

_OURS: Final = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9_.-]{0,63}")


Schema = StructType | str


_State = TypeVar("_State", SparkValueState, SparkListState, SparkMapState)


@dataclass(slots=True)
class _Declared(Generic[_State]):
    """A state that an earlier `init` declared."""

    declaration: tuple[Any, ...]
    make: Callable[[], _State]
    state: _State


class SparkHandle(StatefulProcessorHandle):
    """The handle that `init` gets, with Spark's own interface.

    `init` is called for every batch, with a new processor. The first call declares the states; a later call gets the
    same states again.
    """

    def __init__(self, context: ProcessContext, time_mode: TimeMode) -> None:
        self._context = context
        self._time_mode = time_mode
        self._known: dict[str, _Declared[Any]] = {}
        self._asked: set[str] = set()
        self._initialising = False
        self.deleted: list[str] = []
        """The stored names of the states that the last `init` deleted."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> SparkHandle:
        """The handle itself: the copy of a processor works on the same state."""
        return self

    def initialise(self, init: Callable[[StatefulProcessorHandle], None]) -> None:
        """Call a processor's `init`."""
        self._asked.clear()
        self.deleted.clear()
        self._initialising = True
        try:
            init(self)
        finally:
            self._initialising = False

    # --- Spark's interface -----------------------------------------------------------------------

    def getValueState(self, stateName: str, schema: Schema, ttlDurationMs: int | None = None) -> ValueState:
        """Declare a state with one row per key."""

        def make(name: str, ttl: float | None) -> Callable[[], SparkValueState]:
            return partial(SparkValueState, self._context.value_state(name, schema, ttl), parse_schema(schema))

        return self._state(stateName, (ValueState, schema, ttlDurationMs), make)

    def getListState(self, stateName: str, schema: Schema, ttlDurationMs: int | None = None) -> ListState:
        """Declare a state with a list of rows per key."""

        def make(name: str, ttl: float | None) -> Callable[[], SparkListState]:
            return partial(SparkListState, self._context.list_state(name, schema, ttl), parse_schema(schema))

        return self._state(stateName, (ListState, schema, ttlDurationMs), make)

    def getMapState(
        self, stateName: str, userKeySchema: Schema, valueSchema: Schema, ttlDurationMs: int | None = None
    ) -> MapState:
        """Declare a state with a map per key."""

        def make(name: str, ttl: float | None) -> Callable[[], SparkMapState]:
            state = self._context.map_state(name, userKeySchema, valueSchema, ttl)
            return partial(SparkMapState, state, parse_schema(userKeySchema), parse_schema(valueSchema))

        return self._state(stateName, (MapState, userKeySchema, valueSchema, ttlDurationMs), make)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Call `handleExpiredTimer` for the current key at that time."""
        self._clocked().register_timer(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the current key."""
        self._clocked().delete_timer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """The times of the current key's timers."""
        return iter(self._clocked().list_timers())

    def _clocked(self) -> ProcessContext:
        """The context, if the step has a clock for timers."""
        if self._time_mode == "none":
            raise SparkCallError(
                f"operator {self._context._info.uid!r} has no clock for timers; pass "
                'timeMode="ProcessingTime" or timeMode="EventTime" where the step is defined'
            )
        return self._context

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state of all keys. As in Spark, it may be called in `init` only.

        If this `init` has declared the state before, what it got for the state cannot be used any more.
        """
        self._require_init(f"deleteIfExists({stateName!r}) was called")
        name = stored_name(stateName)
        self.deleted.append(name)
        if name in self._asked:
            known = self._known[name]
            known.state.end(f"state {stateName!r} cannot be used: init() deleted it with deleteIfExists()")
            known.state = known.make()

    # --- declaring -------------------------------------------------------------------------------

    def _state(
        self, spark_name: str, declared: tuple[Any, ...], make: Callable[[str, float | None], Callable[[], _State]]
    ) -> _State:
        self._require_init(f"state {spark_name!r} was declared")
        name = stored_name(spark_name)
        if name in self._asked:
            raise SparkDefinitionError(f"init() declares the state {spark_name!r} twice; give each state its own name")
        ttl = self._ttl(spark_name, declared[-1])
        if name not in self._known:
            made = make(name, ttl)
            self._known[name] = _Declared(declared, made, made())
        known = self._known[name]
        if known.declaration != declared:
            raise SparkDefinitionError(
                f"init() declares the state {spark_name!r} differently than in an earlier batch; "
                "declare it with the same kind, schemas and time-to-live in every batch"
            )
        self._asked.add(name)
        return cast(_State, known.state)

    def _ttl(self, name: str, ttl_ms: Any) -> float | None:
        """The time-to-live in seconds, or None. In Spark 0 means none, and it works with processing time only."""
        if ttl_ms is None or ttl_ms == 0:
            return None
        if self._time_mode != "processing":
            raise SparkDefinitionError(
                f"state {name!r}: a time-to-live needs the time mode ProcessingTime, as in Spark; pass "
                'timeMode="ProcessingTime", or leave ttlDurationMs out'
            )
        if not isinstance(ttl_ms, int | np.integer) or ttl_ms < 0:
            raise SparkDefinitionError(
                f"state {name!r}: ttlDurationMs={ttl_ms!r} is not a number of milliseconds above 0"
            )
        return index(ttl_ms) / 1000

    def _require_init(self, what: str) -> None:
        if not self._initialising:
            raise SparkCallError(f"{what} outside of init(); do it in init(), as Spark requires")


def stored_name(name: str) -> str:
    """The stored name of a state: the name itself, or a name derived from it if it has characters we do not accept."""
    if not name.strip():
        raise SparkDefinitionError(f"{name!r} is not a name for a state; use letters, digits, and . _ or -")
    if _OURS.fullmatch(name):
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return f"{re.sub('[^A-Za-z0-9.-]', '-', name)[:48]}-{digest}"
