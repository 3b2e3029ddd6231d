"""Rows that relays deliver to real slots: only what the driver names counts, whatever else was delivered."""

from __future__ import annotations

import os
import pickle
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from strandline.checkpoint.metadata import SinkFile
from strandline.errors import SlotLostError, StaleAttemptError, StrandlineError
from strandline.operators.base import KEY_GROUP_COLUMN
from strandline.runtime.delivery.deliveries import DeliveryExchange
from strandline.runtime.driver.opening import pickled
from strandline.runtime.protocol.exchange import Delivery, ExchangeHeader
from strandline.runtime.protocol.messages import OperatorSpec, StagerSpec
from strandline.runtime.protocol.slot_calls import BatchRound, Prepare, SlotClient
from strandline.runtime.protocol.taskmanager_calls import ForSlots, PreparedSlot
from strandline.sinks.base import Stager
from strandline.state.coding.keys import key_group_range
from tests.runtime.processes import B0, B1, GROUPS, NOON, PARALLELISM, TOTALS, UID, Driver, Rows
from tests.waiting import wait_until

pytestmark = pytest.mark.faults

SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64()), (KEY_GROUP_COLUMN, pa.int32())])


@dataclass(frozen=True)
class RowsIntoFile(Stager):
    """Writes what it stages into a folder, one file an attempt."""

    folder: str

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        rows = [tuple(row.values()) for one in batches for row in one.to_pylist()]
        path = Path(self.folder) / uuid.uuid4().hex
        path.write_bytes(pickle.dumps(rows))
        yield SinkFile("here", str(path), "", len(rows), path.stat().st_size)


def header(index: int, batch: int, partition: int, round_: int = 0) -> ExchangeHeader:
    name = uuid.uuid4().hex
    return ExchangeHeader(1, batch, round_, UID, index, 77, NOON, exchange=name, partition=partition)


def arrow(index: int, rows: Rows) -> pa.RecordBatch:
    group = key_group_range(index, PARALLELISM, GROUPS).start
    columns = ([user for user, _ in rows], [x for _, x in rows], [group] * len(rows))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def deliver(slot: SlotClient, of: ExchangeHeader, *batches: Rows) -> Delivery:
    """What a relay does with the rows of its partition for one slot."""
    with DeliveryExchange(of, SCHEMA, slot) as exchange:
        for rows in batches:
            exchange.send(arrow(of.subtask, rows))
        exchange.finish()
        return exchange.delivered()


def half_of(slot: SlotClient, of: ExchangeHeader) -> None:
    """A task that dies in the middle of a delivery."""
    with DeliveryExchange(of, SCHEMA, slot) as exchange:
        exchange.send(arrow(of.subtask, [("c", 1)]))
        raise ZeroDivisionError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "staged"
    made.mkdir()
    return made


@pytest.fixture
def slots(driver: Driver, folder: Path) -> dict[int, SlotClient]:
    operators = [OperatorSpec(UID, pickled(TOTALS), [StagerSpec(None, pickled(RowsIntoFile(str(folder))))])]
    driver.start_manager()
    return driver.start(*(driver.spec(index, operators=operators) for index in range(2)))


def prepare(driver: Driver, batch: int, *deliveries: Delivery, round_: int = 0) -> dict[int, PreparedSlot]:
    request = Prepare(batch, round_, NOON, list(deliveries), [UID], "here", last=True)
    answers = driver.manager.prepare(ForSlots([0, 1], request))
    for failure in answers.failures.values():
        raise failure.error()
    return answers.values


def staged(prepared: dict[int, PreparedSlot]) -> list[tuple[Any, ...]]:
    """The rows that the driver would publish."""
    files = [file for slot in prepared.values() for file in slot.status.staged]
    return sorted(row for file in files for row in pickle.loads(Path(file.staged).read_bytes()))


def test_only_the_deliveries_that_the_driver_names_count(driver: Driver, slots: dict[int, SlotClient]) -> None:
    first = deliver(slots[0], header(0, B0, 0), [("a", 1)], [("b", 2), ("a", 3)])
    deliver(slots[0], header(0, B0, 1), [("a", 1000)])  # the task is repeated, and this attempt does not count
    second = deliver(slots[0], header(0, B0, 1), [("a", 5)])
    third = deliver(slots[1], header(1, B0, 1), [("z", 7)])

    prepared = prepare(driver, B0, third, second, first)
    assert staged(prepared) == [("a", 3, 9), ("b", 1, 2), ("z", 1, 7)]
    assert prepared[0].status.prepared == {UID: (B0, 0)}
    counts = prepared[0].status.counts[UID]
    assert (counts.rows_in, counts.rows_out) == (4, 2)
    assert staged(prepare(driver, B0, third, second, first)) == [("a", 3, 9), ("b", 1, 2), ("z", 1, 7)], "repeated"
    driver.commit(B0)

    with pytest.raises(StaleAttemptError, match="is over"):
        deliver(slots[0], header(0, B0, 0), [("late", 1)])
    assert staged(prepare(driver, B1)) == [], "a batch without rows"
    driver.commit(B1)


