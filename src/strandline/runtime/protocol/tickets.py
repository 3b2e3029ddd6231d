"""The tickets of a server: calls that take long, each carried out once in a thread, whose callers ask again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

KEPT: Final = 60.0
"""How many seconds a reply is kept at least, for a caller whose connection broke."""


@dataclass(slots=True)
class _Ticket:
    done: threading.Event = field(default_factory=threading.Event)
    reply: bytes = b""
    keep: float = KEPT
    forgotten_at: float = float("inf")


class Tickets:
    """Carries out each call once, whoever asks for it how often. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _Ticket] = {}

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._known

    def begin(self, call_id: str, name: str, work: Callable[[], bytes], patience: float) -> None:
        """Begin a call, unless it has begun. `work` returns its reply and raises nothing.

        The reply is kept for as long as the caller, who waits `patience` seconds for an answer, may ask for it.
        """
        with self._lock:
            self._forget()
            if call_id in self._known:
                return
            ticket = self._known[call_id] = _Ticket(keep=max(KEPT, 2 * patience))
        threading.Thread(target=_carry_out, args=(ticket, work), daemon=True, name=f"call-{name}").start()

    def reply(self, call_id: str, seconds: float) -> bytes | None:
        """The reply, if it is there within `seconds`; None if the call is still being carried out.

        Raises `KeyError` if the call is not known.
        """
        ticket = self._known[call_id]
        return ticket.reply if ticket.done.wait(seconds) else None

    def _forget(self) -> None:
        now = time.monotonic()
        for call_id in [known for known, ticket in self._known.items() if ticket.forgotten_at < now]:
            del self._known[call_id]


def _carry_out(ticket: _Ticket, work: Callable[[], bytes]) -> None:
    ticket.reply = work()
    ticket.forgotten_at = time.monotonic() + ticket.keep
    ticket.done.set()
