"""Calls between processes: with the secret or not at all, and errors arrive as what they are."""

from __future__ import annotations

import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from strandline import errors
from strandline.errors import AuthenticationError, SlotLostError, StrandlineError
from strandline.runtime.protocol.address import Address, host_identity
from strandline.runtime.protocol.calls import (
    ANSWER,
    LONG,
    NOTHING,
    STILL_AT_IT,
    Client,
    Nothing,
    call,
    declared_calls,
    request_decoder,
)
from strandline.runtime.protocol.coordinator_calls import CoordinatorCalls, CoordinatorClient
from strandline.runtime.protocol.failures import Failure, translate
from strandline.runtime.protocol.gate import connect_options
from strandline.runtime.protocol.server import Server
from strandline.runtime.protocol.slot_calls import SlotCalls, SlotClient
from strandline.runtime.protocol.taskmanager_calls import TaskManagerCalls, TaskManagerClient
from strandline.runtime.protocol.tickets import KEPT, Tickets
from tests.waiting import wait_until

RUN, GENERATION = "the run", 3
SECRET = "the run's secret"
ROWS = pa.RecordBatch.from_pydict({"x": [1, 2, 3]})
HOWS = ["tcp", "unix"]

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StrandlineError)]


class Text(msgspec.Struct, frozen=True):
    """A request."""

    value: str
    pairs: dict[int, tuple[str, bytes | None]] = {}


ONE = Text("1")


class Pause(msgspec.Struct, frozen=True):
    """Asks for an answer that takes its time."""

    seconds: float
    patience: float


class Calls(ABC):
    """What is asked here."""

    @call(deadline=5.0)
    @abstractmethod
    def echo(self, request: Text) -> Text: ...

    @call(deadline=5.0)
    @abstractmethod
    def fail(self, request: Text) -> None: ...

    @call(deadline=5.0)
    @abstractmethod
    def crash(self, request: Nothing) -> None: ...

    @call(deadline=lambda request: request.patience)
    @abstractmethod
    def leave(self, request: Pause) -> None: ...

    @call(deadline=lambda request: request.patience)
    @abstractmethod
    def sleep(self, request: Pause) -> None: ...

    @call(deadline=lambda request: request.patience)
    @abstractmethod
    def doze(self, request: Pause) -> None: ...

    @call(deadline=lambda request: request.patience)
    @abstractmethod
    def wake(self, request: Pause) -> str: ...

    @call(deadline=LONG)
    @abstractmethod
    def oversleep(self, request: Text) -> None: ...

    @call(deadline=5.0, fenced=False)
    @abstractmethod
    def greet(self, request: Nothing) -> str: ...


class CallsClient(Client, Calls):
    """Calls it."""

    def echo(self, request: Text) -> Text:
        return self.carry_out(Calls.echo, request)

    def fail(self, request: Text) -> None:
        return self.carry_out(Calls.fail, request)

    def crash(self, request: Nothing) -> None:
        return self.carry_out(Calls.crash, request)

    def leave(self, request: Pause) -> None:
        return self.carry_out(Calls.leave, request)

    def sleep(self, request: Pause) -> None:
        return self.carry_out(Calls.sleep, request)

    def doze(self, request: Pause) -> None:
        return self.carry_out(Calls.doze, request)

    def wake(self, request: Pause) -> str:
        return self.carry_out(Calls.wake, request)

    def oversleep(self, request: Text) -> None:
        return self.carry_out(Calls.oversleep, request)

    def greet(self, request: Nothing) -> str:
        return self.carry_out(Calls.greet, request)


