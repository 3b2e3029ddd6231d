"""The gate: nobody reaches the server without the token, and whoever has it reaches the server whatever others do."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from strandline.runtime.protocol.gate import LONGEST_REQUEST, Gate, gate_token
from tests.examples import examples
from tests.waiting import wait_until

SECRET = "the secret of the run"
REQUEST = (
    f"CONNECT strandline HTTP/1.1\r\nHost: x\r\nProxy-Authorization:  Strandline {gate_token(SECRET)}\r\n\r\n".encode()
)
GRANTED = b"HTTP/1.1 200 OK\r\n\r\n"


class Echo:
    """A server that gives back what it gets, behind a gate."""

    def __init__(self, folder: Path, **limits: float) -> None:
        self.path = str(folder / "s")
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        self.gate = Gate("127.0.0.1", SECRET, self._connect, **limits)  # type: ignore[arg-type]  # numbers of both kinds

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return connection

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._echo, args=(caller,), daemon=True).start()

    @staticmethod
    def _echo(caller: socket.socket) -> None:
        with caller, suppress(OSError):
            while data := caller.recv(1 << 16):
                caller.sendall(data)

    def stranger(self) -> socket.socket:
        caller = socket.create_connection(("127.0.0.1", self.gate.port))
        caller.settimeout(60)
        return caller

    def friend(self) -> socket.socket:
        caller = self.stranger()
        caller.sendall(REQUEST)
        assert read(caller, len(GRANTED)) == GRANTED
        return caller

    def close(self) -> None:
        self.gate.close()
        self._listener.close()


def read(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := source.recv(count - len(data))):
        data += piece
    return data


def ended(caller: socket.socket) -> bool:
    """Waits until the gate has closed a connection."""
    with suppress(ConnectionError):
        while caller.recv(1 << 16):
            pass
    return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Echo]:
    echo = Echo(tmp_path)
    yield echo
    echo.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    echo = Echo(tmp_path_factory.mktemp("gate"))
    yield echo
    echo.close()


def test_a_caller_without_the_token_cannot_fill_the_memory(server: Echo) -> None:
    with server.stranger() as caller:
        with pytest.raises(ConnectionError):
            caller.sendall(bytes(300 << 20))
        assert ended(caller)
    assert server.connections == 0


@given(st.binary(max_size=2 * LONGEST_REQUEST))
@example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(REQUEST.replace(b"CONNECT", b"GET"))
@example(REQUEST.replace(gate_token(SECRET).encode(), gate_token("another").encode()))
@example(REQUEST.replace(gate_token(SECRET).encode(), SECRET.encode()))
@example(REQUEST.replace(b"Proxy-Authorization", b"Authorization"))
@example(b"CONNECT x HTTP/1.1\r\nProxy-Authorization:\r\n" + REQUEST)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_but_the_token_opens_the_gate(shared: Echo, sent: bytes) -> None:
    before = shared.connections
    with shared.stranger() as caller:
        with suppress(ConnectionError):
            caller.sendall(sent)
            caller.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert caller.recv(100)[:12] in (b"", b"HTTP/1.1 407")
        assert ended(caller)
    assert shared.connections == before


@given(st.lists(st.integers(1, len(REQUEST) - 1), max_size=5), st.binary(max_size=300))
@settings(max_examples=examples(30), deadline=None)
def test_a_request_may_arrive_in_pieces_and_with_what_follows(shared: Echo, cuts: list[int], more: bytes) -> None:
    with shared.stranger() as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        places = sorted({0, *cuts, len(REQUEST)})
        for start, stop in pairwise(places):
            caller.sendall(REQUEST[start:stop] + (more if stop == len(REQUEST) else b""))
        assert read(caller, len(GRANTED) + len(more)) == GRANTED + more


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_bytes_arrive_in_order_however_slowly_they_are_read(server: Echo, seed: int) -> None:
    choice = random.Random(seed)
    data = choice.randbytes(9_000_000 + seed)

    def send(caller: socket.socket) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[caller.send(rest[: choice.randint(1, 1 << 19)]) :]

    with server.friend() as caller, server.friend() as neighbour:
        sender = threading.Thread(target=send, args=(caller,))
        sender.start()
        neighbour.sendall(b"a neighbour is not held up by a caller that does not read")
        assert read(neighbour, 11) == b"a neighbour"
        assert read(caller, len(data)) == data
        sender.join()


def test_a_flood_of_silent_connections_does_not_keep_callers_out(server: Echo) -> None:
    with ExitStack() as strangers:
        silent = [strangers.enter_context(server.stranger()) for _ in range(300)]
        for number in range(20):
            silent.append(strangers.enter_context(server.stranger()))
            with server.friend() as caller:
                caller.sendall(b"%d" % number)
                assert read(caller, len(b"%d" % number)) == b"%d" % number
        assert all(ended(caller) for caller in silent[:150]), "the oldest made room"
    assert server.connections == 20


def test_a_connection_that_stays_silent_is_closed(tmp_path: Path) -> None:
    server = Echo(tmp_path, longest_wait=0.2)
    with server.stranger() as silent, server.stranger() as slow, server.friend() as caller:
        slow.sendall(REQUEST[:20])
        assert ended(silent)
        assert ended(slow)
        caller.sendall(b"still there")
        assert read(caller, 11) == b"still there"
    server.close()


def test_a_caller_that_a_busy_server_does_not_take_is_told_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "busy")

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(1)
        connection.connect(path)
        return connection

    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as filling:
        listener.bind(path)
        listener.listen(0)  # and nobody accepts
        with suppress(BlockingIOError):
            while True:
                filling.enter_context(connect())
        gate = Gate("127.0.0.1", SECRET, connect)
        with socket.create_connection(("127.0.0.1", gate.port)) as caller:
            caller.settimeout(10)
            caller.sendall(REQUEST)
            assert ended(caller)
        gate.close()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize(("bind_host", "callers"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])])
def test_a_gate_listens_on_ipv6(server: Echo, bind_host: str, callers: list[str]) -> None:
    gate = Gate(bind_host, SECRET, server._connect)
    for host in callers:
        with socket.create_connection((host, gate.port)) as caller:
            caller.sendall(REQUEST)
            assert read(caller, len(GRANTED)) == GRANTED
    gate.close()


def test_an_end_that_closes_closes_the_other_end_after_the_last_byte(server: Echo) -> None:
    with server.friend() as caller:
        caller.sendall(b"last words")
        assert read(caller, 10) == b"last words"
        caller.shutdown(socket.SHUT_WR)
        assert ended(caller)


def test_a_closed_gate_leaves_no_descriptor(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    server = Echo(tmp_path)
    callers = [server.friend(), server.friend(), server.stranger()]
    server.close()
    assert all(ended(caller) for caller in callers)
    for caller in callers:
        caller.close()
    with pytest.raises(ConnectionError):
        server.stranger()
    server._listener.close()
    # Only the listener of the test itself may be left. What other tests left behind in this process may still close.
    wait_until(lambda: psutil.Process().num_fds() <= before + 1, what="the end of the descriptors")
