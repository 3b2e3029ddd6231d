"""A job whose drivers, slots, task managers, Python workers and servers are killed and frozen, one after the other.

The drivers are processes of a module of its own, which tells what happens in a file, an event a line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from strandline.errors import StrandlineError
from strandline_bench.chaos.job import Place
from strandline_bench.chaos.machine import JVM_OPTIONS
from strandline_bench.chaos.processes import MARK, end_all, marked
from strandline_bench.servers.server import Server

PATIENCE: Final = 180.0
"""Seconds for a driver to start or to end."""
LONGEST_STOP: Final = 8.0
"""Seconds for which something is frozen, at most: longer than the heartbeat timeout."""
WORKERS: Final = ("slot", "taskmanager", "relay")
KILLS: Final = ("kill driver", *(f"kill {kind}" for kind in WORKERS))
FREEZES: Final = ("freeze driver", *(f"freeze {kind}" for kind in WORKERS))
OF_SERVERS: Final = ("kill server", "freeze server")

Say = Callable[[str], None]


class Disturbance:
    """The drivers of a round, and what is done to them and to the servers."""

    def __init__(
        self,
        place: Place,
        module: str,
        arguments: Sequence[Any],
        servers: Mapping[str, Server],
        chance: random.Random,
        faults: Sequence[str],
    ) -> None:
        """A driver is `module`, which gets the number of the driver behind the `arguments`, all as JSON.

        `faults` are the kinds of faults, but for those of servers; "second driver" is one of them.
        """
        self._place = place
        self._module = module
        self._arguments = arguments
        self._servers = servers
        self._chance = chance
        self._kinds = faults
        self._mark = os.urandom(6).hex()
        self._drivers: list[_Driver] = []
        self._repairs: list[tuple[float, Callable[[], object]]] = []
        """What has to be done at which time, such as the thaw of what was frozen."""
        self._hurt: set[str] = set()
        """The servers that are down or frozen."""
        self.faults: Counter[str] = Counter()

    def disturb(self, seconds: float) -> None:
        """Write input and do harm, one fault after the other, until the time is over."""
        self._place.write(2)
        self._begin()
        self._await_start()
        until = time.monotonic() + seconds
        next_fault = time.monotonic() + self._chance.uniform(0.5, 3.0)
        while (now := time.monotonic()) < until:
            time.sleep(0.1)
            if self._chance.random() < 0.05:
                self._place.write(1)
            for due in [one for one in self._repairs if one[0] <= now]:
                self._repairs.remove(due)
                due[1]()
            if not any(driver.lives() for driver in self._drivers):
                self._begin()
            if now >= next_fault:
                self._harm()
                next_fault = now + self._chance.uniform(1.0, 6.0)

    def finish(self) -> Iterator[str]:
        """End all drivers, by a kill or in order; let a last one go on and stop. Yields what is wrong with that."""
        self._repair()
        if self._chance.random() < 0.5:
            for driver in self._drivers:
                driver.kill()
            self.faults["kill driver"] += 1
        (self._place.folder / "enough").touch()
        if not all(driver.ended() for driver in self._drivers):
            yield f"a driver did not end after {PATIENCE:g} s"
            return
        self._place.write(1)
        self._place.flush()
        before = len(self.told("ended"))
        self._begin()
        if not self._drivers[-1].ended():
            yield f"the last driver did not end after {PATIENCE:g} s"
        elif len(self.told("ended")) == before:
            yield f"the last driver did not finish: {[*self.told('refused'), *self.told('died')][-1:]}"
        deadline = time.monotonic() + 15.0
        while (left := [one.pid for kind in WORKERS[:2] for one in marked(self._mark, kind)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        yield from (f"process {pid} is left" for pid in left)

    def end(self) -> None:
        """Leave no process behind, and the servers as they were, whatever happened."""
        for driver in self._drivers:
            driver.kill()
        end_all(self._mark)
        for server in self._servers.values():
            server.ensure_running()

    def told(self, event: str) -> list[str]:
        """What the drivers told of one kind of event."""
        lines = [line for file in self._place.folder.glob("*.events") for line in file.read_text().splitlines()]
        return [line.removeprefix(event).strip() for line in lines if line.split(" ", 1)[0] == event]

    def _begin(self) -> None:
        number = len(self._drivers)
        folder = self._place.folder
        command = [sys.executable, "-m", self._module, json.dumps([*self._arguments, number])]
        self._drivers.append(_Driver(command, folder / f"driver-{number}.log", self._mark))

    def _await_start(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.told("started"):
            if not self._drivers[0].lives() or time.monotonic() > deadline:
                raise StrandlineError(f"the first driver did not start; see its log in {self._place.folder}")
            time.sleep(0.05)

    def _harm(self) -> None:
        """One fault. It is not counted if there is nobody to be harmed."""
        chance = self._chance
        kind = chance.choice([*self._kinds, *(OF_SERVERS * 2 if self._servers else ())])
        after = time.monotonic() + chance.uniform(0.2, LONGEST_STOP)
        if kind in OF_SERVERS:
            self._harm_server(kind, after)
        elif kind == "second driver":
            if sum(driver.lives() for driver in self._drivers) < 2:
                self._begin()
                self.faults[kind] += 1
        elif kind.endswith(" driver"):
            self._harm_driver(kind, after)
        else:
            self._harm_worker(kind, after)

    def _harm_server(self, kind: str, after: float) -> None:
        well = sorted(self._servers.keys() - self._hurt)
        if not well:
            return
        name = self._chance.choice(well)
        server = self._servers[name]
        self._hurt.add(name)
        if kind == "kill server":
            server.kill()
        else:
            server.freeze()
        self._repairs.append((after, lambda: self._heal(name)))
        self.faults[f"{kind} {name}"] += 1

    def _harm_driver(self, kind: str, after: float) -> None:
        live = [driver for driver in self._drivers if driver.lives()]
        if not live:
            return
        victim = self._chance.choice(live)
        if kind == "kill driver":
            victim.kill()
        else:
            victim.signal(signal.SIGSTOP)
            self._repairs.append((after, lambda: victim.signal(signal.SIGCONT)))
            if len(live) == 1:
                self._begin()  # it takes the job over while the other one sleeps
        self.faults[kind] += 1

    def _harm_worker(self, kind: str, after: float) -> None:
        how, worker = kind.split(" ")
        victims = marked(self._mark, worker)
        if not victims:
            return
        victim = self._chance.choice(victims)
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "freeze":
            self._repairs.append((after, lambda: _thaw(victim)))
        self.faults[kind] += 1

    def _heal(self, name: str) -> None:
        self._servers[name].ensure_running()
        self._hurt.remove(name)

    def _repair(self) -> None:
        """Undo what is frozen or down."""
        for _due, repair in self._repairs:
            repair()
        self._repairs.clear()


def _thaw(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.send_signal(signal.SIGCONT)


class _Driver:
    """A driver with its JVM, in a process group of its own."""

    def __init__(self, command: list[str], log: Path, mark: str) -> None:
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            **os.environ,
            MARK: mark,
            "SPARK_SUBMIT_OPTS": JVM_OPTIONS,
        }
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def lives(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the driver and its JVM."""
        if self.lives():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def ended(self) -> bool:
        """Wait until the driver has ended; False if it does not."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        return not self.lives()
