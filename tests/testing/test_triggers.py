"""A fault at one chosen operation, counted over all storages and processes that share a control file."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

from strandline.errors import StorageError, UnknownOutcomeError
from strandline.runtime.protocol.address import Address, host_identity
from strandline.runtime.protocol.calls import CONNECTION_HOOK, Client
from strandline.storage import Storage, open_storage
from strandline.testing.call_faults import HOOK, TRIGGER_VARIABLE, FaultyConnection
from strandline.testing.triggers import Control, prepare
from tests.waiting import wait_until


def opened(folder: Path, control: Path) -> Storage:
    return open_storage(f"faulty+file://{folder}/root", {"trigger": str(control)})


def test_the_chosen_operation_fails_before_it_happens_and_no_other_one_does(tmp_path: Path) -> None:
    control = prepare(tmp_path, Control(pattern="^storage write b", number=2))
    one, other = opened(tmp_path, control), opened(tmp_path, control)
    one.write("b1", b"1")
    one.write("a", b"1")
    with pytest.raises(StorageError, match="storage write b2: fails on purpose, before"):
        other.write("b2", b"1")
    one.write("b3", b"1")
    assert [file.path for file in one.list()] == ["a", "b1", "b3"]
    assert (tmp_path / "fired").read_text().endswith("storage write b2")


def test_the_outcome_of_an_operation_that_fails_afterwards_is_unknown(tmp_path: Path) -> None:
    control = prepare(tmp_path, Control(pattern="^storage create", after=True))
    storage = opened(tmp_path, control)
    with pytest.raises(UnknownOutcomeError):
        storage.create("a", b"1")
    assert storage.read("a") == b"1"


def test_exactly_one_of_many_threads_has_the_fault(tmp_path: Path) -> None:
    control = prepare(tmp_path, Control(pattern="^storage exists", number=20, journal=True))
    storage = opened(tmp_path, control)

    def failed(number: int) -> bool:
        try:
            storage.exists(str(number))
        except StorageError:
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(failed, range(50))) == 1
    assert len((tmp_path / "journal").read_text().splitlines()) == 50


def test_an_operation_that_asks_waits_until_somebody_has_acted(tmp_path: Path) -> None:
    control = prepare(tmp_path, Control(pattern="^storage write", happening="ask", after=True))
    storage = opened(tmp_path, control)
    done = threading.Event()

    def write() -> None:
        storage.write("a", b"1")
        done.set()

    threading.Thread(target=write, daemon=True).start()
    wait_until((tmp_path / "fired").exists)
    assert storage.exists("a")
    assert not done.is_set()
    (tmp_path / "acted").touch()
    assert done.wait(10)


def test_without_a_control_file_nothing_happens(tmp_path: Path) -> None:
    control = prepare(tmp_path, Control(pattern="storage"))
    control.unlink()
    opened(tmp_path, control).write("a", b"1")


class Flight:
    """Stands for pyarrow's client, which cannot be made without a server."""

    calls = 0

    def do_action(self, action: Any, options: Any) -> list[Any]:
        self.calls += 1
        return [action]


def test_a_call_fails_before_it_is_sent_or_after_it_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for after, sent in ((False, 1), (True, 2)):
        control = prepare(tmp_path, Control(pattern="^call commit$", number=2, after=after))
        monkeypatch.setenv(TRIGGER_VARIABLE, str(control))
        inner = Flight()
        connection = FaultyConnection(inner)
        connection.do_action(flight.Action("commit", b""), None)
        with pytest.raises(flight.FlightUnavailableError, match="call commit"):
            connection.do_action(flight.Action("commit", b""), None)
        assert inner.calls == sent


def test_the_environment_wraps_the_connections_of_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIGGER_VARIABLE, str(tmp_path / "control"))
    monkeypatch.setenv(CONNECTION_HOOK, HOOK)
    client = Client(Address(host_identity(), str(tmp_path / "none"), "127.0.0.1", 1), "secret", "run", lambda: 0)
    assert isinstance(client._client, FaultyConnection)
    client.close()
    assert os.environ[CONNECTION_HOOK] == "strandline.testing.call_faults:FaultyConnection"
