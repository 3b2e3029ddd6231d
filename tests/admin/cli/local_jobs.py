"""Jobs of this host without Spark: a real server over given facts, and a real entry of its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from strandline.observe.registration import Registration, local_runs
from strandline.runtime.driver.status import RunStatus
from tests.rest.served import Client, GivenJob, serving
from tests.waiting import wait_until


@contextmanager
def local_job(view: GivenJob) -> Iterator[Client]:
    """A job that runs in this process, as far as others can see."""
    with serving(view) as client, registered(view, client.served.url, client.served.token):
        yield client


@contextmanager
def registered(view: GivenJob, url: str = "", token: str = "") -> Iterator[None]:
    """The entry of a run, until the end of the block."""
    registration = Registration(view, None, url, token)
    try:
        # A test may register the same run twice: the entry of the first time says that it has ended.
        wanted = (view.given.run, view.given.status, url)
        wait_until(
            lambda: any((run.entry.run, run.entry.status, run.entry.rest_url) == wanted for run in local_runs()),
            what="the entry",
        )
        yield
    finally:
        if not view.given.status.ended:
            view.given = msgspec.structs.replace(view.given, status=RunStatus.FINISHED)
        registration.close()
