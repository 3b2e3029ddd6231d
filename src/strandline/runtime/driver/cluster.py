"""The cluster of a run, as the driver sees it: starts slots, finds lost ones, replaces them, and calls them."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from strandline.checkpoint.batch import is_of
from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import SlotLostError, StaleAttemptError, StrandlineError
from strandline.runtime.driver.deployment import NO_RESTORE_POINT, Deployment, RestorePoint
from strandline.runtime.driver.durable_segments import DurableSegments
from strandline.runtime.driver.placement import rescaled_homes, spread
from strandline.runtime.driver.realtime.slots import EpochSlots
from strandline.runtime.driver.recoveries import (
    KEPT_RECOVERIES,
    Began,
    Recovery,
    lost_slots_text,
    slot_recovery,
)
from strandline.runtime.driver.restore.savepoints import SavepointTarget
from strandline.runtime.driver.restored_state import RestoredState
from strandline.runtime.driver.run_logs import RunLogs
from strandline.runtime.driver.slot_samples import SlotSample
from strandline.runtime.driver.task_managers import Answers, TaskManagers
from strandline.runtime.protocol.address import Address, is_local_master
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
from strandline.runtime.protocol.exchange import Delivery
from strandline.runtime.protocol.figures import ChangelogFigures
from strandline.runtime.protocol.folders import DRIVER_SOCKET, socket_folder
from strandline.runtime.protocol.logs import slot_log
from strandline.runtime.protocol.messages import (
    BatchTime,
    Rebuilt,
    RunInfo,
    SlotSpec,
)
from strandline.runtime.protocol.profiles import Folded, Profile
from strandline.runtime.protocol.server import Server
from strandline.runtime.protocol.slot_calls import (
    BatchRound,
    Prepare,
    PrepareEmpty,
    Query,
    SlotClient,
    SlotStatus,
)
from strandline.runtime.protocol.taskmanager_calls import (
    Barrier,
    CheckpointAborted,
    CheckpointCompleted,
    CommitBatch,
    CommittedSlot,
    DurableSegment,
    ForSlots,
    OlderSlots,
    PreparedSlot,
    SlotAnswers,
    SpareSlots,
    StartedSlot,
    StartSlots,
    TakeCheckpoint,
    TakeSavepoint,
    TaskManagerClient,
    TaskManagerInfo,
)
from strandline.runtime.protocol.tls import Tls
from strandline.runtime.protocol.user_folder import make_private
from strandline.runtime.task.launcher import ensure_task_manager

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

CLOSE_PATIENCE = 20.0
"""Seconds that task managers get to stop their slots and to delete files, at the end of a run."""
JOB_GROUP = "spark.jobGroup.id"
"""The local property of Spark by which jobs are cancelled together."""

SLOT_PATIENCE = 10
"""After how many times the heartbeat timeout the driver gives up a slot that it calls itself. The slot's task manager
is quicker, and can tell a frozen slot from a busy one."""

Asked = TypeVar("Asked")
Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot runs."""

    manager: str
    address: Address


class CheckpointListener(Protocol):
    """Whoever takes the news of checkpoints that arrive from task managers: the generation that runs."""

    def acknowledge(self, news: Acknowledgement) -> None: ...

    def decline(self, news: Decline) -> None: ...


class CutsOfRelays(Protocol):
    """Whoever tells relays when to cut their rows: the generation that runs in real time."""

    def next_cut(self, news: RelayNews) -> CutOrder: ...


