"""Calls between processes: with the secret or not at all, and errors arrive as what they are."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from strandline import errors
from strandline.errors import AuthenticationError, SlotLostError, StrandlineError
from strandline.runtime.protocol.wire import (
    Address,
    Client,
    Server,
    decode_error,
    encode_error,
    host_identity,
    translate,
)

SECRET = "the run's secret"
ROWS = pa.RecordBatch.from_pydict({"x": [1, 2, 3]})
HOWS = ["tcp", "unix"]

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StrandlineError)]


class Process:
    """What a process of a run serves here: an echo, errors of every class, and an exchange that gives rows back."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.server = Server(
            SECRET,
            {"echo": self.echo, "fail": self.fail, "crash": self.crash, "sleep": time.sleep},
            bind_host="127.0.0.1",
            unix_path=str(folder / "p.sock"),
            exchange=self.exchange,
        )

    def echo(self, body: Any) -> Any:
        self.calls.append("echo")
        return body

    def fail(self, name: str) -> None:
        raise getattr(errors, name)(f"subtask 3: {name} äöü\nsecond line")

    def crash(self, _body: Any) -> None:
        raise KeyError("a bug")

    def exchange(self, _context: Any, command: bytes, reader: Any, writer: Any) -> None:
        self.calls.append("exchange")
        if command == b"fail":
            raise errors.UserCodeError("the user's own fault")
        writer.begin(ROWS.schema)
        for chunk in reader:
            writer.write_batch(chunk.data)

    def address(self, how: str) -> Address:
        """As a caller on this host sees it, or one elsewhere."""
        return self.server.address if how == "unix" else replace(self.server.address, host_id="elsewhere")


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("w"))
    yield process
    process.server.close()


def give_and_take(client: Client, command: bytes = b"") -> list[pa.RecordBatch]:
    """One exchange, as the relay makes it."""
    try:
        writer, reader = client.exchange(command)
        with writer:
            writer.begin(ROWS.schema)
            writer.write_batch(ROWS)
            writer.done_writing()
            return [chunk.data for chunk in reader if chunk.data is not None]
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise translate(error, "slot 0") from error


@pytest.mark.parametrize("how", HOWS)
def test_values_go_there_and_back(process: Process, how: str) -> None:
    client = Client(process.address(how), SECRET)
    for value in (None, 7, [1, "zwei", b"\x00"], {"a": {1: [2.5]}}):
        assert client.call("echo", value) == value
    assert give_and_take(client)[0].equals(ROWS)
    client.close()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("secret", ["", "wrong", SECRET[:-1], SECRET + "!", SECRET.upper()])
def test_a_wrong_secret_is_refused(process: Process, how: str, secret: str) -> None:
    client = Client(process.address(how), secret)
    with pytest.raises(AuthenticationError, match="does not carry the run's secret"):
        client.call("echo", 1)
    with pytest.raises(AuthenticationError, match="does not carry the run's secret"):
        give_and_take(client)
    assert process.calls == []
    client.close()


@pytest.mark.parametrize("how", HOWS)
def test_a_missing_secret_is_refused_for_every_kind_of_call(process: Process, how: str) -> None:
    with flight.connect(process.address(how).location()) as stranger:
        nothing = flight.FlightDescriptor.for_command(b"")
        for call in (
            lambda: list(stranger.do_action(flight.Action("echo", b"\xc0"))),
            lambda: list(stranger.list_actions()),
            lambda: list(stranger.list_flights()),
            lambda: stranger.get_flight_info(nothing),
            lambda: stranger.do_get(flight.Ticket(b"")).read_all(),
            lambda: stranger.do_exchange(nothing)[1].read_chunk(),
        ):
            with pytest.raises(flight.FlightUnauthenticatedError):
                call()
    assert process.calls == []


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_arrive_as_the_same_class_with_the_same_text(process: Process, kind: type[StrandlineError]) -> None:
    client = Client(process.server.address, SECRET)
    with pytest.raises(StrandlineError) as caught:
        client.call("fail", kind.__name__)
    assert type(caught.value) is kind
    assert str(caught.value) == f"subtask 3: {kind.__name__} äöü\nsecond line"
    client.close()


