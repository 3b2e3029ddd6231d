"""A driver in a process of its own, to be killed: runs the job of `Place.sums` until it is told that it is enough.

With the option `kafka` it reads from Kafka, and emits a row for every row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import wait_until


class Driver:
    """Starts and kills the process; as a context, leaves none behind."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._facts = root / "driver.json"

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.running():
            self.kill()

    def start(self) -> None:
        self._facts.unlink(missing_ok=True)
        with (self.root / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.jobs.driver", str(self.root), json.dumps(self.options)],
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_run(self) -> None:
        """Wait until the job runs."""
        wait_until(lambda: self.pids() or not self.running(), seconds=90, what="the start of the driver")
        assert self.running(), (self.root / "driver.log").read_text()[-3000:]

    def await_death(self, why: str) -> None:
        """Wait until the process has ended by itself, and take away what it left running."""
        wait_until(lambda: not self.running(), seconds=60, what=why)
        self.kill()

    def pids(self) -> list[int]:
        """Task managers and slots of the run, once it has begun."""
        return list(json.loads(self._facts.read_text())["pids"]) if self._facts.exists() else []

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to the driver and its JVM: everything that a machine's loss of the driver would take."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self) -> None:
        """Ask for an orderly end, and wait for it."""
        assert self._process is not None
        (self.root / "enough").touch()
        assert self._process.wait(timeout=120) == 0, (self.root / "driver.log").read_text()[-3000:]


def main() -> None:
    import time

    from tests.jobs.kafka_place import EachRow, KafkaPlace
    from tests.jobs.place import Place, start_spark
    from tests.jobs.postgres_place import PostgresPlace

    root = Path(sys.argv[1])
    options = json.loads(sys.argv[2])
    spark = start_spark()
    faults, kafka = options.pop("faults", None), options.pop("kafka", None)
    postgres = options.pop("postgres", None)
    place = Place(root, spark) if kafka is None else KafkaPlace(root, spark, **kafka)
    place = place if postgres is None else PostgresPlace(root, spark, **postgres)
    job = place.sums(**options) if kafka is None else place.sums(EachRow(), **options)
    if faults is not None:
        config = place.config(**options).replace(
            checkpoint_dir=f"faulty+file://{place.checkpoints}", storage_options=faults
        )
        job = place.sums(config=config, sink=f"faulty+file://{place.output}")
    run = job.start()
    pids = run.processes().pids
    temporary = root / "driver.tmp"
    temporary.write_text(json.dumps({"pids": pids}))
    temporary.replace(root / "driver.json")
    while not (root / "enough").exists():
        time.sleep(0.1)  # between two looks
        if run.await_termination(timeout=0):
            raise SystemExit(1)
    run.process_all_available()
    run.stop()
    spark.stop()


if __name__ == "__main__":
    main()
