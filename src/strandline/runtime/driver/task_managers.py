"""The task managers of a run, and calls to several of them, or to slots behind them, at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.protocol.coordinator_calls import Heartbeat
from strandline.runtime.protocol.taskmanager_calls import SlotAnswers, TaskManagerClient

Asked = TypeVar("Asked")
Told = TypeVar("Told")


@dataclass(slots=True)
class RegisteredTaskManager:
    """A task manager that the driver knows."""

    client: TaskManagerClient
    last_heartbeat: float
    lost_slots: frozenset[int] = frozenset()
    """Slots whose process has ended, by the last heartbeat."""

    def suspect(self, timeout: float) -> bool:
        """Whether the task manager reported a lost slot, or has been silent for `timeout` seconds."""
        return bool(self.lost_slots) or time.monotonic() - self.last_heartbeat > timeout


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

    def __init__(self) -> None:
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

    def register(self, identity: str, client: TaskManagerClient) -> None:
        self._known[identity] = RegisteredTaskManager(client, time.monotonic())

    def forget(self, identity: str) -> None:
        self._known.pop(identity, None)

    def heartbeat(self, news: Heartbeat) -> bool:
        """Note a sign of life; False if the task manager is not known."""
        known = self._known.get(news.identity)
        if known is None:
            return False
        known.last_heartbeat = time.monotonic()
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
            if known is None:
                return SlotLostError(f"task manager {identity} is not known")
            try:
                return method(known.client, requests[identity])
            except StrandlineError as error:
                return error

        try:
            return list(self._pool.map(one, requests))
        except RuntimeError:  # the pool is shut down
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

    def close(self) -> None:
        self._pool.shutdown(wait=False)
