"""Two drivers of one job, stopped and continued at random: each takes the job over from the other, again and again.

A driver that sleeps and wakes up believes that it still owns the job. At the end there must be one truth: the output
of the batch computation, and exactly the files that the checkpoints refer to.
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
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from strandline.errors import FencedError, StrandlineError
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.storage import JobPaths, open_storage
from strandline_bench.chaos.job import JOB, Place
from strandline_bench.chaos.machine import JVM_OPTIONS, Machine
from strandline_bench.chaos.plan import Plan, Variant
from strandline_bench.chaos.processes import MARK, end_all, marked

PATIENCE: Final = 120.0
"""Seconds for a driver to start or to end."""
LONGEST_STOP: Final = 8.0
PAUSES: Final = ((0.0, 2.0), (10.0, 25.0))
"""Seconds until a driver that was fenced takes the job back, from and to. After a short pause the other driver is still
starting its slots; after a long one it has completed checkpoints."""


def run(minutes: float, seed: int, *, changelog: bool, work_dir: Path | None = None) -> dict[str, Any]:
    """Run it, and return what was found as plain values."""
    home = Path(tempfile.mkdtemp(prefix="strandline-two-drivers-", dir=work_dir))
    plan = Plan(seed, Variant("plain", changelog, "parquet"), "none", str(home))
    place = Place(home, seed, plan.variant)
    chance = random.Random(seed)
    drivers = [_Driver(home, seed, changelog, number) for number in range(2)]
    try:
        for driver in drivers:
            driver.await_start()
        events = _disturb(drivers, place, chance, time.monotonic() + minutes * 60)
        (home / "enough").touch()
        problems = [text for driver in drivers for text in driver.ended()]
    finally:
        for driver in drivers:
            driver.kill()
    log_facts = facts_of_log(place)
    if not log_facts["checkpoints"]:
        problems.append("the drivers completed no checkpoint, so the run shows nothing: the machine may be too busy")
    with Machine(work_dir) as machine:
        trial = machine.finish(plan)
    problems += trial.problems or ([] if trial.verdict == "survived" else [f"the last driver: {trial.verdict}"])
    foreign = [line[:500] for driver in drivers for line in driver.lines("foreign")]
    problems += [f"an error that is not ours: {line.removeprefix('foreign ')}" for line in foreign]
    result = {
        "minutes": minutes,
        "seed": seed,
        "changelog": changelog,
        "files": place.files(),
        **dict(sorted(events.items())),
        "starts": sum(driver.count("started") for driver in drivers),
        "fenced": sum(driver.count("fenced") for driver in drivers),
        "errors": [line[:500] for driver in drivers for line in driver.lines("error")][:20],
        "foreign_errors": foreign[:20],
        **log_facts,
        "problems": problems,
        "folder": str(home) if problems else None,
    }
    if not problems:
        shutil.rmtree(home, ignore_errors=True)
    return result


def facts_of_log(place: Place) -> dict[str, int]:
    """How often the job was taken over, and how many checkpoints were completed. Each has an entry in the log."""
    log = JobLogStore(open_storage(str(place.checkpoints)), JobPaths(JOB)).load()
    entries = log.position + 1
    return {"takeovers": log.generation, "checkpoints": entries - log.generation, "log_entries": entries}


class _Driver:
    """One of the two drivers, with its JVM, in a process group of its own."""

    def __init__(self, home: Path, seed: int, changelog: bool, number: int) -> None:
        self._home = home
        self.mark = os.urandom(6).hex()
        self._told = home / f"driver-{number}.events"
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            **os.environ,
            MARK: self.mark,
            "SPARK_SUBMIT_OPTS": JVM_OPTIONS,
        }
        arguments = json.dumps([str(home), seed, changelog, number])
        with (home / f"driver-{number}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "strandline_bench.chaos.two_drivers", arguments],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def lines(self, event: str) -> list[str]:
        """What the driver told of one kind of event."""
        if not self._told.exists():
            return []
        return [line for line in self._told.read_text().splitlines() if line.startswith(event)]

    def count(self, event: str) -> int:
        """How many events of a kind the driver told."""
        return len(self.lines(event))

    def await_start(self) -> None:
        """Wait until the driver has run the job once."""
        deadline = time.monotonic() + PATIENCE
        while not self.count("started"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise StrandlineError(f"a driver did not start; see its log in {self._home}")
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send a signal to the driver and its JVM."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ended(self) -> list[str]:
        """Wait until the driver has ended, and its processes with it. Returns what is wrong."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return ["a driver did not end"]
        deadline = time.monotonic() + 15.0
        while (left := [*marked(self.mark, "slot"), *marked(self.mark, "taskmanager")]) and time.monotonic() < deadline:
            time.sleep(0.05)
        problems = [f"process {process.pid} is left" for process in left]
        return problems if code == 0 else [f"a driver ended with code {code}", *problems]

    def kill(self) -> None:
        """Leave nothing behind, whatever happened."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        end_all(self.mark)


def _disturb(drivers: list[_Driver], place: Place, chance: random.Random, until: float) -> Counter[str]:
    """Write input, and stop and continue drivers and their task managers at random, until the time is over."""
    events: Counter[str] = Counter()
    stopped: dict[int, float] = {}
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.1, 0.6))
        if chance.random() < 0.5:
            place.write(1)
        for number, driver in enumerate(drivers):
            if number in stopped:
                if time.monotonic() > stopped[number]:
                    driver.signal(signal.SIGCONT)
                    del stopped[number]
            elif chance.random() < 0.04:
                driver.signal(signal.SIGSTOP)
                stopped[number] = time.monotonic() + chance.uniform(0.2, LONGEST_STOP)
                events["stops"] += 1
            elif chance.random() < 0.03:
                victims = [*marked(driver.mark, "slot"), *marked(driver.mark, "taskmanager")]
                if victims:
                    with suppress(ProcessLookupError):
                        os.kill(chance.choice(victims).pid, signal.SIGKILL)
                    events["kills"] += 1
    for number in stopped:
        drivers[number].signal(signal.SIGCONT)
    return events


def show(result: dict[str, Any], console: Console) -> None:
    """Print what `run` found."""
    console.print(
        f"two drivers, {result['minutes']:g} minutes, seed {result['seed']}: {result['takeovers']} takeovers, "
        f"{result['fenced']} times fenced, {result.get('stops', 0)} stops, {result.get('kills', 0)} kills, "
        f"{result['files']} input files, {result['checkpoints']} checkpoints",
        highlight=False,
    )
    for problem in result["problems"]:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)
    console.print("one truth" if not result["problems"] else f"WRONG; kept in {result['folder']}")


def main() -> None:
    """A driver: start the job whenever another one has taken it over, until it is enough."""
    from strandline_bench.chaos.worker import session

    folder, seed, changelog, number = json.loads(sys.argv[1])
    home = Path(folder)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    place = Place(home, seed, Variant("plain", changelog, "parquet"))
    spark = session()
    chance = random.Random(f"{seed}-{number}")

    def tell(event: str) -> None:
        with (home / f"driver-{number}.events").open("a") as events:
            events.write(event.replace("\n", " ") + "\n")

    while not (home / "enough").exists():
        try:
            run = place.job(spark, place.config({})).start()
            tell("started")
            while not (home / "enough").exists() and not run.await_termination(0.1):
                continue
            run.stop()
        except FencedError:
            tell("fenced")
        except StrandlineError as error:
            tell(f"error {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - an error that is not ours is told, too
            tell(f"foreign {type(error).__name__}: {error}")
        until = time.monotonic() + chance.uniform(*chance.choice(PAUSES))
        while time.monotonic() < until and not (home / "enough").exists():
            time.sleep(0.05)
    spark.stop()


if __name__ == "__main__":
    main()
