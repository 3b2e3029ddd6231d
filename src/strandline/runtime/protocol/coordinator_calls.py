"""The calls that the driver answers: task managers register and report, relays ask where the slots are."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from strandline.checkpoint.pending import SubtaskAck
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.calls import LONG, QUICK, Client, Nothing, call
from strandline.runtime.protocol.cuts import CutOrder, RelayNews
from strandline.runtime.protocol.failures import Failure

HEARTBEAT_EVERY = 1.0
"""Seconds between two heartbeats of a task manager."""


class Registration(msgspec.Struct, frozen=True):
    """A task manager that has begun."""

    identity: str
    address: Address
    pid: int
    started: int = 0
    """When the process began, in ticks since its host did: its id alone may be used again."""


class Heartbeat(msgspec.Struct, frozen=True):
    """A sign of life of a task manager."""

    identity: str
    lost: list[int]
    """Slots whose process has ended."""
    failure: Failure | None = None
    """The death of a background thread, here or in a slot. The task manager cannot go on."""
    restored_bytes: int = 0
    """How many bytes of their state the slots have restored that are being started."""
    restored_generation: int = 0
    """The generation of these slots."""


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    """What the driver says to a sign of life."""

    wanted: bool
    """Whether the task manager is still needed; if not, it ends."""


class Acknowledgement(msgspec.Struct, frozen=True):
    """One subtask's part of a checkpoint is durable."""

    generation: int
    """The generation of the slot that took the snapshot. The task manager may serve a newer one by now."""
    checkpoint: int
    ack: SubtaskAck


class Decline(msgspec.Struct, frozen=True):
    """A task manager cannot make its part of a checkpoint durable."""

    generation: int
    checkpoint: int
    reason: str
    slot_lost: bool
    """Whether the reason is a lost slot: then nobody is to blame, and the checkpoint is taken again."""


class CoordinatorCalls(ABC):
    """What the driver can be asked to do."""

    @call(deadline=10.0, fenced=False)
    @abstractmethod
    def register(self, request: Registration) -> None:
        """Makes a task manager known."""

    @call(deadline=HEARTBEAT_EVERY, fenced=False)
    @abstractmethod
    def heartbeat(self, request: Heartbeat) -> HeartbeatAnswer:
        """Notes that a task manager lives."""

    @call(deadline=30.0)
    @abstractmethod
    def slot_addresses(self, request: Nothing) -> dict[int, Address]:
        """Where the slots are."""

    @call(deadline=QUICK)
    @abstractmethod
    def next_cut(self, request: RelayNews) -> CutOrder:
        """Takes a relay's cut, and answers when the relay should cut its rows again."""

    @call(deadline=LONG)
    @abstractmethod
    def acknowledge(self, request: Acknowledgement) -> None:
        """Takes a subtask's acknowledgement of a checkpoint."""

    @call(deadline=LONG)
    @abstractmethod
    def decline(self, request: Decline) -> None:
        """Takes the news that a checkpoint cannot complete."""


class CoordinatorClient(Client, CoordinatorCalls):
    """Calls the driver."""

    def register(self, request: Registration) -> None:
        return self.carry_out(CoordinatorCalls.register, request)

    def heartbeat(self, request: Heartbeat) -> HeartbeatAnswer:
        return self.carry_out(CoordinatorCalls.heartbeat, request)

    def slot_addresses(self, request: Nothing) -> dict[int, Address]:
        return self.carry_out(CoordinatorCalls.slot_addresses, request)

    def next_cut(self, request: RelayNews) -> CutOrder:
        return self.carry_out(CoordinatorCalls.next_cut, request)

    def acknowledge(self, request: Acknowledgement) -> None:
        return self.carry_out(CoordinatorCalls.acknowledge, request)

    def decline(self, request: Decline) -> None:
        return self.carry_out(CoordinatorCalls.decline, request)
