"""Operations that take long: they are started, answered by an id at once, and asked for by that id."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from strandline.errors import StrandlineError
from strandline.redaction import shown
from strandline.rest.answers import RestError

log = logging.getLogger(__name__)

MOST_IN_FLIGHT = 16
KEPT_OPERATIONS = 500
"""How many operations are remembered. Beyond that, those that ended first are forgotten."""

AWAITED_SECONDS = 10.0
"""For how long after the end of an operation its client is expected to ask for it."""

Kind = Literal["checkpoint", "savepoint", "stop", "cancel", "rescale", "profile", "disposal"]
Say = Callable[[str], None]
"""Tells whoever asks what an operation does at present."""


class Progress(Struct, frozen=True, omit_defaults=True):
    """How far an operation is. Flink has no such field.

    Attributes:
        step: What it does at present, in words.
        done: How much is done, in `unit`.
        total: How much there is to do, in `unit`; an estimate for bytes; None if it is not known.
        unit: What `done` and `total` count.
        bytes: How many bytes are uploaded, where that is known.
    """

    step: str
    done: int = 0
    total: int | None = None
    unit: Literal["subtasks", "bytes", "steps"] = "steps"
    bytes: int | None = None


def _nothing() -> Progress | None:
    return None


class Operation:
    """One operation. Its thread writes the end; everybody may read."""

    def __init__(self, kind: Kind, progress: Callable[[], Progress | None]) -> None:
        self.kind = kind
        self._progress = progress
        self._step = ""
        self.ended = threading.Event()
        self.result: Any = None
        self.failure: Exception | None = None
        self._ended_at = 0.0
        self._told = False

    def say(self, text: str) -> None:
        """Note what the operation does at present."""
        self._step = shown(text)[:500]

    @property
    def progress(self) -> Progress | None:
        """How far the operation is, if anything is known."""
        return self._progress() or (Progress(self._step) if self._step else None)

    def run(self, work: Callable[[Say], Any]) -> None:
        """Do the work, and keep its result or error."""
        try:
            self.result = work(self.say)
        except StrandlineError as error:
            self.failure = error
        except Exception as error:
            log.exception("the operation %s failed", self.kind)
            self.failure = error
        finally:
            self._progress = _nothing
            self._ended_at = time.monotonic()
            self.ended.set()

    def tell(self) -> Operation:
        """The operation, for somebody who asked for it."""
        self._told |= self.ended.is_set()
        return self

    @property
    def is_awaited(self) -> bool:
        """Whether somebody probably still asks for the end: it is to come, or came lately and was not told yet."""
        if not self.ended.is_set():
            return True
        return not self._told and time.monotonic() - self._ended_at < AWAITED_SECONDS


class Triggers:
    """The operations of one server: a bounded number at a time, each in a thread of its own.

    The threads are daemons. A driver that ends does not wait for an operation that somebody asked for by REST.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: OrderedDict[tuple[str, str], Operation] = OrderedDict()

    def start(
        self,
        job: str,
        kind: Kind,
        trigger: str | None,
        work: Callable[[Say], Any],
        progress: Callable[[], Progress | None] = _nothing,
    ) -> str:
        """Start an operation and return its id: `trigger`, or a new one.

        A client that did not get the answer may send the request again with the same id. It starts nothing then. Too
        many operations at a time are a 503, and the id of another kind of operation is a 409.
        """
        id = trigger or uuid.uuid4().hex
        with self._lock:
            if self._is_known(job, kind, id):
                return id
            if sum(not one.ended.is_set() for one in self._operations.values()) >= MOST_IN_FLIGHT:
                raise RestError(503, f"{MOST_IN_FLIGHT} operations are in progress already; try again when one ended.")
            operation = self._operations[job, id] = Operation(kind, progress)
            self._forget()
        threading.Thread(target=operation.run, args=(work,), name=f"strandline-{kind}-{id[:8]}", daemon=True).start()
        return id

    def knows(self, job: str, kind: Kind, trigger: str) -> bool:
        """Whether an operation of that id was started. The id of another kind of operation is a 409."""
        with self._lock:
            return self._is_known(job, kind, trigger)

    def get(self, job: str, trigger: str, *kinds: Kind) -> Operation:
        """The operation of that id. An unknown one is a 404."""
        with self._lock:
            found = self._operations.get((job, trigger))
        if found is None or found.kind not in kinds:
            raise RestError(
                404,
                f"There is no {kinds[0]} operation of the trigger id {trigger}: it was never started on this server, "
                f"or {KEPT_OPERATIONS} others came after it.",
            )
        return found.tell()

    def await_told(self, seconds: float) -> None:
        """Wait until clients have heard of the ends of their operations, for at most so many seconds.

        A job that is stopped by REST often ends its process. Without this wait, the client would not learn the path
        of the savepoint.
        """
        deadline = time.monotonic() + seconds
        waited = False
        while time.monotonic() < deadline and self._is_any_awaited():
            waited = True
            time.sleep(0.05)
        if waited:
            time.sleep(0.1)  # the answer is made, but not sent yet

    def _is_any_awaited(self) -> bool:
        with self._lock:
            # Nobody can ask for the end of a cancellation.
            return any(one.is_awaited for one in self._operations.values() if one.kind != "cancel")

    def _is_known(self, job: str, kind: Kind, trigger: str) -> bool:
        known = self._operations.get((job, trigger))
        if known is not None and known.kind != kind:
            raise RestError(409, f"The trigger id {trigger} belongs to another operation ({known.kind}).")
        return known is not None

    def _forget(self) -> None:
        ended = [key for key, one in self._operations.items() if one.ended.is_set()]
        for key in ended[: max(0, len(self._operations) - KEPT_OPERATIONS)]:
            del self._operations[key]
