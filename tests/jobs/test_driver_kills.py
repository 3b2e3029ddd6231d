"""The driver is killed at random and at chosen moments; nothing is lost and nothing comes twice."""

from __future__ import annotations

import os
import random
import time

import pytest

from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.admin.verification import Verification
from strandline.observe.history_reader import read_history
from strandline.storage.local import LocalStorage
from tests.jobs.driver import Driver
from tests.jobs.durable import is_data
from tests.jobs.kills import DELETED, PUBLISHED, UPLOADED, WON, WRITTEN
from tests.jobs.place import Place, batches, running_sums

pytestmark = [pytest.mark.spark, pytest.mark.faults]

KILLS = int(os.environ.get("STRANDLINE_DRIVER_KILLS", "1"))
SEED = int(os.environ.get("STRANDLINE_SEED", str(random.SystemRandom().randrange(1 << 31))))


@pytest.mark.timeout(600)
def test_results_after_many_kills_equal_those_of_a_run_without(place: Place) -> None:
    """The first driver has the changelog on; those after it have it or not."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    data = batches(6 * KILLS + 4, seed=SEED)
    written = 0
    options = {"checkpoint_interval": "300ms", "materialization_interval": "700ms", "changelog": True}
    with Driver(place.root, **options) as driver:
        for number in range(KILLS):
            driver.options = {**options, "changelog": number == 0 or chance.random() < 0.5}
            driver.start()
            driver.await_run()
            deadline = time.monotonic() + chance.uniform(0.2, 5.0)
            while time.monotonic() < deadline and written < len(data):
                place.write(data[written])
                written += 1
                time.sleep(chance.uniform(0.05, 0.6))  # any moment of a batch or a checkpoint
            driver.kill()
            history = read_history(LocalStorage(str(place.checkpoints)), "visits")
            assert history is not None
            assert history.facts.driver_lost
            assert len(history.runs) == number + 1
            # Whatever a reader sees at any moment is a prefix of the right answer: no row twice, none from the future.
            assert set(place.rows()) <= set(running_sums(data[:written])), f"seed {SEED}"
            assert len(place.rows()) == len(set(place.rows())), f"seed {SEED}"
        for batch in data[written:]:
            place.write(batch)
        driver.options = {**options, "changelog": chance.random() < 0.5}
        driver.start()
        driver.finish()
    assert place.rows() == running_sums(data), f"seed {SEED}"
    history = read_history(LocalStorage(str(place.checkpoints)), "visits")
    assert history is not None
    assert history.facts.status == "stopped"
    assert not history.facts.driver_lost
    assert [run.liveness for run in history.runs] == ["ended"] + ["dead"] * KILLS
    assert history.facts.checkpoints.last_completed is not None
    assert history.notes == ()


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("moments", [(WON, DELETED), (UPLOADED, WRITTEN, PUBLISHED)])
def test_a_kill_between_any_two_steps_of_a_completion_leaves_a_correct_state(
    place: Place, moments: tuple[str, ...]
) -> None:
    """Uploads done, `_metadata` written, log entry won, rows published, files of older ones deleted."""
    data = batches(len(moments), seed=7)
    switch = place.root / "on"
    faults = {"switch": str(switch), "journal": str(place.root / "journal")}
    # Every checkpoint has state files of its own, so that every completion deletes some.
    options = {"checkpoint_interval": "300ms", "incremental": False, "inline_threshold": 0}
    for moment, rows in zip(moments, data, strict=True):
        driver = Driver(place.root, **options, faults={**faults, "kill_pattern": moment})
        driver.start()
        driver.await_run()
        switch.touch()
        place.write(rows)
        driver.await_death(f"the kill {moment}")
        switch.unlink()
        seen = place.rows()
        assert len(seen) == len(set(seen)), moment
        assert set(seen) <= set(running_sums(data)), moment
    killed = [line for line in (place.root / "journal").read_text().splitlines() if line.startswith("killed ")]
    assert len(killed) == len(moments)
    driver = Driver(place.root, **options, faults=faults)
    driver.start()
    driver.finish()
    assert place.rows() == running_sums(data)

    storage = LocalStorage(str(place.checkpoints))
    delete_garbage(storage, find_garbage(storage, "visits", now=time.time() + 10, min_age=0, take_over=True))
    verification = Verification.of_job(storage, "visits")
    assert [found.damage for found in verification.run()] == [()]
    needed = {handle.path for handle in verification.handles}
    left = {file.path for file in storage.list("visits") if is_data(file.path)}
    assert {path for path in left if not path.endswith("/_metadata")} == needed
    assert len(left) == len(needed) + 1
