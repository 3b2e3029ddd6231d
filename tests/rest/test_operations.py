"""Operations over HTTP: 202 with an id, then polling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline.checkpoint.metadata import encode
from strandline.rest.flink_operations import checkpoint_progress
from strandline.runtime.driver.status import RunStatus
from tests.factories import checkpoint_metadata
from tests.observe.generated import generated_facts
from tests.rest.served import Client, GivenJob, serving
from tests.rest.steered import SteeredJob
from tests.waiting import wait_until

TRIGGER = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def job() -> Iterator[SteeredJob]:
    steered = SteeredJob()
    yield steered
    steered.go_on.set()


@pytest.fixture
def server(job: SteeredJob) -> Iterator[Client]:
    with serving(
        GivenJob(generated_facts(), job), GivenJob(generated_facts(name="over", status=RunStatus.STOPPED))
    ) as one:
        yield one


def started(client: Client, method: str, path: str, body: object = None) -> str:
    answer = client(method, path, body)
    assert answer.status == 202, answer.body
    assert list(answer.json) == ["request-id"]
    id: str = answer.json["request-id"]
    return id


def ended(client: Client, path: str) -> Any:
    wait_until(lambda: client.get(path)["status"]["id"] == "COMPLETED")
    return client.get(path)["operation"]


@pytest.mark.parametrize(
    ("method", "path", "body", "polled", "asked", "operation"),
    [
        ("POST", "checkpoints", None, "checkpoints", ("checkpoint", False), {"checkpointId": 19}),
        ("POST", "checkpoints", {"checkpointType": "FULL"}, "checkpoints", ("checkpoint", True), {"checkpointId": 19}),
        (
            "POST",
            "savepoints",
            {"target-directory": "/s", "formatType": "NATIVE"},
            "savepoints",
            ("savepoint", "/s", "native"),
            {"location": "/s/savepoint-1"},
        ),
        (
            "POST",
            "stop",
            {"targetDirectory": "/s", "drain": True},
            "savepoints",
            ("stop", "/s", "canonical", True),
            {"location": "/s/savepoint-1"},
        ),
        ("POST", "stop", {}, "stop", ("stop", None, "canonical", False), {}),
        ("POST", "flamegraph", {"subtask": 1, "seconds": 2}, "flamegraph", ("profile", 1, 2.0), None),
        ("POST", "profile", None, "profile", ("profile", 0, 10.0), None),
        ("PATCH", "rescaling?parallelism=3", None, "rescaling", ("rescale", 3), None),
        ("POST", "rescaling?parallelism=3", None, "rescaling", ("rescale", 3), None),
    ],
)
def test_an_operation_is_started_and_asked_for(
    server: Client,
    job: SteeredJob,
    method: str,
    path: str,
    body: object,
    polled: str,
    asked: tuple[object, ...],
    operation: object,
) -> None:
    id = started(server, method, f"/jobs/visits/{path}", body)
    under_way = server.get(f"/jobs/visits/{polled}/{id}")
    assert under_way["status"] == {"id": "IN_PROGRESS"}
    assert under_way["operation"] is None
    job.go_on.set()
    result = ended(server, f"/jobs/visits/{polled}/{id}")
    assert job.asked == [asked]
    if operation is not None:
        assert result == operation


def test_the_results_of_a_rescale_and_a_profile_are_given(server: Client, job: SteeredJob) -> None:
    job.go_on.set()
    rescale = started(server, "PATCH", "/jobs/visits/rescaling?parallelism=3")
    assert ended(server, f"/jobs/visits/rescaling/{rescale}")["rescaling"]["parallelism"] == 3
    profile = started(server, "POST", "/jobs/visits/profile", {"seconds": 1})
    folded = {"seconds": 1.0, "samples": 2, "stacks": {"main;work": 2}}
    assert ended(server, f"/jobs/visits/profile/{profile}") == folded


def test_a_failure_comes_with_its_cause_in_words(server: Client, job: SteeredJob) -> None:
    job.go_on.set()
    id = started(server, "POST", "/jobs/visits/savepoints", {"target-directory": "/full"})
    cause = ended(server, f"/jobs/visits/savepoints/{id}")["failure-cause"]
    assert cause == {
        "class": "StorageError",
        "stack-trace": "the disk of /full has no space left; free some, and try again",
    }


def test_a_rescale_says_what_it_does(server: Client, job: SteeredJob) -> None:
    id = started(server, "PATCH", "/jobs/visits/rescaling?parallelism=3")
    wait_until(lambda: server.get(f"/jobs/visits/rescaling/{id}")["progress"] is not None)
    assert server.get(f"/jobs/visits/rescaling/{id}")["progress"] == {"step": "taking a last checkpoint"}


def test_a_savepoint_that_also_cancels_does_both(server: Client, job: SteeredJob) -> None:
    job.go_on.set()
    id = started(server, "POST", "/jobs/visits/savepoints", {"target-directory": "/s", "cancel-job": True})
    ended(server, f"/jobs/visits/savepoints/{id}")
    assert job.asked == [("savepoint", "/s", "canonical"), ("cancel",)]


def test_a_job_is_cancelled_by_flinks_request(server: Client, job: SteeredJob) -> None:
    job.go_on.set()
    answer = server("PATCH", "/jobs/visits?mode=cancel")
    assert (answer.status, answer.json) == (202, {})
    wait_until(lambda: job.asked == [("cancel",)])


def test_a_repeated_request_with_the_same_trigger_id_starts_nothing(server: Client, job: SteeredJob) -> None:
    body = {"target-directory": "/s", "triggerId": TRIGGER}
    assert started(server, "POST", "/jobs/visits/savepoints", body) == TRIGGER
    assert started(server, "POST", "/jobs/visits/savepoints", body) == TRIGGER
    job.go_on.set()
    ended(server, f"/jobs/visits/savepoints/{TRIGGER}")
    assert started(server, "POST", "/jobs/visits/savepoints", body) == TRIGGER
    assert len(job.asked) == 1
    assert server("POST", "/jobs/visits/checkpoints", {"triggerId": TRIGGER}).status == 409


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/jobs/over/savepoints", {}, 409, "Job over cannot be steered here: it is stopped"),
        ("PATCH", "/jobs/over", None, 409, "cannot be steered"),
        ("POST", "/jobs/nobody/stop", {}, 404, "Job nobody not found"),
        ("GET", f"/jobs/visits/savepoints/{TRIGGER}", None, 404, "no savepoint operation of the trigger id"),
        ("GET", "/jobs/visits/savepoints/xyz", None, 400, "triggerid"),
        ("POST", "/jobs/visits/savepoints", b"{", 400, "not a valid SavepointRequest"),
        ("POST", "/jobs/visits/savepoints", b"\xff", 400, "SavepointRequest"),
        ("POST", "/jobs/visits/savepoints", {"targetDirectory": "/s"}, 400, "targetDirectory"),
        ("POST", "/jobs/visits/savepoints", {"target-directory": 7}, 400, "target-directory"),
        ("POST", "/jobs/visits/savepoints", {"formatType": "ZIP"}, 400, "formatType"),
        ("POST", "/jobs/visits/profile", {"seconds": 3600}, 400, "seconds"),
        ("PATCH", "/jobs/visits/rescaling", None, 400, "parallelism"),
        ("PATCH", "/jobs/visits/rescaling?parallelism=0", None, 400, "parallelism"),
        ("PATCH", "/jobs/visits/rescaling?parallelism=129", None, 400, "128 key groups"),
        ("PATCH", "/jobs/visits?mode=stop", None, 400, "mode"),
        ("DELETE", "/jobs/visits", None, 405, "Method Not Allowed"),
        ("GET", "/nothing/here", None, 404, "Not found: /nothing/here"),
    ],
)
def test_bad_requests_get_a_clear_answer(
    server: Client, job: SteeredJob, method: str, path: str, body: object, status: int, words: str
) -> None:
    answer = server(method, path, body)
    assert (answer.status, list(answer.json)) == (status, ["errors"])
    assert words in answer.json["errors"][0]
    assert job.asked == []


def test_a_savepoint_is_disposed_of_and_nothing_else(server: Client, tmp_path: Path) -> None:
    folder = tmp_path / "savepoint-visits-1"
    folder.mkdir()
    (folder / "_metadata").write_bytes(encode(checkpoint_metadata(3, kind="savepoint", subtasks=())))
    other = tmp_path / "chk-3"
    other.mkdir()
    (other / "_metadata").write_bytes(encode(checkpoint_metadata(3)))
    for place, gone in ((folder, True), (other, False), (tmp_path, False), (tmp_path / "none", False)):
        id = started(server, "POST", "/savepoint-disposal", {"savepoint-path": str(place)})
        cause = ended(server, f"/savepoint-disposal/{id}").get("failure-cause")
        assert (cause is None) == gone
    assert not folder.exists()
    assert (other / "_metadata").exists()
    assert server("POST", "/savepoint-disposal", {}).status == 400


def test_only_so_many_operations_are_in_progress(server: Client, job: SteeredJob) -> None:
    for _ in range(16):
        started(server, "POST", "/jobs/visits/checkpoints")
    refused = server("POST", "/jobs/visits/checkpoints")
    assert refused.status == 503
    assert "16 operations are in progress" in refused.json["errors"][0]


def test_a_savepoint_in_progress_tells_its_subtasks_and_bytes() -> None:
    """The facts of generated jobs lie in the past; so this one begins then as well."""
    facts = generated_facts(checkpoints=17)
    began = int(facts.checkpoints.history[-1].trigger_time * 1000)
    progress = checkpoint_progress(facts, began, savepoint=True)
    assert progress is not None
    assert progress.step == "2 of 4 subtasks have acknowledged savepoint 17"
    assert (progress.unit, progress.total) == ("bytes", 200_000_000)
    assert checkpoint_progress(facts, began + 1, savepoint=True) is None
    assert checkpoint_progress(facts, int(time.time() * 1000), savepoint=False) is None
