"""Changed tumbling and sliding windows: whether their panes can be made of the old ones, and how.

A window that ends after the watermark of the checkpoint must have all its rows. So the old step must have kept every
pane at least as long as the new one does, and no old pane may have to be split. Windows that ended before were those of
the old step, and come no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import lcm
from typing import Final

import numpy as np
import pyarrow as pa

from strandline.errors import JobDefinitionError
from strandline.operators.aggregate.changes import carried_columns, converted_states
from strandline.operators.aggregate.grouping import Grouping
from strandline.operators.rewrite import Rewrite, state_ranges
from strandline.operators.step_change import StepChange
from strandline.operators.timed.time_index import TIME_BYTES, time_bytes, time_of
from strandline.operators.windows.pane_windows import PANES, TIMES, PaneWindows
from strandline.operators.windows.specs import SlidingWindow
from strandline.state.backends.base import StateBackend
from strandline.state.coding.keys import state_prefix

_CUT: Final = ("size_ms", "slide_ms", "offset_ms")
_MOST_PANES: Final = 1 << 20
"""How many panes are compared before two windows that rarely meet count as too different."""
_CHUNK: Final = 1 << 13
"""How many panes are merged at a time."""


def carry_over_panes(change: StepChange, windows: PaneWindows) -> tuple[Rewrite, ...]:
    """Accept the differences that the stored panes allow; returns what is rewritten of them."""
    found = change.numbers(*_CUT, "allowed_lateness_ms")
    rewrites: list[Rewrite] = []
    old_emit = change.before.parameters.get("emit")
    if old_emit == "update":
        change.accept("emit")
    change.explain("and what open windows have so far would come out only if they change again", "emit")
    if found is not None:
        (size, slide, offset, lateness), _ = found
        try:
            old = SlidingWindow(size, slide, offset)
        except JobDefinitionError:
            return ()
        new = windows.spec
        same = _same_windows(old, new)
        if (same or windows.emit == "close") and _kept_long_enough(old, lateness, new, windows.lateness):
            change.accept(*_CUT, "allowed_lateness_ms")
            if old.pane_ms != new.pane_ms:
                rewrites.append(MergedPanes(windows.spec, windows.grouping))
        _explain(change, old, new, windows.emit)
    columns = carried_columns(change, windows.grouping.plan, PANES)
    if columns is not None:
        rewrites.insert(0, converted_states(PANES, columns, windows.grouping.codec))
    return tuple(rewrites)


def _same_windows(old: SlidingWindow, new: SlidingWindow) -> bool:
    return (old.size_ms, old.slide_ms) == (new.size_ms, new.slide_ms) and (
        (old.offset_ms - new.offset_ms) % new.slide_ms == 0
    )


def _fits(old: SlidingWindow, new: SlidingWindow) -> bool:
    """Whether every old pane is within one new pane."""
    return new.pane_ms % old.pane_ms == 0 and (new.offset_ms - old.offset_ms) % old.pane_ms == 0


def _kept_long_enough(old: SlidingWindow, old_lateness: int, new: SlidingWindow, new_lateness: int) -> bool:
    """Whether the old step keeps every pane at least as long as the new one does."""
    period = lcm(old.slide_ms, new.slide_ms) // old.pane_ms
    if not _fits(old, new) or period > _MOST_PANES:
        return False
    panes = old.offset_ms + np.arange(period) * old.pane_ms
    kept = old.last_ends(panes) + old_lateness
    needed = new.last_ends(new.panes(panes)) + new_lateness
    return bool((kept >= needed).all())


def _explain(change: StepChange, old: SlidingWindow, new: SlidingWindow, emit: str) -> None:
    if not _fits(old, new):
        why = "and the rows that were added up for the old windows cannot be spread over the new ones"
    elif emit == "update" and not _same_windows(old, new):
        why = "and what open windows have so far would come out only if they change again"
    else:
        why = "and a part of the rows that open windows need is gone"
    change.explain(why, *_CUT, "allowed_lateness_ms")


@dataclass(frozen=True, slots=True)
class MergedPanes(Rewrite):
    """Merges the stored panes of a key that are within the same new pane."""

    spec: SlidingWindow
    grouping: Grouping

    @property
    def states(self) -> tuple[str, ...]:
        return ()

    def apply(self, backend: StateBackend, key_groups: range) -> None:
        """Merge pane by pane, in the order of time: lists of values are joined in that order."""
        for group, (start, end) in zip(key_groups, state_ranges(key_groups, TIMES), strict=True):
            index = [key for key, _ in backend.scan(start, end)]
            panes = np.array([time_of(key, len(start)) for key in index], np.int64)
            new_panes = self.spec.panes(panes)
            for pane, new_pane in zip(panes.tolist(), new_panes.tolist(), strict=True):
                if pane != new_pane:
                    self._move(backend, group, pane, new_pane)
            wanted = {start + time_bytes(pane) for pane in set(new_panes.tolist())}
            gone = [key for key in index if key not in wanted]
            backend.apply(gone, [None] * len(gone))
            backend.apply(sorted(wanted), [b""] * len(wanted))

    def _move(self, backend: StateBackend, group: int, pane: int, new_pane: int) -> None:
        prefix = state_prefix(group, PANES)
        begin, target = prefix + time_bytes(pane), prefix + time_bytes(new_pane)
        entries = backend.scan(begin, prefix + time_bytes(pane + 1))
        while some := list(islice(entries, _CHUNK)):
            keys = [target + key[len(prefix) + TIME_BYTES :] for key, _ in some]
            values = self._merged(backend.get_many(keys), [value for _, value in some])
            backend.apply(keys, values)
            backend.apply([key for key, _ in some], [None] * len(some))

    def _merged(self, there: list[bytes | None], added: list[bytes]) -> list[bytes]:
        codec = self.grouping.codec
        places = [at for at, value in enumerate(there) if value is not None]
        earlier = codec.decode([value for value in there if value is not None])
        both = pa.Table.from_batches([earlier, codec.decode(added)]).combine_chunks().to_batches()[0]
        ids = np.concatenate((np.array(places, np.int64), np.arange(len(added))))
        _, merged = self.grouping.by_id("merge", ids, both, lambda _number: "of a restored window")
        return codec.encode(merged)