@pytest.mark.parametrize("how", HOWS)
def test_errors_of_an_exchange_arrive_too(process: Process, how: str) -> None:
    client = Client(process.address(how), SECRET)
    with pytest.raises(errors.UserCodeError, match=r"^the user's own fault$"):
        give_and_take(client, b"fail")
    client.close()


def test_other_exceptions_arrive_as_ours_with_their_class_in_the_text(process: Process) -> None:
    client = Client(process.server.address, SECRET)
    with pytest.raises(StrandlineError, match=r"^KeyError: 'a bug'$") as caught:
        client.call("crash")
    assert type(caught.value) is StrandlineError
    assert client.call("echo", 1) == 1
    client.close()


def test_an_unknown_action_is_no_lost_slot(process: Process) -> None:
    """Who takes it for one would start the slot again and again."""
    client = Client(process.server.address, SECRET)
    with pytest.raises(StrandlineError, match="unknown action 'dance'") as caught:
        client.call("dance")
    assert not isinstance(caught.value, SlotLostError)
    client.close()


def test_a_process_without_data_says_so(tmp_path: Path) -> None:
    server = Server(SECRET, {}, bind_host="127.0.0.1", unix_path=str(tmp_path / "s"))
    client = Client(server.address, SECRET)
    with pytest.raises(StrandlineError, match="no data is exchanged") as caught:
        give_and_take(client)
    assert not isinstance(caught.value, SlotLostError)
    client.close()
    server.close()


@pytest.mark.parametrize("how", HOWS)
def test_a_dead_server_is_a_lost_slot_at_once(tmp_path: Path, how: str) -> None:
    process = Process(tmp_path)
    client, late = Client(process.address(how), SECRET), process.address(how)
    assert client.call("echo", 1) == 1
    process.server.close()
    started = time.monotonic()
    with pytest.raises(SlotLostError, match="no answer"):
        client.call("echo", 1, timeout=5)
    with pytest.raises(SlotLostError):
        give_and_take(client)
    with pytest.raises(SlotLostError):
        Client(late, SECRET).call("echo", 1, timeout=5)
    assert time.monotonic() - started < 3
    client.close()


def test_a_process_that_does_not_answer_in_time_counts_as_lost(process: Process) -> None:
    client = Client(process.server.address, SECRET)
    started = time.monotonic()
    with pytest.raises(SlotLostError):
        client.call("sleep", 2, timeout=0.3)
    assert time.monotonic() - started < 1.8
    client.close()


def test_callers_on_the_same_host_use_the_socket_and_others_tcp(process: Process) -> None:
    address = process.server.address
    assert address.location() == f"grpc+unix://{address.unix_path}"
    assert replace(address, host_id="elsewhere").location() == f"grpc://127.0.0.1:{address.port}"
    assert replace(address, unix_path="/not/there").location() == f"grpc://127.0.0.1:{address.port}"
    assert address.host_id == host_identity()
    assert socket.gethostname() in host_identity()


def test_an_address_survives_the_wire(process: Process) -> None:
    client = Client(process.server.address, SECRET)
    packed = client.call("echo", process.server.address.pack())
    assert Address.unpack(packed) == process.server.address
    client.close()


def test_a_closed_server_leaves_no_socket(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.server.close()
    assert not (tmp_path / "p.sock").exists()


def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "p.sock").touch()
    process = Process(tmp_path)
    assert Client(process.server.address, SECRET).call("echo", 1) == 1
    process.server.close()


def test_an_error_of_a_newer_release_is_still_an_error() -> None:
    data = encode_error(errors.FencedError("text")).replace(b"FencedError", b"FutureError")
    assert str(decode_error(data)) == "text"
