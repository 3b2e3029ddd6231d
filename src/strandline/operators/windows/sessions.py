"""Session windows: the open sessions of a key in one state entry, and an index of when to look at a key again.

The entry of a key is `when to look (8 bytes) | length (4 bytes) and columns of each session, by start`. The index entry
`key group | "session-ends" | 0x00 | when to look | key` may be early, for a session that went on since, but never late:
then a row that prolongs a session has nothing to do with the index, and the operator's timer may be early too. "When"
is rounded down to a part of the gap, so that there are few different times.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import NullType, StructField, StructType

from strandline.errors import StrandlineError
from strandline.operators.aggregate.grouping import SLICE_ROWS, Grouping, Partials, Slices, flat
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo
from strandline.operators.columns.binary import binary_content, binary_from
from strandline.operators.columns.columns import present
from strandline.operators.columns.keys import KeyDecoder
from strandline.operators.columns.rows import arrow_schema
from strandline.operators.timed.time_index import TIME_BYTES, TimeIndex, time_bytes
from strandline.operators.windows.session_entries import SessionCodec, Sessions, fixed_bytes, join_bytes, touching
from strandline.operators.windows.specs import SessionWindow
from strandline.operators.windows.state import TIME_COLUMN, WindowBatch, WindowRows, WindowSettings, WindowState
from strandline.pyspark_releases import spark_schema
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import EncodedKeys, KeyEncoder, canonical_column, state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.key_ranges import prefix_end

SESSIONS: Final = "sessions"
ENDS: Final = "session-ends"
TIMES: Final = "session-times"
_LOOK: Final = "__sl_look"
_START: Final = "__sl_start"
_LAST: Final = "__sl_last"
_HEAD: Final = len(state_prefix(0, ENDS))
_SESSIONS_HEAD: Final = state_prefix(0, SESSIONS)[2:]
_ENDS_HEAD: Final = state_prefix(0, ENDS)[2:] + time_bytes(0)[:1]
_TIMES_PER_GAP: Final = 16

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _DueKeys:
    """Keys to look at: parts of their stored keys, when they were to be looked at, and their sessions."""

    groups: Any
    keys: Any
    looks: Int64s
    sessions: Sessions

    def stored(self, places: Int64s) -> list[bytes]:
        """The stored keys of their sessions."""
        return _joined_list(
            self.groups.take(pa.array(places)), _scalar(_SESSIONS_HEAD), self.keys.take(pa.array(places))
        )

    def ends(self, places: Int64s, looks: Int64s) -> list[bytes]:
        """The stored keys of their index entries, were they to be looked at then."""
        at = pa.array(places)
        times = (looks.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8")
        return _joined_list(self.groups.take(at), _scalar(_ENDS_HEAD), fixed_bytes(times), self.keys.take(at))


class SessionWindows(WindowState):
    """Keeps sessions until no row can belong to them any more."""

    def __init__(self, settings: WindowSettings, spec: SessionWindow) -> None:
        schema = arrow_schema(settings.struct)
        self.emit = settings.emit
        self.gap = spec.gap_ms * 1000
        self.lateness = settings.lateness_ms * 1000
        self.key_columns = list(settings.key_columns)
        self.decoder = KeyDecoder(settings.where, schema, self.key_columns)
        self.grouping = Grouping(settings.where, settings.plan, settings.struct, self.key_columns)
        self.encoder = self.grouping.encoder
        timed = schema.append(pa.field(TIME_COLUMN, pa.int64())).append(pa.field(_LOOK, pa.int64()))
        self.time_encoder = KeyEncoder(timed, [*self.key_columns, TIME_COLUMN], KEY_GROUP_COLUMN)
        self.ends_encoder = KeyEncoder(timed, [_LOOK, *self.key_columns], KEY_GROUP_COLUMN)
        self.codec = SessionCodec(settings.plan.stored)
        self.index = TimeIndex(TIMES)
        self._step = max(1, spec.gap_ms // _TIMES_PER_GAP)
        self._key_groups = range(0)

    def open(self, where: str, key_groups: range) -> None:
        """Remember where this runs."""
        self.grouping.where = where
        self._key_groups = key_groups

    def states(self) -> list[StateDescriptor]:
        """The sessions, when to look at a key again, and the times at which there is a key to look at."""
        nothing = StructType([StructField("present", NullType())]).json()
        stored = spark_schema(self.codec.schema).json()
        return [
            StateDescriptor(SESSIONS, "aggregate", stored),
            StateDescriptor(ENDS, "aggregate", nothing),
            StateDescriptor(TIMES, "aggregate", nothing),
        ]

    def late(self, times: Int64s, watermark_ms: int) -> Bools:
        """Whether the session of a row alone was over."""
        return times + self.gap + self.lateness <= watermark_ms * 1000

    def begin(self, changes: ChangeSet, batch: BatchInfo) -> WindowBatch:
        """Get ready for a batch."""
        self.index.begin(changes, batch.batch_id, self._key_groups)
        return _SessionBatch(self, changes, batch)

    def look_at(self, times: Int64s) -> Int64s:
        """When to look at something that is due at a time (microseconds): in milliseconds, not later."""
        return -(-times // 1000) // self._step * self._step


class _SessionBatch(WindowBatch):
    """The sessions during one batch."""

    def __init__(self, state: SessionWindows, changes: ChangeSet, batch: BatchInfo) -> None:
        self._state = state
        self._changes = changes
        self._batch = batch.batch_id
        self._watermark = None if batch.watermark_ms is None else batch.watermark_ms * 1000
        self._before = None if batch.late_watermark_ms is None else batch.late_watermark_ms * 1000
        self._partials = Partials(self._merge)
        self._folded: list[pa.Table] = []

    def add(self, rows: pa.Table) -> None:
        """Aggregate rows by key and session."""
        full = self._partials.add(self._partial(rows))
        if full is not None:
            self._folded += (keys for keys, _ in self._fold(full))

    def finish(self) -> Iterator[WindowRows]:
        """Put all rows into state, emit what is due or changed, and drop what is over."""
        rest = self._partials.rest()
        updating = self._state.emit == "update"
        if rest is not None:
            again = bool(self._folded)
            for keys, sessions in self._fold(rest):
                if again:
                    self._folded.append(keys)
                elif updating:
                    yield self._changed_rows(keys, sessions)
        if updating and self._folded:
            yield from self._reread(self._state.grouping.distinct(self._folded))
        soonest = None
        if self._watermark is not None:
            soonest = yield from self._look(self._watermark)
        ahead = (t for t in self._state.index.times() if self._watermark is None or t * 1000 > self._watermark)
        times = [time for time in (next(ahead, None), soonest) if time is not None]
        self._state.next_timer_ms = min(times, default=None)

    # --- rows into sessions ------------------------------------------------------------------------

    def _partial(self, rows: pa.Table) -> pa.Table:
        """The sessions of some rows."""
        state = self._state
        order = state.time_encoder.encode(rows).order()
        encoded = state.encoder.encode(rows).take(order)
        times = flat(rows.column(TIME_COLUMN)).to_numpy()[order]
        fresh = np.concatenate(([True], times[1:] - times[:-1] > state.gap))
        fresh[encoded.starts()] = True
        begins = np.flatnonzero(fresh)
        ids = np.empty(len(order), np.int64)
        ids[order] = np.cumsum(fresh) - 1
        ends = np.append(begins[1:], len(order)) - 1
        return self._table("partial", ids, rows, rows.take(pa.array(order[begins])), times[begins], times[ends])

    def _merge(self, partials: Sequence[pa.Table]) -> pa.Table:
        """The sessions of several tables, as one where they touch."""
        if len(partials) == 1:
            return partials[0]
        rows = pa.concat_tables(partials).combine_chunks()
        encoded = self._state.encoder.encode(rows)
        order = encoded.order()
        owners = np.empty(len(order), np.int64)
        owners[order] = _run_ids(encoded.take(order))
        begins, ends = (flat(rows.column(name)).to_numpy() for name in (_START, _LAST))
        ids, first, starts, lasts = touching(owners, begins, ends, self._state.gap)
        return self._table("merge", ids, rows, rows.take(pa.array(first)), starts, lasts)

    def _table(
        self, step: Any, ids: Int64s, rows: pa.Table, firsts: pa.Table, starts: Int64s, lasts: Int64s
    ) -> pa.Table:
        """One row per session: key, first and last time, accumulators; `firsts` has a row of each session."""
        grouping = self._state.grouping
        keys = {name: canonical_column(flat(firsts.column(name))) for name in grouping.columns}
        _, states = grouping.by_id(step, ids, rows, lambda row: _key_shown(keys, self._state.key_columns, row))
        labels = [label for a in grouping.plan.accumulators for label in a.labels]
        made = {**keys, _START: pa.array(starts), _LAST: pa.array(lasts)}
        return pa.table(made | dict(zip(labels, states.columns, strict=True)))

    def _fold(self, partial: pa.Table) -> Iterator[tuple[pa.Table, Sessions]]:
        """Merge sessions with stored ones, in key order; gives keys and all their sessions by slices."""
        partial = partial.combine_chunks()
        encoded = self._state.encoder.encode(partial)
        order = encoded.order()
        starts = encoded.take(order).starts()
        edges = np.append(starts, len(order))
        slices = Slices(len(starts))
        for part in slices:
            places = order[edges[part.start] : edges[part.stop]]
            rows = partial.take(pa.array(places)).combine_chunks()
            yield self._fold_slice(rows, encoded.take(places), slices)

    def _fold_slice(self, rows: pa.Table, encoded: EncodedKeys, slices: Slices) -> tuple[pa.Table, Sessions]:
        state = self._state
        first = encoded.starts()
        keys = rows.select(state.grouping.columns).take(pa.array(first)).combine_chunks()
        stored = encoded.take(first).stored(SESSIONS)
        values = self._changes.get_many(stored)
        known = present(values)
        owners = np.repeat(np.arange(len(first)), np.diff(first, append=rows.num_rows))
        sessions = self._as_sessions(rows, owners)
        old_looks = np.full(len(first), np.iinfo(np.int64).max)
        if known.any():
            old_looks[known], old = state.codec.decode([value for value in values if value is not None])
            old_owners = np.flatnonzero(known)[old.owners]
            sessions = self._united(old_owners, old, sessions, keys)
        looks = np.minimum(old_looks, state.look_at(self._soonest(sessions, len(first), self._waits(sessions))))
        entries = state.codec.encode(looks, sessions)
        self._changes.put_many(stored, entries)
        slices.weigh(entries)
        self._move(keys, old_looks, looks, known)
        return keys, sessions

    def _as_sessions(self, rows: pa.Table, owners: Int64s) -> Sessions:
        grouping = self._state.grouping
        labels = [label for a in grouping.plan.accumulators for label in a.labels]
        states = [flat(rows.column(label)) for label in labels]
        starts, lasts = (flat(rows.column(name)).to_numpy() for name in (_START, _LAST))
        changed = np.full(len(owners), self._batch)
        return Sessions(owners, starts, lasts, changed, pa.RecordBatch.from_arrays(states, schema=grouping.plan.stored))

    def _united(self, old_owners: Int64s, old: Sessions, new: Sessions, keys: pa.Table) -> Sessions:
        """Old and new sessions of the same keys, as one where they touch."""
        owners = np.concatenate((old_owners, new.owners))
        begins, lasts = np.concatenate((old.starts, new.starts)), np.concatenate((old.lasts, new.lasts))
        ids, first, starts, ends = touching(owners, begins, lasts, self._state.gap)
        changed = np.full(len(first), np.iinfo(np.int64).min)
        np.maximum.at(changed, ids, np.concatenate((old.changed, new.changed)))
        states = pa.Table.from_batches([old.states, new.states]).combine_chunks().to_batches()[0]

        def key_of(number: int) -> object:
            place = int(owners[first[number]])
            return _key_shown({n: keys.column(n) for n in keys.column_names}, self._state.key_columns, place)

        _, merged = self._state.grouping.by_id("merge", ids, states, key_of)
        return Sessions(owners[first], starts, ends, changed, merged)

    def _waits(self, sessions: Sessions) -> Bools:
        """Whether a session is still to be emitted by closing: it was not due before, or changed in this batch."""
        if self._state.emit == "update":
            return np.zeros(len(sessions.lasts), np.bool_)
        if self._before is None:
            return np.ones(len(sessions.lasts), np.bool_)
        waits: Bools = (sessions.lasts + self._state.gap > self._before) | (sessions.changed == self._batch)
        return waits

    def _soonest(self, sessions: Sessions, count: int, waits: Bools) -> Int64s:
        """When the first of each key's sessions has to be emitted, if it waits for that, or is over."""
        ends = sessions.lasts + self._state.gap
        due = np.where(waits, ends, ends + self._state.lateness)
        return np.minimum.reduceat(due, np.searchsorted(sessions.owners, np.arange(count)))

    def _move(self, keys: pa.Table, old: Int64s, new: Int64s, known: Bools) -> None:
        """Bring the index from `old` to `new` times; `known` says which keys are in it."""
        moved = new != old
        gone = self._ends(keys, old, moved & known)
        self._changes.put_many(gone, [None] * len(gone))
        come = self._ends(keys, new, moved)
        self._changes.put_many(come, [b""] * len(come))
        groups = flat(keys.column(KEY_GROUP_COLUMN)).to_numpy().astype(np.int64)
        self._state.index.add(groups[moved], new[moved], self._changes)

    def _ends(self, keys: pa.Table, times: Int64s, mask: Bools) -> list[bytes]:
        if not mask.any():
            return []
        some = keys.append_column(_LOOK, pa.array(times)).filter(pa.array(mask))
        return self._state.ends_encoder.encode(some.combine_chunks()).stored(ENDS)

    # --- sessions that changed ---------------------------------------------------------------------

    def _changed_rows(self, keys: pa.Table, sessions: Sessions) -> WindowRows:
        sessions = sessions.filter(sessions.changed == self._batch)
        return self._rows([flat(keys.column(name)) for name in self._state.key_columns], sessions)

    def _rows(self, keys: list[Any], sessions: Sessions) -> WindowRows:
        owners = pa.array(sessions.owners)
        columns = [column.take(owners) for column in keys]
        return WindowRows(columns, sessions.starts, sessions.lasts + self._state.gap, sessions.states)

    def _reread(self, keys: pa.Table) -> Iterator[WindowRows]:
        encoded = self._state.encoder.encode(keys)
        order = encoded.order()
        slices = Slices(len(order))
        for part in slices:
            places = order[part]
            values = self._changes.get_many(encoded.take(places).stored(SESSIONS))
            slices.weigh(values)
            _, sessions = self._state.codec.decode([value for value in values if value is not None])
            yield self._changed_rows(keys.take(pa.array(places)), sessions)

    # --- sessions that are due ---------------------------------------------------------------------

    def _look(self, watermark: int) -> Generator[WindowRows, None, int | None]:
        """Look at the keys that may have something due; returns when the next of those that have not will have."""
        index = self._state.index
        due = [time for time in index.times() if time * 1000 <= watermark]
        remaining: set[tuple[int, int]] = set()
        looked = list(index.by_group(due))
        soonest: list[int] = []
        for ends in self._due_keys(looked):
            slices = Slices(len(ends))
            for part in slices:
                due_keys = self._due(ends[part], slices)
                yield from self._emit_due(due_keys, watermark)
                remaining |= self._drop_over(due_keys, watermark, soonest)
        over = [(time, group) for group, times in looked for time in times if (time, group) not in remaining]
        index.remove(over, self._changes)
        return min(soonest, default=None)

    def _due_keys(self, looked: list[tuple[int, list[int]]]) -> Iterator[list[bytes]]:
        held: list[bytes] = []
        for group, times in looked:
            prefix = state_prefix(group, ENDS)
            scan = self._changes.scan_range(prefix + time_bytes(times[0]), prefix_end(prefix + time_bytes(times[-1])))
            while some := [key for key, _ in islice(scan, SLICE_ROWS)]:
                held += some
                if len(held) >= SLICE_ROWS:
                    yield held
                    held = []
        if held:
            yield held

    def _due(self, ends: list[bytes], slices: Slices) -> _DueKeys:
        """Read the sessions of the keys of index entries, in key order."""
        array = pa.array(ends, pa.binary())
        groups, keys = pc.binary_slice(array, 0, 2), binary_from(array, _HEAD + TIME_BYTES)
        stored = join_bytes(groups, _scalar(_SESSIONS_HEAD), keys)
        order = pc.sort_indices(stored)
        values = self._changes.get_many(stored.take(order).to_pylist())
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            raise StrandlineError(f"{self._state.grouping.where}: the index of sessions names a key that has none")
        slices.weigh(found)
        looks, sessions = self._state.codec.decode(found)
        return _DueKeys(groups.take(order), keys.take(order), looks, sessions)

    def _emit_due(self, due: _DueKeys, watermark: int) -> Iterator[WindowRows]:
        sessions = due.sessions
        emitted = self._waits(sessions) & (sessions.lasts + self._state.gap <= watermark)
        if emitted.any():
            yield self._rows(self._state.decoder.decode(due.keys), sessions.filter(emitted))

    def _drop_over(self, due: _DueKeys, watermark: int, soonest: list[int]) -> set[tuple[int, int]]:
        """Delete sessions that are over, and bring the rest up to date in state and index.

        Gives the times and key groups at which there are still keys to look at, among those up to the watermark, and
        adds to `soonest` when.
        """
        state, changes = self._state, self._changes
        ends = due.sessions.lasts + state.gap
        left = due.sessions.filter(ends + state.lateness > watermark)
        kept, owners = np.unique(left.owners, return_inverse=True)
        left = replace(left, owners=owners)
        gone = np.setdiff1d(np.arange(len(due.looks)), kept)
        for keys in (due.stored(gone), due.ends(gone, due.looks[gone])):
            changes.put_many(keys, [None] * len(keys))
        if len(kept) == 0:
            return set()
        waits = (left.lasts + state.gap > watermark) & (state.emit == "close")
        next_due = self._soonest(left, len(kept), waits)
        looks, before = state.look_at(next_due), due.looks[kept]
        fewer = np.bincount(owners, minlength=len(kept)) != np.bincount(due.sessions.owners)[kept]
        moved = looks != before
        rewritten = np.flatnonzero(moved | fewer)
        if len(rewritten):
            some = left.filter(np.isin(owners, rewritten))
            some = replace(some, owners=np.searchsorted(rewritten, some.owners))
            changes.put_many(due.stored(kept[rewritten]), state.codec.encode(looks[rewritten], some))
        old, new = due.ends(kept[moved], before[moved]), due.ends(kept[moved], looks[moved])
        changes.put_many(old, [None] * len(old))
        changes.put_many(new, [b""] * len(new))
        raw = np.frombuffer(binary_content(due.groups.take(pa.array(kept)))[1], ">u2")
        groups = raw.astype(np.int64)
        state.index.add(groups[moved], looks[moved], changes)
        near = looks * 1000 <= watermark
        if near.any():
            soonest.append(int(-(-next_due[near].min() // 1000)))
        return set(zip(looks[near].tolist(), groups[near].tolist(), strict=True))


def _run_ids(keys: EncodedKeys) -> Int64s:
    """Numbers of runs of equal keys."""
    fresh = np.zeros(len(keys), np.int64)
    fresh[keys.starts()] = 1
    return np.cumsum(fresh) - 1


def _key_shown(columns: Mapping[str, Any], names: Sequence[str], row: int) -> tuple[Any, ...]:
    return tuple(columns[name][row].as_py() for name in names)


def _scalar(content: bytes) -> Any:
    return pa.scalar(content, pa.binary())


def _joined_list(*parts: Any) -> list[bytes]:
    joined: list[bytes] = join_bytes(*parts).to_pylist()
    return joined
