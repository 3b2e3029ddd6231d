"""Timers, stored as state: sorted by time within each key group, and by key.

A timer is two entries. `key group | TIMERS | 0x00 | time | key bytes` has the key's Python values as its value.
`key group | TIMES | 0x00 | key bytes | time` is empty. So timers are part of checkpoints and move with their key group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, merge
from operator import index
from typing import Any, Final, Literal, cast

import numpy as np
import pyarrow as pa

from strandline.errors import StrandlineError
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import EncodedKeys, state_prefix
from strandline.state.handles.states import KeyScope
from strandline.state.key_ranges import prefix_end

TimerService = Literal["heap", "rocksdb"]

TIMERS: Final = "__sl_timers"
TIMES: Final = "__sl_timers_of_key"

_TIME: Final = 8
_GROUP: Final = 2
_SHIFT: Final = 1 << 63
_NEVER: Final = b"\xff" * (_TIME + 1)
"""Greater than every encoded time."""
_TIMERS_AT: Final = len(state_prefix(0, TIMERS))
_TIMES_AT: Final = len(state_prefix(0, TIMES))

Timer = bytes
"""`time | key group | key bytes`. Timers sort in the order in which they fire."""


def encode_time(time_ms: int) -> bytes:
    """A time as bytes that sort like the times."""
    return (time_ms + _SHIFT).to_bytes(_TIME, "big")


def time_of(timer: Timer) -> int:
    """When `timer` is due."""
    return int.from_bytes(timer[:_TIME], "big") - _SHIFT


def times_prefix(key: bytes) -> bytes:
    """The prefix of the stored times of a key. `key` is its key group and key bytes. Each entry ends with its time."""
    return key[:_GROUP] + TIMES.encode() + b"\0" + key[_GROUP:]


def keys_of(timers: Sequence[Timer]) -> EncodedKeys:
    """The keys of some timers, to load their states."""
    groups = np.frombuffer(b"".join(timer[_TIME : _TIME + _GROUP] for timer in timers), np.uint8).reshape(-1, _GROUP)
    return EncodedKeys(groups, None, pa.array([timer[_TIME + _GROUP :] for timer in timers], pa.binary()))


class Timers:
    """The timers of one operator subtask. `register`, `delete` and `times` concern the scope's current key."""

    def __init__(
        self, scope: KeyScope, groups: range, service: TimerService, encode_key: Callable[[tuple[Any, ...]], bytes]
    ) -> None:
        self._scope = scope
        self._encode_key = encode_key
        self._make_index = partial(_HeapIndex if service == "heap" else _ScannedIndex, groups)
        self._index: _TimerIndex = self._make_index()
        self._keys: EncodedKeys | None = None
        self._prefixes: list[bytes] = []
        self._until = b""
        self._cancelled: set[Timer] = set()

    def begin(self) -> None:
        """Start the scope's batch, before anything is written in it."""
        self._until = b""
        self._cancelled.clear()
        self._index.begin(self._changes(), self._scope.batch_id)

    def forget(self) -> None:
        """Drop the index of the stored timers. The next batch reads them again, whatever its id."""
        self._index = self._make_index()

    def register(self, time_ms: int) -> None:
        """Set a timer of the current key at `time_ms`. An existing timer of that time stays."""
        prefix, time = self._prefix(), _encoded(time_ms)
        timer = _timer(time, prefix)
        changes = self._changes()
        changes.put(_stored(timer), self._encode_key(self._scope.values[self._scope.index]))
        changes.put(prefix + time, b"")
        self._index.add(timer)

    def delete(self, time_ms: int) -> None:
        """Delete a timer of the current key. A missing timer is not an error."""
        prefix, time = self._prefix(), _encoded(time_ms)
        timer = _timer(time, prefix)
        self._remove(timer)
        if time <= self._until:
            self._cancelled.add(timer)  # it may be among the timers already collected to fire, and must not fire

    def times(self) -> list[int]:
        """The times of the current key's timers, ascending."""
        return [time_of(entry[-_TIME:]) for entry, _ in self._changes().scan(self._prefix())]

    def due(self, until_ms: int) -> Iterator[tuple[Timer, bytes | None]]:
        """The timers up to `until_ms` as of this call, ascending, each with its encoded key if that is known.

        The caller checks `cancelled` before it fires a timer, and calls `done` after it.
        """
        self._until = encode_time(until_ms)
        cancelled = self._cancelled
        return (due for due in self._index.due(self._until) if due[0] not in cancelled)

    def cancelled(self, timer: Timer) -> bool:
        """Whether the timer was deleted since it was collected."""
        return timer in self._cancelled

    def done(self, timer: Timer) -> None:
        """Remove a timer that has fired."""
        self._remove(timer)
        self._cancelled.discard(timer)

    def encoded_keys(self, due: Sequence[tuple[Timer, bytes | None]]) -> list[bytes]:
        """The encoded keys of timers that `due` returned."""
        unread = sorted(_stored(timer) for timer, key in due if key is None)
        read = dict(zip(unread, self._changes().get_many(unread), strict=True)) if unread else {}
        return [cast(bytes, read[_stored(timer)]) if key is None else key for timer, key in due]

    def earliest(self) -> int | None:
        """The time of the next timer as of now, or None."""
        return self._index.earliest()

    def _remove(self, timer: Timer) -> None:
        self._changes().put_many([_stored(timer), times_prefix(timer[_TIME:]) + timer[:_TIME]], [None, None])
        self._index.remove(timer)

    def _changes(self) -> ChangeSet:
        changes = self._scope.changes
        if changes is None:
            raise _outside_of_key(self._scope)
        return changes

    def _prefix(self) -> bytes:
        scope = self._scope
        if scope.index < 0:
            raise _outside_of_key(self._scope)
        if self._keys is not scope.keys:
            self._keys = scope.keys
            self._prefixes = scope.stored_keys(TIMES)
        return self._prefixes[scope.index]


