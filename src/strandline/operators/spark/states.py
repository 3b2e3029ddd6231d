"""Spark's handle for a `StatefulProcessor`, on Strandline's states and timers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from operator import index
from typing import Any, Final, TypeVar, cast

import numpy as np
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessorHandle,
    ValueState,
)
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError
from strandline.operators.base import TimeMode
from strandline.operators.columns.rows import row_factory
from strandline.operators.process.context import ProcessContext
from strandline.state.coding.ddl import parse_schema
from strandline.state.handles import states as access

_OURS: Final = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9_.-]{0,63}")
_WIDE: Final = Context(prec=76)

Schema = StructType | str
Convert = Callable[[Any], Any]
_State = TypeVar("_State", ValueState, ListState, MapState)


class SparkHandle(StatefulProcessorHandle):
    """What `init` is given: Spark's own interface, so that processors written for Spark find what they expect.

    Spark makes a new processor and calls `init` for every batch. The states are declared by the first `init`; a later
    one is given the same states again.
    """

    def __init__(self, context: ProcessContext, time_mode: TimeMode) -> None:
        self._context = context
        self._time_mode = time_mode
        self._known: dict[str, tuple[tuple[Any, ...], ValueState | ListState | MapState]] = {}
        self._asked: set[str] = set()
        self._initialising = False
        self.deleted: list[str] = []
        """The states, by their stored names, that the last `init` wants purged."""

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
        """A state of one row per key."""

        def make(name: str, ttl: float | None) -> ValueState:
            return SparkValueState(self._context.value_state(name, schema, ttl), parse_schema(schema))

        return self._state(stateName, (ValueState, schema, ttlDurationMs), make)

    def getListState(self, stateName: str, schema: Schema, ttlDurationMs: int | None = None) -> ListState:
        """A state of a list of rows per key."""

        def make(name: str, ttl: float | None) -> ListState:
            return SparkListState(self._context.list_state(name, schema, ttl), parse_schema(schema))

        return self._state(stateName, (ListState, schema, ttlDurationMs), make)

    def getMapState(
        self, stateName: str, userKeySchema: Schema, valueSchema: Schema, ttlDurationMs: int | None = None
    ) -> MapState:
        """A state of a map per key."""

        def make(name: str, ttl: float | None) -> MapState:
            state = self._context.map_state(name, userKeySchema, valueSchema, ttl)
            return SparkMapState(state, parse_schema(userKeySchema), parse_schema(valueSchema))

        return self._state(stateName, (MapState, userKeySchema, valueSchema, ttlDurationMs), make)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Have `handleExpiredTimer` called for the current key."""
        self._context.register_timer(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Forget a timer of the current key."""
        self._context.delete_timer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """The times of the current key's timers."""
        return iter(self._context.list_timers())

    def deleteIfExists(self, stateName: str) -> None:
        """Remove a state of all keys; only in `init`, as in Spark."""
        self._require_init(f"deleteIfExists({stateName!r}) was called")
        name = stored_name(stateName)
        self._asked.discard(name)
        self.deleted.append(name)

    # --- declaring -------------------------------------------------------------------------------

    def _state(self, spark_name: str, declared: tuple[Any, ...], make: Callable[[str, float | None], _State]) -> _State:
        self._require_init(f"state {spark_name!r} was asked for")
        name = stored_name(spark_name)
        if name in self._asked:
            raise JobDefinitionError(f"init() asks for the state {spark_name!r} twice; give each state its own name")
        ttl = self._ttl(spark_name, declared[-1])
        if name not in self._known:
            self._known[name] = declared, make(name, ttl)
        before, state = self._known[name]
        if before != declared:
            raise JobDefinitionError(
                f"init() asks for the state {spark_name!r} in another way than it did before: "
                "its kind, schemas and time-to-live must be the same in every batch"
            )
        self._asked.add(name)
        return cast(_State, state)

    def _ttl(self, name: str, ttl_ms: Any) -> float | None:
        """Seconds, or None; Spark takes 0 for no time-to-live, and has it by processing time only."""
        if ttl_ms is None or ttl_ms == 0:
            return None
        if self._time_mode != "processing":
            raise JobDefinitionError(
                f"state {name!r}: a time-to-live needs the time mode ProcessingTime, as in Spark; pass "
                'time_mode="processing", or leave ttlDurationMs out'
            )
        if not isinstance(ttl_ms, int | np.integer) or ttl_ms < 0:
            raise JobDefinitionError(f"state {name!r}: ttlDurationMs={ttl_ms!r} is no number of milliseconds above 0")
        return index(ttl_ms) / 1000

    def _require_init(self, what: str) -> None:
        if not self._initialising:
            raise StrandlineError(f"{what} outside of init(); Spark allows it there only")


def stored_name(name: str) -> str:
    """A state's name as it is stored: its own, or where it has other characters than we take, one made of it."""
    if not name.strip():
        raise JobDefinitionError(f"{name!r} is no name for a state")
    if _OURS.fullmatch(name):
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return f"{re.sub('[^A-Za-z0-9.-]', '-', name)[:48]}-{digest}"


# --- states --------------------------------------------------------------------------------------


class SparkValueState(ValueState):
    """Spark's value state; a value is a tuple, also of one column."""

    def __init__(self, state: access.ValueState, schema: StructType) -> None:
        self._state = state.as_rows()
        self._rows = _StateRows(schema)
        self.exists = state.exists  # type: ignore[method-assign]  # bound once: both are called for every key
        if self._rows.given is None:
            self.get = state.get  # type: ignore[method-assign]

    def exists(self) -> bool:
        return self._state.exists()

    def get(self) -> tuple[Any, ...] | None:
        row = self._state.get()
        return row if row is None else self._rows.give(row)

    def update(self, newValue: Any) -> None:
        if self._rows.fits(newValue):
            try:
                self._state.update(newValue)
                return
            except SchemaError:
                pass  # Spark takes more than we do
        self._state.update(self._rows.take(newValue))

    def clear(self) -> None:
        self._state.clear()


class SparkListState(ListState):
    """Spark's list state."""

    def __init__(self, state: access.ListState, schema: StructType) -> None:
        self._state = state.as_rows()
        self._rows = _StateRows(schema)

    def exists(self) -> bool:
        return self._state.exists()

    def get(self) -> Iterator[tuple[Any, ...]]:
        rows = self._state.get()
        return rows if self._rows.given is None else map(self._rows.give, rows)

    def put(self, newState: Any) -> None:
        self._state.put(self._all(newState))

    def appendValue(self, newState: Any) -> None:
        if self._rows.fits(newState):
            try:
                self._state.append_value(newState)
                return
            except SchemaError:
                pass  # Spark takes more than we do
        self._state.append_value(self._rows.take(newState))

    def appendList(self, newState: Any) -> None:
        self._state.append(self._all(newState))

    def clear(self) -> None:
        self._state.clear()

    def _all(self, values: Iterable[Any]) -> list[tuple[Any, ...]]:
        rows = [self._rows.take(value) for value in values]
        if not rows:
            raise SchemaError(
                f"list state {self._state.descriptor.name!r}: put and appendList refuse an empty list, as in Spark; "
                "use clear() to remove the list"
            )
        return rows


class SparkMapState(MapState):
    """Spark's map state."""

    def __init__(self, state: access.MapState, key_schema: StructType, schema: StructType) -> None:
        self._state = state.as_rows()
        self._keys = _StateRows(key_schema)
        self._rows = _StateRows(schema)
        self._row = row_factory(schema)

    def exists(self) -> bool:
        return self._state.exists()

    def getValue(self, key: Any) -> tuple[Any, ...] | None:
        row = self._state.get(self._keys.take(key))
        return None if row is None else cast("tuple[Any, ...]", self._row(self._rows.give(row)))

    def containsKey(self, key: Any) -> bool:
        return self._state.contains(self._keys.take(key))

    def updateValue(self, key: Any, value: Any) -> None:
        self._state.put(self._keys.take(key), self._rows.take(value))

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        give_key, give = self._keys.give, self._rows.give
        return ((give_key(key), give(value)) for key, value in self._state.items())

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return map(self._keys.give, self._state.keys())

    def values(self) -> Iterator[tuple[Any, ...]]:
        return map(self._rows.give, self._state.values())

    def removeKey(self, key: Any) -> None:
        self._state.remove(self._keys.take(key))

    def clear(self) -> None:
        self._state.clear()


# --- values --------------------------------------------------------------------------------------


class _StateRows:
    """Rows of one state as Spark takes and gives them."""

    def __init__(self, schema: StructType) -> None:
        taken = [_taker(field.dataType) for field in schema.fields]
        self._taken = taken if any(taken) else None
        self._exact = not _has_times(schema)
        self.given = giver(schema)
        """How a stored row becomes the one that user code gets; None where it is that already."""

    def fits(self, value: Any) -> bool:
        """Whether a value can be tried as it is; one that does not fit is then refused."""
        return self._exact and type(value) is tuple

    def take(self, value: Any) -> tuple[Any, ...]:
        """What Spark makes of a value: any iterable of columns, numpy and pandas scalars as Python ones."""
        row = tuple(map(plain_value, value))
        if self._taken is None or len(row) != len(self._taken):
            return row
        return tuple(
            item if take is None or item is None else take(item) for take, item in zip(self._taken, row, strict=True)
        )

    def give(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A stored row as user code gets it."""
        return row if self.given is None else tuple(self.given(row))


_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None), Decimal, date, datetime})


def plain_value(value: Any) -> Any:
    """A numpy or pandas scalar as the Python value it stands for, at any depth."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value] if isinstance(value, list) else tuple(map(plain_value, value))
    if isinstance(value, dict):
        return {plain_value(key): plain_value(item) for key, item in value.items()}
    for method in ("to_pytimedelta", "to_pydatetime"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value


def _taker(data_type: DataType) -> Convert | None:
    """Brings a value into the form that a state of `data_type` takes, where Spark is more lenient; None: nothing to do.

    Values are not null; what fits neither way is left for the state to refuse.
    """
    match data_type:
        case StringType():
            return _text
        case DateType():
            return lambda value: value.date() if isinstance(value, datetime) else value
        case TimestampNTZType():
            return lambda value: value.replace(tzinfo=None) if isinstance(value, datetime) else value
        case DecimalType():
            step = Decimal(1).scaleb(-data_type.scale)
            return lambda value: (
                value.quantize(step, ROUND_HALF_UP, _WIDE)
                if isinstance(value, Decimal) and value.is_finite()
                else value
            )
        case ArrayType():
            element = _optional(_taker(data_type.elementType))
            return element and (lambda value: [element(item) for item in value] if _listed(value) else value)
        case MapType():
            key, item = _taker(data_type.keyType), _optional(_taker(data_type.valueType))
            if key is None and item is None:
                return None
            key, item = key or _same, item or _same
            return lambda value: {key(k): item(v) for k, v in value.items()} if isinstance(value, dict) else value
        case StructType():
            return _struct_taker(data_type)
        case _:
            return None


def _struct_taker(struct: StructType) -> Convert:
    names = struct.fieldNames()
    takers = [_optional(_taker(field.dataType)) or _same for field in struct.fields]

    def take(value: Any) -> Any:
        if isinstance(value, dict):
            value = tuple(map(value.get, names))
        elif not _listed(value) and hasattr(value, "__dict__"):
            value = tuple(plain_value(vars(value).get(name)) for name in names)
        if not _listed(value) or len(value) != len(names):
            return value
        return tuple(one(item) for one, item in zip(takers, value, strict=True))

    return take


def _text(value: Any) -> Any:
    """As Java would write it."""
    if isinstance(value, str):
        return str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _same(value: Any) -> Any:
    return value


def _optional(convert: Convert | None) -> Convert | None:
    return convert and (lambda value: None if value is None else convert(value))


def giver(struct: StructType) -> Convert | None:
    """Turns a stored row into what PySpark's own conversion gives; None where it is that already.

    Structs inside become rows, and timestamps become local time without a time zone.
    """
    givers = [_optional(_giver(field.dataType)) for field in struct.fields]
    if not any(givers):
        return None
    return lambda row: tuple(v if give is None else give(v) for give, v in zip(givers, row, strict=True))


def _giver(data_type: DataType) -> Convert | None:
    match data_type:
        case TimestampType():
            return lambda value: value.astimezone().replace(tzinfo=None)
        case ArrayType():
            element = _optional(_giver(data_type.elementType))
            return element and (lambda value: [element(item) for item in value])
        case MapType():
            key, item = _giver(data_type.keyType), _optional(_giver(data_type.valueType))
            if key is None and item is None:
                return None
            key, item = key or _same, item or _same
            return lambda value: {key(k): item(v) for k, v in value.items()}
        case StructType():
            make, inner = row_factory(data_type), giver(data_type)
            return lambda value: make(value if inner is None else inner(value))
        case _:
            return None


def _has_times(data_type: DataType) -> bool:
    match data_type:
        case TimestampType() | TimestampNTZType():
            return True
        case ArrayType():
            return _has_times(data_type.elementType)
        case MapType():
            return _has_times(data_type.keyType) or _has_times(data_type.valueType)
        case StructType():
            return any(_has_times(field.dataType) for field in data_type.fields)
        case _:
            return False
