"""The operator that joins two keyed streams, inner or outer, with or without bounds of event time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from strandline.checkpoint.steps import StepDescription
from strandline.errors import JobDefinitionError
from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, Operator, Output, SideRows, SubtaskInfo
from strandline.operators.columns.described import described_columns
from strandline.operators.columns.event_times import micros, whole_millis
from strandline.operators.columns.gather import gathered
from strandline.operators.columns.nulls import all_valid, is_valid
from strandline.operators.columns.row_codec import RowCodec
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.columns.time_columns import with_time_columns
from strandline.operators.join.heads import MATCHED, SIDE, Heads, stored_rows
from strandline.operators.join.limits import DEFAULT_LIMITS, JoinLimits
from strandline.operators.join.matching import Matches, matching
from strandline.operators.join.plan import LEFT, RIGHT, SIDE_COLUMN, JoinColumn, JoinPlan, JoinType
from strandline.operators.rewrite import Rewrite
from strandline.operators.step_change import StepChange
from strandline.operators.timed.expiry_index import NEVER, ExpiryIndex
from strandline.operators.timed.late_rows import DROP, check_late
from strandline.operators.timed.timed_items import TimedItems
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.keys import KeyEncoder
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.look_up import LookUp
from strandline.state.handles.query import Found
from strandline.state.key_ranges import prefix_end

ROWS: Final = "rows"
_INDEX: Final = "rows-until"
_BUCKET_COLUMN: Final = "__sl_bucket"
_GRANULES: Final = 16
_SIDES: Final = ("left", "right")
_PRESERVED: Final = {"inner": (False, False), "left": (True, False), "right": (False, True), "full": (True, True)}
"""Which sides of a join show their rows without a partner."""

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class JoinOperator(Operator):
    """Joins left and right rows with equal keys and left time + lower <= right time <= left time + upper.

    Without time columns (inner joins only) every pair with equal keys joins, and state grows for ever. Rows at or
    before the watermark of the batch before are late, and counted. They are dropped (`late="drop"`), or go to the side
    outputs `<late>_left` and `<late>_right`, with the columns of their side. An outer join emits a row without a
    partner once the watermark says that no partner can come any more; the columns of the other side are null. A row
    never joins if a key column or its time is null.

    `input_columns` says how the planner makes one input of both sides. `JoinPlan` says which columns the output has.
    """

    sorted_input = False

    def __init__(
        self,
        uid: str,
        left_keys: Sequence[str],
        right_keys: Sequence[str],
        left_schema: StructType,
        right_schema: StructType,
        how: JoinType = "inner",
        left_time: str | None = None,
        right_time: str | None = None,
        lower_ms: int | None = None,
        upper_ms: int | None = None,
        limits: JoinLimits = DEFAULT_LIMITS,
        late: str = DROP,
    ) -> None:
        self._arguments = (
            *(uid, tuple(left_keys), tuple(right_keys), left_schema, right_schema, how),
            *(left_time, right_time, lower_ms, upper_ms, limits, late),
        )
        bounds = None if lower_ms is None or upper_ms is None else (lower_ms, upper_ms)
        schemas, times = (left_schema, right_schema), (left_time, right_time)
        plan = JoinPlan(uid, left_keys, right_keys, schemas, times, how, bounds)
        self.uid = uid
        self.limits = limits
        self.key_columns = plan.key_columns
        self.input_columns: tuple[JoinColumn, ...] = plan.columns
        self.input_struct = plan.input_struct
        self.output_struct = plan.output_struct
        self.output_schema = plan.output_schema
        self.plan = plan
        self._late_sides = self._read_late(late, bounds is not None)
        self.side_outputs = {
            name: with_time_columns(schema, {}) for name, schema in zip(self._late_sides, schemas, strict=False)
        }
        self.timed = bounds is not None
        self.time_mode = "event" if self.timed else "none"
        self.time_columns, self.default_time = plan.output_times()
        self.lower, self.upper = (1000 * bound for bound in bounds or (0, 0))
        self.bucket = max(limits.least_bucket_us, 2 * (self.upper - self.lower))
        self.preserved = _PRESERVED[how]
        self._where = f"operator {uid!r}"
        self.codecs = tuple(RowCodec(struct, self._where) for struct in plan.stored)
        self._input = arrow_schema(plan.input_struct).append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        self.encoder = KeyEncoder(self._input, self.key_columns, KEY_GROUP_COLUMN)
        buckets = self._input.append(pa.field(_BUCKET_COLUMN, pa.int64()))
        self.head_encoder = KeyEncoder(buckets, [*self.key_columns, _BUCKET_COLUMN], KEY_GROUP_COLUMN)
        self.index: ExpiryIndex | None = None
        self._slice = limits.largest_slice

    def _read_late(self, late: str, timed: bool) -> tuple[str, ...]:
        """The names of the side outputs of late rows, of the left and of the right side; empty if rows are dropped."""
        where = f"operator {self.uid!r}"
        check_late(
            late,
            where,
            "the partners of a late row may be forgotten; with a longer watermark_delay= fewer rows are late",
        )
        if late == DROP:
            return ()
        if not timed:
            raise JobDefinitionError(f"{where}: late={late!r} needs within=: only by event time are rows late")
        return f"{late}_left", f"{late}_right"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only; the slot builds the rest again."""
        return JoinOperator, self._arguments

    def open(self, info: SubtaskInfo) -> None:
        """Remember the subtask, and open the expiry index."""
        self._where = info.where
        granule = self.bucket // 1000 // _GRANULES
        self.index = ExpiryIndex(_INDEX, granule, info, self.limits.read_keys) if self.timed else None

    def states(self) -> list[StateDescriptor]:
        """The rows of both sides, and the expiry index."""
        both = StructType([field for side in self.plan.stored for field in side.fields])
        rows = StateDescriptor(ROWS, "rows", both.json(), ttl_ms=self.bucket // 1000 if self.timed else None)
        return [rows, ExpiryIndex.descriptor(_INDEX)] if self.timed else [rows]

    def describe(self) -> StepDescription:
        """The kind of the join, its bounds, and the columns of both sides, all of which are stored."""
        plan = self.plan
        lower_ms, upper_ms = plan.bounds_ms or (None, None)
        keys = described_columns(self.input_struct, self.key_columns)
        times = [
            described_columns(schema, [time])
            for schema, time in zip(plan.schemas, plan.times, strict=True)
            if time is not None
        ]
        return StepDescription(
            self.uid,
            "join",
            keys,
            tuple(column for columns in times for column in columns),
            {"how": plan.how, "lower_ms": lower_ms, "upper_ms": upper_ms},
            {
                "right keys": tuple((name, kind) for name, (_, kind) in zip(plan.right_keys, keys, strict=True)),
                "left": described_columns(plan.schemas[0]),
                "right": described_columns(plan.schemas[1]),
            },
        )

    def carry_over(self, change: StepChange) -> tuple[Rewrite, ...]:
        """A side may lose its rows without a partner: of a side that had none, nobody noted who has found one."""
        showed = _PRESERVED.get(str(change.before.parameters.get("how")), (False, False))
        if all(before or not now for before, now in zip(showed, self.preserved, strict=True)):
            change.accept("how")
        change.explain("and nobody noted which of the stored rows have found a partner", "how")
        change.explain("and the rows that other bounds need may be gone", "lower_ms", "upper_ms")
        return ()

    def run(self, rows: Iterator[pa.RecordBatch], changes: ChangeSet, batch: BatchInfo) -> Iterator[Output]:
        """Yield the pairs that the rows of the batch complete, then the rows that can find no partner any more."""
        self.late_rows = 0
        if self.index is not None:
            self.index.begin(batch.batch_id)
        for part in gathered(rows, self._input, self.limits.largest_slice, self._where):
            usable, lonely, late = self._sorted_out(part, batch.late_watermark_ms)
            if late.any():
                self.late_rows += int(np.count_nonzero(late))
                yield from self._late(part.filter(pa.array(late)))
            yield from self._alone(part.filter(pa.array(lonely)))
            part = part.filter(pa.array(usable)) if not usable.all() else part
            done = 0
            while done < part.num_rows:
                some = part.slice(done, self._slice)
                done += some.num_rows
                yield from _Slice(self, some, changes).join()
        if self.index is not None:
            if batch.watermark_ms is not None:
                yield from self._expire(changes, batch.watermark_ms)
            if any(self.preserved):
                self.next_timer_ms = self.index.next_ms(changes)

    def look_up(self, look: LookUp, state: str | None) -> Found:
        """The rows that are kept for the key, by side."""
        self._refuse_state(state)
        prefix = look.stored(ROWS)
        entries = [value for _, value in look.backend.scan(prefix, prefix_end(prefix))]
        if not entries:
            return None
        shown = {}
        for side, codec, items in zip(_SIDES, self.codecs, stored_rows(entries), strict=True):
            names = {column.name: getattr(column, side) or column.name for column in self.input_columns}
            rows = codec.decode_array(items.data)
            shown[side] = rows.rename_columns([names[name] for name in rows.schema.names]).to_pylist()
        return (shown,)

    def nothing(self, state: str | None) -> dict[str, list[Any]]:
        """No rows on either side."""
        self._refuse_state(state)
        return {side: [] for side in _SIDES}

    def _sorted_out(self, part: pa.RecordBatch, late_ms: int | None) -> tuple[Flags, Flags, Flags]:
        """Which rows can join, which can never join, and which are late; every row is one of the three."""
        usable = all_valid([part.column(name) for name in self.key_columns])
        late = np.zeros(part.num_rows, np.bool_)
        if self.timed:
            times, timed = self.times(part)
            usable &= timed
            if late_ms is not None:
                late = timed & (times <= 1000 * late_ms)
        return usable & ~late, ~usable & ~late, late

    def _late(self, part: pa.RecordBatch) -> Iterator[SideRows]:
        """The late rows for the side outputs, if there are side outputs."""
        sides = part.column(SIDE_COLUMN).to_numpy()
        for side, name in enumerate(self._late_sides):
            if (sides == side).any():
                yield SideRows(name, self.plan.input_rows(part.filter(pa.array(sides == side)), side))

    def times(self, part: pa.RecordBatch) -> tuple[Numbers, Flags]:
        """The time of every row in microseconds, and which rows have one."""
        if not self.timed:
            return np.zeros(part.num_rows, np.int64), np.ones(part.num_rows, np.bool_)
        left, right = (part.column(cast(str, name)) for name in self.plan.time_columns)
        from_left = part.column(SIDE_COLUMN).to_numpy() == LEFT
        return np.where(from_left, micros(left), micros(right)), np.where(from_left, is_valid(left), is_valid(right))

    def _alone(self, part: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Output of rows that can never join, if the join preserves their side."""
        sides = part.column(SIDE_COLUMN).to_numpy()
        for side in (LEFT, RIGHT):
            if self.preserved[side] and (sides == side).any():
                yield self._unpaired(side, self.own_columns(part.filter(pa.array(sides == side)), side))

    def own_columns(self, part: pa.RecordBatch, side: int) -> pa.RecordBatch:
        """The stored columns of the rows of a side."""
        names = self.codecs[side].schema.names
        return pa.RecordBatch.from_arrays([part.column(name) for name in names], names=names)

    def _unpaired(self, side: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        return self.plan.output(rows, None) if side == LEFT else self.plan.output(None, rows)

    def row_due_ms(self, times: Numbers, flags: npt.NDArray[np.uint8]) -> Numbers:
        """The first watermark at which each row can find no partner any more."""
        due: Numbers = whole_millis(times + np.where(flags & SIDE, -self.lower, self.upper))
        return due

    def bucket_due_ms(self, buckets: Numbers) -> Numbers:
        """The first watermark at which no row of each bucket can find a partner any more."""
        due: Numbers = whole_millis((buckets + 1) * self.bucket - 1 + max(self.upper, -self.lower))
        return due

    def waiting(self, flags: npt.NDArray[np.uint8]) -> Flags:
        """Which rows are emitted without a partner when they are due."""
        shown = np.array(self.preserved)[flags & SIDE]
        still: Flags = shown & (flags & MATCHED == 0)
        return still

    def _expire(self, changes: ChangeSet, watermark_ms: int) -> Iterator[pa.RecordBatch]:
        """Delete the rows that are due, and yield those that found no partner, if the join preserves their side."""
        assert self.index is not None
        for due in self.index.due(changes, watermark_ms):
            keys = sorted(set(due.keys))
            done = 0
            while done < len(keys):
                some = keys[done : done + self._slice]
                done += len(some)
                yield from self._expire_some(changes, some, watermark_ms)

    def _expire_some(self, changes: ChangeSet, keys: list[bytes], watermark_ms: int) -> Iterator[pa.RecordBatch]:
        assert self.index is not None
        heads = Heads(changes, keys, self.limits.chunk_bytes)
        fired = heads.known & (heads.headers["due"] <= watermark_ms)
        heads.read_chunks(np.stack((fired, fired), axis=1))
        self.adapt(heads.size)
        items, owner = heads.items, heads.heads_of_items()
        row_due = self.row_due_ms(items.time, items.flags)
        gone = fired[owner] & (row_due <= watermark_ms)
        vain = gone & self.waiting(items.flags)
        most = self.limits.output_rows
        for side in (LEFT, RIGHT):
            places = np.flatnonzero(vain & (items.flags & SIDE == side))
            for start in range(0, len(places), most):
                some = items.take(places[start : start + most])
                yield self._unpaired(side, self.codecs[side].decode_array(some.data))
        kept = np.flatnonzero(~gone)
        heads.items = items.take(kept)
        owner, row_due = owner[kept], row_due[kept]
        again = fired & (np.bincount(owner, minlength=len(keys)) > 0)
        heads.headers["left"][fired & ~again] = 0
        heads.headers["right"][fired & ~again] = 0
        due = np.full(len(keys), NEVER)
        np.minimum.at(due, owner, self.bucket_due_ms(heads.items.time // self.bucket))
        still = self.waiting(heads.items.flags)
        np.minimum.at(due, owner[still], row_due[still])
        heads.headers["due"][again] = due[again]
        heads.write(fired[heads.owner])
        self.index.add(changes, [keys[at] for at in np.flatnonzero(again).tolist()], due[again])

    def adapt(self, size: int) -> None:
        """Choose how many rows are joined at a time; the last slice read `size` bytes of state."""
        limits = self.limits
        if size > limits.slice_bytes:
            self._slice = max(limits.smallest_slice, self._slice // 2)
        elif size < limits.slice_bytes // 4:
            self._slice = min(limits.largest_slice, self._slice * 2)


class _Slice:
    """New rows of both sides: joins them with each other and with the stored rows of their keys."""

    def __init__(self, operator: JoinOperator, part: pa.RecordBatch, changes: ChangeSet) -> None:
        order = np.argsort(part.column(SIDE_COLUMN).to_numpy(), kind="stable")
        self._operator = operator
        self._changes = changes
        self._part = part = part.take(pa.array(order))
        self._sides = part.column(SIDE_COLUMN).to_numpy().astype(np.uint8)
        self._lefts = lefts = int((self._sides == LEFT).sum())
        self._rows = operator.own_columns(part.slice(0, lefts), LEFT), operator.own_columns(part.slice(lefts), RIGHT)
        self._times, _ = operator.times(part)
        lower, upper = operator.lower, operator.upper
        self._low = self._times + np.where(self._sides == LEFT, lower, -upper)
        self._high = self._times + np.where(self._sides == LEFT, upper, -lower)

    def join(self) -> Iterator[pa.RecordBatch]:
        """Yield the new pairs and store the new rows."""
        operator, lefts = self._operator, self._lefts
        keys, own, head_keys, buckets, heads = self._heads()
        operator.adapt(heads.size)
        stored = heads.items
        stored_keys = head_keys[heads.heads_of_items()]
        old_left, old_right = (np.flatnonzero(stored.flags & SIDE == side) for side in (LEFT, RIGHT))
        # Every left row is matched with every right row, except stored with stored: those were matched before.
        new_left = matching(
            *(keys[:lefts], self._low[:lefts], self._high[:lefts]),
            np.concatenate((stored_keys[old_right], keys[lefts:])),
            np.concatenate((stored.time[old_right], self._times[lefts:])),
        )
        new_right = matching(
            *(keys[lefts:], self._low[lefts:], self._high[lefts:]), stored_keys[old_left], stored.time[old_left]
        )
        met_right, met_left = new_left.targets(), new_right.targets()
        yield from self._pairs(LEFT, new_left, stored, old_right[met_right[: len(old_right)]], met_right)
        yield from self._pairs(RIGHT, new_right, stored, old_left[met_left], met_left)
        matched = np.concatenate((new_left.queries(), met_right[len(old_right) :] | new_right.queries()))
        flags = stored.flags.copy()
        flags[old_right[met_right[: len(old_right)]]] |= MATCHED
        flags[old_left[met_left]] |= MATCHED
        self._write(heads, flags, own, matched, buckets)

    def _heads(self) -> tuple[Numbers, Numbers, Numbers, Numbers, Heads]:
        """For each row, the numbers of its key and its head; for each head, its key and its bucket; the heads."""
        operator, part = self._operator, self._part
        encoded = operator.encoder.encode(part)
        order = encoded.order()
        starts = encoded.take(order).starts()
        keys = np.empty(len(order), np.int64)
        keys[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
        # A row needs the head of its own bucket, and those of the one or two buckets in which its partners may be.
        own, low, high = (times // operator.bucket for times in (self._times, self._low, self._high))
        below, above = np.flatnonzero(low != own), np.flatnonzero((high != own) & (high != low))
        rows = np.concatenate((np.arange(len(keys)), below, above))
        wanted = np.concatenate((own, low[below], high[above]))
        first = int(wanted.min())
        span = int(wanted.max()) - first + 1
        numbers, heads = np.unique(keys[rows] * span + (wanted - first), return_inverse=True)
        head_keys, buckets = numbers // span, numbers % span + first
        chunks = np.zeros((len(numbers), 2), np.bool_)
        chunks[heads, 1 - self._sides[rows]] = True
        names = [*operator.key_columns, KEY_GROUP_COLUMN]
        distinct = part.select(names).take(pa.array(order[starts][head_keys]))
        columns = [*distinct.columns, pa.array(buckets)]
        named = pa.RecordBatch.from_arrays(columns, names=[*names, _BUCKET_COLUMN])
        stored = operator.head_encoder.encode(named).stored(ROWS)
        read = Heads(self._changes, stored, operator.limits.chunk_bytes)
        read.read_chunks(chunks)
        return keys, heads[: len(keys)], head_keys, buckets, read

    def _pairs(
        self, side: int, matches: Matches, stored: TimedItems, partners: Numbers, met: Flags
    ) -> Iterator[pa.RecordBatch]:
        """Output of the pairs of new rows of `side` with stored rows and, for the left side, with new right rows."""
        if not len(matches):
            return
        codecs, plan = self._operator.codecs, self._operator.plan
        others = codecs[1 - side].decode_array(stored.data.take(pa.array(partners)))
        old = len(met)
        if side == LEFT:
            others = pa.concat_batches([others, self._rows[RIGHT]])
            old -= self._rows[RIGHT].num_rows
        places = np.concatenate((np.cumsum(met[:old]) - 1, len(partners) + np.arange(len(met) - old)))
        most = self._operator.limits.output_rows
        for start in range(0, len(matches), most):
            queries, targets = matches.pairs(start, start + most)
            mine, theirs = self._rows[side].take(pa.array(queries)), others.take(pa.array(places[targets]))
            yield plan.output(mine, theirs) if side == LEFT else plan.output(theirs, mine)

    def _write(
        self, heads: Heads, flags: npt.NDArray[np.uint8], own: Numbers, matched: Flags, buckets: Numbers
    ) -> None:
        operator, stored = self._operator, heads.items
        dirty = np.zeros(len(heads.keys), np.bool_)
        dirty[own] = True
        touched = np.flatnonzero(dirty)
        if any(operator.preserved):
            changed = operator.waiting(stored.flags) & ~operator.waiting(flags)
            dirty[stored.entry[changed]] = True
        data = pa.concat_arrays(
            [codec.encode_array(rows) for codec, rows in zip(operator.codecs, self._rows, strict=True)]
        )
        new = TimedItems(own, self._times, self._sides | np.where(matched, MATCHED, 0).astype(np.uint8), data)
        heads.items = stored.flagged(flags).followed_by(new)
        if operator.index is not None:
            due = np.where(heads.known, heads.headers["due"], operator.bucket_due_ms(buckets))
            waiting = operator.waiting(new.flags)
            np.minimum.at(due, own[waiting], operator.row_due_ms(new.time, new.flags)[waiting])
            sooner = touched[(~heads.known | (due < heads.headers["due"]))[touched]]
            heads.headers["due"][touched] = due[touched]
            operator.index.add(self._changes, [heads.keys[at] for at in sooner.tolist()], due[sooner])
        heads.write(dirty)
