"""Tells a slot that the relay of an exchange lives, every second, in a thread beside the exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from strandline.errors import StrandlineError
from strandline.runtime.liveness.silence import Silence
from strandline.runtime.liveness.threads import BackgroundThread
from strandline.runtime.protocol.slot_calls import PULSE_EVERY, RelayAlive, SlotClient


class RelayPulse:
    """A context: signs of life go to the slot inside it.

    The slot's task manager, or the driver, ends a slot that is frozen, and then the exchange fails. If they cannot tell
    this process, because only the connection between relay and slot is cut, the relay gives up by itself, after longer.
    """

    def __init__(
        self, exchange: str, connect: Callable[[], SlotClient], limit: float, give_up: Callable[[], None]
    ) -> None:
        """`connect` makes a connection of its own: that of the exchange may be full of rows.

        `give_up` is called once the slot has not answered for `limit` seconds.
        """
        self._exchange = exchange
        self._connect = connect
        self._limit = limit
        self._give_up = give_up
        self._ended = threading.Event()

    def __enter__(self) -> RelayPulse:
        BackgroundThread("relay-pulse", self._pulse, lambda _error: self._give_up()).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _pulse(self) -> None:
        silence = Silence()
        client: SlotClient | None = None
        while not self._ended.wait(PULSE_EVERY):
            client = client or self._connect()
            try:
                client.relay_alive(RelayAlive(self._exchange))
                silence.heard()
            except StrandlineError:
                if silence.seconds() > self._limit:
                    self._give_up()
                    break
        if client is not None:
            client.close()
