"""Logs and a flame graph of a real run: while it runs, and after its end."""

from __future__ import annotations

import pytest

from strandline.errors import StrandlineError
from tests.jobs.place import Place

pytestmark = pytest.mark.spark


def test_logs_and_stacks_of_a_run_can_be_read_and_its_logs_stay_after_the_end(place: Place) -> None:
    with place.sums().start() as run:
        job = run._observation.job
        assert job is not None
        place.write([("a", 1)])
        run.process_all_available()
        driver, manager, *slots = job.processes()
        assert (driver, slots) == ("driver", ["slot-0", "slot-1"])
        assert "slot 1 of job visits begins" in job.log("slot-1").text
        assert job.log(manager, 10_000).process == manager
        folded = job.profile(1, 0.2)
        assert folded.samples == sum(folded.stacks.values())
        with pytest.raises(StrandlineError, match="has no subtask 2; there are 0 to 1"):
            job.profile(2, 0.2)
        run.stop()
        assert list(job.processes()) == [driver, manager, *slots]
        assert "slot 1 of job visits begins" in job.log("slot-1").text
        assert "Fatal Python error" not in job.log("slot-0").text + job.log("slot-1").text
        kept = place.checkpoints / "visits" / "history" / "logs" / job.facts().run
        assert sorted(path.stem for path in kept.iterdir()) == sorted([driver, manager, *slots])
