"""Answers as JSON, encoded once for each state of a job, and errors in Flink's form."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from strandline.observe.facts import JobFacts

KEPT_JOBS = 64
KEPT_ANSWERS = 64
"""How many encoded answers are kept for each job, all made of the same facts."""
KEPT_BYTES = 64_000_000
"""How large all kept answers are together."""


class RestError(Exception):
    """A request that cannot be answered: the status of the answer, and why in words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Errors(msgspec.Struct, frozen=True):
    """Why a request was refused or has failed, as Flink says it."""

    errors: list[str]


@dataclass(frozen=True, slots=True)
class Answer:
    """An encoded answer. The tag changes with its content."""

    body: bytes
    tag: str


def encode(value: object) -> bytes:
    """`value` as JSON. Values that JSON does not know are written as texts."""
    return msgspec.json.encode(value, enc_hook=str)


class AnswerCache:
    """Keeps encoded answers as long as the facts of a job are the same ones.

    The facts of a running job change once a second. So however many clients ask, an answer is encoded once a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._jobs: OrderedDict[str, tuple[JobFacts, OrderedDict[str, Answer]]] = OrderedDict()

    def get(self, facts: JobFacts, key: str, build: Callable[[], object]) -> Answer:
        """The answer of the name `key` over these facts. `build` makes what is encoded, or the encoded bytes."""
        with self._lock:
            found = self._known(facts).get(key)
        if found is not None:
            return found
        value = build()
        body = value if isinstance(value, bytes) else encode(value)
        answer = Answer(body, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')
        with self._lock:
            answers = self._known(facts)
            self._bytes += len(body) - len(answers[key].body if key in answers else b"")
            answers[key] = answer
            while len(answers) > KEPT_ANSWERS:
                self._bytes -= len(answers.popitem(last=False)[1].body)
            while self._bytes > KEPT_BYTES and self._jobs:
                self._forget(next(iter(self._jobs)))
        return answer

    def _known(self, facts: JobFacts) -> OrderedDict[str, Answer]:
        kept = self._jobs.get(facts.id)
        if kept is None or kept[0] is not facts:
            self._forget(facts.id)
            kept = self._jobs[facts.id] = (facts, OrderedDict())
        self._jobs.move_to_end(facts.id)
        while len(self._jobs) > KEPT_JOBS:
            self._forget(next(iter(self._jobs)))
        return kept[1]

    def _forget(self, job: str) -> None:
        _, answers = self._jobs.pop(job, (None, {}))
        self._bytes -= sum(len(answer.body) for answer in answers.values())
