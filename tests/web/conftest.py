"""One browser and one server over generated jobs, for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.rest.served import Client, serving
from tests.rest.steered import SteeredJob
from tests.web.browser import CHROMIUM, MISSING, chromium
from tests.web.jobs import LOGS, broken_job, given, hostile_job, lost_job, running_job


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def server() -> Iterator[Client]:
    """A running job that can be steered, one without its driver, one that failed, and one with a hostile name."""
    steered = SteeredJob()
    steered.go_on.set()
    with serving(
        given(running_job(), steered, LOGS), given(lost_job()), given(broken_job()), given(hostile_job())
    ) as client:
        yield client
