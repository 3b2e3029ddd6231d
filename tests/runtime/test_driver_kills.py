"""The driver is killed at random moments, again and again; nothing is lost and nothing comes twice."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.runtime.conftest import Place, running_sums, wait_until
from tests.runtime.driver import Driver
from tests.runtime.test_recovery import batches

pytestmark = [pytest.mark.spark, pytest.mark.faults]

KILLS = int(os.environ.get("STRANDLINE_DRIVER_KILLS", "3"))
SEED = int(os.environ.get("STRANDLINE_SEED", str(random.SystemRandom().randrange(1 << 31))))


@pytest.mark.timeout(600)
def test_results_after_many_kills_equal_those_of_a_run_without(place: Place) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    data = batches(6 * KILLS + 4, seed=SEED)
    written = 0
    with Driver(place.root, checkpoint_interval="300ms") as driver:
        for _ in range(KILLS):
            driver.start()
            wait_until(lambda: driver.pids() or not driver.running(), seconds=90, what="the start of the driver")
            assert driver.running(), (place.root / "driver.log").read_text()[-3000:]
            deadline = time.monotonic() + chance.uniform(0.2, 5.0)
            while time.monotonic() < deadline and written < len(data):
                place.write(data[written])
                written += 1
                time.sleep(chance.uniform(0.05, 0.6))
            driver.kill()
            # Whatever a reader sees at any moment is a prefix of the right answer: no row twice, none from the future.
            assert set(place.rows()) <= set(running_sums(data[:written])), f"seed {SEED}"
            assert len(place.rows()) == len(set(place.rows())), f"seed {SEED}"
        for batch in data[written:]:
            place.write(batch)
        driver.start()
        driver.finish()
    assert place.rows() == running_sums(data), f"seed {SEED}"
