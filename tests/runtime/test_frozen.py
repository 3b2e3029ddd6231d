"""Frozen processes, without Spark: whoever waits for one goes on, and nothing is lost."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.delivery.relay_pulse import RelayPulse
from strandline.runtime.driver.rocksdb_factory import pickle_factory
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.coordinator_calls import Heartbeat
from strandline.runtime.protocol.exchange import ExchangeHeader
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.protocol.slot_calls import BatchRound, SlotClient
from strandline.runtime.protocol.taskmanager_calls import ForSlots, OlderSlots, SpareSlots, TakeCheckpoint
from strandline.runtime.task.launcher import ensure_task_manager
from tests.runtime.processes import B0, B1, NOON, UID, Driver, cluster_without_spark, gone, send
from tests.waiting import wait_until

pytestmark = pytest.mark.faults

LOST = (flight.FlightError, pa.ArrowException, OSError)


def with_factory(spec: SlotSpec, factory: Callable[[Any, Any], None]) -> SlotSpec:
    """The slot runs `factory` while it starts."""
    backend = msgspec.structs.replace(spec.backend, rocksdb_factory=pickle_factory(factory))
    return msgspec.structs.replace(spec, backend=backend)


def test_a_slot_that_is_frozen_is_killed_and_comes_back_with_everything_that_was_committed(driver: Driver) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0), driver.spec(1))
    send(slots[0], 0, B0, [("a", 1)])
    driver.prepare_empty(B0, 0)
    driver.commit(B0)
    frozen, other = driver.slot_pids()
    os.kill(frozen, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        # Whatever waits for it: the rows of a relay, and calls of every kind.
        rows = pool.submit(send, slots[0], 0, B1, [("a", 1)])
        collected = pool.submit(driver.manager.collect_prepared, ForSlots([0, 1], BatchRound(B1, 0)))
        barrier = pool.submit(driver.manager.take_checkpoint, TakeCheckpoint(checkpoint=1, timeout=600))
        with pytest.raises(SlotLostError):
            rows.result()
        for answers in (collected.result(), barrier.result()):
            assert isinstance(answers.failures[0].error(), SlotLostError)
            assert set(answers.values) == {1}
    wait_until(lambda: driver.lost == {0}, what="the report of the loss")
    assert driver.manager.describe(NOTHING).slots[0].ended == "it has been silent for 3 s"
    assert gone(frozen)
    slots |= driver.start(driver.spec(0, 2, decided_batch=B0))
    assert driver.slot_pids()[1] == other
    assert send(slots[0], 0, B1, [("a", 10)]) == [("a", 2, 11)]


def test_a_slot_that_freezes_while_it_starts_is_killed(driver: Driver) -> None:
    def freeze(_options: Any, _info: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    driver.start_manager()
    with pytest.raises(SlotLostError, match="ended while it started"):
        driver.start(with_factory(driver.spec(0), freeze))
    assert driver.slot_pids() == []
    driver.start(driver.spec(0, 2))


@pytest.mark.slow
def test_a_slot_whose_interpreter_hangs_is_killed(driver: Driver) -> None:
    """Neither stopped nor at work: no thread of it can run Python."""

    def hang(_options: Any, _info: Any) -> None:
        ctypes.PyDLL(None).sleep(600)  # does not let the interpreter go

    driver.start_manager()
    with pytest.raises(SlotLostError, match="ended while it started"):
        driver.start(with_factory(driver.spec(0), hang))


def test_a_slot_that_works_hard_is_not_taken_for_frozen(driver: Driver) -> None:
    """It gives no sign of life for longer than the heartbeat timeout, because one call keeps the interpreter busy."""

    def sum_up(_options: Any, _info: Any) -> None:
        sum(range(250_000_000))

    driver.start_manager()
    driver.start(with_factory(driver.spec(0), sum_up))
    assert driver.statuses().values[0].incarnation == 1


@pytest.mark.parametrize("slots_too", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_task_manager_that_is_frozen_is_replaced_and_its_slots_end(driver: Driver, slots_too: bool) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0), driver.spec(1))
    send(slots[0], 0, B0, [("a", 1)])
    driver.prepare_empty(B0, 0)
    driver.commit(B0)
    frozen = [driver.manager_pid, *driver.slot_pids()]
    first = driver.identity
    for pid in frozen if slots_too else frozen[:1]:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SlotLostError):
        driver.manager.collect_prepared(ForSlots([0, 1], BatchRound(B1, 0)))
    driver.start_manager()
    assert driver.identity != first
    wait_until(lambda: all(map(gone, frozen)), what="the end of the frozen processes")
    slots = driver.start(*(driver.spec(index, 2, decided_batch=B0) for index in range(2)))
    assert send(slots[0], 0, B1, [("a", 1)]) == [("a", 2, 2)]


def test_a_slot_that_is_frozen_does_not_outlive_its_task_manager(driver: Driver) -> None:
    """It cannot notice that its task manager died. The next one is started after the slot is killed."""
    driver.start_manager()
    driver.start(driver.spec(0))
    (slot,) = driver.slot_pids()
    os.kill(slot, signal.SIGSTOP)
    os.kill(driver.manager_pid, signal.SIGKILL)
    wait_until(lambda: gone(driver.manager_pid), what="the end of the task manager")
    driver.start_manager()
    wait_until(lambda: gone(slot), what="the end of the slot")


def test_a_task_manager_that_the_driver_gave_up_is_replaced_even_if_it_answers(driver: Driver) -> None:
    driver.start_manager()
    first, pid = driver.identity, driver.manager_pid
    second = ensure_task_manager(driver.run, {first})
    assert second != first
    wait_until(lambda: gone(pid), what="the end of the first one")
    assert ensure_task_manager(driver.run, {first}) == second


def open_exchange(slot: SlotClient, index: int, name: str) -> tuple[Any, Any]:
    """An exchange whose relay has sent nothing but its schema."""
    header = ExchangeHeader(1, B0, 0, UID, index, 77, NOON, exchange=name)
    writer, reader = slot.exchange(msgspec.msgpack.encode(header))
    writer.begin(pa.schema([("user", pa.string())]))
    return writer, reader


def test_a_relay_that_vanished_does_not_keep_its_slot_busy_for_ever(driver: Driver) -> None:
    """As one on a host that is gone: the connection stands, and nobody is there.

    A relay that lives keeps its slot meanwhile, however long its rows take.
    """
    driver.start_manager()
    slots = driver.start(driver.spec(0), driver.spec(1))
    given_up = threading.Event()
    pulse = RelayPulse("alive", lambda: driver.client(slots[1].address), 600, given_up.set)
    _writer, reader = open_exchange(slots[0], 0, "gone")
    other_writer, other_reader = open_exchange(slots[1], 1, "alive")
    with pulse:
        for one in (reader, other_reader):
            one.read_chunk()  # the slot is busy with it
        wait_until(lambda: driver.lost, what="the end of a slot")
        with pytest.raises(LOST):
            reader.read_chunk()
        assert driver.lost == {0}
    assert not given_up.is_set()
    other_reader.cancel()
    del other_writer


def test_a_relay_gives_up_a_slot_that_never_answers(driver: Driver) -> None:
    driver.start_manager()
    slot = driver.start(driver.spec(0))[0]
    (pid,) = driver.slot_pids()
    given_up = threading.Event()
    slot.pulse(NOTHING)
    os.kill(driver.manager_pid, signal.SIGSTOP)  # nobody kills the slot
    os.kill(pid, signal.SIGSTOP)
    writer, reader = open_exchange(slot, 0, "alive")

    def give_up() -> None:
        given_up.set()
        reader.cancel()

    with RelayPulse("alive", lambda: driver.client(slot.address), 1, give_up):
        with pytest.raises(LOST):  # noqa: PT012 - it may have begun to answer before the signal reached it
            while True:
                reader.read_chunk()
        assert given_up.is_set()
    del writer


def test_slots_that_are_frozen_do_not_hold_up_the_end(driver: Driver) -> None:
    driver.start_manager()
    driver.start(driver.spec(0), driver.spec(1))
    pids = driver.slot_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    driver.manager.stop_slots(NOTHING)
    assert all(map(gone, pids))


def test_a_task_manager_without_slots_in_a_new_generation_ends_its_old_ones(driver: Driver) -> None:
    driver.start_manager()
    driver.start(driver.spec(0), driver.spec(1))
    pids = driver.slot_pids()
    driver.manager.start_spares(SpareSlots(1))
    driver.generation = 2
    driver.manager.end_older_slots(OlderSlots(2))
    assert driver.slot_pids() == []
    assert all(map(gone, pids))
    assert not list(driver.local.glob("gen-1"))
    children = psutil.Process(driver.manager_pid).children()
    assert all(map(gone, [child.pid for child in children])), "the process that waited to become a slot ends, too"


def test_a_task_manager_whose_thread_died_is_given_up_and_the_generation_fails(tmp_path: Path) -> None:
    cluster = cluster_without_spark(tmp_path)
    try:
        identity = ensure_task_manager(cluster.run)
        died = Failure.of(StrandlineError("the background thread changelog-upkeep has died: KeyError"))
        assert cluster.heartbeat(Heartbeat(identity, [])).wanted
        assert cluster.failure is None
        assert not cluster.heartbeat(Heartbeat(identity, [], died)).wanted
        assert "changelog-upkeep" in str(cluster.failure)
        assert not cluster.heartbeat(Heartbeat(identity, [])).wanted
        assert ensure_task_manager(cluster.run, cluster._managers.given_up) != identity
    finally:
        cluster.close()
