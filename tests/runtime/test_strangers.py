"""Processes of a run beside strangers: a run with TLS works, and nobody without the secret has anything unpickled."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.flight as flight
import pytest

from strandline.config import Config
from strandline.errors import AuthenticationError
from strandline.runtime.driver.certificate import run_tls
from strandline.runtime.protocol.address import TCP_ONLY
from strandline.runtime.protocol.calls import Envelope
from strandline.runtime.protocol.gate import connect_options
from strandline.runtime.protocol.slot_calls import Query
from tests.runtime.processes import B0, B1, SECRET, UID, Driver, checkpoint, send


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver whose processes reach each other by TCP alone, with TLS."""
    monkeypatch.setenv(TCP_ONLY, "1")
    driver = Driver(tmp_path, run_tls(Config(checkpoint_dir="x", tls="auto")))
    yield driver
    driver.close()


def test_a_run_works_when_all_its_connections_are_encrypted(encrypted: Driver) -> None:
    encrypted.start_manager()
    slots = encrypted.start(encrypted.spec(0), encrypted.spec(1))
    assert slots[0].address.location(tls=True).startswith("grpc+tls://127.0.0.1:")
    assert send(slots[0], 0, B0, [("a", 1), ("a", 2)]) == [("a", 2, 3)]
    encrypted.prepare_empty(B0, 0)
    encrypted.commit(B0)
    assert len(checkpoint(encrypted, 1)) == 2
    assert send(slots[0], 0, B1, [("a", 10)]) == [("a", 3, 13)]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self._place = str(place)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._place,)


def test_nothing_is_unpickled_for_a_caller_without_the_secret(driver: Driver, tmp_path: Path) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0))
    near = slots[0].address
    far = msgspec.structs.replace(near, host_id="elsewhere")
    bomb = Query(UID, None, pickle.dumps(Bomb(tmp_path / "exploded")))
    body = msgspec.msgpack.encode(Envelope(driver.run.run_id, 1, bomb, "", 0.0))
    for address, options in ((near, []), (far, []), (far, connect_options(SECRET))):
        with (
            flight.connect(address.location(), generic_options=options) as stranger,
            pytest.raises((flight.FlightUnauthenticatedError, flight.FlightUnavailableError)),
        ):
            list(stranger.do_action(flight.Action("query", body)))
        with pytest.raises(AuthenticationError):
            driver.client(address, "a guess").query(bomb)
    assert not (tmp_path / "exploded").exists()
    slots[0].query(bomb)  # whoever has the secret gets an answer, and the key is bytes to a slot
    assert not (tmp_path / "exploded").exists()
