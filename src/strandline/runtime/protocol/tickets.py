"""The tickets of a server: calls that may take long, each carried out once, whose callers ask again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

KEPT: Final = 60.0
"""How many seconds a call is known at least after its reply is there: one of its messages may still be on the way."""

_LOOK_EVERY: Final = 1.0
"""Seconds between two searches for replies that can be forgotten."""


@dataclass(slots=True)
class _Ticket:
    done: threading.Event = field(default_factory=threading.Event)
    reply: bytes = b""
    keep: float = KEPT
    forgotten_at: float = float("inf")


class Tickets:
    """Carries out each call once, no matter how often it is requested. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _Ticket] = {}
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._known

    def carry_out(self, call_id: str, work: Callable[[], bytes], patience: float) -> bytes | None:
        """Carry a call out in this thread, and return its reply; None if it has begun before.

        `work` returns the reply and raises nothing. The reply is kept until the caller says that it has arrived, or for
        as long as the caller, who waits `patience` seconds for an answer, may ask for it.
        """
        with self._lock:
            self._forget()
            if call_id in self._known:
                return None
            ticket = self._known[call_id] = _Ticket(keep=max(KEPT, 2 * patience))
        try:
            ticket.reply = work()
        finally:
            ticket.forgotten_at = time.monotonic() + ticket.keep
            ticket.done.set()
        return ticket.reply

    def reply(self, call_id: str, seconds: float) -> bytes | None:
        """The reply, if it is there within `seconds`; None if the call is still being carried out; empty if it died.

        Raises `KeyError` if the call is not known.
        """
        ticket = self._known[call_id]
        return ticket.reply if ticket.done.wait(seconds) else None

    def arrived(self, call_ids: Iterable[str]) -> None:
        """The replies of these calls have arrived: nobody asks for them again."""
        soon = time.monotonic() + KEPT
        with self._lock:
            for call_id in call_ids:
                if (ticket := self._known.get(call_id)) is not None:
                    ticket.forgotten_at = min(ticket.forgotten_at, soon)

    def _forget(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        for call_id in [known for known, ticket in self._known.items() if ticket.forgotten_at < now]:
            del self._known[call_id]
