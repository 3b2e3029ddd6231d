"""Connections that end: no client holds one for long without a request, however slowly it sends or reads."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 100
"""With more connections, requests are answered by 503. With twice as many, connections are refused."""
HEADER_BYTES = 16 * 1024
"""How long the line and the headers of a request may be."""
IDLE_SECONDS = 20.0
"""How long a connection stays without a complete request. It is longer than uvicorn's own limit after an answer."""


class BoundedProtocol(H11Protocol):
    """Uvicorn's HTTP protocol, with a limit for clients that send no whole request or do not read the answer.

    Uvicorn waits without limit for the first request of a connection, and for an answer to be read.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = logging.getLogger(__name__)
        self._answered: object = None
        self._idle_since = self.loop.time()
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        if len(self.connections) > 2 * MAX_CONNECTIONS:
            transport.abort()
            return
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Abort the connection if it has been without a request for too long; else look again later."""
        now = self.loop.time()
        request: Any = self.cycle  # None before the first one, whatever uvicorn's types say
        answering = request is not None and not request.response_complete
        if answering or request is not self._answered:
            self._answered = request
            self._idle_since = now
        if now - self._idle_since > IDLE_SECONDS:
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(IDLE_SECONDS / 10, self._look)
