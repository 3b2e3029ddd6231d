"""One server over two generated jobs, for all tests that only read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strandline.runtime.driver.status import RunStatus
from tests.observe.generated import generated_facts
from tests.rest.served import Client, GivenJob, serving


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    running = GivenJob(generated_facts())
    failed = GivenJob(generated_facts(name="broken", status=RunStatus.FAILED))
    with serving(running, failed) as client:
        yield client