class _TimerIndex(ABC):
    """Finds the earliest timers of a subtask.

    Between batches the index keeps the timers of the last committed batch and those of the batch that ran last. If the
    next batch has another id, the last one was committed. If it has the same id, the last attempt is void.
    """

    @abstractmethod
    def begin(self, changes: ChangeSet, batch_id: int) -> None: ...

    @abstractmethod
    def add(self, timer: Timer) -> None: ...

    @abstractmethod
    def remove(self, timer: Timer) -> None: ...

    @abstractmethod
    def due(self, until: bytes) -> Iterator[tuple[Timer, bytes | None]]: ...

    @abstractmethod
    def earliest(self) -> int | None: ...


class _ScannedIndex(_TimerIndex):
    """Reads the stored entries, and keeps only the time of the first timer of each key group.

    So a batch scans only the key groups that have a due timer or whose first timer was removed.
    """

    def __init__(self, groups: range) -> None:
        self._prefixes = {group.to_bytes(_GROUP, "big"): state_prefix(group, TIMERS) for group in groups}
        self._committed: dict[bytes, bytes] | None = None
        self._first: dict[bytes, bytes] | None = None
        self._unsure: set[bytes] = set()
        self._batch_id: int | None = None
        self._changes: ChangeSet | None = None

    def begin(self, changes: ChangeSet, batch_id: int) -> None:
        if batch_id != self._batch_id:
            self._committed = self._first
            self._batch_id = batch_id
        self._changes = changes
        if self._committed is None:
            self._committed = {group: self._seek(group) for group in self._prefixes}
        self._first = self._committed.copy()
        self._unsure.clear()

    def add(self, timer: Timer) -> None:
        first, group, time = self._firsts(), timer[_TIME : _TIME + _GROUP], timer[:_TIME]
        if time < first[group]:
            first[group] = time

    def remove(self, timer: Timer) -> None:
        group = timer[_TIME : _TIME + _GROUP]
        if timer[:_TIME] <= self._firsts()[group]:
            self._unsure.add(group)

    def due(self, until: bytes) -> Iterator[tuple[Timer, bytes | None]]:
        scans = [self._due_of(group, until) for group, first in self._firsts().items() if first <= until]
        return merge(*scans)

    def earliest(self) -> int | None:
        first = self._firsts()
        for group in self._unsure:
            first[group] = self._seek(group)
        self._unsure.clear()
        soonest = min(first.values(), default=_NEVER)
        return None if soonest == _NEVER else time_of(soonest)

    def _due_of(self, group: bytes, until: bytes) -> Iterator[tuple[Timer, bytes]]:
        self._unsure.add(group)
        prefix = self._prefixes[group]
        assert self._changes is not None
        # The end is after every key of the last due time. The scan begins here, so that it sees no later timer.
        entries = self._changes.scan_range(prefix, prefix_end(prefix + until))
        at = len(prefix)
        return ((stored[at : at + _TIME] + group + stored[at + _TIME :], key) for stored, key in entries)

    def _seek(self, group: bytes) -> bytes:
        assert self._changes is not None
        prefix = self._prefixes[group]
        found = next(self._changes.scan(prefix), None)
        return _NEVER if found is None else found[0][len(prefix) : len(prefix) + _TIME]

    def _firsts(self) -> dict[bytes, bytes]:
        assert self._first is not None
        return self._first