class Cluster(CoordinatorCalls):
    """Starts, finds, calls and replaces slots. One per run; it outlives the run's generations."""

    def __init__(
        self,
        spark_context: SparkContext,
        make_run: Callable[[Address], RunInfo],
        *,
        run_id: str,
        secret: str,
        bind_host: str,
        advertise_host: str,
        tls: Tls | None = None,
    ) -> None:
        self.spark_context = spark_context
        self.listener: CheckpointListener | None = None
        self.cuts: CutsOfRelays | None = None
        """Whoever answers relays, while a query runs in real time."""
        self.recoveries: deque[Recovery] = deque(maxlen=KEPT_RECOVERIES)
        self.on_recovery: Callable[[Recovery], None] = lambda _recovery: None
        """Called with every recovery. It must not wait."""
        self.restored = RestoredState()
        """How far the slots of a generation that is being opened are with their state."""
        self._moves = 0
        self.failure: StrandlineError | None = None
        """The death of a background thread in a task manager or a slot of this generation."""
        self._places: dict[int, Place] = {}
        self._incarnations: dict[int, int] = {}
        self._homes: dict[int, str] = {}
        """The task manager that each slot was last given to; a slot returns there as long as it lives."""
        self._deployment: Deployment | None = None
        self._restore = NO_RESTORE_POINT
        self._segments = DurableSegments()
        self._why_lost: dict[int, str] = {}
        """Why the slots were lost that are being replaced."""
        self._closed = False
        self.abandoned = False
        """Whether the run ends at once: nobody waits for slots any more."""
        self._lock = threading.RLock()
        self._secret = secret
        self._tls = tls
        self._run_id = run_id
        self._server = Server(
            secret,
            CoordinatorCalls,
            self,
            run_id=run_id,
            generation=self._generation,
            bind_host=bind_host,
            advertise_host=advertise_host,
            tls=tls,
            unix_path=str(make_private(socket_folder(run_id)) / DRIVER_SOCKET),
        )
        self.run = make_run(self._server.address)
        self._managers = TaskManagers(self.run.heartbeat_timeout)
        self.logs = RunLogs(self.run, self._managers, self._home_of)

    # --- what task managers and relays ask ---------------------------------------------------------

    def _generation(self) -> int:
        return self._deployment.generation if self._deployment is not None else 0

    def register(self, request: Registration) -> None:
        client = TaskManagerClient(
            request.address,
            self._secret,
            self._run_id,
            self._generation,
            patience=self.run.heartbeat_timeout,
            tls=self._tls,
        )
        self._managers.register(request, client)
        log.info("job %s: task manager %s registered", self.run.job, request.identity)

    def heartbeat(self, request: Heartbeat) -> HeartbeatAnswer:
        wanted = self._managers.heartbeat(request) and not self._closed
        self.restored.note(request.identity, request.restored_generation, request.restored_bytes)
        if wanted and request.failure is not None:
            self.failure = request.failure.error()
            # It cannot go on: the next generation gets another one.
            self._managers.forget(request.identity, str(self.failure))
            wanted = False
        return HeartbeatAnswer(wanted)

    def slot_addresses(self, request: Nothing) -> dict[int, Address]:
        return {index: place.address for index, place in list(self._places.items())}

    def next_cut(self, request: RelayNews) -> CutOrder:
        cuts = self.cuts
        if cuts is None:
            raise StaleAttemptError(f"job {self.run.job}: no query runs in real time")
        return cuts.next_cut(request)

    def acknowledge(self, request: Acknowledgement) -> None:
        if self.listener is not None:
            self.listener.acknowledge(request)

    def decline(self, request: Decline) -> None:
        if self.listener is not None:
            self.listener.decline(request)

    # --- starting and replacing --------------------------------------------------------------------

    def deploy(self, deployment: Deployment) -> dict[int, list[Rebuilt]]:
        """Start all slots of a new generation from what it restores. Earlier generations' slots end."""
        with self._lock:
            if deployment.rescale and self._deployment is not None:
                self._homes = rescaled_homes(self._deployment, deployment, self._homes, self._discover(1))
            self._deployment = deployment
            self.failure = None
            self._places = {}
            self._restore = deployment.restore
            self._segments = DurableSegments(deployment.restore.batch)
            try:
                rebuilt = self._start(range(deployment.parallelism), deployment.restore.batch, self.restored.begin)
            finally:
                self.restored.end()
            used = {place.manager for place in self._places.values()}
            others = [identity for identity in self._managers if identity not in used]
            older = OlderSlots(deployment.generation)
            for identity, answer in self._managers.ask(others, TaskManagerClient.end_older_slots, older):
                if isinstance(answer, SlotLostError):
                    self._managers.forget(identity, str(answer))
            return rebuilt

    def set_restore_point(self, generation: int, metadata: CheckpointMetadata) -> None:
        """A checkpoint of the job is complete: slots without local files start from it from now on.

        Waits while slots start: they may need the files of the checkpoint before, which are deleted after this call.
        Does nothing if the checkpoint is of a generation that has ended.
        """
        with self._lock:
            if generation == self._generation():
                self._restore = RestorePoint(
                    metadata.batch_id, metadata.subtasks, checkpoint=metadata.checkpoint_id, steps=metadata.steps
                )
                self._segments.truncate(metadata.batch_id)

    def lost(self) -> dict[int, str]:
        """Slots that do not run any more, and why, found by asking every task manager."""
        with self._lock:
            assert self._deployment is not None
            found = {
                index: self._why_lost.get(index, "it did not start") for index in range(self._deployment.parallelism)
            }
            owners = {place.manager for place in self._places.values()}
            for identity, answer in self._managers.ask(owners, TaskManagerClient.describe, NOTHING):
                own = [index for index, place in self._places.items() if place.manager == identity]
                if isinstance(answer, StrandlineError):
                    log.warning("job %s: task manager %s is lost: %s", self.run.job, identity, answer)
                    self._managers.forget(identity, str(answer))
                    why = self._managers.given_up.get(identity, str(answer))
                    found.update(dict.fromkeys(own, f"task manager {identity} is lost: {why}"))
                    continue
                for index in own:
                    slot = answer.slots.get(index)
                    if slot is not None and slot.alive:
                        found.pop(index, None)
                    else:
                        found[index] = (slot.ended if slot is not None else "") or "its process is gone"
            return found

    @property
    def addresses(self) -> str:
        """Names where the slots are. The name changes whenever one moves: relays then ask for the addresses again."""
        return f"{self.run.run_id}-{self._moves}"

    def incarnation(self, index: int) -> int:
        """How often slot `index` was started in this run."""
        return self._incarnations[index]

    def suspects(self) -> bool:
        """Whether a heartbeat reported a lost slot, or one is missing; cheap, no call."""
        if self._deployment is not None and len(self._places) < self._deployment.parallelism:
            return True
        return any(self._managers.suspect(place.manager) for place in list(self._places.values()))

    def give_up_silent(self) -> bool:
        """Give up the task managers that are silent, while a batch may wait for their slots.

        Those on the driver's host are killed, and then the batch fails by itself. Returns whether there are others: a
        batch that waits for their slots must be interrupted.
        """
        silent = self._managers.silent()
        for identity in silent:
            log.warning(
                "job %s: task manager %s has been silent for %g s (heartbeat_timeout)",
                self.run.job,
                identity,
                self.run.heartbeat_timeout,
            )
            self._managers.forget(
                identity, f"it has been silent for {self.run.heartbeat_timeout:g} s (heartbeat_timeout)"
            )
        return any(not one.nearby for one in silent.values())

    def recover(self, decided_batch: int) -> list[int]:
        """Replace every lost slot at `decided_batch`; the others keep their state. Returns which were replaced."""
        with self._lock:
            if self.abandoned:
                raise SlotLostError(f"job {self.run.job}: the run ends")
            lost = self.lost()
            missing = sorted(lost)
            if missing:
                why = lost_slots_text(lost)
                log.warning("job %s: replacing slots %s at batch %d: %s", self.run.job, missing, decided_batch, why)
                self._why_lost = lost  # for the next attempt, if this one fails
                began = Began.now()
                rebuilt = self._start(missing, decided_batch)
                self._why_lost = {}
                self.note_recovery(slot_recovery(began, decided_batch, rebuilt, why))
            return missing

    def note_recovery(self, recovery: Recovery) -> None:
        """Keep the record of a recovery, and tell whoever listens."""
        self.recoveries.append(recovery)
        self.on_recovery(recovery)

    def _start(
        self,
        indices: Sequence[int],
        decided_batch: int,
        begin: Callable[[list[SlotSpec]], None] = lambda _specs: None,
    ) -> dict[int, list[Rebuilt]]:
        """Start slots at `decided_batch`; each returns to its task manager if that lives. `begin` gets their specs."""
        deployment = self._deployment
        assert deployment is not None
        for index in indices:
            self._places.pop(index, None)
        homes = self._allocate(indices)
        known = {**self._homes, **homes}
        beside = Counter(known[index] for index in range(deployment.parallelism) if index in known)
        specs: dict[str, list[SlotSpec]] = {}
        for index in indices:
            self._incarnations[index] = self._incarnations.get(index, 0) + 1
            spec = deployment.slot_spec(
                self.run,
                index,
                self._incarnations[index],
                self._restore,
                self._segments,
                decided_batch,
                beside[homes[index]],
            )
            specs.setdefault(homes[index], []).append(spec)
        begin([spec for some in specs.values() for spec in some])
        use_copies = deployment.rescale or self.run.local_recovery
        requests = {identity: StartSlots(some, use_copies) for identity, some in specs.items()}
        started: dict[str, dict[int, StartedSlot]] = {}
        answers = self._managers.ask_each(TaskManagerClient.start_slots, requests)
        for identity, answer in zip(requests, answers, strict=True):
            if isinstance(answer, StrandlineError):
                raise answer
            started[identity] = answer
        rebuilt: dict[int, list[Rebuilt]] = {}
        for identity, slots in started.items():
            for index, slot in slots.items():
                self._places[index] = Place(identity, slot.address)
                rebuilt[index] = slot.rebuilt
        self._homes.update(homes)
        self._moves += 1
        return rebuilt

    def _allocate(self, indices: Sequence[int]) -> dict[int, str]:
        """The task manager of each slot: where the slot was before, else where the fewest slots are."""
        homes = {index: self._homes[index] for index in indices if self._homes.get(index) in self._managers}
        for identity, answer in self._managers.ask(set(homes.values()), TaskManagerClient.describe, NOTHING):
            if isinstance(answer, StrandlineError):
                self._managers.forget(identity, str(answer))
                homes = {index: home for index, home in homes.items() if home != identity}
        homeless = [index for index in indices if index not in homes]
        if homeless:
            occupied = [*homes.values(), *(place.manager for place in self._places.values())]
            homes |= spread(homeless, self._discover(len(homeless)), occupied)
        return homes

    def _discover(self, at_least: int) -> list[str]:
        """The task managers of all executors that take tasks now; those without one get one."""
        run, context = self.run, self.spark_context
        given_up = frozenset(self._managers.given_up)
        tasks = max(at_least, int(context.defaultParallelism))
        local = is_local_master(str(context.master))

        def ensure(_numbers: Iterable[int]) -> list[str]:
            if not local:
                time.sleep(0.1)  # so that every executor gets a task: none may finish before the others begin
            return [ensure_task_manager(run, given_up)]

        try:
            with self._interruptible():
                found = set(context.parallelize(range(tasks), tasks).mapPartitions(ensure).collect())
        except Exception as error:  # Spark raises many types
            cause = _RAISED.search(str(error)) or re.match(".*", str(error))
            raise SlotLostError(f"job {run.job}: no task manager could be started: {cause and cause[0]}") from error
        alive = sorted(found & set(self._managers))  # all have registered; some may have died since
        if not alive:
            raise SlotLostError(f"job {run.job}: the task managers {sorted(found)} were lost as soon as they had begun")
        return alive

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Spark jobs of this thread can be cancelled by `abandon`. In the query's thread, its end cancels them."""
        context = self.spark_context
        own = context.getLocalProperty(JOB_GROUP) is None
        if own:
            context.setLocalProperty(JOB_GROUP, self._run_id)
        try:
            yield
        finally:
            if own:
                context.setLocalProperty(JOB_GROUP, None)  # type: ignore[arg-type]  # None removes it

    def start_spares(self, slots: int) -> None:
        """Starts slot processes in advance, `slots` in all, spread over the task managers."""
        each = -(-slots // max(1, len(self._managers)))
        self._managers.ask(self._managers, TaskManagerClient.start_spares, SpareSlots(each))

    # --- batches -----------------------------------------------------------------------------------

    def collect_prepared(self, batch: int, round_: int) -> dict[int, SlotStatus]:
        """The status of every slot; with the changelog, once what it prepared in this round is durable."""
        return self._durable(batch, self._every_slot(TaskManagerClient.collect_prepared, BatchRound(batch, round_)))

    def prepare(
        self, batch: int, round_: int, time: BatchTime, deliveries: Sequence[Delivery]
    ) -> dict[int, SlotStatus]:
        """Have every slot prepare its steps with delivered rows. Answers as `collect_prepared` does.

        A step that reads other steps comes after them, with the rows that their slots have delivered to it.
        """
        assert self._deployment is not None
        self._check_current(batch)
        slots_of = self._by_manager(self._places)
        known = list(deliveries)
        *first, last = self._deployment.levels
        for steps in first:
            for prepared in self._prepare_steps(batch, round_, time, known, steps, slots_of).values():
                known += prepared.status.forwarded
        return self._durable(batch, self._prepare_steps(batch, round_, time, known, last, slots_of, last=True))

    def _prepare_steps(
        self,
        batch: int,
        round_: int,
        time: BatchTime,
        deliveries: Sequence[Delivery],
        steps: Collection[str],
        slots_of: Mapping[str, list[int]],
        *,
        last: bool = False,
    ) -> dict[int, PreparedSlot]:
        wanted = [one for one in deliveries if one.operator in steps]
        requests = {
            identity: ForSlots(
                some,
                Prepare(
                    batch,
                    round_,
                    time,
                    [one for one in wanted if one.subtask in some],
                    list(steps),
                    self.addresses,
                    last,
                ),
            )
            for identity, some in slots_of.items()
        }
        answers = self._managers.ask_slots(TaskManagerClient.prepare, requests, slots_of)
        return self._complete(answers, self._places).all()

    def _durable(self, batch: int, prepared: Mapping[int, PreparedSlot]) -> dict[int, SlotStatus]:
        """Notes where the segments are that the slots have prepared."""
        for index, slot in prepared.items():
            self._segments.prepared(batch, index, slot.segments)
        return {index: slot.status for index, slot in prepared.items()}

    def prepare_empty(self, request: PrepareEmpty, slots: Iterable[int]) -> None:
        """Have operators of some slots prepared that Spark did not call."""
        self._on_slots(TaskManagerClient.prepare_empty, request, slots).all()

    def discard(self, batch: int, round_: int) -> None:
        """Begin a round: what slots prepared for the batch is void."""
        self._every_slot(TaskManagerClient.discard, BatchRound(batch, round_))

    def commit(
        self, batch: int, barrier: Barrier | None = None, durable: Sequence[DurableSegment] = ()
    ) -> dict[int, CommittedSlot]:
        """Have every slot make a decided batch its state. Returns when each slot next has something to do.

        With the changelog a `barrier` may go with it, which is taken after the batch. Then the acknowledgements that
        are ready at once are returned, too. `durable` are the segments of epochs, up to this one, that the task
        managers have not heard of.
        """
        with self._lock:  # a checkpoint may be completed at this moment
            self._check_current(batch)
            self._segments.decided(batch, self.run.changelog is not None)
            self._segments.take_in(durable)
        return self._every_slot(TaskManagerClient.commit, CommitBatch(batch, barrier, list(durable)))

    def note_decided(self, batch: int, segments: Sequence[DurableSegment]) -> None:
        """Note a decided epoch that slots have not heard of, and the segments from which a lost slot can be rebuilt."""
        with self._lock:
            self._segments.decided(batch, self.run.changelog is not None)
            self._segments.take_in(segments)

    def epoch_slots(self) -> EpochSlots:
        """Calls to all slots of this generation without their task managers."""
        deployment = self._deployment
        assert deployment is not None
        generation = deployment.generation
        clients = {
            index: SlotClient(
                place.address,
                self._secret,
                self._run_id,
                lambda: generation,
                patience=SLOT_PATIENCE * self.run.heartbeat_timeout,
                tls=self._tls,
            )
            for index, place in sorted(self._places.items())
        }
        return EpochSlots(clients, deployment.levels, self.addresses)

    def _check_current(self, batch: int) -> None:
        """Raises `SlotLostError` for a batch of an older generation: its thread has woken up late."""
        if not is_of(batch, self._generation()):
            raise SlotLostError(f"job {self.run.job}: the generation of batch {batch} has ended")

    def statuses(self) -> list[SlotStatus]:
        """The status of every slot that answers."""
        return list(self._on_slots(TaskManagerClient.slot_status, NOTHING, self._places).values.values())

    # --- checkpoints -------------------------------------------------------------------------------

    def barrier(self, checkpoint_id: int, timeout: float, full: bool = False) -> list[SubtaskAck]:
        """Have every slot freeze its state; uploads go on in the background. A `full` one uploads the whole state.

        Returns the acknowledgements that are ready at once: all of them, as a rule, with the changelog.
        """
        request = TakeCheckpoint(checkpoint=checkpoint_id, timeout=timeout, full=full)
        answers = self._every_task_manager(TaskManagerClient.take_checkpoint, request)
        return [ack for acks in answers.values() for ack in acks]

    def savepoint(self, checkpoint_id: int, target: SavepointTarget, timeout: float) -> None:
        """Have every slot freeze its state for a savepoint; uploads go on in the background."""
        request = TakeSavepoint(checkpoint_id, target.settings, target.format == "canonical", timeout)
        self._every_task_manager(TaskManagerClient.take_savepoint, request)

    def checkpoint_completed(self, news: CheckpointCompleted) -> None:
        """Tell all task managers that a checkpoint is complete."""
        self._tell(TaskManagerClient.checkpoint_completed, news)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Tell all task managers that a checkpoint was given up."""
        self._tell(TaskManagerClient.checkpoint_aborted, CheckpointAborted(checkpoint_id))

    # --- figures -----------------------------------------------------------------------------------

    def query(self, request: Query) -> list[bytes]:
        """What every slot knows of one key, pickled."""
        return list(self._every_slot(TaskManagerClient.query, request).values())

    def slot_samples(self, changelogs: Mapping[str, ChangelogFigures]) -> list[SlotSample]:
        """The figures of every slot that answers, with those of the changelog of its task manager."""
        places = dict(self._places)
        found = self._on_slots(TaskManagerClient.slot_figures, NOTHING, places).values
        samples = []
        for index, figures in sorted(found.items()):
            place = places[index]
            changelog = changelogs.get(place.manager, ChangelogFigures())
            waited = round(changelog.wait_ms * 1_000_000)
            samples.append(SlotSample(index, place.manager, place.address.host, figures, waited))
        return samples

    def profile(self, index: int, request: Profile) -> Folded:
        """Sample the Python threads of a slot."""
        return self._on_slots(TaskManagerClient.profile, request, [index]).all()[index]

    def changelog_figures(self) -> dict[str, ChangelogFigures] | None:
        """What the changelog of each task manager takes up and costs; None without a changelog."""
        if self.run.changelog is None:
            return None
        answers = self._managers.ask(self._managers, TaskManagerClient.changelog_figures, NOTHING)
        return {identity: answer for identity, answer in answers if isinstance(answer, ChangelogFigures)}

    def processes(self) -> list[TaskManagerInfo]:
        """Task managers and slots with their process ids, as far as the task managers answer."""
        answers = self._managers.ask(self._managers, TaskManagerClient.describe, NOTHING)
        return [answer for _identity, answer in answers if not isinstance(answer, StrandlineError)]

    def _home_of(self, process: str) -> str | None:
        """The task manager that runs a slot now, by the name of its log."""
        return next((place.manager for index, place in list(self._places.items()) if slot_log(index) == process), None)

    # --- calling -----------------------------------------------------------------------------------

    def _every_slot(
        self, method: Callable[[TaskManagerClient, ForSlots[Asked]], SlotAnswers[Told]], request: Asked
    ) -> dict[int, Told]:
        """Call all slots. Raises the first error; `SlotLostError` if a slot does not answer."""
        return self._on_slots(method, request, self._places).all()

    def _on_slots(
        self,
        method: Callable[[TaskManagerClient, ForSlots[Asked]], SlotAnswers[Told]],
        request: Asked,
        slots: Iterable[int],
    ) -> Answers[Told]:
        """Call some slots through their task managers, all at once."""
        wanted = list(slots)
        slots_of = self._by_manager(wanted)
        requests = {identity: ForSlots(some, request) for identity, some in slots_of.items()}
        return self._complete(self._managers.ask_slots(method, requests, slots_of), wanted)

    def _every_task_manager(
        self, method: Callable[[TaskManagerClient, Asked], SlotAnswers[Told]], request: Asked
    ) -> dict[int, Told]:
        """Call all task managers that have slots, which answer for each slot. Raises the first error."""
        wanted = list(self._places)
        slots_of = self._by_manager(wanted)
        requests = dict.fromkeys(slots_of, request)
        return self._complete(self._managers.ask_slots(method, requests, slots_of), wanted).all()

    def _by_manager(self, slots: Iterable[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index in slots:
            place = self._places.get(index)
            if place is not None:
                found.setdefault(place.manager, []).append(index)
        return found

    def _complete(self, answers: Answers[Told], wanted: Iterable[int]) -> Answers[Told]:
        """The answers, with an error for every slot that nobody answered for."""
        for index in wanted:
            if index not in answers.values and index not in answers.errors:
                answers.errors[index] = SlotLostError(f"slot {index} of job {self.run.job} is not running")
        return answers

    def _tell(self, method: Callable[[TaskManagerClient, Asked], None], news: Asked) -> None:
        """Tell all task managers. One that does not answer is forgotten if no slot is there, else found lost later."""
        if self.abandoned:
            return
        for identity, answer in self._managers.ask(self._managers, method, news):
            if not isinstance(answer, StrandlineError):
                continue
            log.warning("job %s: %s: %s", self.run.job, identity, answer)
            silent = isinstance(answer, SlotLostError)  # any other error is an answer, such as a refusal of old news
            if silent and all(place.manager != identity for place in list(self._places.values())):
                self._managers.forget(identity, str(answer))

    def abandon(self) -> None:
        """End all calls and Spark jobs of the cluster that are under way, because the run ends at once."""
        self.abandoned = True
        self._managers.abandon()
        self.spark_context.cancelJobGroup(self._run_id)

    def close(self, patience: float = CLOSE_PATIENCE) -> None:
        """End all slots and task managers. Those that have not ended after `patience` seconds are killed.

        May be called again, for those that another thread has waited for too long.
        """
        # A task manager that learns from a heartbeat that nobody wants it ends at once. So heartbeats tell only those
        # that could not be asked: the others stop their slots first, and give their logs.
        self._managers.end(patience, self.logs.collect)
        self._closed = True
        self._server.close()
        with suppress(OSError):  # a task manager of this host is still there, and will remove the folder
            socket_folder(self._run_id).rmdir()


_RAISED = re.compile(r"(?:strandline\.)?errors\.\w+: .*")
"""An error of ours in the text of an error of Spark's."""
