"""Refuses to start a job that runs already, for those who do not want to take it over."""

from __future__ import annotations

import logging
import os

from strandline.config import Config
from strandline.errors import StrandlineError
from strandline.observe.facts import job_id
from strandline.observe.registration import local_runs
from strandline.storage import open_storage

log = logging.getLogger(__name__)


def check_not_running(job: str, config: Config) -> None:
    """Raise `StrandlineError` if another process of this user on this host runs the job.

    Whether a run on another host still lives can only be guessed, and whoever starts a job again there after a failure
    must not have to wait. So such a run is taken over without a question.
    """
    id = job_id(open_storage(config.checkpoint_dir, config.storage_options).url, job)
    try:
        runs = local_runs()
    except StrandlineError as error:
        log.warning("job %s: it is not known whether it runs already: %s", job, error)
        return
    for found in runs:
        entry = found.entry
        if found.liveness == "alive" and entry.job_id == id and entry.pid != os.getpid():
            page = f" ({entry.rest_url})" if entry.rest_url else ""
            raise StrandlineError(
                f"job {job!r} runs already, in process {entry.pid}{page}. Stop it first: strandline stop {job}. Or "
                "give --take-over: then that run ends at once, as if its driver had been lost, and this one goes on "
                "from its last checkpoint"
            )
