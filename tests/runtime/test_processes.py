"""Real task managers and slots without Spark: how they work together, and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from strandline.checkpoint.metadata import SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import AuthenticationError, DamagedFileError, SlotLostError, StaleAttemptError, StrandlineError
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import count
from strandline.operators.aggregate.functions import sum as sum_of
from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN
from strandline.runtime.driver.opening import pickle_operator
from strandline.runtime.protocol.folders import run_folder, socket_folder
from strandline.runtime.protocol.messages import (
    BackendSettings,
    BatchTime,
    ExchangeHeader,
    OperatorSpec,
    RunInfo,
    SlotSpec,
    SnapshotReport,
    StorageSettings,
    batch_id,
)
from strandline.runtime.protocol.wire import Address, Client, Server, decode_error, translate
from strandline.runtime.task.launcher import ensure_task_manager
from strandline.runtime.task.relay import _exchange
from strandline.runtime.taskmanager.process import TaskManager
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import key_group_range
from tests.runtime.taskmanager.changelog.host import upload_settings
from tests.waiting import wait_until

pytestmark = pytest.mark.faults

JOB, UID, SECRET = "visits", "totals", "secret"
GROUPS, PARALLELISM = 128, 2
HEARTBEAT_TIMEOUT = 3.0
TOTALS = AggregateOperator(UID, ["user"], parse_schema("user string, x long"), {"n": count(), "s": sum_of("x")})
OPERATORS = [OperatorSpec(UID, pickle_operator(TOTALS))]

Rows = list[tuple[str, int]]


class Driver:
    """A coordinator without a query: it listens, and remembers what it was told."""

    def __init__(self, root: Path) -> None:
        run_id = uuid.uuid4().hex
        self.managers: dict[str, dict[str, Any]] = {}
        self.lost: set[int] = set()
        self.acks: dict[int, dict[int, SubtaskAck]] = {}
        self.declined: list[dict[str, Any]] = []
        self.wanted = True
        self.asleep = False
        self.seen: set[int] = set()
        self.server = Server(
            SECRET,
            {
                "register": self.register,
                "heartbeat": self.heartbeat,
                "acknowledge": self.acknowledge,
                "decline": self.declined.append,
            },
            bind_host="127.0.0.1",
            unix_path=str(socket_folder(run_id) / "c.sock"),
        )
        self.run = RunInfo(
            JOB,
            run_id,
            SECRET,
            self.server.address.pack(),
            str(root / "local"),
            "127.0.0.1",
            HEARTBEAT_TIMEOUT,
            StorageSettings(str(root / "durable"), {}),
            [],
            upload_settings(),
        )
        self.durable = root / "durable"
        self.local = run_folder(self.run.local_dir, JOB, run_id)

    def register(self, body: dict[str, Any]) -> None:
        self.managers[body["identity"]] = body
        self.seen.add(body["pid"])

    def heartbeat(self, body: dict[str, Any]) -> dict[str, bool]:
        while self.asleep:
            time.sleep(0.05)
        self.lost = set(body["lost"])
        return {"wanted": self.wanted}

    def acknowledge(self, body: dict[str, Any]) -> None:
        ack = msgspec.convert(body["ack"], SubtaskAck)
        self.acks.setdefault(body["checkpoint"], {})[ack.state.subtask] = ack

    def start_manager(self) -> Client:
        self.identity = ensure_task_manager(self.run)
        self.manager = Client(Address.unpack(self.managers[self.identity]["address"]), SECRET)
        return self.manager

    @property
    def manager_pid(self) -> int:
        return int(self.managers[self.identity]["pid"])

    def slot_pids(self) -> list[int]:
        slots = self.manager.call("describe", timeout=10)["slots"]
        pids = [slots[index]["pid"] for index in sorted(slots)]
        self.seen.update(pids)
        return pids

    def spec(self, index: int, incarnation: int = 1, **other: Any) -> SlotSpec:
        values: dict[str, Any] = {"generation": 1, "restore": [], "restore_batch": -1, "decided_batch": -1, **other}
        backend = BackendSettings("rocksdb", 16 << 20, 1 << 20, True, "lz4")
        return SlotSpec(
            run=self.run,
            index=index,
            incarnation=incarnation,
            parallelism=PARALLELISM,
            max_parallelism=GROUPS,
            backend=backend,
            operators=values.pop("operators", OPERATORS),
            **values,
        )

    def start(self, *specs: SlotSpec) -> dict[int, Client]:
        started = self.manager.call("start_slots", {"specs": specs})
        self.slot_pids()
        return {index: Client(Address.unpack(slot["address"]), SECRET) for index, slot in started.items()}

    def fan(self, action: str, body: Any = None) -> dict[int, Any]:
        answers = self.manager.call("fan", {"action": action, "body": body, "timeout": 20})
        return {
            index: decode_error(answer["error"]) if "error" in answer else answer["value"]
            for index, answer in answers.items()
        }

    def close(self) -> None:
        self.asleep = False
        self.server.close()
        for pid in self.seen:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(socket_folder(self.run.run_id), ignore_errors=True)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.close()


def gone(pid: int) -> bool:
    """A zombie is gone too: only the test process has not asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def send(slot: Client, index: int, batch: int, rows: Rows, round_: int = 0) -> list[tuple[Any, ...]]:
    """One task's work: what a relay does with the rows of its partition, and what Spark gets for them."""
    group = key_group_range(index, PARALLELISM, GROUPS).start
    schema = pa.schema(
        [("user", pa.string()), ("x", pa.int64()), (KEY_GROUP_COLUMN, pa.int32()), (SUBTASK_COLUMN, pa.int32())]
    )
    columns = zip(*((user, x, group, index) for user, x in rows), strict=True)
    arrow = pa.RecordBatch.from_arrays(
        [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
    header = ExchangeHeader(1, batch, round_, UID, index, 77, NOON)
    try:
        writer, reader = slot.exchange(msgspec.msgpack.encode(header))
        with writer:
            produced = list(_exchange(writer, reader, arrow.slice(0, 1), iter([arrow.slice(1)])))
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise translate(error, f"slot {index}") from error
    return sorted(tuple(row.values()) for batch in produced for row in batch.to_pylist())


def checkpoint(driver: Driver, number: int) -> list[SubtaskState]:
    """Barrier, upload, acknowledgements; confirmed to the task manager. Gives the states that it holds."""
    answers = driver.manager.call("barrier", {"checkpoint": number, "timeout": 20})
    assert all("value" in answer for answer in answers.values())
    wait_until(lambda: len(driver.acks.get(number, {})) == len(answers), what="the last acknowledgement")
    driver.manager.call("checkpoint_completed", {"checkpoint": number, "replaced": {}})
    return [ack.state for ack in driver.acks[number].values()]


NOON = BatchTime(12 * 3600 * 1000)
B0, B1, B2 = (batch_id(1, number) for number in range(3))


def test_a_slot_that_was_killed_comes_back_with_everything_that_was_committed(driver: Driver) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0), driver.spec(1))

    # A batch: each subtask prepares, whoever asks again gets the same rows, and commit makes it state.
    assert send(slots[0], 0, B0, [("a", 1), ("b", 2), ("a", 3)]) == [("a", 2, 4), ("b", 1, 2)]
    assert send(slots[0], 0, B0, [("other", 9)]) == [("a", 2, 4), ("b", 1, 2)]
    assert driver.fan("prepare_empty", {"batch": B0, "round": 0, "time": NOON}) == {0: None, 1: None}
    assert {index: status["prepared"] for index, status in driver.fan("status").items()} == {
        0: {UID: [B0, 0]},
        1: {UID: [B0, 0]},
    }
    assert driver.fan("commit", {"batch": B0}) == {0: {}, 1: {}}
    with pytest.raises(StaleAttemptError, match="is over"):
        send(slots[0], 0, B0, [("a", 1)])

    # A checkpoint holds it; the next batch is only in a segment.
    restore = checkpoint(driver, 1)
    assert driver.declined == []
    assert send(slots[0], 0, B1, [("a", 10)]) == [("a", 3, 14)]
    assert send(slots[1], 1, B1, [("z", 5)]) == [("z", 1, 5)]
    assert driver.fan("commit", {"batch": B1}) == {0: {}, 1: {}}

    # A third one is prepared only: it dies with the slot.
    send(slots[0], 0, B2, [("a", 1000)])
    victim, other = driver.slot_pids()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: driver.lost == {0}, what="the report of the loss")
    assert isinstance(driver.fan("status")[0], SlotLostError)
    with pytest.raises(SlotLostError):
        send(slots[0], 0, B2, [("a", 1)])

    mine = [state for state in restore if state.subtask == 0]
    slots |= driver.start(driver.spec(0, 2, restore=mine, restore_batch=B0, decided_batch=B1))
    assert driver.slot_pids()[1] == other
    assert driver.fan("status")[0]["incarnation"] == 2
    wait_until(lambda: driver.lost == set(), what="the end of the loss")
    driver.fan("discard", {"batch": B2, "round": 1})
    with pytest.raises(StaleAttemptError, match="round 0 is over"):
        send(slots[0], 0, B2, [("a", 1)])
    assert send(slots[0], 0, B2, [("a", 1), ("b", 0)], round_=1) == [("a", 4, 15), ("b", 2, 2)]

    # The next checkpoint names what is durable already, and uploads only the rest.
    driver.fan("prepare_empty", {"batch": B2, "round": 1, "time": NOON})
    driver.fan("commit", {"batch": B2})
    durable = {file.handle.path for state in restore for file in state.files if file.shared and file.handle}
    states = checkpoint(driver, 2)
    named = {file.handle.path for state in states for file in state.files if file.shared and file.handle}
    uploaded = {handle.path for ack in driver.acks[2].values() for handle in ack.uploaded}
    assert durable & named
    assert not durable & uploaded
    assert uploaded == named - durable


