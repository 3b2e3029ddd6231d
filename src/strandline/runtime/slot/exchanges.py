"""The exchanges that a slot is in the middle of, and how long the relay of each has been silent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from strandline.runtime.liveness.silence import Silence


class Exchanges:
    """Knows the open exchanges by their id. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Silence] = {}

    @contextmanager
    def opened(self, exchange: str) -> Iterator[None]:
        """The exchange is open inside. An exchange without an id is not watched."""
        if exchange:
            with self._lock:
                self._open[exchange] = Silence()
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(exchange, None)

    def heard(self, exchange: str) -> None:
        """The relay of an exchange gave a sign of life."""
        with self._lock:
            silence = self._open.get(exchange)
            if silence is not None:
                silence.heard()

    def longest_silence(self) -> float:
        """The longest silence of any relay, in seconds. To be asked often."""
        with self._lock:
            return max((silence.seconds() for silence in self._open.values()), default=0.0)
