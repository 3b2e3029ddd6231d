"""The gate of a process: callers from other hosts show the run's token before the server sees a byte of them.

A gRPC server receives a whole message before it looks at its headers, so the secret in a header does not protect its
memory. Therefore the server listens on places that only the user's own processes reach, and the gate listens on TCP. A
gRPC client can open its connection with an HTTP `CONNECT`, as for a proxy. The gate reads that one short request,
compares the token in it, and from then on passes bytes between the caller and the server.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

log = logging.getLogger(__name__)

MOST_WAITING: Final = 128
"""How many connections may wait without a token. One more, and the oldest is closed: a caller of ours waits for
milliseconds."""
LONGEST_WAIT: Final = 5.0
"""Seconds within which a caller must show its token."""
LONGEST_REQUEST: Final = 1024
"""Bytes of a `CONNECT` with its headers."""
_PIECE: Final = 1 << 20
"""How many bytes are passed on at once."""
_END: Final = b"\r\n\r\n"
_GRANTED: Final = b"HTTP/1.1 200 OK\r\n\r\n"
REFUSED: Final = 407
"""The status for a caller without the token."""
_REFUSAL: Final = f"HTTP/1.1 {REFUSED} Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n".encode()
_HEADER: Final = "Proxy-Authorization"
_SCHEME: Final = "Strandline"


def gate_token(secret: str) -> str:
    """What a caller shows to the gate. It is not the secret itself, because the `CONNECT` is sent before TLS begins."""
    return hmac.new(secret.encode(), b"strandline gate", hashlib.sha256).hexdigest()


def connect_options(secret: str) -> list[tuple[str, str | int]]:
    """Options of a gRPC client that goes through a gate. Proxies that the environment names are not for our calls."""
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.http_connect_server", "strandline"),
        ("grpc.http_connect_headers", f"{_HEADER}: {_SCHEME} {gate_token(secret)}"),
    ]


@dataclass(slots=True, eq=False)
class _End:
    """One end of a connection through the gate, or a caller that waits for it to open."""

    socket: socket.socket
    other: _End | None = None
    """The end that gets what is read here; None while the caller has not shown its token."""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    """What this end did not take yet. The other end is not read meanwhile."""
    finished: bool = False
    """Whether the other end has ended: this one is closed when it has taken everything."""
    request: bytes = b""
    since: float = 0.0


class Gate:
    """Listens on TCP, in a thread of its own."""

    def __init__(
        self,
        bind_host: str,
        secret: str,
        connect: Callable[[], socket.socket],
        *,
        longest_wait: float = LONGEST_WAIT,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """`connect` connects to the server. Raises `OSError` if this host has no address `bind_host`."""
        self._longest_wait = longest_wait
        self._most_waiting = most_waiting
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        both = bind_host == "::" and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((bind_host, 0), family=family, backlog=512, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._expected = f"{_SCHEME} {gate_token(secret)}".encode()
        self._connect = connect
        self._waiting: dict[_End, None] = {}
        """Callers without a token, the oldest first."""
        self._buffer = bytearray(_PIECE)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            log.exception("the gate has died; for callers from other hosts this process is lost")
        finally:
            # Of the two ends of a connection, one at least is always watched.
            for end in [key.data for key in self._selector.get_map().values() if key.data is not None]:
                self._close(end)
            self._selector.close()
            self._listener.close()
            self._woken.close()

    def _turn(self) -> bool:
        """Serves what is ready; False after `close`."""
        oldest = next(iter(self._waiting), None)
        patience = None if oldest is None else max(0.0, oldest.since + self._longest_wait - time.monotonic())
        for key, events in self._selector.select(patience):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                known = self._selector.get_map().get(key.fd)
                if known is not None and known.data is key.data:  # else an earlier event of this turn has closed it
                    self._serve(key.data, events)
        late = time.monotonic() - self._longest_wait
        for end in [end for end in self._waiting if end.since <= late]:
            self._close(end)
        return True

    def _serve(self, end: _End, events: int) -> None:
        try:
            if end.other is None:
                self._admit(end)
                return
            if events & selectors.EVENT_WRITE:
                self._flush(end)
            if events & selectors.EVENT_READ and not end.finished and not end.other.unsent:
                self._pass_on(end, end.other)
        except BlockingIOError:
            pass
        except OSError:
            self._close(end)  # the other side is gone
        except Exception:
            log.exception("a connection through the gate failed")
            self._close(end)

    # --- before the token ------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted, _address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # No descriptor is left. Those that wait without a token make room.
            log.warning("a connection cannot be accepted: %s", error)
            if self._waiting:
                self._close(next(iter(self._waiting)))
            else:
                time.sleep(0.1)
            return
        accepted.setblocking(False)
        end = _End(accepted, since=time.monotonic())
        self._waiting[end] = None
        self._selector.register(accepted, selectors.EVENT_READ, end)
        if len(self._waiting) > self._most_waiting:
            self._close(next(iter(self._waiting)))

    def _admit(self, end: _End) -> None:
        read = end.socket.recv(LONGEST_REQUEST - len(end.request))
        end.request += read
        if _END in end.request:
            if not self._has_token(end.request):
                with suppress(OSError):
                    end.socket.send(_REFUSAL)
                self._close(end)
                return
            self._let_through(end)
        elif not read or len(end.request) >= LONGEST_REQUEST:
            self._close(end)

    def _has_token(self, request: bytes) -> bool:
        first, *headers = request.split(b"\r\n")
        for header in headers:
            name, _, value = header.partition(b":")
            if name.strip().lower() == _HEADER.lower().encode():
                return first.startswith(b"CONNECT ") and hmac.compare_digest(value.strip(), self._expected)
        return False

    def _let_through(self, end: _End) -> None:
        try:
            inner = _End(self._connect(), end)
        except OSError as error:  # also `BlockingIOError`: a Unix socket whose backlog is full does not wait
            log.warning("the server behind the gate does not take a connection: %s", error)
            self._close(end)
            return
        del self._waiting[end]
        end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.other = inner
        inner.socket.setblocking(False)
        self._selector.register(inner.socket, selectors.EVENT_READ, inner)
        inner.unsent = memoryview(end.request.partition(_END)[2])
        end.unsent = memoryview(_GRANTED)
        self._flush(inner)
        self._flush(end)

    # --- after it --------------------------------------------------------------------------------

    def _pass_on(self, source: _End, sink: _End) -> None:
        count = source.socket.recv_into(self._buffer)
        if not count:
            sink.finished = True
            self._watch(source)
        else:
            sink.unsent = memoryview(self._buffer)[:count]
        self._flush(sink)

    def _flush(self, sink: _End) -> None:
        """Sends what it can, and watches for what can be done next."""
        unsent = sink.unsent
        with suppress(BlockingIOError):
            while unsent:
                unsent = unsent[sink.socket.send(unsent) :]
        # The buffer is shared by all connections, so what is left moves out of it.
        sink.unsent = memoryview(bytes(unsent)) if unsent.obj is self._buffer else unsent
        if sink.finished and not sink.unsent:
            self._close(sink)
            return
        self._watch(sink)
        if sink.other is not None:
            self._watch(sink.other)

    def _watch(self, end: _End) -> None:
        other = end.other
        assert other is not None
        reads = not other.unsent and not other.finished
        wanted = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if end.unsent else 0)
        known = self._selector.get_map().get(end.socket)
        if known is not None and known.events == wanted:
            return
        if known is not None:
            self._selector.unregister(end.socket)
        if wanted:
            self._selector.register(end.socket, wanted, end)

    def _close(self, end: _End) -> None:
        self._waiting.pop(end, None)
        for one in (end, end.other):
            if one is not None:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(one.socket)
                one.socket.close()
