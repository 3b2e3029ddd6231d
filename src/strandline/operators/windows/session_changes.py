"""Changed sessions: which differences the stored sessions allow.

The gap cannot change: sessions that were joined cannot be split, and a session that is over for the old gap is gone.
"""

from __future__ import annotations

from dataclasses import replace

from strandline.operators.aggregate.changes import carried_columns
from strandline.operators.rewrite import ConvertedValues, Rewrite
from strandline.operators.step_change import StepChange
from strandline.operators.windows.session_entries import SPAN_COLUMNS, SessionCodec
from strandline.operators.windows.session_keys import SESSIONS
from strandline.operators.windows.session_windows import SessionWindows


def carry_over_sessions(change: StepChange, windows: SessionWindows) -> tuple[Rewrite, ...]:
    """Accept the differences that the stored sessions allow; returns what is rewritten of them."""
    change.explain("and sessions of the old gap can be neither split nor joined any more", "gap_ms")
    found = change.numbers("allowed_lateness_ms")
    if found is not None:
        ((old,), (new,)) = found
        if new <= old:
            change.accept("allowed_lateness_ms")
        # With lateness, a session that is emitted on update is looked at only when that has passed.
        if change.before.parameters.get("emit") == "update" and old == 0:
            change.accept("emit")
    change.explain("and sessions that were over are gone", "allowed_lateness_ms")
    change.explain("and what open sessions have so far would not come out when it should", "emit")
    columns = carried_columns(change, windows.grouping.plan, SESSIONS, SPAN_COLUMNS)
    if columns is None:
        return ()
    carried, before = columns, SessionCodec(columns.old)

    def convert(values: list[bytes]) -> list[bytes]:
        looks, sessions = before.decode(values)
        return windows.codec.encode(looks, replace(sessions, states=carried.convert(sessions.states)))

    return (ConvertedValues(SESSIONS, convert),)
