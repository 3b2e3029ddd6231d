"""Time to live: states whose stored values begin with their expiry time, and the sweep that removes expired ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, get_args

from pyspark.sql.types import StructType

from strandline.config.option import DurationLike, because, parse_duration
from strandline.errors import JobDefinitionError
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.states import KeyScope, ListState, MapState, ValueState
from strandline.state.key_ranges import prefix_end

TtlUpdate = Literal["write", "read_and_write"]

STAMP_BYTES: Final = 8
_CHUNK: Final = 1000
_RANGE_COST: Final = 4
"""The cost of opening a scan, counted in entries, so that a sweep over many empty key groups ends too."""


def parse_ttl(ttl: DurationLike, where: str) -> int:
    """The milliseconds of `"1h"`, a number of seconds or a `timedelta`. Raises `JobDefinitionError` for others."""
    try:
        milliseconds = round(parse_duration(ttl) * 1000)
    except ValueError as error:
        raise JobDefinitionError(
            f'{where}: ttl={ttl!r} is not valid{because(error)}; use a duration like "500ms", "10 min" or "1h", '
            "a number of seconds, or a timedelta"
        ) from None
    if milliseconds < 1:
        raise JobDefinitionError(f"{where}: ttl={ttl!r} is not valid; it must be at least a millisecond")
    return milliseconds


def check_update(update: str, where: str) -> bool:
    """Whether reading prolongs life; raises `JobDefinitionError` for an unknown word."""
    if update not in get_args(TtlUpdate):
        raise JobDefinitionError(f"{where}: ttl_update={update!r} is not valid; use 'write' or 'read_and_write'")
    return update == "read_and_write"


def stamp_of(time_ms: int) -> bytes:
    """A time as stored values begin with it; stamps compare as their times do."""
    return max(time_ms, 0).to_bytes(STAMP_BYTES, "big")


class Expiry:
    """The clock of one state: which values are expired now, and when a value that is written now expires."""

    __slots__ = ("_ttl_ms", "now", "on_read", "stamp", "written")

    def __init__(self, ttl_ms: int, on_read: bool) -> None:
        self._ttl_ms = ttl_ms
        self.on_read = on_read
        self.now = self.stamp = stamp_of(0)
        self.written = 0
        """The number of entries written since the last sweep."""

    def begin(self, now_ms: int) -> None:
        """Set the time of the batch. It is constant within a batch, so that a repeated batch sees the same values."""
        self.now = stamp_of(now_ms)
        self.stamp = stamp_of(now_ms + self._ttl_ms)

    def living(self, entries: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        """The entries that are not expired, without their expiry times."""
        now = self.now
        return ((key, data[STAMP_BYTES:]) for key, data in entries if data[:STAMP_BYTES] > now)

    def refresh(self, changes: ChangeSet, prefix: bytes) -> None:
        """Renew the expiry time of every living entry below `prefix`, as if it were written now."""
        old = ((key, data) for key, data in changes.scan(prefix) if self.now < data[:STAMP_BYTES] != self.stamp)
        while part := list(islice(old, _CHUNK)):
            changes.put_many([key for key, _ in part], [self.stamp + data[STAMP_BYTES:] for _, data in part])
            self.written += len(part)


class ExpiringValueState(ValueState):
    """A value state whose values expire."""

    __slots__ = ("expiry",)

    def __init__(
        self, descriptor: StateDescriptor, schema: StructType, scope: KeyScope, where: str, expiry: Expiry
    ) -> None:
        super().__init__(descriptor, schema, scope, where)
        self.expiry = expiry

    def get(self) -> Any:
        data = self._living()
        if data is None:
            return None
        expiry = self.expiry
        if expiry.on_read and data[:STAMP_BYTES] != expiry.stamp:
            self._put(expiry.stamp + data[STAMP_BYTES:])
        return self._decode(data[STAMP_BYTES:])

    def update(self, value: Any) -> None:
        if self._scope.index < 0:
            raise self._scope.outside_of_key(self.descriptor)
        self._put(None if value is None else self.expiry.stamp + self._encode(value))

    def exists(self) -> bool:
        """Whether the key has a value. The call does not renew its expiry time."""
        return self._living() is not None

    def _living(self) -> bytes | None:
        at = self._scope.index
        if at < 0:
            raise self._scope.outside_of_key(self.descriptor)
        data = self._known[self._keys[at]]
        return None if data is None or data[:STAMP_BYTES] <= self.expiry.now else data

    def _put(self, data: bytes | None) -> None:
        key = self._keys[self._scope.index]
        self._known[key] = data
        self._scope.writable(self.descriptor).put(key, data)
        self.expiry.written += 1

    def _begin(self) -> None:
        self.expiry.begin(self._scope.now_ms)


class ExpiringListState(ListState):
    """A list state whose values expire. All values that one batch appends to a key expire together."""

    __slots__ = ("expiry",)

    def __init__(
        self, descriptor: StateDescriptor, schema: StructType, scope: KeyScope, where: str, expiry: Expiry
    ) -> None:
        super().__init__(descriptor, schema, scope, where)
        self.expiry = expiry

    def get(self) -> Iterator[Any]:
        if self.expiry.on_read:
            self.expiry.refresh(self._scope.writable(self.descriptor), self._prefix())
        return super().get()

    def _scan(self) -> Iterator[tuple[bytes, bytes]]:
        return self.expiry.living(super()._scan())

    def _joined(self) -> bytes:
        self.expiry.written += 1
        return self.expiry.stamp + super()._joined()

    def _begin(self) -> None:
        super()._begin()
        self.expiry.begin(self._scope.now_ms)


class ExpiringMapState(MapState):
    """A map state whose entries expire one by one. With "read_and_write", all reads but `exists` renew them."""

    __slots__ = ("expiry",)

    def __init__(
        self,
        descriptor: StateDescriptor,
        key_schema: StructType,
        schema: StructType,
        scope: KeyScope,
        where: str,
        expiry: Expiry,
    ) -> None:
        super().__init__(descriptor, key_schema, schema, scope, where)
        self.expiry = expiry

    def get(self, key: Any, default: Any = None) -> Any:
        data = self._read(key)
        return default if data is None else self._codec.decode(data[STAMP_BYTES:])

    def put(self, key: Any, value: Any) -> None:
        changes = self._scope.writable(self.descriptor)
        entry = self._entry(key)
        changes.put(entry, self.expiry.stamp + self._codec.encode(value))
        self.expiry.written += 1

    def contains(self, key: Any) -> bool:
        return self._read(key) is not None

    def items(self) -> Iterator[tuple[Any, Any]]:
        self._refresh()
        return super().items()

    def keys(self) -> Iterator[Any]:
        self._refresh()
        return super().keys()

    def values(self) -> Iterator[Any]:
        self._refresh()
        return super().values()

    def _read(self, key: Any) -> bytes | None:
        changes, expiry = self._scope.writable(self.descriptor), self.expiry
        entry = self._entry(key)
        data = changes.get(entry)
        if data is None or data[:STAMP_BYTES] <= expiry.now:
            return None
        if expiry.on_read and data[:STAMP_BYTES] != expiry.stamp:
            changes.put(entry, expiry.stamp + data[STAMP_BYTES:])
            expiry.written += 1
        return data

    def _refresh(self) -> None:
        if self.expiry.on_read:
            self.expiry.refresh(self._scope.writable(self.descriptor), self._prefix())

    def _scan(self) -> Iterator[tuple[bytes, bytes]]:
        return self.expiry.living(super()._scan())

    def _begin(self) -> None:
        self.expiry.begin(self._scope.now_ms)


@dataclass(frozen=True, slots=True)
class SweepBudget:
    """How many entries a sweep examines in one batch."""

    entries: int = 512
    per_write: int = 2
    """Further entries for each entry written since the last sweep. With two, the sweep passes through the whole state
    before expired entries outnumber the others."""


DEFAULT_SWEEP: Final = SweepBudget()


class Sweep:
    """Removes expired entries of keys that receive no more rows, a bounded part of the state in every batch.

    The sweep passes through the subtask's key groups in a circle and remembers its position. After a restart it begins
    at the first key group. When a batch is repeated, it skips a part until the next pass. Both only delay the removal.
    Without batches there is no sweep, but the state does not grow either. Batches that only fire timers count too.
    """

    def __init__(
        self, states: Sequence[tuple[str, Expiry]], groups: range, budget: SweepBudget = DEFAULT_SWEEP
    ) -> None:
        self._states = states
        self._groups = groups
        self._budget = budget
        self._range = 0
        self._from = b""

    def run(self, changes: ChangeSet) -> None:
        """Examine the next entries and remove the expired ones.

        Call it before the batch writes anything. Then scans need not merge the batch's own changes.
        """
        count = len(self._states) * len(self._groups)
        budget = self._budget.entries
        for _, expiry in self._states:
            budget += self._budget.per_write * expiry.written
            expiry.written = 0
        for _ in range(count):
            if budget <= 0:
                return
            group, state = divmod(self._range, len(self._states))
            name, expiry = self._states[state]
            budget -= _RANGE_COST + self._sweep(changes, state_prefix(self._groups[group], name), expiry, budget)
            if not self._from:
                self._range = (self._range + 1) % count

    def _sweep(self, changes: ChangeSet, prefix: bytes, expiry: Expiry, budget: int) -> int:
        """Sweep one state in one key group and return the number of examined entries. `_from` is empty at its end."""
        start, self._from = self._from or prefix, b""
        seen = 0
        dead: list[bytes] = []
        for key, data in changes.scan_range(start, prefix_end(prefix)):
            if seen >= budget:
                self._from = key
                break
            seen += 1
            if data[:STAMP_BYTES] <= expiry.now:
                dead.append(key)
        changes.put_many(dead, [None] * len(dead))
        return seen
