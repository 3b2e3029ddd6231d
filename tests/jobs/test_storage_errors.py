"""Storage fails for a while at the steps of a completion and of a takeover: the job goes on, and no row is lost."""

from __future__ import annotations

from typing import Any

import pytest

import strandline as sl
from tests.jobs.place import Place, batches, running_sums
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

DATA = batches(3, seed=13)


class Outage:
    """A job whose calls that match `pattern` fail while the switch is on."""

    def __init__(self, place: Place, pattern: str, **faults: str) -> None:
        self.place = place
        self._switch = place.root / "on"
        self._faults = {"fail_pattern": pattern, "switch": str(self._switch), **faults}

    def job(self, **options: Any) -> sl.Job:
        config = self.place.config(**options).replace(
            checkpoint_dir=f"faulty+file://{self.place.checkpoints}", storage_options=self._faults
        )
        return self.place.sums(config=config, sink=f"faulty+file://{self.place.output}")

    def begin(self) -> None:
        self._switch.touch()

    def end(self) -> None:
        self._switch.unlink()


def goes_on_after_a_fresh_start(outage: Outage, runs: list[sl.JobRun], **options: Any) -> None:
    run = outage.job(**options).start()
    runs.append(run)
    outage.place.write(DATA[2])
    run.process_all_available()
    assert outage.place.rows() == running_sums(DATA)


@pytest.mark.parametrize("changelog", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_that_cannot_be_published_is_finished_by_a_restart(
    place: Place, runs: list[sl.JobRun], changelog: bool
) -> None:
    """The restart cannot publish either, at first: it has taken the job over by then, and goes on with that."""
    outage = Outage(place, "^rename ")
    run = outage.job(changelog=changelog).start()
    runs.append(run)
    place.write(DATA[0])
    run.process_all_available()
    outage.begin()
    place.write(DATA[1])
    wait_until(lambda: run.figures().restarts >= 2, what="a restart after a restart")
    outage.end()
    assert run.trigger_checkpoint().status == "completed"  # by the generation that the restart begins
    run.process_all_available()
    assert place.rows() == running_sums(DATA[:2])
    run.cancel()
    goes_on_after_a_fresh_start(outage, runs, changelog=changelog)


def test_a_passing_error_at_the_metadata_of_a_checkpoint_goes_unnoticed(place: Place, runs: list[sl.JobRun]) -> None:
    outage = Outage(place, "^create .*/_metadata$", fail_times="1")
    outage.begin()
    run = outage.job(checkpoint_every_batch=True, restart_strategy="none").start()
    runs.append(run)
    place.write(DATA[0])
    run.process_all_available()
    assert [one.status for one in run.checkpoints()] == ["completed"]
    assert place.rows() == running_sums(DATA[:1])


def test_with_a_checkpoint_in_every_batch_failed_ones_are_tolerated_and_then_restart_the_job(
    place: Place, runs: list[sl.JobRun]
) -> None:
    outage = Outage(place, "^create .*/_metadata$")
    run = outage.job(checkpoint_every_batch=True, tolerable_failed_checkpoints=1, checkpoint_interval="1h").start()
    runs.append(run)
    place.write(DATA[0])
    run.process_all_available()
    outage.begin()
    place.write(DATA[1])
    wait_until(lambda: run.figures().restarts >= 1, what="a restart")
    assert [one.status for one in run.checkpoints()][1:3] == ["failed", "failed"]
    outage.end()
    run.process_all_available()
    assert place.rows() == running_sums(DATA[:2])
    run.cancel()
    goes_on_after_a_fresh_start(outage, runs)
