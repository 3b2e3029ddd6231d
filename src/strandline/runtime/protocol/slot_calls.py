"""The calls that a slot answers. Its task manager makes them; relays give signs of life."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from strandline.checkpoint.metadata import SinkFile
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.calls import LONG, QUICK, Client, Nothing, call
from strandline.runtime.protocol.exchange import Delivery
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.messages import BatchTime, Rebuilt, Sealed, SnapshotReport
from strandline.runtime.protocol.profiles import MOST_SECONDS, Folded, Profile

NextTimers = dict[str, int]
"""When the steps of a slot next have something to do without rows: for each uid the earliest time by the step's clock.
A step without a clock, or with nothing to do, has no entry."""

EARLIEST = -(1 << 62)
"""A time that every clock has reached: the entry of a step whose timers are not known yet."""


PULSE_EVERY = 1.0
"""Seconds between two signs of life that a task manager asks a slot for, and that a relay gives to its slot."""


class BatchFailure(msgspec.Struct, frozen=True):
    """The failure of a slot's work on a batch."""

    batch: int
    round: int
    failure: Failure


class RowCounts(msgspec.Struct, frozen=True):
    """How many rows a step took in and gave in one batch, and how many bytes they have in Arrow."""

    rows_in: int = 0
    rows_out: int = 0
    """To all its outputs."""
    late_rows: int = 0
    """Rows among those it took in that came too late."""
    bytes_in: int = 0
    """Of rows that were combined before they came, those that came."""
    bytes_out: int = 0

    def plus(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.rows_in + other.rows_in,
            self.rows_out + other.rows_out,
            self.late_rows + other.late_rows,
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
        )

    def minus(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.rows_in - other.rows_in,
            self.rows_out - other.rows_out,
            self.late_rows - other.late_rows,
            self.bytes_in - other.bytes_in,
            self.bytes_out - other.bytes_out,
        )


class PushedRows(msgspec.Struct, frozen=True, array_like=True):
    """Output rows that a slot sends to the driver."""

    operator: str
    output: str | None
    """The side output; None for the main output."""
    stream: bytes
    """The rows as an Arrow stream."""
    rows: int = 0


class SlotStatus(msgspec.Struct, frozen=True):
    """Where a slot stands."""

    incarnation: int
    prepared: dict[str, tuple[int, int] | None]
    """The batch and round that each operator has prepared."""
    sealed: list[Sealed]
    """The segments of what is prepared."""
    committed: dict[str, int]
    """The last committed batch of each operator."""
    counts: dict[str, RowCounts]
    """The rows of what each operator has prepared."""
    failure: BatchFailure | None
    staged: list[SinkFile] = []
    """The rows of what is prepared that the slot itself has staged for sinks."""
    pushed: list[PushedRows] = []
    """The rows of what is prepared that the driver wants itself. Only the last answer to `prepare` has them."""
    forwarded: list[Delivery] = []
    """The rows that the operators have delivered to operators that read them. Only the answer to `prepare` has them."""


class OperatorFigures(msgspec.Struct, frozen=True):
    """What the state of one operator takes up in a slot, and what the operator has done since the slot started."""

    state_bytes: int
    memory_bytes: int
    estimated_keys: int
    taken_ns: int = 0
    """When the figures were taken, by a clock of the slot's that nobody sets. Shares follow from two of them."""
    rows_in: int = 0
    """Rows of committed batches."""
    rows_out: int = 0
    busy_ns: int = 0
    """How long the operator worked on rows, applied commits and took barriers."""
    back_pressured_ns: int = 0
    """How long it waited for relays, or for slots of the next step, to take its output."""
    first_key_group: int = 0
    key_group_rows: list[int] = []
    """`rows_in` for each key group, from `first_key_group` on."""
    cache_hits: int = 0
    """Reads of data blocks that RocksDB's cache answered."""
    cache_misses: int = 0
    """Those that it did not answer."""
    bytes_in: int = 0
    """Of the rows of committed batches, in Arrow."""
    bytes_out: int = 0


class SlotFigures(msgspec.Struct, frozen=True):
    """The figures of each operator, and what the slot's state takes of its memory."""

    operators: dict[str, OperatorFigures]
    budget_bytes: int
    used_bytes: int
    pid: int = 0
    """The process id of the slot. Figures of another process begin at 0 again."""


class BatchRound(msgspec.Struct, frozen=True):
    """One round of one batch."""

    batch: int
    round: int


class PrepareEmpty(msgspec.Struct, frozen=True):
    """Asks for the preparation of operators that Spark did not call in a round."""

    batch: int
    round: int
    time: BatchTime