def test_a_slot_refuses_callers_without_the_secret(driver: Driver) -> None:
    driver.start_manager()
    slot = driver.start(driver.spec(0))[0]
    for address in (slot.address, driver.manager.address):
        stranger = Client(address, "guessed")
        with pytest.raises(AuthenticationError):
            stranger.call("status")
    with pytest.raises(AuthenticationError):
        send(Client(slot.address, "guessed"), 0, B0, [("a", 1)])
    assert send(slot, 0, B0, [("a", 1)]) == [("a", 1, 1)]


def test_slots_end_with_their_task_manager_and_the_next_one_finds_their_files(driver: Driver) -> None:
    driver.start_manager()
    assert ensure_task_manager(driver.run) == driver.identity
    slots = driver.start(driver.spec(0), driver.spec(1))
    send(slots[0], 0, B0, [("a", 1)])
    driver.fan("prepare_empty", {"batch": B0, "round": 0, "time": NOON})
    driver.fan("commit", {"batch": B0})
    pids = driver.slot_pids()
    first = driver.identity
    os.kill(driver.manager_pid, signal.SIGKILL)
    wait_until(lambda: all(gone(pid) for pid in pids), what="the end of the slots")
    driver.start_manager()
    assert driver.identity != first
    slots = driver.start(*(driver.spec(index, 2, decided_batch=B0) for index in range(2)))
    assert send(slots[0], 0, B1, [("a", 1)]) == [("a", 2, 2)]


