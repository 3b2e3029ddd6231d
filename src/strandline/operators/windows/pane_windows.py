"""Tumbling and sliding windows: one state entry for each pane and key, in the order of time.

A stored key is `key group | "panes" | 0x00 | start of the pane | key`. A row costs one read and one write, however many
windows it belongs to. The panes of due windows are read by a scan over a range of time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import NullType, StructField, StructType

from strandline.operators.aggregate.grouping import Grouping
from strandline.operators.aggregate.partials import Partials
from strandline.operators.aggregate.slices import Slices
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo
from strandline.operators.columns.binary import binary_content, binary_from
from strandline.operators.columns.gather import contiguous
from strandline.operators.columns.key_decoder import KeyDecoder
from strandline.operators.columns.lookups import found_mask
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.timed.time_index import TIME_BYTES, TimeIndex, time_bytes, time_of
from strandline.operators.windows.specs import SlidingWindow
from strandline.operators.windows.window_state import (
    PANE,
    TIME_COLUMN,
    WindowBatch,
    WindowRows,
    WindowSettings,
    WindowState,
)
from strandline.pyspark_releases import spark_schema
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import KeyEncoder, state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.look_up import LookUp
from strandline.state.key_ranges import prefix_end

PANES: Final = "panes"
TIMES: Final = "pane-times"
_HEAD: Final = len(state_prefix(0, PANES))

Int64s = npt.NDArray[np.int64]
Entries = tuple[list[bytes], list[bytes]]


class PaneWindows(WindowState):
    """Keeps each pane until the last window that has it is over."""

    place = PANE
    place_us = 1000

    def __init__(self, settings: WindowSettings, spec: SlidingWindow) -> None:
        schema = arrow_schema(settings.struct)
        limits = settings.limits
        self.spec = spec
        self.chunk_entries = limits.chunk_entries
        self.emit = settings.emit
        self.lateness = settings.lateness_ms
        self.key_columns = list(settings.key_columns)
        self.decoder = KeyDecoder(settings.where, schema, self.key_columns)
        self.grouping = Grouping(
            settings.where, settings.plan, settings.struct, self.key_columns, [PANE], limits.grouping
        )
        self.encoder = KeyEncoder(schema, self.key_columns, KEY_GROUP_COLUMN)
        self.index = TimeIndex(TIMES)
        self._key_groups = range(0)

    def open(self, where: str, key_groups: range) -> None:
        """Remember the subtask and its key groups."""
        self.grouping.where = where
        self._key_groups = key_groups

    def states(self) -> list[StateDescriptor]:
        """The panes, and their time index."""
        stored = spark_schema(self.grouping.plan.stored)
        nothing = StructType([StructField("present", NullType())])
        return [
            StateDescriptor(PANES, "aggregate", stored.json()),
            StateDescriptor(TIMES, "aggregate", nothing.json()),
        ]

    def look_up(self, look: LookUp) -> WindowRows | None:
        """The windows of all panes that are kept for the key. A window that has closed is among them if its panes are
        kept for others, or for late rows."""
        index = state_prefix(look.group, TIMES)
        times = [time_of(key, len(index)) for key, _ in look.backend.scan(index, prefix_end(index))]
        prefix = state_prefix(look.group, PANES)
        values = look.backend.get_many([prefix + time_bytes(time) + look.key for time in times])
        found = found_mask(values)
        if not found.any():
            return None
        spec = self.spec
        panes = np.array(times, np.int64)[found]
        first = spec.first_ends(panes)
        counts = (spec.last_ends(panes) - first) // spec.slide_ms + 1
        at = np.repeat(np.arange(len(panes)), counts)
        ends = first[at] + (np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)) * spec.slide_ms
        states = self.grouping.codec.decode([value for value in values if value is not None])
        made, merged = self.grouping.by_id("merge", ends, states.take(pa.array(at)), lambda _end: look.key)
        return WindowRows([], (made - spec.size_ms) * 1000, made * 1000, merged)

    def late(self, times: Int64s, watermark_ms: int) -> npt.NDArray[np.bool_]:
        """For each row time (microseconds), whether the last window of the row was over at `watermark_ms`."""
        return self.spec.late(times, self.lateness, watermark_ms)

    def over(self, panes: Int64s, watermark_ms: int) -> npt.NDArray[np.bool_]:
        """For each pane, whether the last window that has it is over at `watermark_ms`."""
        return self.spec.last_ends(panes) + self.lateness <= watermark_ms

    def begin(self, changes: ChangeSet, batch: BatchInfo) -> WindowBatch:
        """Start a batch."""
        self.index.begin(changes, batch.batch_id, self._key_groups)
        return _PaneBatch(self, changes, batch)

    def plan_timer(self, watermark_ms: int | None) -> None:
        """Set `next_timer_ms` to the next time at which a window is due or a pane is over."""
        panes = np.array(self.index.times(), np.int64)
        if len(panes) == 0:
            self.next_timer_ms = None
            return
        spec = self.spec
        due = over = spec.last_ends(panes) + self.lateness
        if self.emit == "close":
            due = spec.first_ends(panes)
            if watermark_ms is not None:
                ahead = np.maximum(due, spec.end_after(watermark_ms))
                due = np.where(spec.last_ends(panes) > watermark_ms, ahead, over)
        self.next_timer_ms = int(due.min())


class _PaneBatch(WindowBatch):
    """The panes during one batch."""

    def __init__(self, state: PaneWindows, changes: ChangeSet, batch: BatchInfo) -> None:
        self._state = state
        self._spec = state.spec
        self._grouping = state.grouping
        self._changes = changes
        self._watermark = batch.watermark_ms
        self._before = batch.late_watermark_ms
        self._partials = Partials(state.grouping.merge, state.grouping.limits)
        self._changed: list[pa.Table] = []
        # Whether a window that was emitted before is emitted again when it changes.
        self._again = state.emit == "update" or (state.lateness > 0 and self._before is not None)

    def add(self, rows: pa.Table) -> None:
        """Aggregate the rows by key and pane."""
        panes = self._spec.panes_of(contiguous(rows.column(TIME_COLUMN)).to_numpy())
        self._hold(*self._grouping.part(rows.append_column(PANE, pa.array(panes))))

    def add_combined(self, rows: pa.Table) -> None:
        """Add partial results."""
        self._hold(rows.select(self._grouping.schema.names), distinct=False)

    def _hold(self, part: pa.Table, distinct: bool) -> None:
        full = self._partials.add(part, distinct)
        if full is not None:
            for keys, _ in self._fold(full):
                self._note(keys)

    def finish(self) -> Iterator[WindowRows]:
        """Merge all rows into state, yield the windows that are due or changed, and delete the panes that are over."""
        rest = self._partials.rest()
        if rest is not None:
            tumbling = self._spec.size_ms == self._spec.slide_ms
            at_once = self._again and tumbling and not self._changed
            for keys, running in self._fold(rest):
                if at_once:
                    yield self._panes_alone(keys, running)
                else:
                    self._note(keys)
        if self._changed:
            yield from self._emit_changed(self._grouping.distinct(self._changed))
        if self._watermark is not None:
            played = self._due_panes(self._watermark)
            yield from self._close(played, self._watermark)
            self._purge(set(played), self._watermark)
        self._state.plan_timer(self._watermark)

    # --- rows into panes ---------------------------------------------------------------------------

    def _fold(self, partial: pa.Table) -> Iterator[tuple[pa.Table, pa.RecordBatch]]:
        index = self._state.index

        def may_exist(keys: pa.Table) -> npt.NDArray[np.bool_]:
            return index.has(_numbers(keys, KEY_GROUP_COLUMN), _numbers(keys, PANE))

        # The index is updated at the end: the second slice of a new pane need not read entries, for there are none.
        folded: list[pa.Table] = []
        for keys, running in self._grouping.fold(partial, PANES, self._changes, may_exist):
            folded.append(keys.select([KEY_GROUP_COLUMN, PANE]))
            yield keys, running
        for keys in folded:
            index.add(_numbers(keys, KEY_GROUP_COLUMN), _numbers(keys, PANE), self._changes)

    def _note(self, keys: pa.Table) -> None:
        """Remember the keys and panes whose windows are emitted again."""
        if self._again:
            wanted = np.ones(keys.num_rows, np.bool_)
            if self._state.emit == "close" and self._before is not None:
                wanted = self._spec.first_ends(_numbers(keys, PANE)) <= self._before
            if wanted.any():
                self._changed.append(keys.filter(pa.array(wanted)))

    # --- windows that changed ----------------------------------------------------------------------

    def _emitted_again(self, ends: Int64s) -> npt.NDArray[np.bool_]:
        """Which changed windows are emitted again: those that are not over, and will not be emitted when they close."""
        wanted = np.ones(len(ends), np.bool_)
        if self._before is not None:
            wanted = ends + self._state.lateness > self._before
            if self._state.emit == "close":
                wanted &= ends <= self._before
        return wanted

    def _panes_alone(self, keys: pa.Table, running: pa.RecordBatch) -> WindowRows:
        """The windows of panes, if a window has one pane."""
        panes = _numbers(keys, PANE)
        ends = panes + self._spec.size_ms
        columns = [contiguous(keys.column(name)) for name in self._state.key_columns]
        wanted = self._emitted_again(ends)
        if not wanted.all():
            mask = pa.array(wanted)
            columns, running = [column.filter(mask) for column in columns], running.filter(mask)
        return WindowRows(columns, panes[wanted] * 1000, ends[wanted] * 1000, running)

    def _emit_changed(self, changed: pa.Table) -> Iterator[WindowRows]:
        """Yield the windows of changed panes, merged from all their panes, by slices of keys."""
        spec = self._spec
        if spec.size_ms == spec.slide_ms:
            for keys, running in self._grouping.reread(changed, PANES, self._changes):
                yield self._panes_alone(keys, running)
            return
        encoded = self._state.encoder.encode(changed)
        order = encoded.order()
        starts = encoded.take(order).starts()
        at_once = max(1, self._grouping.limits.slice_rows // (2 * spec.size_ms // spec.pane_ms))
        edges = [*starts[::at_once].tolist(), len(order)]
        for begin, end in pairwise(edges):
            some = changed.take(pa.array(order[begin:end])).combine_chunks()
            first = starts[(starts >= begin) & (starts < end)] - begin
            ids = np.repeat(np.arange(len(first)), np.diff(first, append=end - begin))
            yield from self._merge_changed(some, first, ids)

    def _merge_changed(self, changed: pa.Table, first: Int64s, ids: Int64s) -> Iterator[WindowRows]:
        """The windows of some changed panes.

        `first` has one row of `changed` for each key. `ids` has the number of the key of each row.
        """
        spec = self._spec
        at, ends = self._windows_of(_numbers(changed, PANE), None, None)
        asked = self._emitted_again(ends)
        if not asked.any():
            return
        asked_ids, asked_ends = ids[at][asked], ends[asked]
        low = int(asked_ends.min())
        count = int(asked_ends.max() - low) // spec.slide_ms + 1
        windows = np.unique(asked_ids * count + (asked_ends - low) // spec.slide_ms)
        per_window = spec.size_ms // spec.pane_ms
        begins = low + windows % count * spec.slide_ms - spec.size_ms
        panes = (begins[:, None] + np.arange(per_window) * spec.pane_ms).ravel()
        owners = np.repeat(windows // count, per_window)
        there = np.isin(panes, self._state.index.times())
        pairs = _distinct_pairs(owners[there], panes[there])
        keys = changed.select([*self._state.key_columns, KEY_GROUP_COLUMN]).take(pa.array(first[pairs[0]]))
        encoded = self._grouping.encoder.encode(keys.append_column(PANE, pa.array(pairs[1])))
        order = encoded.order()
        values = self._changes.get_many(encoded.take(order).stored(PANES))
        found = found_mask(values)
        states = self._grouping.codec.decode([value for value in values if value is not None])
        owners, panes = pairs[0][order][found], pairs[1][order][found]
        at, ends = self._windows_of(panes, low, int(asked_ends.max()))
        numbers = owners[at] * count + (ends - low) // spec.slide_ms
        wanted = np.isin(numbers, windows)
        columns = [contiguous(changed.column(name)).take(pa.array(first)) for name in self._state.key_columns]
        yield self._merged(numbers[wanted], states.take(pa.array(at[wanted])), columns, low, count)

    # --- windows that are due ----------------------------------------------------------------------

    def _due_panes(self, watermark: int) -> list[int]:
        """The panes of the windows that are due at the watermark."""
        if self._state.emit == "update":
            return []
        panes = np.array(self._state.index.times(), np.int64)
        next_ends = self._spec.first_ends(panes)
        if self._before is not None:
            next_ends = np.maximum(next_ends, self._spec.end_after(self._before))
        due = next_ends <= np.minimum(self._spec.last_ends(panes), watermark)
        return [int(pane) for pane in panes[due]]

    def _close(self, panes: list[int], watermark: int) -> Iterator[WindowRows]:
        """Yield the windows of `panes` whose end the watermark has reached, and delete the panes that are over then."""
        for keys, values in self._chunks(panes):
            array = pa.array(keys, pa.binary())
            times = _times(array)
            rest = binary_from(array, _HEAD + TIME_BYTES)
            states = self._grouping.codec.decode(values)
            if self._spec.size_ms == self._spec.slide_ms:
                columns = self._state.decoder.decode(rest)
                yield WindowRows(columns, times * 1000, (times + self._spec.size_ms) * 1000, states)
            else:
                yield from self._close_sliding(rest, times, states, watermark)
            over = self._state.over(times, watermark)
            gone = keys if over.all() else [keys[at] for at in np.flatnonzero(over).tolist()]
            self._changes.put_many(gone, [None] * len(gone))

    def _close_sliding(self, keys: Any, panes: Int64s, states: pa.RecordBatch, watermark: int) -> Iterator[WindowRows]:
        spec = self._spec
        low = int(spec.first_ends(panes).min())
        if self._before is not None:
            low = max(low, spec.end_after(self._before))
        at, ends = self._windows_of(panes, low, watermark)
        if len(at) == 0:
            return
        count = int(ends.max() - low) // spec.slide_ms + 1
        known = keys.dictionary_encode()
        numbers = known.indices.to_numpy().astype(np.int64)[at] * count + (ends - low) // spec.slide_ms
        if len(at) != len(panes) or not np.array_equal(at, np.arange(len(at))):
            states = states.take(pa.array(at))
        yield self._merged(numbers, states, self._state.decoder.decode(known.dictionary), low, count)

    def _windows_of(self, panes: Int64s, low: int | None, high: int | None) -> tuple[Int64s, Int64s]:
        """For each pane, its windows that end from `low` to `high`: the place of the pane, and the window's end."""
        spec = self._spec
        first, last = spec.first_ends(panes), spec.last_ends(panes)
        first = first if low is None else np.maximum(first, low)
        last = last if high is None else np.minimum(last, high)
        counts = np.maximum((last - first) // spec.slide_ms + 1, 0)
        at = np.repeat(np.arange(len(panes)), counts)
        steps = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        return at, first[at] + steps * spec.slide_ms

    def _merged(self, numbers: Int64s, states: pa.RecordBatch, keys: list[Any], low: int, count: int) -> WindowRows:
        """Windows merged from panes. Panes with the same number belong to the same window.

        A number is the place of the key in `keys`, times `count`, plus the number of the window, counted from the one
        that ends at `low`.
        """

        def key_of(number: int) -> object:
            return tuple(column[number // count].as_py() for column in keys)

        made, merged = self._grouping.by_id("merge", numbers, states, key_of)
        ends = low + made % count * self._spec.slide_ms
        places = pa.array(made // count)
        columns = [column.take(places) for column in keys]
        return WindowRows(columns, (ends - self._spec.size_ms) * 1000, ends * 1000, merged)

    # --- panes out of state ------------------------------------------------------------------------

    def _chunks(self, panes: list[int]) -> Iterator[Entries]:
        """The stored entries of `panes`, in chunks. All entries of a key are in the same chunk."""
        keys: list[bytes] = []
        values: list[bytes] = []
        alone = self._spec.size_ms == self._spec.slide_ms
        most = self._state.chunk_entries
        if not alone:
            most = max(1, most * self._spec.slide_ms // self._spec.size_ms)
        chunks = Slices(0, self._grouping.limits, most)
        for group, times in self._state.index.by_group(panes):
            prefix = state_prefix(group, PANES)
            last = prefix + time_bytes(times[-1])
            scan = self._changes.scan_range(prefix + time_bytes(times[0]), prefix_end(last))
            while entries := list(islice(scan, chunks.size + 1)):
                if len(entries) > chunks.size and not alone:
                    yield from self._aligned(prefix, times, chunks)
                    break
                keys += [key for key, _ in entries]
                values += [value for _, value in entries]
                if len(keys) >= chunks.size:
                    yield keys, values
                    chunks.adapt(values)
                    keys, values = [], []
        if keys:
            yield keys, values

    def _aligned(self, prefix: bytes, panes: list[int], chunks: Slices) -> Iterator[Entries]:
        """The entries of one key group's panes, read side by side and cut at the same keys."""
        scans = [self._changes.scan(prefix + time_bytes(pane)) for pane in panes]
        held: list[list[tuple[bytes, bytes]]] = [[] for _ in scans]
        open_scans = set(range(len(scans)))
        cut = len(prefix) + TIME_BYTES
        while open_scans or any(held):
            at_once = max(2, chunks.size // len(scans))
            for at in list(open_scans):
                if len(held[at]) < at_once:
                    more = list(islice(scans[at], at_once))
                    held[at] += more
                    if len(more) < at_once:
                        open_scans.discard(at)
            # Beyond the least key that an open scan has reached, entries of a key may not have been read yet.
            ends = [held[at][-1][0][cut:] for at in open_scans if held[at]]
            bound = min(ends) if ends else None
            keys: list[bytes] = []
            values: list[bytes] = []
            for at, entries in enumerate(held):
                ready = len(entries) if bound is None else bisect_right(entries, bound, key=lambda e: e[0][cut:])
                keys += [key for key, _ in entries[:ready]]
                values += [value for _, value in entries[:ready]]
                held[at] = entries[ready:]
            if keys:
                yield keys, values
                chunks.adapt(values)

    def _purge(self, read: set[int], watermark: int) -> None:
        """Delete the panes that are over, except those of `read`, which are deleted already; update the time index."""
        index = self._state.index
        panes = np.array(index.times(), np.int64)
        over = [int(pane) for pane in panes[self._state.over(panes, watermark)]]
        for group, times in index.by_group([pane for pane in over if pane not in read]):
            for pane in times:
                scan = self._changes.scan(state_prefix(group, PANES) + time_bytes(pane))
                while gone := [key for key, _ in islice(scan, self._state.chunk_entries)]:
                    self._changes.put_many(gone, [None] * len(gone))
        index.remove([(pane, group) for pane in over for group in sorted(index.groups_at(pane))], self._changes)


def _numbers(table: pa.Table, name: str) -> Int64s:
    numbers: Int64s = contiguous(table.column(name)).to_numpy()
    return numbers


def _times(keys: Any) -> Int64s:
    """The starts of the panes of stored keys."""
    offsets, content = binary_content(keys)
    data = np.frombuffer(content, np.uint8)
    raw = np.ascontiguousarray(data[(offsets[:-1] + _HEAD + 1)[:, None] + np.arange(8)])
    return (raw.view(">u8").ravel().astype(np.uint64) ^ np.uint64(1 << 63)).view(np.int64)


def _distinct_pairs(owners: Int64s, panes: Int64s) -> tuple[Int64s, Int64s]:
    order = np.lexsort((panes, owners))
    owners, panes = owners[order], panes[order]
    fresh = np.concatenate(([True], (owners[1:] != owners[:-1]) | (panes[1:] != panes[:-1])))[: len(owners)]
    return owners[fresh], panes[fresh]
