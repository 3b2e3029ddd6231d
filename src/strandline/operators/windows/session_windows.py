"""Session windows: the open sessions of a key in one state entry, and an index of looks at the key.

A look is a time at which a session of the key may be due. The entry of a key is `look (8 bytes) | length (4 bytes) and
columns of each session, by start`. An index entry is `key group | "session-ends" | 0x00 | look | key`. A look may be
too early, because the session went on since, but is never too late. So a row that prolongs a session does not change
the index. The operator's timer may be too early for the same reason. Looks are rounded down to a part of the gap, so
that there are few different times.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import NullType, StructField, StructType

from strandline.errors import StrandlineError
from strandline.operators.aggregate.accumulators import OverflowInSumError
from strandline.operators.aggregate.grouping import Grouping
from strandline.operators.aggregate.partials import Partials
from strandline.operators.aggregate.slices import Slices
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo
from strandline.operators.columns.binary import binary_content
from strandline.operators.columns.gather import contiguous
from strandline.operators.columns.key_decoder import KeyDecoder
from strandline.operators.columns.lookups import found_mask
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.timed.time_index import TimeIndex, time_bytes
from strandline.operators.windows.session_entries import SessionCodec, Sessions, touching
from strandline.operators.windows.session_keys import LOOKS, SESSIONS, TIMES, DueKeys, parts_of_looks
from strandline.operators.windows.specs import SessionWindow
from strandline.operators.windows.window_state import (
    LAST,
    START,
    TIME_COLUMN,
    WindowBatch,
    WindowRows,
    WindowSettings,
    WindowState,
)
from strandline.pyspark_releases import spark_schema
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import EncodedKeys, KeyEncoder, canonical_column, state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.look_up import LookUp
from strandline.state.key_ranges import prefix_end

_LOOK: Final = "__sl_look"

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class SessionWindows(WindowState):
    """Keeps sessions until no row can belong to them any more."""

    place = START
    place_us = 1

    def __init__(self, settings: WindowSettings, spec: SessionWindow) -> None:
        schema = arrow_schema(settings.struct)
        self.emit = settings.emit
        self.spec = spec
        self.gap = spec.gap_ms * 1000
        self.lateness = settings.lateness_ms * 1000
        self.key_columns = list(settings.key_columns)
        self.decoder = KeyDecoder(settings.where, schema, self.key_columns)
        self.grouping = Grouping(
            settings.where, settings.plan, settings.struct, self.key_columns, limits=settings.limits.grouping
        )
        self.encoder = self.grouping.encoder
        timed = schema.append(pa.field(TIME_COLUMN, pa.int64())).append(pa.field(_LOOK, pa.int64()))
        self.time_encoder = KeyEncoder(timed, [*self.key_columns, TIME_COLUMN], KEY_GROUP_COLUMN)
        self.look_encoder = KeyEncoder(timed, [_LOOK, *self.key_columns], KEY_GROUP_COLUMN)
        self.codec = SessionCodec(settings.plan.stored)
        self.index = TimeIndex(TIMES)
        self._step = max(1, spec.gap_ms // settings.limits.looks_per_gap)
        self._key_groups = range(0)

    def open(self, where: str, key_groups: range) -> None:
        """Remember the subtask and its key groups."""
        self.grouping.where = where
        self._key_groups = key_groups

    def states(self) -> list[StateDescriptor]:
        """The sessions, the looks, and the time index of the looks."""
        nothing = StructType([StructField("present", NullType())]).json()
        stored = spark_schema(self.codec.schema).json()
        return [
            StateDescriptor(SESSIONS, "aggregate", stored),
            StateDescriptor(LOOKS, "aggregate", nothing),
            StateDescriptor(TIMES, "aggregate", nothing),
        ]

    def look_up(self, look: LookUp) -> WindowRows | None:
        """The sessions of the key."""
        entry = look.entry(SESSIONS)
        if entry is None:
            return None
        _, sessions = self.codec.decode([entry])
        return WindowRows([], sessions.starts, sessions.lasts + self.gap, sessions.states)

    def late(self, times: Int64s, watermark_ms: int) -> Bools:
        """For each row time (microseconds), whether the session of this row alone was over at `watermark_ms`."""
        return self.spec.late(times, self.lateness // 1000, watermark_ms)

    def begin(self, changes: ChangeSet, batch: BatchInfo) -> WindowBatch:
        """Start a batch."""
        self.index.begin(changes, batch.batch_id, self._key_groups)
        return _SessionBatch(self, changes, batch)

    def look_at(self, times: Int64s) -> Int64s:
        """The looks (milliseconds) for sessions that are due at the given times (microseconds); never later."""
        return -(-times // 1000) // self._step * self._step


class _SessionBatch(WindowBatch):
    """The sessions during one batch."""

    def __init__(self, state: SessionWindows, changes: ChangeSet, batch: BatchInfo) -> None:
        self._state = state
        self._changes = changes
        self._batch = batch.batch_id
        self._watermark = None if batch.watermark_ms is None else batch.watermark_ms * 1000
        self._before = None if batch.late_watermark_ms is None else batch.late_watermark_ms * 1000
        self._partials = Partials(self._merge, state.grouping.limits)
        self._folded: list[pa.Table] = []

    def add(self, rows: pa.Table) -> None:
        """Aggregate the rows by key and session."""
        try:
            self._hold(self._partial(rows), distinct=True)
        except OverflowInSumError:
            # Only the sum of all rows of a session may overflow; it is chance which of them come together.
            times = contiguous(rows.column(TIME_COLUMN)).to_numpy()
            self._hold(self._table("partial", np.arange(rows.num_rows), rows, rows, times, times), distinct=False)

    def add_combined(self, rows: pa.Table) -> None:
        """Add pieces of sessions."""
        grouping = self._state.grouping
        self._hold(rows.select([*grouping.columns, START, LAST, *grouping.labels]), distinct=False)

    def _hold(self, part: pa.Table, distinct: bool) -> None:
        full = self._partials.add(part, distinct)
        if full is not None:
            self._folded += (keys for keys, _ in self._fold(full))

    def finish(self) -> Iterator[WindowRows]:
        """Merge all rows into state, yield the sessions that are due or changed, and delete those that are over."""
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
        """The sessions that the rows alone make."""
        state = self._state
        order = state.time_encoder.encode(rows).order()
        encoded = state.encoder.encode(rows).take(order)
        times = contiguous(rows.column(TIME_COLUMN)).to_numpy()[order]
        fresh = np.concatenate(([True], times[1:] - times[:-1] > state.gap))
        fresh[encoded.starts()] = True
        begins = np.flatnonzero(fresh)
        ids = np.empty(len(order), np.int64)
        ids[order] = np.cumsum(fresh) - 1
        ends = np.append(begins[1:], len(order)) - 1
        return self._table("partial", ids, rows, rows.take(pa.array(order[begins])), times[begins], times[ends])

    def _merge(self, partials: Sequence[pa.Table]) -> pa.Table:
        """The sessions of several tables; sessions that touch are merged."""
        rows = pa.concat_tables(partials).combine_chunks()
        encoded = self._state.encoder.encode(rows)
        order = encoded.order()
        owners = np.empty(len(order), np.int64)
        owners[order] = _run_ids(encoded.take(order))
        begins, ends = (contiguous(rows.column(name)).to_numpy() for name in (START, LAST))
        ids, first, starts, lasts = touching(owners, begins, ends, self._state.gap)
        return self._table("merge", ids, rows, rows.take(pa.array(first)), starts, lasts)

    def _table(
        self, step: Any, ids: Int64s, rows: pa.Table, firsts: pa.Table, starts: Int64s, lasts: Int64s
    ) -> pa.Table:
        """A table with one row per session: key, first and last time, accumulators; `firsts` has one row of each."""
        grouping = self._state.grouping
        keys = {name: canonical_column(contiguous(firsts.column(name))) for name in grouping.columns}
        _, states = grouping.by_id(step, ids, rows, lambda row: _key_shown(keys, self._state.key_columns, row))
        made = {**keys, START: pa.array(starts), LAST: pa.array(lasts)}
        return pa.table(made | dict(zip(grouping.labels, states.columns, strict=True)))

    def _fold(self, partial: pa.Table) -> Iterator[tuple[pa.Table, Sessions]]:
        """Merge sessions into the stored ones, in key order; yields keys and all their sessions by slices."""
        partial = partial.combine_chunks()
        encoded = self._state.encoder.encode(partial)
        order = encoded.order()
        starts = encoded.take(order).starts()
        edges = np.append(starts, len(order))
        slices = Slices(len(starts), self._state.grouping.limits)
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
        known = found_mask(values)
        owners = np.repeat(np.arange(len(first)), np.diff(first, append=rows.num_rows))
        sessions = self._as_sessions(rows, owners)
        old_looks = np.full(len(first), np.iinfo(np.int64).max)
        if known.any():
            old_looks[known], old = state.codec.decode([value for value in values if value is not None])
            if self._before is not None:
                # A job that was started again with a shorter lateness has sessions that are over, but not deleted yet.
                old = old.filter(old.lasts + state.gap + state.lateness > self._before)
            old_owners = np.flatnonzero(known)[old.owners]
            sessions = self._united(old_owners, old, sessions, keys)
        looks = np.minimum(old_looks, state.look_at(self._soonest(sessions, len(first), self._waits(sessions))))
        entries = state.codec.encode(looks, sessions)
        self._changes.put_many(stored, entries)
        slices.adapt(entries)
        self._move(keys, old_looks, looks, known)
        return keys, sessions

    def _as_sessions(self, rows: pa.Table, owners: Int64s) -> Sessions:
        grouping = self._state.grouping
        states = [contiguous(rows.column(label)) for label in grouping.labels]
        starts, lasts = (contiguous(rows.column(name)).to_numpy() for name in (START, LAST))
        changed = np.full(len(owners), self._batch)
        return Sessions(owners, starts, lasts, changed, pa.RecordBatch.from_arrays(states, schema=grouping.plan.stored))

    def _united(self, old_owners: Int64s, old: Sessions, new: Sessions, keys: pa.Table) -> Sessions:
        """Old and new sessions of the same keys; sessions that touch are merged."""
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
        """Which sessions will be emitted when they close: those that were not due before, or changed in this batch."""
        if self._state.emit == "update":
            return np.zeros(len(sessions.lasts), np.bool_)
        if self._before is None:
            return np.ones(len(sessions.lasts), np.bool_)
        waits: Bools = (sessions.lasts + self._state.gap > self._before) | (sessions.changed == self._batch)
        return waits

    def _soonest(self, sessions: Sessions, count: int, waits: Bools) -> Int64s:
        """For each key, the first time at which one of its sessions is due, if it waits to be emitted, or is over."""
        ends = sessions.lasts + self._state.gap
        due = np.where(waits, ends, ends + self._state.lateness)
        return np.minimum.reduceat(due, np.searchsorted(sessions.owners, np.arange(count)))

    def _move(self, keys: pa.Table, old: Int64s, new: Int64s, known: Bools) -> None:
        """Change the looks of keys from `old` to `new`; `known` says which keys have a look in the index."""
        moved = new != old
        gone = self._look_keys(keys, old, moved & known)
        self._changes.put_many(gone, [None] * len(gone))
        come = self._look_keys(keys, new, moved)
        self._changes.put_many(come, [b""] * len(come))
        groups = contiguous(keys.column(KEY_GROUP_COLUMN)).to_numpy().astype(np.int64)
        self._state.index.add(groups[moved], new[moved], self._changes)

    def _look_keys(self, keys: pa.Table, times: Int64s, mask: Bools) -> list[bytes]:
        if not mask.any():
            return []
        some = keys.append_column(_LOOK, pa.array(times)).filter(pa.array(mask))
        return self._state.look_encoder.encode(some.combine_chunks()).stored(LOOKS)

    # --- sessions that changed ---------------------------------------------------------------------

    def _changed_rows(self, keys: pa.Table, sessions: Sessions) -> WindowRows:
        sessions = sessions.filter(sessions.changed == self._batch)
        return self._rows([contiguous(keys.column(name)) for name in self._state.key_columns], sessions)

    def _rows(self, keys: list[Any], sessions: Sessions) -> WindowRows:
        owners = pa.array(sessions.owners)
        columns = [column.take(owners) for column in keys]
        return WindowRows(columns, sessions.starts, sessions.lasts + self._state.gap, sessions.states)

    def _reread(self, keys: pa.Table) -> Iterator[WindowRows]:
        encoded = self._state.encoder.encode(keys)
        order = encoded.order()
        slices = Slices(len(order), self._state.grouping.limits)
        for part in slices:
            places = order[part]
            values = self._changes.get_many(encoded.take(places).stored(SESSIONS))
            slices.adapt(values)
            _, sessions = self._state.codec.decode([value for value in values if value is not None])
            yield self._changed_rows(keys.take(pa.array(places)), sessions)

    # --- sessions that are due ---------------------------------------------------------------------

    def _look(self, watermark: int) -> Generator[WindowRows, None, int | None]:
        """Look at the keys whose look is due: yield the sessions that are due, and delete those that are over.

        Returns the next time at which one of these keys has something due, if its new look is not after the watermark.
        """
        index = self._state.index
        due = [time for time in index.times() if time * 1000 <= watermark]
        remaining: set[tuple[int, int]] = set()
        looked = list(index.by_group(due))
        soonest: list[int] = []
        for keys in self._due_keys(looked):
            slices = Slices(len(keys), self._state.grouping.limits)
            for part in slices:
                due_keys = self._due(keys[part], slices)
                yield from self._emit_due(due_keys, watermark)
                remaining |= self._drop_over(due_keys, watermark, soonest)
        over = [(time, group) for group, times in looked for time in times if (time, group) not in remaining]
        index.remove(over, self._changes)
        return min(soonest, default=None)

    def _due_keys(self, looked: list[tuple[int, list[int]]]) -> Iterator[list[bytes]]:
        most = self._state.grouping.limits.slice_rows
        held: list[bytes] = []
        for group, times in looked:
            prefix = state_prefix(group, LOOKS)
            scan = self._changes.scan_range(prefix + time_bytes(times[0]), prefix_end(prefix + time_bytes(times[-1])))
            while some := [key for key, _ in islice(scan, most)]:
                held += some
                if len(held) >= most:
                    yield held
                    held = []
        if held:
            yield held

    def _due(self, looks: list[bytes], slices: Slices) -> DueKeys:
        """Read the sessions of the keys that index entries refer to, in key order."""
        groups, keys, entries = parts_of_looks(looks)
        values = self._changes.get_many(entries.to_pylist())
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            raise StrandlineError(
                f"{self._state.grouping.where}: the index of sessions has a key without sessions; "
                "this is a bug, please report it"
            )
        slices.adapt(found)
        times, sessions = self._state.codec.decode(found)
        return DueKeys(groups, keys, times, sessions)

    def _emit_due(self, due: DueKeys, watermark: int) -> Iterator[WindowRows]:
        sessions = due.sessions
        emitted = self._waits(sessions) & (sessions.lasts + self._state.gap <= watermark)
        if emitted.any():
            yield self._rows(self._state.decoder.decode(due.keys), sessions.filter(emitted))

    def _drop_over(self, due: DueKeys, watermark: int, soonest: list[int]) -> set[tuple[int, int]]:
        """Delete the sessions that are over, and update the entries and looks of the others.

        Returns the pairs of look and key group that are still in the index although the watermark has reached the look,
        and appends to `soonest` the next time at which one of these keys has something due.
        """
        state, changes = self._state, self._changes
        ends = due.sessions.lasts + state.gap
        left = due.sessions.filter(ends + state.lateness > watermark)
        kept, owners = np.unique(left.owners, return_inverse=True)
        left = replace(left, owners=owners)
        gone = np.setdiff1d(np.arange(len(due.looks)), kept)
        for keys in (due.entry_keys(gone), due.look_keys(gone, due.looks[gone])):
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
            changes.put_many(due.entry_keys(kept[rewritten]), state.codec.encode(looks[rewritten], some))
        old, new = due.look_keys(kept[moved], before[moved]), due.look_keys(kept[moved], looks[moved])
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
    """The number of the run of equal keys that each key belongs to."""
    fresh = np.zeros(len(keys), np.int64)
    fresh[keys.starts()] = 1
    return np.cumsum(fresh) - 1


def _key_shown(columns: Mapping[str, Any], names: Sequence[str], row: int) -> tuple[Any, ...]:
    return tuple(columns[name][row].as_py() for name in names)
