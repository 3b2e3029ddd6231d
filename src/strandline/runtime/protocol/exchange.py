"""An exchange of rows between a relay and a slot: what goes over the wire, and in which order.

1. The relay opens the exchange with an `ExchangeHeader`, and tells its schema.
2. The slot answers `SEND_INPUT`, if the subtask is not prepared yet. Then the relay sends all rows, and at the end how
   many they were.
3. The slot answers `OUTPUT_FOLLOWS` once the subtask is prepared, and then its output rows.

Without Spark's shuffle, rows are delivered instead: many relays have rows for one slot. The header names the partition
that the relay reads. The relay sends all its rows for the slot, and how many they were. The slot answers `RECEIVED`,
and keeps the rows until the driver names the deliveries that count, in `SlotCalls.prepare`. Slots deliver the output of
a step to the slots of the next step in the same way.

In real time such an exchange goes on for as long as the relay runs. A `Section` ends the rows of every cut. The slot
does not answer it: an epoch waits for the sections that it names; see `cuts`.
"""

from __future__ import annotations

import msgspec

from strandline.runtime.protocol.messages import BatchTime

SEND_INPUT = b"send input"
OUTPUT_FOLLOWS = b"output follows"
RECEIVED = b"received"


class ExchangeHeader(msgspec.Struct, frozen=True):
    """Says to which attempt of which batch an exchange belongs; the slot refuses a stale one."""

    generation: int
    batch: int
    round: int
    operator: str
    subtask: int
    attempt: int
    time: BatchTime
    initial: bool = False
    """Whether the rows are initial state, before the first batch of a job that begins."""
    exchange: str = ""
    """Names the exchange. The relay gives signs of life under this name until the exchange ends."""
    partition: int | None = None
    """The partition of which rows are delivered; None if the rows are those of the whole subtask. See `Delivery`."""
    goes_on: bool = False
    """Whether the exchange brings the rows of many cuts, each of which names its batch."""


class Delivery(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The rows of one partition that were delivered to one subtask."""

    operator: str
    subtask: int
    partition: int
    """The partition that a relay reads. Below zero: output of a subtask of another step; see `partition_of_feed`."""
    exchange: str
    """The name of the exchange that brought them. A task that Spark repeats has exchanges of its own."""
    rows: int


def partition_of_feed(number: int, subtask: int, parallelism: int) -> int:
    """What takes the place of a partition if the rows are the output of a subtask: no other delivery has it."""
    return -1 - (number * parallelism + subtask)
