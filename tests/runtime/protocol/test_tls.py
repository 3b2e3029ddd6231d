"""TLS between hosts: nobody can read along, and neither end talks to somebody without a certificate of the run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pyarrow.flight as flight
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from strandline.config import Config
from strandline.errors import ConfigError, SlotLostError
from strandline.runtime.driver.certificate import run_tls
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.calls import NOTHING, Nothing
from strandline.runtime.protocol.coordinator_calls import (
    Acknowledgement,
    CoordinatorCalls,
    CoordinatorClient,
    Decline,
    Heartbeat,
    HeartbeatAnswer,
    Registration,
)
from strandline.runtime.protocol.cuts import CutOrder, RelayNews
from strandline.runtime.protocol.gate import connect_options
from strandline.runtime.protocol.server import Server
from strandline.runtime.protocol.tls import Tls

SECRET = "the-secret-of-the-run"
ANSWER = {7: Address("a-host-that-is-far-away", "", "host", 7)}
AUTO = Config(checkpoint_dir="x", tls="auto")


class Driver(CoordinatorCalls):
    """Answers one question, over TLS."""

    def __init__(self, folder: Path, tls: Tls | None) -> None:
        self.asked = 0
        self.server = Server(
            SECRET,
            CoordinatorCalls,
            self,
            run_id="run",
            generation=lambda: 0,
            bind_host="127.0.0.1",
            unix_path=str(folder / "s"),
            tls=tls,
        )
        self.address = msgspec.structs.replace(self.server.address, host_id="elsewhere")

    def register(self, request: Registration) -> None: ...

    def heartbeat(self, request: Heartbeat) -> HeartbeatAnswer:
        return HeartbeatAnswer(True)

    def slot_addresses(self, request: Nothing) -> dict[int, Address]:
        self.asked += 1
        return ANSWER

    def next_cut(self, request: RelayNews) -> CutOrder:
        return CutOrder(None)

    def acknowledge(self, request: Acknowledgement) -> None: ...

    def decline(self, request: Decline) -> None: ...


def ask(address: Address, tls: Tls | None) -> dict[int, Address]:
    client = CoordinatorClient(address, SECRET, "run", lambda: 0, tls=tls, patience=1.0)
    try:
        return client.slot_addresses(NOTHING)
    finally:
        client.close()


def auto() -> Tls:
    tls = run_tls(AUTO)
    assert tls is not None
    return tls


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Tls | None], Driver]]:
    made: list[Driver] = []

    def make(tls: Tls | None) -> Driver:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Driver(folder, tls))
        return made[-1]

    yield make
    for driver in made:
        driver.server.close()


class Wire:
    """A TCP port in front of another one that keeps a copy of what passes."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for source, target in ((caller, server), (server, caller)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), target:
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_who_reads_the_wire_sees_neither_secret_nor_content_only_with_tls(
    serve: Callable[[Tls | None], Driver], encrypted: bool
) -> None:
    tls = auto() if encrypted else None
    driver = serve(tls)
    wire = Wire(driver.address.port)
    assert ask(msgspec.structs.replace(driver.address, port=wire.port), tls) == ANSWER
    wire.close()
    assert (b"a-host-that-is-far-away" in wire.seen) is not encrypted
    if encrypted:
        assert SECRET.encode() not in wire.seen


def test_a_caller_without_the_certificate_of_the_run_is_refused(serve: Callable[[Tls | None], Driver]) -> None:
    tls = auto()
    driver = serve(tls)
    stranger = msgspec.structs.replace(auto(), ca=tls.ca)  # trusts the driver, but has another certificate
    for other in (None, stranger, auto()):
        with pytest.raises(SlotLostError):
            ask(driver.address, other)
    assert driver.asked == 0
    with (
        flight.connect(
            driver.address.location(tls=True),
            generic_options=connect_options(SECRET),
            tls_root_certs=tls.ca,
            override_hostname=tls.server_name,
        ) as without,
        pytest.raises(flight.FlightUnavailableError),
    ):
        list(without.list_actions())
    assert ask(driver.address, tls) == ANSWER


def test_a_server_without_the_certificate_of_the_run_learns_nothing(serve: Callable[[Tls | None], Driver]) -> None:
    impostor = serve(auto())
    wire = Wire(impostor.address.port)
    with pytest.raises(SlotLostError):
        ask(msgspec.structs.replace(impostor.address, port=wire.port), auto())
    wire.close()
    assert impostor.asked == 0
    assert SECRET.encode() not in wire.seen


def test_processes_of_one_host_use_the_socket_without_tls(serve: Callable[[Tls | None], Driver]) -> None:
    driver = serve(auto())
    assert ask(driver.server.address, None) == ANSWER


# --- certificates in files ---------------------------------------------------------------------------


class Authority:
    """Signs the certificates of hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {folder.name}")])
        self._write("ca.pem", self._signed(self._name, self._key.public_key(), None))

    def host(self, name: str) -> Config:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._write(f"{name}.pem", self._signed(subject, key.public_key(), name))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (self._folder / f"{name}.key").write_bytes(private)
        return Config(
            checkpoint_dir="x",
            tls_certificate=self._folder / f"{name}.pem",
            tls_key=self._folder / f"{name}.key",
            tls_ca=self._folder / "ca.pem",
        )

    def _write(self, name: str, certificate: x509.Certificate) -> None:
        (self._folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, host: str | None) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )
        if host is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def test_hosts_have_certificates_of_their_own_from_one_authority(
    serve: Callable[[Tls | None], Driver], tmp_path: Path
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    driver = serve(run_tls(ours.host("localhost")))
    address = msgspec.structs.replace(driver.address, host="localhost")
    assert ask(address, run_tls(ours.host("worker"))) == ANSWER
    with pytest.raises(SlotLostError):
        ask(address, run_tls(theirs.host("worker")))
    with pytest.raises(SlotLostError):  # the certificate is not for this name of the host
        ask(driver.address, run_tls(ours.host("worker")))
    named = ours.host("worker").replace(tls_server_name="localhost")
    assert ask(driver.address, run_tls(named)) == ANSWER


def test_a_file_that_is_missing_is_named_before_the_run_begins(tmp_path: Path) -> None:
    config = Authority(tmp_path / "ours").host("localhost")
    Path(str(config.tls_key)).unlink()
    with pytest.raises(ConfigError, match=r"tls_key = '.*localhost\.key' cannot be read on this host: No such file"):
        run_tls(config)


def test_without_options_there_is_no_tls() -> None:
    assert run_tls(Config(checkpoint_dir="x")) is None
    assert "PRIVATE" not in repr(auto())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_certificate": "c"}, "tls_certificate alone does not encrypt anything; set tls_key, tls_ca, too"),
        ({"tls_key": "k", "tls_ca": "a"}, "tls_key, tls_ca alone does not encrypt anything; set tls_certificate, too"),
        ({"tls": "auto", "tls_ca": "a"}, "makes its own certificate; remove it, or remove tls_ca"),
        ({"tls_server_name": "n"}, "tls_server_name goes with"),
        ({"tls": "on"}, 'allowed: "off" or "auto"'),
    ],
)
def test_options_that_would_not_encrypt_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_mapping({"checkpoint_dir": "x", **options})