class _HeapIndex(_TimerIndex):
    """Keeps all timers in memory. It reads them once after the start, so that no batch scans for due timers."""

    def __init__(self, groups: range) -> None:
        self._groups = groups
        self._batch_id: int | None = None
        self._committed: set[Timer] | None = None
        self._heap: list[Timer] = []
        """All timers of `_committed` except `_taken`. It may hold deleted timers, and some timers twice."""
        self._added: set[Timer] = set()
        self._removed: set[Timer] = set()
        self._taken: list[Timer] = []

    def begin(self, changes: ChangeSet, batch_id: int) -> None:
        if self._committed is None:
            self._committed = {
                _unstored(key) for at in self._groups for key, _ in changes.scan(state_prefix(at, TIMERS))
            }
            self._heap = sorted(self._committed)
        elif batch_id != self._batch_id:
            self._commit(self._committed)
        else:
            for timer in self._taken:
                heappush(self._heap, timer)
        self._batch_id = batch_id
        self._added.clear()
        self._removed.clear()
        self._taken.clear()

    def add(self, timer: Timer) -> None:
        self._removed.discard(timer)
        self._added.add(timer)

    def remove(self, timer: Timer) -> None:
        self._added.discard(timer)
        self._removed.add(timer)

    def due(self, until: bytes) -> Iterator[tuple[Timer, bytes | None]]:
        fresh = sorted(timer for timer in self._added if timer[:_TIME] <= until)
        return self._merged(fresh, until)

    def earliest(self) -> int | None:
        heap, committed, removed = self._heap, self._known(), self._removed
        while heap and (heap[0] in removed or heap[0] not in committed):
            self._taken.append(heappop(heap))
        soonest = min([*heap[:1], *self._added], default=None)
        return None if soonest is None else time_of(soonest)

    def _merged(self, fresh: list[Timer], until: bytes) -> Iterator[tuple[Timer, bytes | None]]:
        last = b""
        for timer in merge(fresh, self._take(until)):
            if timer != last:
                yield timer, None
                last = timer

    def _take(self, until: bytes) -> Iterator[Timer]:
        heap, committed, removed = self._heap, self._known(), self._removed
        while heap and heap[0][:_TIME] <= until:
            timer = heappop(heap)
            self._taken.append(timer)
            if timer in committed and timer not in removed:
                yield timer

    def _commit(self, committed: set[Timer]) -> None:
        committed.difference_update(self._taken, self._removed)
        for timer in self._added:
            if timer not in committed:
                committed.add(timer)
                heappush(self._heap, timer)
        if len(self._heap) > 2 * len(committed) + 1024:
            self._heap = list(committed)
            heapify(self._heap)

    def _known(self) -> set[Timer]:
        assert self._committed is not None
        return self._committed


def _encoded(time_ms: int) -> bytes:
    try:
        return encode_time(index(time_ms))
    except (TypeError, OverflowError):
        raise StrandlineError(
            f"a timer's time is a whole number of milliseconds since the epoch, not {time_ms!r}"
        ) from None


def _timer(time: bytes, times_prefix: bytes) -> Timer:
    return time + times_prefix[:_GROUP] + times_prefix[_TIMES_AT:]


def _stored(timer: Timer) -> bytes:
    return timer[_TIME : _TIME + _GROUP] + TIMERS.encode() + b"\0" + timer[:_TIME] + timer[_TIME + _GROUP :]


def _unstored(stored: bytes) -> Timer:
    time_end = _TIMERS_AT + _TIME
    return stored[_TIMERS_AT:time_end] + stored[:_GROUP] + stored[time_end:]


def _outside_of_key(scope: KeyScope) -> StrandlineError:
    return scope.error_class(
        "a timer was used outside of process() and on_timer(): it belongs to the key that is being processed; "
        "do not use it in open(), in close() or after the batch"
    )