class Prepare(msgspec.Struct, frozen=True):
    """Asks for the preparation of some operators, with rows that were delivered to them."""

    batch: int
    round: int
    time: BatchTime
    deliveries: list[Delivery]
    """The rows that count. What else was delivered comes from tasks that Spark repeated."""
    steps: list[str]
    """The operators. Those that read rows of these come with a later call."""
    addresses: str
    """Names where the slots are; see `Cluster.addresses`."""
    last: bool
    """Whether all operators of the slot are prepared then."""


class PrepareEpoch(msgspec.Struct, frozen=True):
    """Asks for the preparation of some operators with the rows of an epoch, in real time."""

    batch: int
    time: BatchTime
    deliveries: list[Delivery]
    """The rows that count. Some may still be on their way: the slot waits for them."""
    steps: list[str]
    """The operators. Those that read rows of these come with a later call."""
    addresses: str
    """Names where the slots are; see `Cluster.addresses`."""
    commits: int | None = None
    """The epoch before, if the slot has not been told that it is decided."""


class EpochSegment(msgspec.Struct, frozen=True, array_like=True):
    """What an epoch changed in one operator's state."""

    operator: str
    content: bytes
    """The segment as it is stored."""
    path: str
    """The segment on the slot's disk."""


class PreparedEpoch(msgspec.Struct, frozen=True, array_like=True):
    """What a slot has prepared of an epoch, for the driver that makes it durable."""

    incarnation: int
    counts: dict[str, RowCounts]
    """Of each operator that was asked for, as all that follows."""
    timers: NextTimers
    """What the operators wait for once the epoch is committed."""
    forwarded: list[Delivery]
    """As in `SlotStatus`."""
    segments: list[EpochSegment] = []
    """With the changelog. Without those that change nothing."""
    rows: list[PushedRows] = []
    """The output rows for sinks that are exactly once. The driver stages them with the next checkpoint."""
    pushed: list[PushedRows] = []
    """As in `SlotStatus`."""


class Commit(msgspec.Struct, frozen=True):
    """The decision that a batch is part of the state."""

    batch: int
    applied: bool = False
    """Whether the answer waits until the batch is applied, and its segment is on the slot's disk."""


class Query(msgspec.Struct, frozen=True):
    """Asks for the state of one key."""

    operator: str
    state: str | None
    """The name of a state of a processor; None for the only one, and for steps without user code."""
    key: bytes
    """The encoded key, without a key group."""


class Freeze(msgspec.Struct, frozen=True):
    """Asks for a snapshot of the committed state, known by `checkpoint` from then on."""

    checkpoint: int
    canonical: bool | None = None
    """For a savepoint: whether in the form that every backend reads. None: for a checkpoint."""


class SnapshotRef(msgspec.Struct, frozen=True):
    """Names a snapshot that was asked for."""

    checkpoint: int


class Pulse(msgspec.Struct, frozen=True):
    """A slot's sign of life."""

    silent_relay: float = 0.0
    """For how many seconds the relay of an exchange has been silent; the longest time of all exchanges."""
    failure: Failure | None = None
    """The death of a background thread. The slot cannot go on."""


class RelayAlive(msgspec.Struct, frozen=True):
    """A relay's sign of life."""

    exchange: str


class SlotReady(msgspec.Struct, frozen=True, tag="ready"):
    """What a slot process says on its standard output once its state is open."""

    address: Address
    states: dict[str, list[dict[str, object]]]
    """What each operator keeps, as checkpoints describe it."""
    rebuilt: list[Rebuilt]


class SlotFailed(msgspec.Struct, frozen=True, tag="failed"):
    """What a slot process says instead if it cannot start."""

    failure: Failure


def profile_deadline(request: Profile) -> float:
    """Seconds for which a caller waits for a profile: a slot whose threads are all busy samples more slowly."""
    return min(request.seconds, MOST_SECONDS) + 10.0


