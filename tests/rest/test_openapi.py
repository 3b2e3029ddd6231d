"""`/openapi.json` says what the server does: schemathesis sends what it allows, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from strandline.observe.facts import Finding
from strandline.rest.access import Access
from strandline.rest.app import create_app
from tests.observe.generated import generated_facts
from tests.rest.served import Client, GivenJob, GivenJobs, serving
from tests.rest.steered import SteeredJob

TOKEN = "a-token-of-this-test"
FINDING = Finding("back-pressure", "warning", "slow", "it is slow", "make it fast")


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    job = SteeredJob()
    job.go_on.set()
    facts = msgspec.structs.replace(generated_facts(samples=3), health=(FINDING,))
    with serving(GivenJob(facts, job)) as client:
        yield client


schema = schemathesis.openapi.from_dict(create_app(GivenJobs([]), Access(TOKEN)).openapi())
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@schema.parametrize()
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_answers_are_as_described(case: Any, server: Client) -> None:
    """Half of the calls name the job that exists; the others name any."""
    if "jobid" in (case.path_parameters or {}) and len(case.path_parameters["jobid"]) % 2:
        case.path_parameters["jobid"] = "visits"
    case.headers["Authorization"] = f"Bearer {server.served.token}"
    for name in ("Origin", "Host"):
        case.headers.pop(name, None)
    case.call_and_validate(base_url=server.served.url, checks=CHECKS, timeout=20)


def test_every_path_is_described_with_its_errors() -> None:
    paths = schema.raw_schema["paths"]
    assert len(paths) > 40
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert {"400", "401", "403", "503"} <= operation["responses"].keys(), (method, path)
            if "{jobid}" in path:
                assert "404" in operation["responses"], (method, path)
            if method != "get":
                assert "202" in operation["responses"], (method, path)


def test_answers_about_a_real_job_fit_their_schemas(server: Client) -> None:
    described = server.get("/openapi.json")
    assert described["components"]["schemas"].keys() >= {"JobFacts", "CheckpointingStatistics", "Errors"}
    assert "X-Strandline-Control" not in described
