"""What a trial does: a variant of the job, a story of steps, and one fault. A seed decides about all of it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal, cast

import msgspec

from strandline.testing.triggers import Control

HEARTBEAT: Final = 3.0
"""`heartbeat_timeout` of every trial, in seconds."""
STOPPED: Final = 2.5 * HEARTBEAT
"""Seconds for which a process is stopped: longer than the heartbeat timeout."""
HANGING: Final = 1.5 * HEARTBEAT
"""Seconds for which an operation hangs."""

SinkName = Literal["parquet", "foreach"]
Victim = Literal["", "slot", "taskmanager", "relay", "driver"]

STORIES: Final = ("plain", "each-batch", "rescale", "savepoint", "back", "cancel")
SINKS: Final[tuple[SinkName, ...]] = ("parquet", "foreach")

WEIGHTS: Final[Mapping[str, int]] = {
    "storage fails before": 16,
    "storage fails after": 16,
    "storage hangs": 5,
    "storage throttles": 3,
    "storage lists late": 3,
    "storage reads late": 2,
    "storage is slow": 2,
    "call fails before": 12,
    "call fails after": 12,
    "call hangs": 4,
    "kill slot": 6,
    "kill taskmanager": 6,
    "kill relay": 4,
    "kill driver": 4,
    "stop slot": 3,
    "stop taskmanager": 2,
    "stop relay": 1,
    "stop driver": 1,
}
"""The kinds of faults, and how many of a hundred trials have them."""


LIES: Final[Mapping[str, Mapping[str, str]]] = {
    "storage throttles": {"fail_pattern": ".", "fail_every": "40", "fail_times": "3", "fail_mode": "unknown"},
    "storage lists late": {"stale_pattern": "^list ", "stale_seconds": "1"},
    "storage reads late": {"stale_pattern": "^(list|read|exists|download) ", "stale_seconds": "1"},
    "storage is slow": {"slow_pattern": ".", "delay_seconds": "0.1"},
}
"""The kinds that last for the whole story, as options of the storage with faults."""


class Variant(msgspec.Struct, frozen=True, order=True):
    """The job and the story of a trial."""

    story: str
    changelog: bool
    sink: SinkName

    @property
    def name(self) -> str:
        """A short text for reports."""
        return f"{self.story}/{'changelog' if self.changelog else 'snapshots'}/{self.sink}"

    @classmethod
    def named(cls, name: str) -> Variant:
        """The variant with such a name. Raises `ValueError` if there is none."""
        for variant in variants():
            if variant.name == name:
                return variant
        raise ValueError(
            f"{name!r} is no variant: write story/durability/sink, where the story is one of {', '.join(STORIES)}, the "
            f"durability is changelog or snapshots, and the sink is one of {', '.join(SINKS)}"
        )


class Plan(msgspec.Struct, frozen=True):
    """One trial."""

    seed: int
    variant: Variant
    kind: str
    """The kind of fault, or "none"."""
    folder: str
    control: Control = Control()
    victim: Victim = ""
    signal: Literal["", "kill", "stop"] = ""
    options: dict[str, str] = {}
    """Options of the storage with faults."""

    @property
    def operation(self) -> str:
        """Where the fault is, such as `after 3 ^call commit$`; empty if it is everywhere."""
        when = "after" if self.control.after else "before"
        return f"{when} {self.control.number} {self.control.pattern}" if self.control.pattern else ""


def variants(stories: Sequence[str] = STORIES, sinks: Sequence[SinkName] = SINKS) -> list[Variant]:
    """All variants with these stories and sinks."""
    return [Variant(story, changelog, sink) for story in stories for changelog in (False, True) for sink in sinks]


def label(operation: str) -> str:
    """An operation without what differs from run to run: numbers and random names."""
    return re.sub(r"await:.*|[0-9a-f]{8,}|\d+", lambda found: "await:#" if ":" in found[0] else "#", operation)


def pattern_of(text: str) -> str:
    """The regular expression of all operations with this label."""
    return f"^{re.escape(text)}$".replace(r"\#", "[0-9a-f-]+")


def draw(seed: int, chosen: Variant, kind: str, journal: Sequence[str], folder: str) -> Plan:
    """The fault of a trial: one of the operations in the journal of a run without faults.

    A label counts by the square root of its occurrences, so that rare operations get their share.
    """
    if kind == "none" or kind in LIES:
        return plan_at("", seed, chosen, kind, folder)
    chance = random.Random(f"{seed}-fault")
    of_storage = [one for one in journal if one.startswith("storage ")]
    of_calls = [one for one in journal if not one.startswith("storage ")]
    operations = of_storage if kind.startswith("storage") else of_calls if kind.startswith("call") else journal
    occurrences = Counter(map(label, operations))
    labels = sorted(occurrences)
    (name,) = chance.choices(labels, [occurrences[one] ** 0.5 for one in labels])
    # The last occurrences are left out: they depend on how long a run takes, and might never come.
    number = 1 + chance.randrange(max(1, round(occurrences[name] * 0.8)))
    when = chance.choice(("before", "after"))
    if kind.endswith((" before", " after")):
        when = kind.rpartition(" ")[2]
    return plan_at(f"{when} {number} {pattern_of(name)}", seed, chosen, kind, folder)


def plan_at(operation: str, seed: int, chosen: Variant, kind: str, folder: str) -> Plan:
    """The trial with a fault at `operation`, which is written as `Plan.operation` has it."""
    if kind == "none":
        return Plan(seed, chosen, kind, folder)
    if kind in LIES:
        return Plan(seed, chosen, kind, folder, options={**LIES[kind], **_files_of_a_lie(kind, folder)})
    where = parsed_operation(operation)
    match kind.split():
        case ["kill" | "stop" as signal, victim]:
            asking = msgspec.structs.replace(where, happening="ask")
            return Plan(seed, chosen, kind, folder, asking, cast("Victim", victim), signal)
        case ["call", "hangs"]:  # the caller's deadline ends the wait
            return Plan(seed, chosen, kind, folder, msgspec.structs.replace(where, seconds=HANGING))
        case ["storage", "hangs"]:
            hanging = msgspec.structs.replace(where, happening="hang", seconds=HANGING)
            return Plan(seed, chosen, kind, folder, hanging)
    return Plan(seed, chosen, kind, folder, where)


def parsed_operation(text: str) -> Control:
    """The operation that `text` names as `Plan.operation` has it. Raises `ValueError` if `text` is written wrongly."""
    found = re.fullmatch(r"(before|after) ([1-9]\d*) (\S.*)", text)
    if found is None:
        raise ValueError(
            f"{text!r}: write before or after, a number from 1 on, and a regular expression, with spaces between, such "
            "as 'after 3 ^call commit$'"
        )
    when, number, pattern = found.groups()
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return Control(pattern=pattern, number=int(number), after=when == "after")


def check_repeatable(operation: str, kind: str) -> None:
    """Raise `ValueError` unless a fault of this kind can happen at `operation`; empty: the seed decides where."""
    if kind != "none" and kind not in WEIGHTS:
        raise ValueError(f"{kind!r} is no kind of fault: known are none, {', '.join(WEIGHTS)}")
    if not operation:
        return
    where = parsed_operation(operation)
    if kind == "none" or kind in LIES:
        raise ValueError(f"{kind!r} does not happen at one operation: leave --at out")
    if kind.endswith(" before" if where.after else " after"):
        raise ValueError(f"{kind!r} cannot happen {operation.split(' ', 1)[0]} an operation")


def _files_of_a_lie(kind: str, folder: str) -> dict[str, str]:
    """What all processes share: the count of calls, or the past."""
    if kind == "storage throttles":
        return {"counter": f"{folder}/calls"}
    return {"stale_folder": f"{folder}/past"} if kind.endswith("late") else {}
