"""A restore that takes its time is seen from outside, in bytes; and then the first batch, while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.observe.registration import local_runs
from tests.admin.cli.commands import strandline
from tests.jobs.place import Place, Sum
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

LONG = "x" * 4000
ROWS = [(f"{number}-{LONG[number:]}", number) for number in range(300)]


class Held(Sum):
    """Does not go on as long as a file is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        while self.gate.exists():
            time.sleep(0.05)
        yield from super().process(key, rows, context)


def test_a_restore_is_seen_in_bytes_and_then_the_first_batch(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRANDLINE_RUNS_DIR", str(tmp_path))
    place, switch, gate = Place(tmp_path, spark), tmp_path / "slow", tmp_path / "gate"
    slow = {"bytes_per_second": "1", "slow_pattern": "^download .*/(shared|chk-)", "switch": str(switch)}
    config = place.config(parallelism=1, rest_port=0, storage_options=slow).replace(
        checkpoint_dir=f"faulty+file://{place.checkpoints}"
    )
    job = place.sums(Held(gate), config)
    with job.start() as run:
        place.write(ROWS)
        run.process_all_available()
        state = run.figures().state_bytes
    switch.touch()
    gate.touch()
    started: list[sl.JobRun] = []
    starting = threading.Thread(target=lambda: started.append(job.start()), daemon=True)
    starting.start()

    def shown(holds: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            if not any(found.alive for found in local_runs()):
                return None
            figures: dict[str, Any] = strandline("status", "visits", "--json").json["figures"]
            return figures if holds(figures) else None

        found = wait_until(look, what=what)
        assert found is not None
        return found

    try:
        restoring = shown(lambda one: one["restoring"] and one["restoring"]["done_bytes"], "the restore")["restoring"]
        assert state / 2 < restoring["total_bytes"] < 2 * state
        assert restoring["done_bytes"] <= restoring["total_bytes"]
        text = strandline("status", "visits").stdout
        assert text.startswith("visits  starting for ")
        assert " kB on local disks" in text or " MB on local disks" in text

        switch.unlink()
        starting.join(60)
        place.write(ROWS)
        first = shown(lambda one: one["running_batch"], "the first batch")
        assert (first["running_batch"]["first"], first["restoring"], first["batches"]) == (True, None, 0)
        text = strandline("status", "visits").stdout
        assert "the first one of generation 2 has been running for" in text
        assert "counted when a batch has ended" in text
        assert "0 in all" not in text

        gate.unlink()
        started[0].process_all_available()
        shown(lambda one: one["rows"] == len(ROWS) and one["running_batch"] is None, "the end of the batch")
        assert "the last one took" in strandline("status", "visits").stdout
    finally:
        switch.unlink(missing_ok=True)
        gate.unlink(missing_ok=True)
        starting.join(60)
        for run in started:
            run.cancel()
