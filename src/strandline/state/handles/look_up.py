"""Looks up the state of one key, for `run.query`: which entries belong to the key, and what they say to a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strandline.errors import StrandlineError
from strandline.state.backends.base import StateBackend
from strandline.state.coding.keys import state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.query import Found, find_state


@dataclass(frozen=True, slots=True)
class LookUp:
    """One key in one key group, and the committed state in which it is looked up."""

    backend: StateBackend
    group: int
    key: bytes
    now_ms: int
    """The time of the clock. Values that have expired by then are left out."""

    def stored(self, state: str) -> bytes:
        """The stored key of the entry of `state`, or the beginning of the stored keys of its entries."""
        return state_prefix(self.group, state) + self.key

    def entry(self, state: str) -> bytes | None:
        """The entry that `state` has for the key."""
        return self.backend.get(self.stored(state))


def declared(where: str, known: Sequence[StateDescriptor], state: str | None) -> StateDescriptor:
    """The state that `state` names among those of a processor; without a name, its only one."""
    by_name = {one.name: one for one in known if one.kind != "timers"}
    if state is None and len(by_name) == 1:
        return next(iter(by_name.values()))
    names = ", ".join(by_name) or "none"
    if state is None:
        raise StrandlineError(f"{where} has several states; name one: {names}" if by_name else f"{where} has no state")
    if state not in by_name:
        raise StrandlineError(f"{where} has no state {state!r}; it has: {names}")
    return by_name[state]


def declared_content(look: LookUp, state: StateDescriptor) -> Found:
    """What a state of a processor holds for the key."""
    return find_state(look.backend, state, look.group.to_bytes(2, "big") + look.key, look.now_ms)