class Process(Calls):
    """What a process of a run serves here: an echo, errors of every class, and an exchange that gives rows back."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.awake = threading.Event()
        self.server = Server(
            SECRET,
            Calls,
            self,
            run_id=RUN,
            generation=lambda: GENERATION,
            bind_host="127.0.0.1",
            unix_path=str(folder / "p.sock"),
            exchange=self.exchange,
        )

    def echo(self, request: Text) -> Text:
        self.calls.append("echo")
        return request

    def fail(self, request: Text) -> None:
        self.calls.append("fail")
        if request.value not in vars(errors):
            raise errors.SchemaError(request.value.encode().decode("unicode_escape"))
        raise getattr(errors, request.value)(f"subtask 3: {request.value} äöü\nsecond line")

    def crash(self, request: Nothing) -> None:
        raise KeyError("a bug")

    def leave(self, request: Pause) -> None:
        sys.exit("enough")

    def sleep(self, request: Pause) -> None:
        self.calls.append("sleep")
        time.sleep(request.seconds)

    def doze(self, request: Pause) -> None:
        self.calls.append("doze")
        time.sleep(request.seconds)

    def wake(self, request: Pause) -> str:
        self.calls.append("wake")
        self.awake.wait()
        return "good morning"

    def oversleep(self, request: Text) -> None:
        self.calls.append("oversleep")
        time.sleep(STILL_AT_IT)
        raise errors.SchemaError(request.value)

    def greet(self, request: Nothing) -> str:
        return "hello"

    def exchange(self, _context: Any, command: bytes, reader: Any, writer: Any) -> None:
        self.calls.append("exchange")
        if command == b"leave":
            sys.exit("enough")
        if command == b"fail":
            raise errors.UserCodeError("the user's own fault")
        if command == b"fail at length":
            raise errors.UserCodeError("x" * 100_000)
        writer.begin(ROWS.schema)
        for chunk in reader:
            writer.write_batch(chunk.data)

    def address(self, how: str) -> Address:
        """As a caller on this host sees it, or one elsewhere."""
        return (
            self.server.address if how == "unix" else msgspec.structs.replace(self.server.address, host_id="elsewhere")
        )


def client_of(address: Address, secret: str = SECRET, run: str = RUN, generation: int = GENERATION) -> CallsClient:
    return CallsClient(address, secret, run, lambda: generation)


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("w"))
    yield process
    process.server.close()


class Relayed:
    """A TCP port in front of a server, whose connections a test can cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relayed:
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()
        self.cut()

    def address(self, address: Address) -> Address:
        return msgspec.structs.replace(address, host_id="elsewhere", port=self._listener.getsockname()[1])

    def more_than(self, connections: int) -> bool:
        return self.connections > connections

    def cut(self) -> None:
        """Break every connection, as a network does; new ones work."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _where = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [caller, server]
                for source, target in ((caller, server), (server, caller)):
                    threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


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
    client = client_of(process.address(how))
    for value in (Text(""), Text("zwei\n", {1: ("a", b"\x00"), -2: ("b", None)})):
        assert client.echo(value) == value
    assert give_and_take(client)[0].equals(ROWS)
    client.close()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("secret", ["", "wrong", SECRET[:-1], SECRET + "!", SECRET.upper()])
def test_a_wrong_secret_is_refused(process: Process, how: str, secret: str) -> None:
    client = client_of(process.address(how), secret)
    with pytest.raises(AuthenticationError, match="does not carry the run's secret"):
        client.echo(ONE)
    with pytest.raises(AuthenticationError, match="does not carry the run's secret"):
        give_and_take(client)
    assert process.calls == []
    client.close()


@pytest.mark.parametrize("how", [*HOWS, "tcp without the token of the gate"])
def test_a_missing_secret_is_refused_for_every_kind_of_call(process: Process, how: str) -> None:
    options = connect_options(SECRET) if how == "tcp" else []
    refusal = flight.FlightUnauthenticatedError if how in HOWS else flight.FlightUnavailableError
    with flight.connect(process.address(how).location(), generic_options=options) as stranger:
        nothing = flight.FlightDescriptor.for_command(b"")
        for call in (
            lambda: list(stranger.do_action(flight.Action("echo", b"\xc0"))),
            lambda: list(stranger.list_actions()),
            lambda: list(stranger.list_flights()),
            lambda: stranger.get_flight_info(nothing),
            lambda: stranger.do_get(flight.Ticket(b"")).read_all(),
            lambda: stranger.do_exchange(nothing)[1].read_chunk(),
        ):
            with pytest.raises(refusal):
                call()
    assert process.calls == []


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_arrive_as_the_same_class_with_the_same_text(process: Process, kind: type[StrandlineError]) -> None:
    client = client_of(process.server.address)
    with pytest.raises(StrandlineError) as caught:
        client.fail(Text(kind.__name__))
    assert type(caught.value) is kind
    assert str(caught.value) == f"subtask 3: {kind.__name__} äöü\nsecond line"
    client.close()


@pytest.mark.parametrize("how", HOWS)
def test_errors_of_an_exchange_arrive_too(process: Process, how: str) -> None:
    client = client_of(process.address(how))
    with pytest.raises(errors.UserCodeError, match=r"^the user's own fault$"):
        give_and_take(client, b"fail")
    client.close()


def test_other_exceptions_arrive_as_ours_with_their_class_in_the_text(process: Process) -> None:
    client = client_of(process.server.address)
    with pytest.raises(StrandlineError, match=r"^KeyError: 'a bug'$") as caught:
        client.crash(NOTHING)
    assert type(caught.value) is StrandlineError
    assert client.echo(ONE) == ONE
    client.close()


@pytest.mark.parametrize("patience", [4.0, 10.0], ids=["quick", "ticket"])
def test_a_call_that_wants_to_end_the_process_is_a_failed_call(process: Process, patience: float) -> None:
    client = client_of(process.server.address)
    with pytest.raises(StrandlineError, match=r"^SystemExit: enough$") as caught:
        client.leave(Pause(0, patience=patience))
    assert type(caught.value) is StrandlineError
    with pytest.raises(StrandlineError, match=r"^SystemExit: enough$"):
        give_and_take(client, b"leave")
    client.close()


class NewerCalls(ABC):
    """What a later release might ask."""

    @call(deadline=5.0)
    @abstractmethod
    def dance(self, request: Nothing) -> None: ...

    @call(deadline=5.0)
    @abstractmethod
    def echo(self, request: int) -> int: ...


def test_an_unknown_call_is_no_lost_slot(process: Process) -> None:
    """Who takes it for one would start the slot again and again."""
    client = client_of(process.server.address)
    with pytest.raises(StrandlineError, match="unknown call 'dance'") as caught:
        client.carry_out(NewerCalls.dance, NOTHING)
    assert not isinstance(caught.value, SlotLostError)
    client.close()


def test_a_request_of_another_type_does_not_reach_the_process(process: Process) -> None:
    client = client_of(process.server.address)
    with pytest.raises(StrandlineError, match="ValidationError") as caught:
        client.carry_out(NewerCalls.echo, 7)
    assert not isinstance(caught.value, SlotLostError)
    assert process.calls == []
    client.close()


def test_a_caller_of_another_run_is_refused(process: Process) -> None:
    client = client_of(process.server.address, run="another run")
    with pytest.raises(errors.StaleAttemptError, match="belongs to run another run"):
        client.greet(NOTHING)
    client.close()


@pytest.mark.parametrize("generation", [GENERATION - 1, GENERATION, GENERATION + 1])
def test_a_fenced_call_of_an_older_generation_is_refused(process: Process, generation: int) -> None:
    client = client_of(process.server.address, generation=generation)
    assert client.greet(NOTHING) == "hello"
    if generation < GENERATION:
        with pytest.raises(errors.StaleAttemptError, match="of generation 2, but generation 3 has begun"):
            client.echo(ONE)
        assert process.calls == []
    else:
        assert client.echo(ONE) == ONE
    client.close()


def test_a_process_without_data_says_so(tmp_path: Path) -> None:
    server = Server(
        SECRET,
        Calls,
        Process(tmp_path),
        run_id=RUN,
        generation=lambda: GENERATION,
        bind_host="127.0.0.1",
        unix_path=str(tmp_path / "s"),
    )
    client = client_of(server.address)
    with pytest.raises(StrandlineError, match="no data is exchanged") as caught:
        give_and_take(client)
    assert not isinstance(caught.value, SlotLostError)
    client.close()
    server.close()


@pytest.mark.parametrize("how", HOWS)
def test_a_dead_server_is_a_lost_slot_at_once(tmp_path: Path, how: str) -> None:
    process = Process(tmp_path)
    client, late = client_of(process.address(how)), process.address(how)
    assert client.echo(ONE) == ONE
    process.server.close()
    started = time.monotonic()
    with pytest.raises(SlotLostError, match="no answer"):
        client.echo(ONE)
    with pytest.raises(SlotLostError):
        give_and_take(client)
    with pytest.raises(SlotLostError):
        client_of(late).echo(ONE)
    assert time.monotonic() - started < 3
    client.close()


def test_a_process_that_does_not_answer_in_time_counts_as_lost(process: Process) -> None:
    client = client_of(process.server.address)
    process.awake.clear()
    with pytest.raises(SlotLostError):
        client.wake(Pause(0, patience=0.3))
    process.awake.set()  # not before: the call above did not wait for its answer
    client.close()


def test_callers_on_the_same_host_use_the_socket_and_others_tcp(process: Process) -> None:
    address = process.server.address
    assert address.location() == f"grpc+unix://{address.unix_path}"
    assert msgspec.structs.replace(address, host_id="elsewhere").location() == f"grpc://127.0.0.1:{address.port}"
    assert msgspec.structs.replace(address, unix_path="/not/there").location() == f"grpc://127.0.0.1:{address.port}"
    assert address.host_id == host_identity()
    assert socket.gethostname() in host_identity()


def test_a_proxy_of_the_environment_does_not_get_our_calls(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    client = client_of(process.address("tcp"))
    assert client.echo(ONE) == ONE
    client.close()


def test_a_closed_server_leaves_no_socket(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.server.close()
    assert not (tmp_path / "p.sock").exists()


def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "p.sock").touch()
    process = Process(tmp_path)
    assert client_of(process.server.address).echo(ONE) == ONE
    process.server.close()


def test_an_error_of_a_newer_release_is_still_an_error() -> None:
    assert str(Failure("FutureError", "text").error()) == "text"
    assert type(Failure("FutureError", "text").error()) is StrandlineError
    assert type(Failure("annotations", "no error class").error()) is StrandlineError


def test_a_quick_call_is_made_again_when_its_connection_breaks(process: Process) -> None:
    with Relayed(process.server.address.port) as relayed, ThreadPoolExecutor() as pool:
        client = client_of(relayed.address(process.server.address))
        answer = pool.submit(client.sleep, Pause(0.3, patience=4))
        wait_until(partial(process.calls.__contains__, "sleep"))
        relayed.cut()
        assert answer.result() is None
        assert process.calls.count("sleep") == 2
        client.close()


def test_a_long_call_is_carried_out_once_however_often_its_connection_breaks(process: Process) -> None:
    with Relayed(process.server.address.port) as relayed, ThreadPoolExecutor() as pool:
        client = client_of(relayed.address(process.server.address))
        process.awake.clear()
        answer = pool.submit(client.wake, Pause(0, patience=LONG))
        wait_until(partial(process.calls.__contains__, "wake"))
        for _ in range(2):
            seen = relayed.connections
            relayed.cut()
            wait_until(partial(relayed.more_than, seen), what="another connection")
        process.awake.set()
        assert answer.result() == "good morning"
        assert process.calls == ["wake"]
        client.close()


def test_a_long_call_takes_as_long_as_it_takes(process: Process) -> None:
    """It takes longer than the caller waits for one reply, and than the process may be silent."""
    client = CallsClient(process.server.address, SECRET, RUN, lambda: GENERATION, patience=0.1)
    client.doze(Pause(STILL_AT_IT + ANSWER, patience=LONG))
    with pytest.raises(errors.SchemaError, match=r"^no$"):
        client.oversleep(Text("no"))
    assert process.calls == ["doze", "oversleep"]
    client.close()


def test_a_process_that_takes_connections_and_is_silent_counts_as_lost() -> None:
    """As one that is stopped: the system still takes connections for it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address("elsewhere", "", "127.0.0.1", mute.getsockname()[1])
        client = CallsClient(address, SECRET, RUN, lambda: GENERATION, patience=0.5)
        with pytest.raises(SlotLostError, match="no answer"):
            client.doze(Pause(0, patience=LONG))
        client.close()


