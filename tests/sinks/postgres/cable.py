"""A cable to a server that a test may cut, or let go silent, at any message of a client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal

Fault = Literal["cut before", "cut after", "silent"]


class Cable:
    """Carries bytes both ways. A fault meets one connection; later ones work."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._left = 0
        self.seen = 0
        """What clients have sent since the last fault was planned: messages, or several at once."""
        self.met = threading.Event()
        """Set when the fault has happened."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def plan(self, fault: Fault | None, message: int) -> None:
        """The fault happens at the client's message with this number, counted from 0."""
        with self._lock:
            self._fault, self._left, self.seen = fault, message, 0
            self.met.clear()

    def close(self) -> None:
        self._listener.close()
        for one in self._open:
            _end(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open += [client, server]
                threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
                threading.Thread(target=self._to_client, args=(client, server), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                fault = self._next()
                if fault == "silent":
                    self.met.set()
                    return  # both ends keep their connections, and hear nothing any more
                if fault == "cut after":
                    server.sendall(data)
                if fault is not None:
                    _end(client)
                    self.met.set()
                    break
                server.sendall(data)
        # An orderly end, as of a client that died: the server carries out what it has been sent.
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _to_client(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                with contextlib.suppress(OSError):
                    client.sendall(data)
        _end(client)

    def _next(self) -> Fault | None:
        with self._lock:
            self.seen += 1
            self._left -= 1
            if self._fault is None or self._left >= 0:
                return None
            fault, self._fault = self._fault, None
            return fault


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@contextlib.contextmanager
def cable(port: int) -> Iterator[Cable]:
    made = Cable(port)
    try:
        yield made
    finally:
        made.close()
