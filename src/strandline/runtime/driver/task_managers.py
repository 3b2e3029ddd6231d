"""The task managers of a run, and calls to several of them, or to slots behind them, at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.liveness.processes import kill_task_manager
from strandline.runtime.liveness.silence import Silence
from strandline.runtime.liveness.threads import map_with_caller
from strandline.runtime.protocol.address import host_identity
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.coordinator_calls import Heartbeat, Registration
from strandline.runtime.protocol.taskmanager_calls import SlotAnswers, TaskManagerClient

log = logging.getLogger(__name__)

Asked = TypeVar("Asked")
Told = TypeVar("Told")


@dataclass(slots=True)
class RegisteredTaskManager:
    """A task manager that the driver knows."""

    client: TaskManagerClient
    registration: Registration
    silence: Silence = field(default_factory=Silence)
    """The time since its last heartbeat."""
    lost_slots: frozenset[int] = frozenset()
    """Slots whose process has ended, by the last heartbeat."""

    @property
    def nearby(self) -> bool:
        """Whether it runs on the driver's host, so that the driver can kill it."""
        return self.registration.address.host_id == host_identity()

    def kill(self) -> None:
        """Kill it and its slots, if it runs on the driver's host. Elsewhere the launcher of its executor does so."""
        if self.nearby and kill_task_manager(self.registration.pid, self.registration.started):
            log.warning("task manager %s is killed", self.registration.identity)


@dataclass(frozen=True, slots=True)
class Answers(Generic[Told]):
    """What slots answered, and the errors of those that failed or are not there."""

    values: dict[int, Told]
    errors: dict[int, StrandlineError]

    def all(self) -> dict[int, Told]:
        """The answers, if every slot gave one; else raises the first error."""
        for _index, error in sorted(self.errors.items()):
            raise error
        return self.values


class TaskManagers:
    """Knows the task managers by their identity, and calls them. Safe to use from several threads."""

    def __init__(self, timeout: float) -> None:
        """A task manager that is silent for `timeout` seconds counts as lost."""
        self.given_up: dict[str, str] = {}
        """Those that were lost, or are not wanted any more, and why. Their executors get other ones."""
        self._timeout = timeout
        self._abandoned = False
        self._ended = False
        self._known: dict[str, RegisteredTaskManager] = {}
        self._pool = ThreadPoolExecutor(32, thread_name_prefix="task-manager-calls")

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known))

    def __contains__(self, identity: object) -> bool:
        return identity in self._known

    def __len__(self) -> int:
        return len(self._known)

    def get(self, identity: str) -> RegisteredTaskManager | None:
        return self._known.get(identity)

    def register(self, registration: Registration, client: TaskManagerClient) -> None:
        self._known[registration.identity] = RegisteredTaskManager(client, registration)

    def forget(self, identity: str, why: str) -> None:
        """Give a task manager up. It is killed if that is possible, and calls to it end."""
        known = self._known.pop(identity, None)
        if known is not None:
            self.given_up[identity] = why
            known.kill()
            known.client.abandon()

    def silent(self) -> dict[str, RegisteredTaskManager]:
        """The task managers that have been silent for too long."""
        return {name: one for name, one in list(self._known.items()) if one.silence.seconds() > self._timeout}

    def suspect(self, identity: str) -> bool:
        """Whether a task manager is not there, is silent or reported a lost slot."""
        known = self._known.get(identity)
        return known is None or bool(known.lost_slots) or known.silence.seconds() > self._timeout

    def heartbeat(self, news: Heartbeat) -> bool:
        """Note a sign of life; False if the task manager is not known."""
        known = self._known.get(news.identity)
        if known is None:
            return False
        known.silence.heard()
        known.lost_slots = frozenset(news.lost)
        return True

    def ask(
        self, identities: Iterable[str], method: Callable[[TaskManagerClient, Asked], Told], request: Asked
    ) -> list[tuple[str, Told | StrandlineError]]:
        """Call task managers, all at once, with the same request; errors are among the answers."""
        requests = dict.fromkeys(identities, request)
        return list(zip(requests, self.ask_each(method, requests), strict=True))

    def ask_each(
        self, method: Callable[[TaskManagerClient, Asked], Told], requests: Mapping[str, Asked]
    ) -> list[Told | StrandlineError]:
        """Call task managers, all at once, each with its own request; errors are among the answers."""

        def one(identity: str) -> Told | StrandlineError:
            known = self._known.get(identity)
            if self._abandoned:  # while this call waited for a thread
                return SlotLostError("the run ends")
            if known is None:
                return SlotLostError(f"task manager {identity} is not known")
            if known.silence.seconds() > self._timeout:
                return SlotLostError(
                    f"task manager {identity} has been silent for {self._timeout:g} s (heartbeat_timeout)"
                )
            try:
                return method(known.client, requests[identity])
            except StrandlineError as error:
                return error

        if self._abandoned:
            return [SlotLostError("the run ends") for _identity in requests]
        if self._ended:
            return [SlotLostError("the run has ended") for _identity in requests]
        try:
            return map_with_caller(self._pool, one, requests)
        except RuntimeError:  # the pool was shut down meanwhile
            return [SlotLostError("the run has ended") for _identity in requests]

    def ask_slots(
        self,
        method: Callable[[TaskManagerClient, Asked], SlotAnswers[Told]],
        requests: Mapping[str, Asked],
        slots: Mapping[str, Sequence[int]],
    ) -> Answers[Told]:
        """Call task managers, each with its own request, which answer for some of their slots.

        If a task manager does not answer, its slots count as lost.
        """
        answers: Answers[Told] = Answers({}, {})
        for identity, told in zip(requests, self.ask_each(method, requests), strict=True):
            if isinstance(told, StrandlineError):
                lost = SlotLostError(f"task manager {identity}: {told}")
                answers.errors.update(dict.fromkeys(slots[identity], lost))
            else:
                answers.values.update(told.values)
                answers.errors.update({index: failure.error() for index, failure in told.failures.items()})
        return answers

    def abandon(self) -> None:
        """End all calls that are under way, and make no more of them: whoever waits for one goes on within seconds."""
        self._abandoned = True
        for known in list(self._known.values()):
            known.client.abandon()

    def end(self, patience: float, before: Callable[[TaskManagerClient], None] = lambda _client: None) -> None:
        """End all task managers and their slots. Those that have not answered after `patience` seconds are killed.

        `before` is called for each task manager when its slots have ended.
        """
        known = list(self._known.values())
        pool = ThreadPoolExecutor(max(1, len(known)), thread_name_prefix="task-manager-ends")
        ending = {pool.submit(_end, one.client, before): one for one in known}
        ended, _late = wait(ending, patience)
        for future, one in ending.items():
            if future not in ended or not future.result():
                one.kill()
                one.client.abandon()
        pool.shutdown(wait=False)
        self._ended = True
        self._pool.shutdown(wait=False)


def _end(client: TaskManagerClient, before: Callable[[TaskManagerClient], None]) -> bool:
    """Ask a task manager to end; False if it does not answer."""
    try:
        client.stop_slots(NOTHING)
    except SlotLostError:
        return False
    except StrandlineError as error:
        log.warning("slots could not be stopped: %s", error)
    before(client)
    try:
        client.shutdown(NOTHING)
        return True
    except StrandlineError:
        return False
