"""The facts of a job are one document: they survive encoding, whatever they hold."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

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


def test_the_figures_of_a_source_are_found_by_its_place_not_by_its_number() -> None:
    """No sink reads `source-0` of this job, so Spark does not know it."""
    facts = generated_facts(samples=0)
    graph = tuple(replace(one, name=one.name.replace("source-", "source-1")) for one in facts.graph)
    facts, figures = replace(facts, graph=graph), facts.figures
    assert figures is not None
    assert [facts.source_figures(one) for one in graph[:2]] == list(figures.sources)
    assert facts.source_figures(graph[2]) is None
    fewer = replace(facts, figures=replace(figures, sources=figures.sources[:1]))
    assert [fewer.source_figures(one) for one in graph[:2]] == [None, None]
