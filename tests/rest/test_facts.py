"""The facts of a job over HTTP."""

from __future__ import annotations

import msgspec
import pytest

from strandline.observe.facts import JobFacts
from tests.observe.generated import generated_facts
from tests.rest.served import Client, GivenJob, serving


def test_the_facts_come_whole_by_id_and_by_name(client: Client) -> None:
    expected = generated_facts()
    for job in (expected.id, "visits"):
        answer = client("GET", f"/jobs/{job}/facts?subtasks=true")
        assert msgspec.json.decode(answer.body, type=JobFacts) == expected
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-strandline-control"] == "no"


def test_facts_that_have_not_changed_are_not_sent_again(client: Client) -> None:
    first = client("GET", "/jobs/visits/facts")
    again = client("GET", "/jobs/visits/facts", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    other = client("GET", "/jobs/visits/facts?checkpoints=3", headers={"If-None-Match": first.headers["etag"]})
    assert other.status == 200


def test_a_client_may_ask_for_what_is_new(client: Client) -> None:
    known = generated_facts()
    since = known.samples[-3].time_ms
    facts = client.get(f"/jobs/visits/facts?after=18&samples_after={since}")
    assert [one["id"] for one in facts["checkpoints"]["history"]] == [18, 19, 20]
    assert all(one["subtasks"] == [] for one in facts["checkpoints"]["history"])
    assert [one["time_ms"] for one in facts["samples"]] == [one.time_ms for one in known.samples[-2:]]


def test_one_checkpoint_comes_with_its_subtasks(client: Client) -> None:
    assert len(client.get("/jobs/visits/facts/checkpoints/19")["subtasks"]) == 4
    assert client("GET", "/jobs/visits/facts/checkpoints/999").status == 404


@pytest.mark.parametrize("query", ["checkpoints=-1", "checkpoints=10001", "checkpoints=x", "after=-1", "subtasks=7"])
def test_a_wrong_bound_is_refused_in_words(client: Client, query: str) -> None:
    answer = client("GET", f"/jobs/visits/facts?{query}")
    assert answer.status == 400
    assert query.partition("=")[0] in answer.json["errors"][0]


def test_an_unknown_job_is_told_so(client: Client) -> None:
    answer = client("GET", "/jobs/nobody/facts")
    assert answer.status == 404
    assert "Job nobody not found" in answer.json["errors"][0]


def test_answers_stay_small_with_many_subtasks_and_checkpoints() -> None:
    with serving(GivenJob(generated_facts(parallelism=1000, checkpoints=10_000))) as client:
        sizes = {
            query: len(client("GET", f"/jobs/visits/facts{query}").body)
            for query in ("", "?checkpoints=10000", "?checkpoints=10000&subtasks=true", "?checkpoints=0")
        }
    assert sizes["?checkpoints=0"] < sizes[""] < 2_000_000
    assert sizes["?checkpoints=10000"] < 7_000_000
    assert sizes["?checkpoints=10000&subtasks=true"] < 15_000_000


def test_logs_are_listed_and_read(client: Client) -> None:
    assert (
        client.get("/jobs/visits/logs") == client.get("/jobs/visits/processes") == {"processes": ["driver", "slot-0"]}
    )
    assert client.get("/jobs/visits/logs/driver?max_bytes=4") == {"process": "driver", "text": "two\n", "cut": True}
    assert client("GET", "/jobs/visits/logs/slot-9").status == 404


def test_the_health_of_a_job_is_told(client: Client) -> None:
    assert client.get("/jobs/visits/health") == {"status": "ok", "findings": []}
