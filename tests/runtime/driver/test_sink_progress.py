"""What the figures of a run say about its sinks."""

from __future__ import annotations

from pathlib import Path

from strandline.errors import SinkError
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.driver.sink_progress import SinkProgress
from strandline.storage.local import LocalStorage
from tests.runtime.driver.restore.generations import take_the_job_over


def test_a_restart_that_has_recovered_the_sinks_ends_their_failures(tmp_path: Path) -> None:
    progress = SinkProgress()
    for _ in range(3):
        progress.failed("sqlite:visits.db#visits", SinkError("the target is down"))
    [failing] = progress.figures()
    assert (failing.failures_in_row, failing.error) == (3, "the target is down")

    SinkCommits(take_the_job_over(LocalStorage(str(tmp_path))), progress)

    [recovered] = progress.figures()
    assert (recovered.failures_in_row, recovered.error) == (0, "")
