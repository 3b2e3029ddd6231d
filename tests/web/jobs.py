"""Generated jobs for the page: healthy, ill, lost, failed, and with names that attack it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from strandline.observe.facts import FailureFacts, Finding, JobFacts
from strandline.observe.health import findings
from strandline.observe.views import JobControl
from strandline.runtime.driver.status import RunStatus
from tests.observe.generated import generated_facts
from tests.rest.served import GivenJob

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&amp;{{7*7}}"
LOGS = {"driver": "first line\nsecond line\n", "slot-0": "the slot's own line\n", "slot-1": ""}
FINDINGS = (
    Finding(
        "back-pressure",
        "critical",
        "Back pressure",
        "Start delay 8.1 s of 9.0 s.",
        "Add subtasks: press Rescale.",
        "counts",
    ),
    Finding("skew", "warning", "One slow subtask", "Subtask 1 is busy 99 % of the time.", "Spread the keys.", "enrich"),
)


def given(facts: JobFacts, control: JobControl | None = None, logs: Mapping[str, str] | None = None) -> GivenJob:
    return GivenJob(facts, control, logs or {})


def running_job(health: tuple[Finding, ...] = FINDINGS) -> JobFacts:
    return msgspec.structs.replace(generated_facts(), health=health)


def lost_job() -> JobFacts:
    facts = msgspec.structs.replace(generated_facts(name="lost"), driver_lost=True, subtasks=())
    return msgspec.structs.replace(facts, health=findings(facts))


def broken_job() -> JobFacts:
    facts = generated_facts(name="broken", status=RunStatus.FAILED)
    return msgspec.structs.replace(facts, health=findings(facts))


def hostile_job() -> JobFacts:
    """Every text that a user or a file may choose is markup that would run as a script."""
    facts = generated_facts(name=HOSTILE)
    return msgspec.structs.replace(
        facts,
        config={HOSTILE: HOSTILE},
        graph=tuple(msgspec.structs.replace(one, name=HOSTILE, description=HOSTILE) for one in facts.graph),
        failures=(FailureFacts(facts.taken_ms, "restart", HOSTILE, HOSTILE),),
        health=(Finding(HOSTILE, "critical", HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
    )
