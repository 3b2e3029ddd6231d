"""A slow start is seen and ended from outside: its restore in bytes, then its first batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class SlowStart:
    """A job with a checkpoint that is restored as slowly as the test wants."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.place = Place(root, spark)
        self.gate, self._switch = root / "gate", root / "slow"
        slow = {"bytes_per_second": "1", "slow_pattern": "^download .*/(shared|chk-)", "switch": str(self._switch)}
        config = self.place.config(parallelism=1, rest_port=0, storage_options=slow).replace(
            checkpoint_dir=f"faulty+file://{self.place.checkpoints}"
        )
        self._job = self.place.sums(Held(self.gate), config)
        self._starting: threading.Thread
        self._started: list[sl.JobRun] = []
        with self._job.start() as run:
            self.place.write(ROWS)
            run.process_all_available()
            self.state = run.figures().state_bytes

    @contextmanager
    def begun(self) -> Iterator[dict[str, Any]]:
        """A start that is in the middle of its restore; the figures that show it."""
        self._switch.touch()
        self._started = []
        self._starting = threading.Thread(target=lambda: self._started.append(self._job.start()), daemon=True)
        self._starting.start()
        try:
            yield self.shown(lambda one: one["restoring"] and one["restoring"]["done_bytes"], "the restore")
        finally:
            self.gate.unlink(missing_ok=True)
            self.run().cancel()

    def is_restoring(self) -> bool:
        return self._starting.is_alive()

    def go_on(self) -> None:
        """The storage is fast again."""
        self._switch.unlink(missing_ok=True)

    def run(self) -> sl.JobRun:
        """The run, once `start` has returned it."""
        self.go_on()
        self._starting.join(60)
        return self._started[0]

    def shown(self, holds: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The figures that the command line shows, as soon as they are so."""

        def look() -> dict[str, Any] | None:
            if not any(found.alive for found in local_runs()):
                return None
            figures: dict[str, Any] = strandline("status", "visits", "--json").json["figures"]
            return figures if holds(figures) else None

        found = wait_until(look, what=what)
        assert found is not None
        return found


@pytest.fixture(scope="class")
def slow(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[SlowStart]:
    root = tmp_path_factory.mktemp("slow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRANDLINE_RUNS_DIR", str(root))
        yield SlowStart(root, spark)


class TestASlowRestore:
    """The tests share one job and its checkpoint."""

    def test_a_cancel_ends_the_run_at_once(self, slow: SlowStart) -> None:
        with slow.begun():
            strandline("cancel", "visits")
            wait_until(lambda: not slow.is_restoring(), what="the end of the start")  # the storage is still slow
            run = slow.run()
            assert run.status == "cancelled"
            assert run.error is None
            assert run.await_termination(0)
            assert run.processes().pids == ()

    def test_a_stop_is_carried_out_when_the_state_is_open(self, slow: SlowStart) -> None:
        with slow.begun():
            stopping = threading.Thread(target=strandline, args=("stop", "visits"))
            stopping.start()
            wait_until(
                lambda: any(one.name.startswith("strandline-stop") for one in threading.enumerate()), what="the request"
            )
            assert slow.is_restoring()
            slow.place.write([("late", 1)])
            run = slow.run()
            assert run.await_termination(30)
            assert (run.status, run.error) == ("stopped", None)
            stopping.join(30)
            assert not stopping.is_alive()

    def test_the_restore_is_seen_in_bytes_and_then_the_first_batch(self, slow: SlowStart) -> None:
        slow.gate.touch()
        with slow.begun() as figures:
            restoring = figures["restoring"]
            assert slow.state / 2 < restoring["total_bytes"] < 2 * slow.state
            assert restoring["done_bytes"] <= restoring["total_bytes"]
            text = strandline("status", "visits").stdout
            assert text.startswith("visits  starting for ")
            assert " kB on local disks" in text or " MB on local disks" in text

            run = slow.run()
            slow.place.write(ROWS)
            first = slow.shown(lambda one: one["running_batch"], "the first batch")
            assert (first["running_batch"]["first"], first["restoring"], first["batches"]) == (True, None, 0)
            text = strandline("status", "visits").stdout
            assert f"the first batch of generation {first['generation']} has been running for" in text
            assert "counted when a batch has ended" in text
            assert "0 in all" not in text

            slow.gate.unlink()
            run.process_all_available()
            slow.shown(lambda one: one["rows"] and one["running_batch"] is None, "the end of the batch")
            assert "the last one took" in strandline("status", "visits").stdout
