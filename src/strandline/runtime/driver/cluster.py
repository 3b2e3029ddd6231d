"""The run's task managers and slots, as the driver sees them: where each slot is, what is lost, how it comes back."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from strandline.checkpoint.metadata import SubtaskState
from strandline.checkpoint.restore import overlapping
from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.driver.durable_segments import DurableSegments
from strandline.runtime.driver.recoveries import KEPT_RECOVERIES, Recovery, slot_recovery
from strandline.runtime.driver.restore.savepoints import SavepointTarget
from strandline.runtime.protocol.folders import socket_folder
from strandline.runtime.protocol.messages import (
    BackendSettings,
    OperatorSpec,
    Rebuilt,
    RunInfo,
    SlotSpec,
    StorageSettings,
)
from strandline.runtime.protocol.wire import Address, Client, Server, decode_error
from strandline.runtime.task.launcher import ensure_task_manager
from strandline.state.coding.keys import key_group_range, subtask_of

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Manager:
    """A registered task manager."""

    identity: str
    client: Client
    pid: int
    last_heartbeat: float
    reported_lost: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot runs."""

    manager: str
    address: Address


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a slot without local files starts from."""

    batch: int = -1
    states: tuple[SubtaskState, ...] = ()
    storage: StorageSettings | None = None
    """Where its files are, if not in the run's own storage."""
    owned: bool = True
    """Whether it is the job's own, so that the next checkpoint may refer to its files."""


_NO_BASE = Base()


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the slots of a generation run, and what they start from."""

    generation: int
    parallelism: int
    max_parallelism: int
    backend: BackendSettings
    operators: tuple[OperatorSpec, ...]
    base: Base = _NO_BASE
    rescale: bool = False
    """Whether the run goes on with another number of slots: they are spread over all executors that there are now, and
    take what is on their host's disk."""
    allow_non_restored: bool = False
    """Whether restored states that their operator does not declare any more may be dropped."""


@dataclass(slots=True)
class Handlers:
    """What the coordinator does with messages about checkpoints; set by the generation that runs."""

    acknowledge: Callable[[Any], None] = field(default=lambda _body: None)
    decline: Callable[[Any], None] = field(default=lambda _body: None)


