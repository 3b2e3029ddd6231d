"""A job that writes into PostgreSQL: its tables hold what the batch computation says, whatever was killed."""

from __future__ import annotations

import os
import random
import time

import pytest

from strandline_bench.servers.postgres import Postgres, Schema
from tests.jobs.driver import Driver
from tests.jobs.place import Place, batches, running_sums

pytestmark = [pytest.mark.spark, pytest.mark.faults]

KILLS = int(os.environ.get("STRANDLINE_DRIVER_KILLS", "1"))
SEED = int(os.environ.get("STRANDLINE_SEED", str(random.SystemRandom().randrange(1 << 31))))


@pytest.mark.timeout(600)
def test_tables_after_kills_of_driver_and_server_equal_those_of_a_run_without(
    place: Place, postgres: Postgres, postgres_schema: Schema
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    data = batches(5 * KILLS + 5, seed=SEED)
    written = 0
    target = {"uri": postgres_schema.uri, "schema": postgres_schema.name}
    with Driver(place.root, checkpoint_interval="200ms", postgres=target) as driver:
        for _ in range(KILLS):
            driver.start()
            driver.await_run()
            for _ in range(3):
                place.write(data[written])
                written += 1
                time.sleep(chance.uniform(0.05, 1.0))  # any moment of a batch or a commit
            driver.kill()
            changes = postgres_schema.query("SELECT * FROM changes")
            assert len(changes) == len(set(changes)), f"seed {SEED}"
            assert set(changes) <= set(running_sums(data[:written])), f"seed {SEED}"
        driver.start()
        driver.await_run()
        for batch in data[written : written + 3]:
            place.write(batch)
        time.sleep(chance.uniform(0.05, 1.0))  # any moment of a batch or a commit
        postgres.kill()
        postgres.start()
        for batch in data[written + 3 :]:
            place.write(batch)
        driver.finish()
    expected = running_sums(data)
    assert sorted(postgres_schema.query("SELECT * FROM changes"), key=repr) == expected, f"seed {SEED}"
    newest = {user: (user, n, s) for user, n, s in sorted(expected, key=lambda row: row[1])}
    assert sorted(postgres_schema.query("SELECT * FROM newest")) == sorted(newest.values()), f"seed {SEED}"
    assert not list((place.checkpoints / "visits" / "staged").rglob("*.arrow"))
