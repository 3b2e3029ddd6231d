"""A process with one JVM that carries trials out, one after the other. The machine tells it which, line by line."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from strandline.errors import StrandlineError
from strandline_bench.chaos.job import Place
from strandline_bench.chaos.oracle import Handles, file_problems, open_files, output_problems
from strandline_bench.chaos.plan import Plan
from strandline_bench.chaos.stories import Teller

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Task(msgspec.Struct, frozen=True):
    """One line from the machine."""

    plan: Plan
    finish: bool = False
    """Whether the driver of this trial was killed: a fresh start goes on, and the oracle looks."""


class Outcome(msgspec.Struct, frozen=True):
    """One line to the machine: what the worker saw of a trial."""

    problems: list[str]
    deaths: list[str] = []
    notes: list[str] = []
    recoveries: list[tuple[float, float, str]] = []
    starts: list[float] = []
    seconds: float = 0.0
    handles: int = 0
    """Open descriptors of the driver after the trial."""


def session() -> SparkSession:
    """A Spark session with two cores."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


class Worker:
    """Carries trials out."""

    def __init__(self, spark: SparkSession, control: Path) -> None:
        self._spark = spark
        self._control = control
        # Private Spark API: the JVM's process id, to look at its open files.
        self._jvm = int(spark._jvm.ProcessHandle.current().pid())  # type: ignore[union-attr]

    def carry_out(self, task: Task) -> Outcome:
        """Tell the story, start the job afresh, and look at what is left."""
        began = time.monotonic()
        place = Place(Path(task.plan.folder), task.plan.seed, task.plan.variant)
        handles = Handles(self._jvm)
        teller = Teller(place, self._spark, {"trigger": str(self._control), **task.plan.options})
        problems: list[str] = []
        try:
            if not task.finish:
                self._tell(teller, task.plan)
            self._control.unlink(missing_ok=True)  # from here on nothing fails
            teller.faults = {}
            place.age_local_files()
            teller.start(parallelism=1)
            teller.process(1)
            teller.stop()
            problems += output_problems(place)
            problems += file_problems(place)
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            problems.append(traceback.format_exc())
            self._control.unlink(missing_ok=True)
            teller.give_up()
        problems += handles.problems(place)
        return Outcome(
            problems,
            teller.deaths,
            teller.notes,
            teller.recoveries,
            teller.starts,
            time.monotonic() - began,
            sum(1 for _ in open_files(os.getpid())),
        )

    def _tell(self, teller: Teller, plan: Plan) -> None:
        """Tell the story. A storage that throttles for good may refuse a step at every try; then the story ends there.

        The output must be right and the files must be whole all the same.
        """
        try:
            teller.tell()
        except StrandlineError as error:
            if plan.kind != "storage throttles":
                raise
            teller.notes.append(f"the story ends early: {error}")
            teller.give_up()


def main() -> None:
    """Read tasks from standard input, and write outcomes to what was standard output."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    worker = Worker(session(), Path(sys.argv[1]))
    answers.write(b"{}\n")
    for line in sys.stdin.buffer:
        outcome: Any = worker.carry_out(msgspec.json.decode(line, type=Task))
        answers.write(msgspec.json.encode(outcome) + b"\n")


if __name__ == "__main__":
    main()