class SlotCalls(ABC):
    """What a slot can be asked to do."""

    @call(deadline=QUICK)
    @abstractmethod
    def status(self, request: Nothing) -> SlotStatus:
        """Where the slot stands."""

    @call(deadline=PULSE_EVERY, fenced=False)
    @abstractmethod
    def pulse(self, request: Nothing) -> Pulse:
        """A sign of life."""

    @call(deadline=2 * PULSE_EVERY, fenced=False)
    @abstractmethod
    def relay_alive(self, request: RelayAlive) -> None:
        """Notes a sign of life of a relay that is in the middle of an exchange."""

    @call(deadline=LONG)
    @abstractmethod
    def status_when_free(self, request: Nothing) -> SlotStatus:
        """Where the slot stands; a slot that is busy with a barrier or a commit answers later."""

    @call(deadline=QUICK)
    @abstractmethod
    def figures(self, request: Nothing) -> SlotFigures:
        """What the slot's state takes up."""

    @call(deadline=10.0)
    @abstractmethod
    def query(self, request: Query) -> bytes:
        """Whether the slot has something for a key, and the state of the key, pickled as a pair."""

    @call(deadline=profile_deadline)
    @abstractmethod
    def profile(self, request: Profile) -> Folded:
        """Samples the threads of the slot."""

    @call(deadline=LONG)
    @abstractmethod
    def prepare_empty(self, request: PrepareEmpty) -> None:
        """Prepares the operators that Spark did not call: for them the batch had no rows."""

    @call(deadline=LONG)
    @abstractmethod
    def prepare(self, request: Prepare) -> SlotStatus:
        """Prepares some operators with delivered rows, delivers their output to those that read it, and stages it for
        sinks."""

    @call(deadline=LONG)
    @abstractmethod
    def prepare_epoch(self, request: PrepareEpoch) -> PreparedEpoch:
        """Prepares some operators with the rows of an epoch, after it has committed the one before."""

    @call(deadline=LONG)
    @abstractmethod
    def discard(self, request: BatchRound) -> None:
        """Begins a round: what was prepared for the batch is void, and attempts of older rounds are refused."""

    @call(deadline=LONG)
    @abstractmethod
    def commit(self, request: Commit) -> NextTimers:
        """Makes the prepared batch the state of all operators."""

    @call(deadline=LONG)
    @abstractmethod
    def compact(self, request: Nothing) -> None:
        """Makes the state small on disk, for a snapshot that many checkpoints will name."""

    @call(deadline=LONG)
    @abstractmethod
    def freeze(self, request: Freeze) -> None:
        """Takes a snapshot of the committed state; its files are written in the background."""

    @call(deadline=LONG)
    @abstractmethod
    def report(self, request: SnapshotRef) -> list[SnapshotReport]:
        """The files of a snapshot, once they are all on disk."""

    @call(deadline=LONG)
    @abstractmethod
    def release(self, request: SnapshotRef) -> None:
        """Lets a snapshot's files go, unless they are the newest local ones."""

    @call(deadline=1.0, fenced=False)
    @abstractmethod
    def stop(self, request: Nothing) -> None:
        """Ends the process, after its answer."""


class SlotClient(Client, SlotCalls):
    """Calls a slot."""

    def status(self, request: Nothing) -> SlotStatus:
        return self.carry_out(SlotCalls.status, request)

    def pulse(self, request: Nothing) -> Pulse:
        return self.carry_out(SlotCalls.pulse, request)

    def relay_alive(self, request: RelayAlive) -> None:
        return self.carry_out(SlotCalls.relay_alive, request)

    def status_when_free(self, request: Nothing) -> SlotStatus:
        return self.carry_out(SlotCalls.status_when_free, request)

    def figures(self, request: Nothing) -> SlotFigures:
        return self.carry_out(SlotCalls.figures, request)

    def query(self, request: Query) -> bytes:
        return self.carry_out(SlotCalls.query, request)

    def profile(self, request: Profile) -> Folded:
        return self.carry_out(SlotCalls.profile, request)

    def prepare_empty(self, request: PrepareEmpty) -> None:
        return self.carry_out(SlotCalls.prepare_empty, request)

    def prepare(self, request: Prepare) -> SlotStatus:
        return self.carry_out(SlotCalls.prepare, request)

    def prepare_epoch(self, request: PrepareEpoch) -> PreparedEpoch:
        return self.carry_out(SlotCalls.prepare_epoch, request)

    def discard(self, request: BatchRound) -> None:
        return self.carry_out(SlotCalls.discard, request)

    def commit(self, request: Commit) -> NextTimers:
        return self.carry_out(SlotCalls.commit, request)

    def compact(self, request: Nothing) -> None:
        return self.carry_out(SlotCalls.compact, request)

    def freeze(self, request: Freeze) -> None:
        return self.carry_out(SlotCalls.freeze, request)

    def report(self, request: SnapshotRef) -> list[SnapshotReport]:
        return self.carry_out(SlotCalls.report, request)

    def release(self, request: SnapshotRef) -> None:
        return self.carry_out(SlotCalls.release, request)

    def stop(self, request: Nothing) -> None:
        return self.carry_out(SlotCalls.stop, request)