@pytest.mark.parametrize("how", ["is gone", "does not answer", "does not want it any more"])
def test_without_its_driver_a_task_manager_ends_and_leaves_nothing(driver: Driver, how: str) -> None:
    driver.start_manager()
    driver.start(driver.spec(0))
    pids = [driver.manager_pid, *driver.slot_pids()]
    assert driver.local.is_dir()
    if how == "is gone":
        driver.server.close()
    elif how == "does not answer":
        driver.asleep = True
    else:
        driver.wanted = False
    wait_until(lambda: all(map(gone, pids)), what="the end of all processes")
    assert not driver.local.exists()
    assert not any(socket_folder(driver.run.run_id).glob("*/address.json"))


def test_an_upload_whose_local_files_cannot_be_read_is_declined(driver: Driver) -> None:
    """Else the coordinator would wait for it until the checkpoint times out."""
    manager = TaskManager(driver.run, "in this process")
    try:
        manager.start_slots({"specs": [msgspec.to_builtins(driver.spec(0))]})
        slot = manager._slots[0]
        slot.client.call("barrier", {"checkpoint": 1})
        (report,) = msgspec.convert(slot.client.call("report", {"checkpoint": 1}), list[SnapshotReport])
        (manifest,) = [Path(path) for name, path, *_ in report.files if name.startswith("MANIFEST")]
        manifest.unlink()
        manager._upload([slot], 1, time.time(), partial(manager._uploader.upload, 1))
        assert [(body["checkpoint"], body["lost"]) for body in driver.declined] == [(1, False)]
        assert manifest.name in driver.declined[0]["reason"]
    finally:
        for slot in manager._slots.values():
            slot.end()
        manager.server.close()


def test_a_checkpoint_file_that_is_damaged_or_missing_is_named(driver: Driver) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0))
    send(slots[0], 0, B0, [("a", 1)])
    driver.fan("commit", {"batch": B0})
    restore = checkpoint(driver, 1)
    (handle,) = [file.handle for file in restore[0].files if file.shared and file.handle]
    path = driver.durable / handle.path
    content = path.read_bytes()

    def restored(generation: int) -> dict[int, Client]:
        spec = driver.spec(0, 2, generation=generation, restore=restore, restore_batch=B0, decided_batch=B0)
        return driver.start(spec)

    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(DamagedFileError, match=rf"visits, operator totals, subtask 0: \S+/{handle.path} is damaged"):
        restored(2)
    path.write_bytes(content[:-1])
    with pytest.raises(DamagedFileError, match=f"{handle.path} is damaged: {len(content) - 1} bytes"):
        restored(3)
    path.unlink()
    with pytest.raises(DamagedFileError, match=f"{handle.path} is missing"):
        restored(4)
    assert driver.slot_pids() == []

    broken = [OperatorSpec(UID, b"junk")]
    with pytest.raises(StrandlineError, match="UnpicklingError"):
        driver.start(driver.spec(0, 2, generation=5, operators=broken))

    path.write_bytes(content)
    restored(6)
    assert driver.fan("status")[0]["committed"] == {UID: B0}
