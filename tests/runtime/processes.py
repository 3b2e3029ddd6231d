"""A driver without Spark for real task managers and slots, and what a relay does with rows."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.flight as flight

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.metadata import SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import count
from strandline.operators.aggregate.functions import sum as sum_of
from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.opening import pickled
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.calls import NOTHING, Nothing
from strandline.runtime.protocol.coordinator_calls import (
    Acknowledgement,
    CoordinatorCalls,
    Decline,
    Heartbeat,
    HeartbeatAnswer,
    Registration,
)
from strandline.runtime.protocol.cuts import CutOrder, RelayNews
from strandline.runtime.protocol.exchange import ExchangeHeader
from strandline.runtime.protocol.failures import translate
from strandline.runtime.protocol.folders import run_folder, socket_folder
from strandline.runtime.protocol.logs import log_folder
from strandline.runtime.protocol.messages import (
    BackendSettings,
    BatchTime,
    OperatorSpec,
    RunInfo,
    SlotSpec,
    StorageSettings,
)
from strandline.runtime.protocol.server import Server
from strandline.runtime.protocol.slot_calls import (
    PrepareEmpty,
    SlotClient,
    SlotStatus,
)
from strandline.runtime.protocol.taskmanager_calls import (
    CheckpointCompleted,
    CommitBatch,
    ForSlots,
    SlotAnswers,
    StartSlots,
    TakeCheckpoint,
    TaskManagerClient,
)
from strandline.runtime.protocol.tls import Tls
from strandline.runtime.protocol.user_folder import make_private
from strandline.runtime.task.launcher import ensure_task_manager
from strandline.runtime.task.relay import _exchange
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import key_group_range
from tests.runtime.taskmanager.changelog.host import upload_settings
from tests.waiting import wait_until

JOB, UID, SECRET = "visits", "totals", "the-secret-of-the-run"
GROUPS, PARALLELISM = 128, 2
HEARTBEAT_TIMEOUT = 3.0
TOTALS = AggregateOperator(UID, ["user"], parse_schema("user string, x long"), {"n": count(), "s": sum_of("x")})
OPERATORS = [OperatorSpec(UID, pickled(TOTALS))]

Rows = list[tuple[str, int]]


def run_info(run_id: str, coordinator: Address, root: Path, tls: Tls | None = None) -> RunInfo:
    return RunInfo(
        JOB,
        run_id,
        SECRET,
        coordinator,
        str(root / "local"),
        "127.0.0.1",
        HEARTBEAT_TIMEOUT,
        StorageSettings(str(root / "durable"), {}),
        [],
        upload_settings(),
        tls=tls,
    )


class Driver(CoordinatorCalls):
    """A coordinator without a query: it listens, and remembers what it was told."""

    def __init__(self, root: Path, tls: Tls | None = None) -> None:
        run_id = uuid.uuid4().hex
        self.managers: dict[str, Registration] = {}
        self.lost: set[int] = set()
        self.failures: list[str] = []
        self.acks: dict[int, dict[int, SubtaskAck]] = {}
        self.declined: list[Decline] = []
        self.wanted = True
        self.generation = 1
        self.asleep = False
        self.seen: set[int] = set()
        self.server = Server(
            SECRET,
            CoordinatorCalls,
            self,
            run_id=run_id,
            generation=lambda: 0,
            bind_host="127.0.0.1",
            unix_path=str(make_private(socket_folder(run_id)) / "c.sock"),
            tls=tls,
        )
        self.run = run_info(run_id, self.server.address, root, tls)
        self.durable = root / "durable"
        self.local = run_folder(self.run.local_dir, JOB, run_id)
        self.logs = log_folder(self.run.local_dir, JOB, run_id)

    def register(self, request: Registration) -> None:
        self.managers[request.identity] = request
        self.seen.add(request.pid)

    def heartbeat(self, request: Heartbeat) -> HeartbeatAnswer:
        while self.asleep:
            time.sleep(0.05)  # for as long as the test wants no answer
        self.lost = set(request.lost)
        self.failures += [request.failure.text] if request.failure is not None else []
        return HeartbeatAnswer(self.wanted)

    def acknowledge(self, request: Acknowledgement) -> None:
        self.acks.setdefault(request.checkpoint, {})[request.ack.state.subtask] = request.ack

    def decline(self, request: Decline) -> None:
        self.declined.append(request)

    def next_cut(self, request: RelayNews) -> CutOrder:
        raise NotImplementedError("no relay asks here")

    def slot_addresses(self, request: Nothing) -> dict[int, Address]:
        raise NotImplementedError("no relay asks here")

    def start_manager(self) -> TaskManagerClient:
        self.identity = ensure_task_manager(self.run)
        address = self.managers[self.identity].address
        self.manager = TaskManagerClient(
            address,
            SECRET,
            self.run.run_id,
            lambda: self.generation,
            patience=HEARTBEAT_TIMEOUT,
            tls=self.run.tls,
        )
        return self.manager

    @property
    def manager_pid(self) -> int:
        return self.managers[self.identity].pid

    def slot_pids(self) -> list[int]:
        slots = self.manager.describe(NOTHING).slots
        pids = [slots[index].pid for index in sorted(slots)]
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

    def start(self, *specs: SlotSpec) -> dict[int, SlotClient]:
        self.generation = max(spec.generation for spec in specs)
        started = self.manager.start_slots(StartSlots(list(specs), use_copies=False))
        self.slot_pids()
        return {index: self.client(slot.address) for index, slot in started.items()}

    def client(self, address: Address, secret: str = SECRET) -> SlotClient:
        return SlotClient(address, secret, self.run.run_id, lambda: self.generation, tls=self.run.tls)

    def prepare_empty(self, batch: int, round_: int) -> None:
        request = ForSlots([0, 1], PrepareEmpty(batch, round_, NOON))
        assert self.manager.prepare_empty(request).failures == {}

    def commit(self, batch: int) -> None:
        answers = self.manager.commit(ForSlots([0, 1], CommitBatch(batch)))
        assert answers.failures == {}
        assert all(one.timers == {} for one in answers.values.values())

    def statuses(self) -> SlotAnswers[SlotStatus]:
        return self.manager.slot_status(ForSlots([0, 1], NOTHING))

    def close(self) -> None:
        self.asleep = False
        self.server.close()
        for pid in self.seen:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(socket_folder(self.run.run_id), ignore_errors=True)


def gone(pid: int) -> bool:
    """A zombie is gone too: only the test process has not asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def send(slot: SlotClient, index: int, batch: int, rows: Rows, round_: int = 0) -> list[tuple[Any, ...]]:
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
    answers = driver.manager.take_checkpoint(TakeCheckpoint(checkpoint=number, timeout=20))
    assert answers.failures == {}
    wait_until(lambda: len(driver.acks.get(number, {})) == len(answers.values), what="the last acknowledgement")
    driver.manager.checkpoint_completed(CheckpointCompleted(number, {}))
    return [ack.state for ack in driver.acks[number].values()]


NOON = BatchTime(12 * 3600 * 1000)
B0, B1, B2 = (batch_id(1, number) for number in range(3))


def cluster_without_spark(root: Path) -> Cluster:
    """The driver's own view of task managers. Nothing may be asked of Spark."""
    run_id = uuid.uuid4().hex

    def info(coordinator: Address) -> RunInfo:
        return run_info(run_id, coordinator, root)

    return Cluster(
        SimpleNamespace(),  # type: ignore[arg-type]  # nothing is asked of Spark here
        info,
        run_id=run_id,
        secret=SECRET,
        bind_host="127.0.0.1",
        advertise_host="127.0.0.1",
    )