class Cluster:
    """Starts, finds, calls and replaces slots. One per run; it outlives the run's generations."""

    def __init__(
        self,
        spark_context: SparkContext,
        make_run: Callable[[list[Any]], RunInfo],
        *,
        run_id: str,
        secret: str,
        bind_host: str,
        advertise_host: str,
    ) -> None:
        self._spark_context = spark_context
        self.handlers = Handlers()
        self.recoveries: deque[Recovery] = deque(maxlen=KEPT_RECOVERIES)
        self.epoch = 0
        self._managers: dict[str, Manager] = {}
        self._places: dict[int, Place] = {}
        self._incarnations: dict[int, int] = {}
        self._homes: dict[int, str] = {}
        """The task manager that each slot was last given to; a slot returns there as long as it lives."""
        self._deployment: Deployment | None = None
        self._base = _NO_BASE
        self._log = DurableSegments()
        self._closed = False
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(32, thread_name_prefix="cluster")
        self._server = Server(
            secret,
            {
                "register": self._register,
                "heartbeat": self._heartbeat,
                "slots": self._slots,
                "acknowledge": lambda body: self.handlers.acknowledge(body),
                "decline": lambda body: self.handlers.decline(body),
            },
            bind_host=bind_host,
            advertise_host=advertise_host,
            unix_path=str(socket_folder(run_id) / "c.sock"),
        )
        self.run = make_run(self._server.address.pack())

    # --- what task managers and relays ask ---------------------------------------------------------

    def _register(self, body: dict[str, Any]) -> None:
        manager = Manager(
            body["identity"], Client(Address.unpack(body["address"]), self.run.secret), body["pid"], time.monotonic()
        )
        self._managers[manager.identity] = manager
        log.info("job %s: task manager %s registered", self.run.job, manager.identity)

    def _heartbeat(self, body: dict[str, Any]) -> dict[str, bool]:
        manager = self._managers.get(body["identity"])
        if manager is None or self._closed:
            return {"wanted": False}
        manager.last_heartbeat = time.monotonic()
        manager.reported_lost = frozenset(body["lost"])
        return {"wanted": True}

    def _slots(self, _body: Any) -> dict[int, list[Any]]:
        return {index: place.address.pack() for index, place in self._places.items()}

    # --- starting and replacing --------------------------------------------------------------------

    def deploy(self, deployment: Deployment) -> dict[int, list[Rebuilt]]:
        """Start all slots of a new generation from what it restores. Earlier generations' slots end."""
        with self._lock:
            if deployment.rescale and self._deployment is not None:
                self._homes = self._rescaled_homes(self._deployment, deployment)
            self._deployment = deployment
            self._places = {}
            self._base = deployment.base
            self._log = DurableSegments(deployment.base.batch)
            return self._start(range(deployment.parallelism), deployment.base.batch)

    def confirm_base(self, batch: int, states: tuple[SubtaskState, ...]) -> None:
        """A checkpoint of the job is complete: slots without local files start from it from now on.

        Waits while slots start: they may need the files of the checkpoint before, which go after this.
        """
        with self._lock:
            self._base = Base(batch, states)
            self._log.truncate(batch)

    def lost(self) -> list[int]:
        """Slots that do not run any more, found by asking every task manager."""
        with self._lock:
            assert self._deployment is not None
            alive: set[int] = set()
            owners = {place.manager for place in self._places.values()}
            for identity, answer in self._ask(owners, "describe", None, timeout=5.0):
                if isinstance(answer, StrandlineError):
                    log.warning("job %s: task manager %s is lost: %s", self.run.job, identity, answer)
                    self._managers.pop(identity, None)
                    continue
                alive |= {
                    int(index)
                    for index, slot in answer["slots"].items()
                    if slot["alive"] and self._places.get(int(index), _NOWHERE).manager == identity
                }
            return [index for index in range(self._deployment.parallelism) if index not in alive]

    @property
    def epoch_name(self) -> str:
        """Changes whenever a slot moves; a relay that sees another one than before asks for the addresses again."""
        return f"{self.run.run_id}-{self.epoch}"

    def incarnation(self, index: int) -> int:
        """How often slot `index` was started in this run."""
        return self._incarnations[index]

    def suspects(self) -> bool:
        """Whether a heartbeat reported a lost slot, or one is missing; cheap, no call."""
        now = time.monotonic()
        if self._deployment is not None and len(self._places) < self._deployment.parallelism:
            return True
        for place in list(self._places.values()):
            manager = self._managers.get(place.manager)
            if manager is None or manager.reported_lost or now - manager.last_heartbeat > self.run.heartbeat_timeout:
                return True
        return False

    def recover(self, decided_batch: int) -> list[int]:
        """Replace every lost slot at `decided_batch`; the others keep their state. Returns which were replaced."""
        with self._lock:
            missing = self.lost()
            if missing:
                log.warning("job %s: replacing slots %s at batch %d", self.run.job, missing, decided_batch)
                began = time.time()
                rebuilt = self._start(missing, decided_batch)
                self.recoveries.append(slot_recovery(began, decided_batch, rebuilt))
            return missing

    def _start(self, indices: Sequence[int], decided_batch: int) -> dict[int, list[Rebuilt]]:
        deployment = self._deployment
        assert deployment is not None
        base = self._base
        for index in indices:
            self._places.pop(index, None)
        homes = self._allocate(indices)
        share: dict[str, int] = {}
        for index in range(deployment.parallelism):
            home = homes.get(index) or self._homes.get(index)
            if home is not None:
                share[home] = share.get(home, 0) + 1
        work: dict[str, list[SlotSpec]] = {}
        for index in indices:
            self._incarnations[index] = self._incarnations.get(index, 0) + 1
            memory = max(16 << 20, deployment.backend.memory_bytes // share[homes[index]])
            key_groups = key_group_range(index, deployment.parallelism, deployment.max_parallelism)
            spec = SlotSpec(
                run=self.run,
                generation=deployment.generation,
                index=index,
                incarnation=self._incarnations[index],
                parallelism=deployment.parallelism,
                max_parallelism=deployment.max_parallelism,
                backend=msgspec.structs.replace(deployment.backend, memory_bytes=memory),
                operators=list(deployment.operators),
                restore=overlapping(base.states, key_groups),
                restore_batch=base.batch,
                decided_batch=decided_batch,
                restore_storage=base.storage,
                restore_owned=base.owned,
                log=self._log.of(index),
                log_complete=self._log.complete,
                allow_non_restored=deployment.allow_non_restored,
            )
            work.setdefault(homes[index], []).append(spec)

        def start(identity: str) -> dict[int, dict[str, Any]]:
            local = deployment.rescale or self.run.local_recovery
            manager = self._managers.get(identity)
            if manager is None:
                raise SlotLostError(f"task manager {identity} was lost before it had its slots")
            answer: dict[int, dict[str, Any]] = manager.client.call(
                "start_slots", {"specs": work[identity], "local": local}
            )
            return answer

        rebuilt: dict[int, list[Rebuilt]] = {}
        for identity, slots in zip(work, list(self._pool.map(start, work)), strict=True):
            for index, slot in slots.items():
                self._places[int(index)] = Place(identity, Address.unpack(slot["address"]))
                rebuilt[int(index)] = msgspec.convert(slot["rebuilt"], list[Rebuilt])
        self._homes.update(homes)
        self.epoch += 1
        return rebuilt

    def _allocate(self, indices: Sequence[int]) -> dict[int, str]:
        """Which task manager each slot goes to: back where it was, else where fewest are. Nobody has to move."""
        homes = {index: self._homes[index] for index in indices if self._homes.get(index) in self._managers}
        for identity, answer in self._ask(set(homes.values()), "describe", None, timeout=5.0):
            if isinstance(answer, StrandlineError):
                self._managers.pop(identity, None)
                homes = {index: home for index, home in homes.items() if home != identity}
        homeless = [index for index in indices if index not in homes]
        if homeless:
            load = Counter(dict.fromkeys(self._discover(len(homeless)), 0))
            for home in (*homes.values(), *(place.manager for place in self._places.values())):
                if home in load:
                    load[home] += 1
            for index in homeless:
                homes[index] = min(load, key=lambda identity: load[identity])
                load[homes[index]] += 1
        return homes

    def _discover(self, at_least: int) -> list[str]:
        """The task managers of all executors that take tasks now; those without one get one."""
        run, context = self.run, self._spark_context
        tasks = max(at_least, int(context.defaultParallelism))
        local = str(context.master).startswith("local[") or context.master == "local"

        def ensure(_numbers: Iterable[int]) -> list[str]:
            if not local:
                time.sleep(0.1)  # so that no executor is done with its task before another one has got one
            return [ensure_task_manager(run)]

        found = set(context.parallelize(range(tasks), tasks).mapPartitions(ensure).collect())
        alive = sorted(found & self._managers.keys())  # they have registered, unless they have died since
        if not alive:
            raise SlotLostError(f"job {run.job}: the task managers {sorted(found)} were lost as soon as they had begun")
        return alive

    def _rescaled_homes(self, before: Deployment, after: Deployment) -> dict[int, str]:
        """Where the slots of another parallelism go: to what most of their state is near, evenly on all executors."""
        everyone = self._discover(1)
        room = Counter({identity: -(-after.parallelism // len(everyone)) for identity in everyone})
        homes: dict[int, str] = {}
        for index in range(after.parallelism):
            groups = key_group_range(index, after.parallelism, after.max_parallelism)
            middle = groups[len(groups) // 2]
            near = self._homes.get(subtask_of(middle, before.parallelism, before.max_parallelism))
            if near is not None and room[near] > 0:
                homes[index] = near
                room[near] -= 1
        return homes

    def warm(self, slots: int) -> None:
        """Have processes ready for so many new slots, so that they need not be waited for later."""
        managers = list(self._managers)
        self._ask(managers, "warm", {"slots": -(-slots // max(1, len(managers)))}, timeout=5.0)

    # --- calling -----------------------------------------------------------------------------------

    def fan(
        self, action: str, body: Any, *, only: Iterable[int] | None = None, timeout: float | None = None
    ) -> dict[int, Any]:
        """Call `action` on slots everywhere at once. Raises the first error; `SlotLostError` if one does not answer."""
        wanted = set(self._places) if only is None else set(only)
        answers = self._fan_slots(action, body, wanted, timeout)
        for index in sorted(wanted):
            if isinstance(answers.get(index), StrandlineError):
                raise answers[index]
        return answers

    def try_fan(self, action: str, body: Any, timeout: float | None = None) -> dict[int, Any]:
        """Like `fan`, but errors are among the answers."""
        return self._fan_slots(action, body, set(self._places), timeout)

    def settle(self, batch: int, round_: int) -> dict[int, Any]:
        """The status of every slot; with the changelog, once what it prepared in this round is durable."""
        answers = self._all("settle", {"batch": batch, "round": round_})
        for index, status in answers.items():
            self._log.prepared(batch, index, status.get("log", {}))
        return answers

    def commit(self, batch: int) -> dict[int, Any]:
        """Have every slot make a decided batch its state; answers what each waits for."""
        with self._lock:  # a checkpoint may be completed at this moment
            self._log.decided(batch, self.run.changelog is not None)
        return self._all("commit", {"batch": batch})

    def barrier(self, checkpoint_id: int, timeout: float) -> list[Any]:
        """Have every slot freeze its state; uploads go on in the background.

        With the changelog there is nothing to freeze: returns the acknowledgements that are ready at once.
        """
        body = {"checkpoint": checkpoint_id, "timeout": timeout}
        answers = self._all("barrier", body, timeout)
        return [ack for answer in answers.values() for ack in answer] if self.run.changelog is not None else []

    def savepoint(self, checkpoint_id: int, target: SavepointTarget, timeout: float) -> None:
        """Have every slot freeze its state for a savepoint; uploads go on in the background."""
        body = {
            "checkpoint": checkpoint_id,
            "target": target.settings,
            "canonical": target.format == "canonical",
            "timeout": timeout,
        }
        self._all("savepoint", body, timeout)

    def _all(self, action: str, body: Any, timeout: float | None = None) -> dict[int, Any]:
        """Have every task manager do `action` for its slots. Raises the first error."""
        answers = self._fan(action, body, set(self._places), timeout)
        for _index, answer in sorted(answers.items()):
            if isinstance(answer, StrandlineError):
                raise answer
        return answers

    def tell_managers(self, action: str, body: Any) -> None:
        """Tell all task managers. One that does not answer is forgotten if no slot is there, else found lost later."""
        for identity, answer in self._ask(set(self._managers), action, body, timeout=10.0):
            if isinstance(answer, StrandlineError):
                log.warning("job %s: %s: %s", self.run.job, identity, answer)
                if all(place.manager != identity for place in list(self._places.values())):
                    self._managers.pop(identity, None)

    def changelog_figures(self) -> dict[str, float]:
        """What the changelogs of all task managers take up and cost; empty without a changelog."""
        total: dict[str, float] = {}
        if self.run.changelog is not None:
            for _identity, answer in self._ask(set(self._managers), "figures", None, timeout=5.0):
                if not isinstance(answer, StrandlineError):
                    for name, value in answer.items():
                        total[name] = total.get(name, 0) + value
        return total

    def describe(self) -> dict[str, Any]:
        """Processes of the run: task managers and slots with their process ids."""
        return {
            identity: answer
            for identity, answer in self._ask(set(self._managers), "describe", None, timeout=5.0)
            if not isinstance(answer, StrandlineError)
        }

    def _fan_slots(self, action: str, body: Any, wanted: set[int], timeout: float | None) -> dict[int, Any]:
        return self._fan("fan", {"action": action, "body": body, "timeout": timeout}, wanted, timeout)

    def _fan(
        self,
        action: str,
        body: dict[str, Any],
        wanted: set[int],
        timeout: float | None,
    ) -> dict[int, Any]:
        """Call `action` of the task managers of `wanted` slots; each answers slot by slot."""
        by_manager: dict[str, list[int]] = {}
        for index in wanted:
            place = self._places.get(index)
            if place is not None:
                by_manager.setdefault(place.manager, []).append(index)
        results: dict[int, Any] = {
            index: SlotLostError(f"slot {index} of job {self.run.job} is not running") for index in wanted
        }

        def one(identity: str) -> dict[int, Any]:
            manager = self._managers.get(identity)
            if manager is None:
                return {}
            request = {**body, "indices": by_manager[identity]}
            try:
                answers = manager.client.call(action, request, timeout=timeout and timeout + 2)
            except StrandlineError as error:
                return dict.fromkeys(by_manager[identity], SlotLostError(f"task manager {identity}: {error}"))
            return {
                int(index): decode_error(answer["error"]) if "error" in answer else answer["value"]
                for index, answer in answers.items()
            }

        for answers in self._pool.map(one, by_manager):
            results.update(answers)
        return results

    def _ask(self, identities: Iterable[str], action: str, body: Any, timeout: float) -> list[tuple[str, Any]]:
        def one(identity: str) -> tuple[str, Any]:
            manager = self._managers.get(identity)
            if manager is None:
                return identity, SlotLostError(f"task manager {identity} is not known")
            try:
                return identity, manager.client.call(action, body, timeout=timeout)
            except StrandlineError as error:
                return identity, error

        return list(self._pool.map(one, list(identities)))

    def close(self) -> None:
        """End all slots and task managers."""
        self._closed = True
        self._ask(set(self._managers), "stop_slots", None, timeout=15.0)
        self._ask(set(self._managers), "shutdown", None, timeout=5.0)
        self._pool.shutdown(wait=False)
        self._server.close()


_NOWHERE = Place("", Address("", "", "", 0))