def test_a_new_round_begins_without_the_rows_of_the_old_one(driver: Driver, slots: dict[int, SlotClient]) -> None:
    old = deliver(slots[0], header(0, B0, 0), [("a", 1)])
    prepare(driver, B0, old)
    assert driver.manager.discard(ForSlots([0, 1], BatchRound(B0, 1))).failures == {}
    with pytest.raises(StaleAttemptError, match="round 0 is over"):
        deliver(slots[0], header(0, B0, 0), [("a", 1)])
    with pytest.raises(StaleAttemptError, match="not in the slot any more"):
        prepare(driver, B0, old, round_=1)
    new = deliver(slots[0], header(0, B0, 0, round_=1), [("a", 2)])
    assert staged(prepare(driver, B0, new, round_=1)) == [("a", 1, 2)]
    driver.commit(B0)


def test_a_delivery_of_which_rows_are_missing_is_refused(driver: Driver, slots: dict[int, SlotClient]) -> None:
    whole = deliver(slots[0], header(0, B0, 0), [("a", 1), ("b", 1)])
    with pytest.raises(StaleAttemptError, match="the 3 rows of partition 0 are not in the slot"):
        prepare(driver, B0, msgspec.structs.replace(whole, rows=3))
    cut = header(0, B0, 1)
    with pytest.raises(ZeroDivisionError):
        half_of(slots[0], cut)
    with pytest.raises(StaleAttemptError, match="not in the slot"):
        prepare(driver, B0, whole, Delivery(UID, 0, 1, cut.exchange, 1))
    assert staged(prepare(driver, B0, whole)) == [("a", 1, 1), ("b", 1, 1)]


def test_deliveries_die_with_their_slot_and_with_nothing_else(
    driver: Driver, slots: dict[int, SlotClient], folder: Path
) -> None:
    lost = deliver(slots[0], header(0, B0, 0), [("a", 1)])
    kept = deliver(slots[1], header(1, B0, 0), [("z", 1)])
    os.kill(driver.slot_pids()[0], signal.SIGKILL)
    wait_until(lambda: driver.lost == {0}, what="the report of the loss")
    answers = driver.manager.prepare(ForSlots([0, 1], Prepare(B0, 0, NOON, [lost, kept], [UID], "here", last=True)))
    assert isinstance(answers.failures[0].error(), SlotLostError)
    assert staged(answers.values) == [("z", 1, 1)]

    operators = [OperatorSpec(UID, pickled(TOTALS), [StagerSpec(None, pickled(RowsIntoFile(str(folder))))])]
    slots |= driver.start(driver.spec(0, 2, operators=operators))
    with pytest.raises(StaleAttemptError, match="not in the slot"):
        prepare(driver, B0, lost, kept)
    driver.manager.discard(ForSlots([0, 1], BatchRound(B0, 1)))
    again = [
        deliver(slots[0], header(0, B0, 0, round_=1), [("a", 1)]),
        deliver(slots[1], header(1, B0, 0, round_=1), [("z", 1)]),
    ]
    assert staged(prepare(driver, B0, *again, round_=1)) == [("a", 1, 1), ("z", 1, 1)]


def test_rows_beyond_the_memory_of_a_batch_wait_on_disk_and_are_gone_afterwards(
    driver: Driver, slots: dict[int, SlotClient]
) -> None:
    many = [(f"user-{number:07d}" * 10, 1) for number in range(20_000)]  # 2.4 MB; a slot has 1 MB for a batch
    one = deliver(slots[0], header(0, B0, 0), many[:10_000], many[10_000:])
    spilled = list(driver.local.rglob("input-*.arrow"))
    assert len(spilled) == 1
    prepared = prepare(driver, B0, one)
    counts = prepared[0].status.counts[UID]
    assert (counts.rows_in, counts.rows_out) == (20_000, 20_000)
    assert min(counts.bytes_in, counts.bytes_out) > 20_000 * (120 + 8)
    driver.commit(B0)
    assert list(driver.local.rglob("input-*.arrow")) == []


def test_a_sink_that_cannot_stage_fails_the_round_and_not_the_slot(
    driver: Driver, slots: dict[int, SlotClient], folder: Path
) -> None:
    one = deliver(slots[0], header(0, B0, 0), [("a", 1)])
    folder.rename(folder.with_name("away"))
    with pytest.raises(StrandlineError, match="No such file"):
        prepare(driver, B0, one)
    folder.with_name("away").rename(folder)
    driver.manager.discard(ForSlots([0, 1], BatchRound(B0, 1)))
    again = deliver(slots[0], header(0, B0, 0, round_=1), [("a", 1)])
    assert staged(prepare(driver, B0, again, round_=1)) == [("a", 1, 1)]
