"""Another number of subtasks: between two runs, and while a run goes on."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

import strandline as sl
from strandline.errors import ConfigError
from tests.jobs.place import Place, running_sums

pytestmark = pytest.mark.spark

Batch = list[tuple[str | None, int]]


def batches(count: int, seed: int) -> list[Batch]:
    random_ = random.Random(seed)
    return [[(f"user{random_.randrange(60)}", random_.randrange(100)) for _ in range(80)] for _ in range(count)]


def feed(place: Place, run: sl.JobRun, rows: list[Batch]) -> None:
    for batch in rows:
        place.write(batch)
    run.process_all_available()


def kill_a_slot(run: sl.JobRun) -> None:
    slots = [slot.pid for slot in run.processes().slots]
    os.kill(random.choice(slots), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="rocksdb"),
        pytest.param({"changelog": True, "materialization_interval": "1s"}, id="changelog"),
        pytest.param({"state_backend": "heap"}, id="heap"),
    ],
)
def test_restored_at_any_parallelism(place: Place, runs: list[sl.JobRun], options: dict[str, Any]) -> None:
    rows = batches(8, seed=1)
    done = 0
    for at, parallelism in enumerate((2, 5, 3, 8)):
        run = place.sums(**options, checkpoint_interval="1h").start(parallelism=parallelism)
        runs.append(run)
        feed(place, run, rows[done : done + 1])
        kill_a_slot(run)
        feed(place, run, rows[done + 1 : done + 2])
        done += 2
        assert run.figures().parallelism == parallelism
        if at % 2:
            run.stop()
        else:
            run.cancel()
        assert place.rows() == running_sums(rows[:done])


@pytest.mark.parametrize(
    ("changelog", "steps"),
    [
        (True, (3, 2)),
        pytest.param(True, (5, 3, 8), marks=pytest.mark.slow),
        pytest.param(False, (5, 3, 8), marks=pytest.mark.slow),
    ],
)
def test_rescaled_while_it_runs(place: Place, runs: list[sl.JobRun], changelog: bool, steps: tuple[int, ...]) -> None:
    rows = batches(8, seed=2)
    run = place.sums(changelog=changelog, checkpoint_interval="200ms").start()
    runs.append(run)
    feed(place, run, rows[:2])
    done = 2
    for parallelism in steps:
        place.write(rows[done])
        rescaled = run.rescale(parallelism)
        assert (rescaled.parallelism, run.figures().parallelism) == (parallelism, parallelism)
        assert 0 < rescaled.pause_ms <= rescaled.duration_ms
        assert rescaled.local_bytes > 0, "the files were on this host"
        assert rescaled.durable_bytes == 0
        kill_a_slot(run)
        feed(place, run, rows[done + 1 : done + 2])
        done += 2
        assert place.rows() == running_sums(rows[:done])
    assert run.figures().restarts == 0
    with pytest.raises(ConfigError, match="parallelism"):
        run.rescale(0)
    with pytest.raises(ConfigError, match="parallelism"):
        run.rescale("many")  # type: ignore[arg-type]
    run.stop()
    # The next run of the job begins as it is configured, with what the rescaled one left.
    run = place.sums(changelog=changelog, parallelism=3).start()
    runs.append(run)
    assert run.figures().parallelism == 3
    more = batches(1, seed=3)
    feed(place, run, more)
    run.stop()
    assert place.rows() == running_sums([*rows[:done], *more])
