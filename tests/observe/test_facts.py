"""The facts of a job are one document: they survive encoding, whatever they hold."""

from __future__ import annotations

import msgspec
import pytest

from strandline.observe.facts import JobFacts, job_id
from strandline.runtime.driver.status import RunStatus
from tests.observe.generated import generated_facts


@pytest.mark.parametrize("status", list(RunStatus))
def test_facts_survive_encoding(status: RunStatus) -> None:
    facts = generated_facts(status=status)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=JobFacts) == facts
    assert facts.runs is not status.ended


def test_the_id_of_a_job_depends_on_its_name_and_its_directory_alone() -> None:
    assert job_id("/a/", "visits") == job_id("/a", "visits")
    assert len({job_id("/a", "visits"), job_id("/b", "visits"), job_id("/a", "clicks")}) == 3
    assert len(job_id("/a", "visits")) == 32