def test_calls_of_a_run_that_ends_are_abandoned(process: Process) -> None:
    client = client_of(process.server.address)
    process.awake.clear()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.wake, Pause(0, patience=LONG))
        wait_until(partial(process.calls.__contains__, "wake"))
        client.abandon()
        with pytest.raises(SlotLostError, match="the run ends"):
            answer.result()
    process.awake.set()
    client.close()


def test_the_reply_to_a_long_call_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("strandline.runtime.protocol.tickets.time.monotonic", lambda: now[0])
    tickets = Tickets()
    for number in range(3):
        assert tickets.carry_out(f"call {number}", lambda: b"reply", patience=100.0) == b"reply"
        assert tickets.carry_out(f"call {number}", lambda: b"again", patience=100.0) is None
        assert tickets.reply(f"call {number}", 5) == b"reply"
        now[0] += 150
    assert [f"call {number}" in tickets for number in range(3)] == [False, True, True]


def test_replies_that_have_arrived_are_not_kept_for_long(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """However patient the caller is: a task manager gives its slots hours for a reply."""
    now = [0.0]
    monkeypatch.setattr("strandline.runtime.protocol.tickets.time", SimpleNamespace(monotonic=lambda: now[0]))
    client = CallsClient(process.server.address, SECRET, RUN, lambda: GENERATION, patience=LONG)
    for _ in range(10):
        client.doze(Pause(0, patience=LONG))
        now[0] += KEPT / 2
    assert len(process.server.tickets) <= 4
    client.close()


def test_a_deadline_is_not_a_reason_to_repeat(process: Process) -> None:
    client = client_of(process.server.address)
    with pytest.raises(SlotLostError):
        client.sleep(Pause(0.5, patience=0.1))
    assert process.calls == ["sleep"]
    client.close()


@pytest.mark.parametrize(
    ("calls", "client"),
    [(SlotCalls, SlotClient), (TaskManagerCalls, TaskManagerClient), (CoordinatorCalls, CoordinatorClient)],
)
def test_every_call_declares_its_terms_and_has_a_client_method(calls: type, client: type) -> None:
    declared = declared_calls(calls)
    assert set(declared) == calls.__abstractmethods__  # type: ignore[attr-defined]  # an ABC has it
    assert not client.__abstractmethods__  # type: ignore[attr-defined]
    for name, method in declared.items():
        assert name in vars(client)
        request_decoder(method)  # its request and response can be decoded
        assert get_type_hints(method).keys() == {"request", "return"}


def test_a_text_that_utf8_cannot_hold_arrives_with_the_rest(process: Process) -> None:
    client = client_of(process.server.address)
    with pytest.raises(errors.SchemaError, match=r"^before \\udc80 after$"):
        client.fail(Text(r"before \udc80 after"))
    with pytest.raises(errors.UserCodeError, match=r"^x{4000}$"):
        give_and_take(client, b"fail at length")
    client.close()
