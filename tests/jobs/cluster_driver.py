"""A job on a real cluster of executors, some of which come or are lost while it runs; prints what happened as JSON.

    python -m tests.jobs.cluster_driver ROOT MASTER PARALLELISM LOSSES TLS

Executors reach each other and the driver by TCP alone, as on different hosts. TLS is the job's option `tls`. With a
standalone master (`spark://`) a second worker is started in the middle, and the run is spread over it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyspark
from pyspark.sql import SparkSession

import strandline as sl
from strandline.runtime.protocol.address import TCP_ONLY
from strandline.runtime.protocol.user_folder import user_folder
from tests.jobs.place import Place, running_sums
from tests.spark_classes import OPTIONS
from tests.waiting import wait_until


def executor_of(manager: str) -> int:
    """The process id of the executor that a task manager belongs to: part of its identity."""
    return int(manager.rsplit("/", 1)[1].split("-")[0])


def lose_a_host(run: sl.JobRun, place: Place, choice: random.Random) -> list[int]:
    """Kill an executor, its task manager and slots, and delete their files: all that a lost host takes with it."""
    manager = choice.choice([manager for manager in run.processes().task_managers if manager.slots])
    slots = [slot.index for slot in manager.slots]
    victims = [executor_of(manager.id), manager.pid, *(slot.pid for slot in manager.slots)]
    for pid in victims:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    for folder in (user_folder(place.root / "local") / "visits").glob("*"):
        for index in slots:
            for path in folder.glob(f"gen-*/slot-{index}"):
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(folder / "copies" / str(manager.pid), ignore_errors=True)
    return slots


def main() -> None:
    root, master, parallelism, losses = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    root.mkdir(parents=True, exist_ok=True)
    os.environ[TCP_ONLY] = "1"
    os.environ["PYSPARK_PYTHON"] = sys.executable  # not that of other tests: Spark starts its own daemon
    spark = (
        SparkSession.builder.master(master)
        .config(f"spark.executorEnv.{TCP_ONLY}", "1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.task.maxFailures", "20")
        .config("spark.excludeOnFailure.enabled", "false")
        .config("spark.executor.memory", "1g")
        .config("spark.executor.extraJavaOptions", os.environ[OPTIONS])
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    place = Place(root, spark)
    choice = random.Random(7)
    rows = [[(f"user{choice.randrange(50)}", choice.randrange(100)) for _ in range(200)] for _ in range(3 * losses + 3)]
    job = place.sums(
        changelog=True,
        checkpoint_interval="300ms",
        materialization_interval="2s",
        parallelism=parallelism,
        tls=sys.argv[5],
    )
    run = job.start()
    try:
        with more_workers(root / "workers", master) as start_worker:
            print(json.dumps(_story(run, place, rows, losses, choice, start_worker)))
            run.stop()
    finally:
        if run.status == "running":
            run.cancel()
        spark.stop()


@contextmanager
def more_workers(folder: Path, master: str) -> Iterator[Callable[[], None] | None]:
    """Starts one more worker of a standalone cluster when it is called; it ends with the context."""
    if not master.startswith("spark://"):
        yield None
        return
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        arguments = ("worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", master)
        started.append(start_spark_process(folder, *arguments))

    try:
        yield start
    finally:
        for process in started:
            process.terminate()
            process.wait()


def start_spark_process(folder: Path, class_: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process of a standalone cluster, which may write into `folder`."""
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_WORKER_CORES": "2",
        "SPARK_WORKER_DIR": str(folder),
    }
    command = ["java", "-Xmx512m", "-cp", str(home / "jars" / "*"), f"org.apache.spark.deploy.{class_}", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _story(
    run: sl.JobRun,
    place: Place,
    rows: list[Any],
    losses: int,
    choice: random.Random,
    start_worker: Callable[[], None] | None,
) -> dict[str, Any]:
    at_start = _slots(run)
    if start_worker is not None:
        place.write([])
        run.process_all_available()
        start_worker()
        wait_until(lambda: _executors(place) == 2, 60, "a second executor")
        assert _slots(run) == at_start, "a new executor gets no work by itself"
        run.rescale(run.figures().parallelism)
    query = place.spark.streams.active[0]
    spread = _slots(run)
    lost: list[list[int]] = []
    done = 0
    for _ in range(losses):
        for batch in rows[done : done + 3]:
            place.write(batch)
        done += 3
        before = len(run.recoveries())
        time.sleep(choice.uniform(0.0, 1.0))  # anywhere in a batch, or between two
        lost.append(lose_a_host(run, place, choice))
        run.process_all_available()
        wait_until(lambda: len(run.recoveries()) > before, 60, "a recovery")  # noqa: B023
    for batch in rows[done:]:
        place.write(batch)
    run.process_all_available()
    facts = {
        "equal": place.rows() == running_sums(rows),
        "slots_at_start": at_start,
        "slots": spread,
        "lost": lost,
        "recovered": [list(one.slots) for one in run.recoveries()],
        "kinds": sorted({one.kind for one in run.recoveries()}),
        "same_query": query.isActive and [one.runId for one in place.spark.streams.active] == [query.runId],
        "restarts": run.figures().restarts,
    }
    pids = [slot.pid for manager in run.processes().task_managers for slot in manager.slots]
    run.rescale(1)
    facts["slots_of_one"] = _slots(run)
    facts["left_behind"] = [pid for pid in pids if psutil.pid_exists(pid)]
    return facts


def _slots(run: sl.JobRun) -> list[list[int]]:
    """The slots of every executor that has some."""
    return sorted([slot.index for slot in manager.slots] for manager in run.processes().task_managers if manager.slots)


def _executors(place: Place) -> int:
    status: Any = place.spark.sparkContext._jsc.sc().getExecutorMemoryStatus()
    return int(status.size()) - 1


if __name__ == "__main__":
    main()
