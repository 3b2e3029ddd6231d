"""Runs trials: gives them to a worker, kills or stops processes when an operation asks for it, and judges the outcome.

The machine has no JVM and holds no state of a trial in memory. So it survives whatever a trial does to its worker: if
the worker is killed, or does not answer, the next worker goes on.
"""

from __future__ import annotations

import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

from strandline.runtime.protocol.calls import CONNECTION_HOOK
from strandline.testing.call_faults import HOOK, TRIGGER_VARIABLE
from strandline.testing.triggers import Control, prepare
from strandline_bench.chaos.plan import HEARTBEAT, STOPPED, Plan, Variant, draw, plan_at
from strandline_bench.chaos.processes import MARK, end_all, marked
from strandline_bench.chaos.worker import Outcome, Task

PATIENCE: Final = 120.0
"""Seconds after which a trial counts as stuck."""
JVM_OPTIONS: Final = os.environ.get("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
WORKER_TRIALS: Final = 150
"""After so many trials a worker is replaced by a new one."""

Verdict = Literal["survived", "wrong", "died", "stuck"]


class Trial(msgspec.Struct, frozen=True):
    """A trial that is over."""

    plan: Plan
    verdict: Verdict
    fired: str
    """The operation at which the fault happened; empty if the run ended before."""
    victim: int
    """The process that was killed or stopped, or 0."""
    problems: list[str]
    notes: list[str]
    seconds: float
    recovery: float | None
    """Seconds from the fault until the state was whole again, if something had to be rebuilt."""
    handles: int


class _WorkerLostError(Exception):
    """The worker has ended."""


class _Worker:
    """The worker process, its control folder and its mark."""

    def __init__(self, home: Path) -> None:
        self.mark = os.urandom(6).hex()
        self.folder = home / f"worker-{self.mark}"
        self.folder.mkdir(parents=True)
        self.trials = 0
        self.log = self.folder / "log"
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            **os.environ,
            MARK: self.mark,
            CONNECTION_HOOK: HOOK,
            TRIGGER_VARIABLE: str(self.folder / "control"),
            "SPARK_SUBMIT_OPTS": JVM_OPTIONS,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "strandline_bench.chaos.worker", str(self.folder / "control")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def send(self, task: Task) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(task) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise _WorkerLostError from None

    def answer(self, timeout: float) -> bytes | None:
        """The next line, or None if there is none within `timeout` seconds. Raises `_WorkerLostError`."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return None
        line = self.process.stdout.readline()
        if not line:
            raise _WorkerLostError
        return line

    def signal(self, number: int) -> None:
        """Send a signal to the driver and its JVM."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill the worker and everything that it started."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        end_all(self.mark)


class Journals:
    """The operations of every variant that ran without a fault. Several machines share it, and a file may keep it."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.known: dict[Variant, list[str]] = {}
        if file is not None and file.exists():
            found = msgspec.json.decode(file.read_bytes(), type=dict[str, list[str]])
            self.known = {Variant.named(name): journal for name, journal in found.items()}
        self._locks: defaultdict[Variant, threading.Lock] = defaultdict(threading.Lock)

    def lock(self, variant: Variant) -> threading.Lock:
        """Held while somebody finds the operations of a variant out."""
        return self._locks[variant]

    def learn(self, variant: Variant, journal: list[str]) -> None:
        """Note the operations of a variant."""
        self.known[variant] = journal
        if self._file is not None:
            found = {variant.name: journal for variant, journal in self.known.items()}
            self._file.write_bytes(msgspec.json.encode(found))


class Machine:
    """Runs trials one after the other. As a context, it leaves no process and no file behind, but those of failures."""

    def __init__(self, home: Path | None = None, *, keep_all: bool = False, journals: Journals | None = None) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="strandline-chaos-", dir=home))
        self._keep_all = keep_all
        self._current: _Worker | None = None
        self._journals = journals or Journals()
        self._number = 0
        self._kept = False

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._current is not None:
            self._current.end()
        if not self._kept:
            shutil.rmtree(self._home, ignore_errors=True)

    def trial(self, seed: int, variant: Variant, kind: str) -> Iterator[Trial]:
        """The trial of a seed; before it one without a fault, if nobody knows yet which operations the variant has."""
        with self._journals.lock(variant):
            if variant not in self._journals.known:
                yield self.run(Plan(0, variant, "none", self._folder(), Control(journal=True)))
        yield self.run(draw(seed, variant, kind, self._journals.known.get(variant, []), self._folder()))

    def trial_at(self, operation: str, seed: int, variant: Variant, kind: str) -> Trial:
        """A trial with its fault at a given operation."""
        return self.run(plan_at(operation, seed, variant, kind, self._folder()))

    def finish(self, plan: Plan) -> Trial:
        """Start the job of a plan afresh, after something else was done to it, and look at everything that is left.

        The files of the job stay: they are the caller's.
        """
        worker = self._ready_worker()
        prepare(worker.folder, plan.control)
        trial = self._judged(plan, Task(plan, finish=True), worker)
        self._kept = self._kept or trial.verdict != "survived"  # the worker's log
        return trial

    def _folder(self) -> str:
        self._number += 1
        return str(self._home / f"trial-{self._number}")

    # --- one trial -------------------------------------------------------------------------------

    def run(self, plan: Plan) -> Trial:
        """Carry a trial out, and judge it. The files of a trial that failed are kept."""
        worker = self._ready_worker()
        prepare(worker.folder, plan.control)
        trial = self._judged(plan, Task(plan), worker)
        self._tidy(trial)
        return trial

    def _judged(self, plan: Plan, task: Task, worker: _Worker) -> Trial:
        began = time.monotonic()
        watch = _Watch(plan, worker)
        try:
            outcome, stuck = self._outcome(task, watch)
            problems = [*outcome.problems, *([] if stuck else self._left_processes())]
        finally:
            watch.wake()
        if plan.control.journal and not stuck:
            self._journals.learn(plan.variant, (worker.folder / "journal").read_text().splitlines())
        verdict: Verdict = "survived"
        if stuck or problems or outcome.deaths:
            verdict = "stuck" if stuck else "wrong" if problems else "died"
        return Trial(
            plan,
            verdict,
            "all" if plan.options else watch.operation if watch.victim or not plan.signal else "",
            watch.victim,
            problems + outcome.deaths,
            outcome.notes,
            round(time.monotonic() - began, 3),
            _recovery(outcome, watch, plan),
            outcome.handles,
        )

    def _ready_worker(self) -> _Worker:
        if self._current is not None and self._current.trials >= WORKER_TRIALS:
            self._end_worker()
        if self._current is None:
            self._current = _Worker(self._home)
            if self._current.answer(PATIENCE) is None:
                raise RuntimeError(f"the worker did not start; see {self._current.log}")
        self._current.trials += 1
        return self._current

    def _end_worker(self) -> None:
        assert self._current is not None
        self._current.end()
        self._current = None

    def _outcome(self, task: Task, watch: _Watch) -> tuple[Outcome, bool]:
        """What the worker says, and whether it had to be killed because it said nothing."""
        while True:
            worker = self._current or self._ready_worker()
            worker.send(task)
            deadline = time.monotonic() + PATIENCE
            try:
                while time.monotonic() < deadline:
                    line = worker.answer(0.005 if watch.waiting and not watch.operation else 0.05)
                    watch.look()
                    if line is not None:
                        return msgspec.json.decode(line, type=Outcome), False
            except _WorkerLostError:
                # The fault killed the driver: its task managers must end by themselves.
                told = self._left_processes(3 * HEARTBEAT) if watch.killed_driver else []
                told += [] if watch.killed_driver else [f"the driver ended; see {worker.log}"]
                self._end_worker()
                if told or task.finish:
                    return Outcome(told or ["the driver ended twice"]), False
                task = Task(task.plan, finish=True)
                continue
            return Outcome([self._stuck_text(worker)]), True

    def _stuck_text(self, worker: _Worker) -> str:
        """Where all threads of a stuck worker are. The worker is killed."""
        size = worker.log.stat().st_size
        worker.process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)  # faulthandler writes without a sign of its end
        threads = worker.log.read_bytes()[size:].decode(errors="replace").split("\n\n")
        self._end_worker()
        ours = "\n\n".join(thread for thread in threads if "/strandline" in thread)
        return f"no end after {PATIENCE:.0f} s. Threads of the driver:\n{ours}"

    def _left_processes(self, patience: float = HEARTBEAT + 5.0) -> list[str]:
        if self._current is None:
            return []
        deadline = time.monotonic() + patience
        while True:
            left = [(kind, one.pid) for kind in ("slot", "taskmanager") for one in marked(self._current.mark, kind)]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for _kind, pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"{kind} process {pid} is left" for kind, pid in left]

    def _tidy(self, trial: Trial) -> None:
        folder = Path(trial.plan.folder)
        if trial.verdict == "survived" and not self._keep_all:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.exists():
            self._kept = True
            (folder / "trial.json").write_bytes(msgspec.json.format(msgspec.json.encode(trial)))


class _Watch:
    """Waits for the chosen operation, and kills or stops the victim of the trial."""

    def __init__(self, plan: Plan, worker: _Worker) -> None:
        self._plan = plan
        self._worker = worker
        self._stopped: list[psutil.Process] = []
        self._wake_at = 0.0
        self.waiting = plan.signal != ""
        """Whether somebody may ask for a signal soon."""
        self.operation = ""
        self.at = 0.0
        self.victim = 0
        self.killed_driver = False

    def look(self) -> None:
        """Act if the operation was reached, and wake up who was stopped long enough."""
        if not self.operation and (self._worker.folder / "fired").exists():
            _pid, at, self.operation = (self._worker.folder / "fired").read_text().split(" ", 2)
            self.at = float(at)
        if self.operation and self.waiting:
            # If there is no victim yet, the first one is hit as soon as it appears, unless the story is over by then.
            going_on = (self._worker.folder / "control").exists()
            self.waiting = going_on and not self._act()
            (self._worker.folder / "acted").touch()
        if self._stopped and time.monotonic() > self._wake_at:
            self.wake()

    def _act(self) -> bool:
        """Kill or stop the victim. Returns False if there is none."""
        kill = self._plan.signal == "kill"
        if self._plan.victim == "driver":
            self.victim = self._worker.process.pid
            self.killed_driver = kill
            self._worker.signal(signal.SIGKILL if kill else signal.SIGSTOP)
            self._stopped = [] if kill else [psutil.Process(self.victim)]
        else:
            found = marked(self._worker.mark, self._plan.victim)
            if not found:
                return False
            one = random.Random(self._plan.seed).choice(found)
            self.victim = one.pid
            with suppress(psutil.Error):
                one.send_signal(signal.SIGKILL if kill else signal.SIGSTOP)
            self._stopped = [] if kill else [one]
        self.at = time.time()
        # Half of the stopped processes sleep for the whole trial: nobody may wait for them.
        for_ever = self._plan.victim != "driver" and self._plan.seed % 2 == 0
        self._wake_at = math.inf if for_ever else time.monotonic() + STOPPED
        return True

    def wake(self) -> None:
        """SIGCONT to whoever is stopped and still there."""
        for process in self._stopped:
            if self._plan.victim == "driver":
                self._worker.signal(signal.SIGCONT)
            else:
                with suppress(psutil.Error):  # psutil knows a process by its start, too
                    process.send_signal(signal.SIGCONT)
        self._stopped = []


def _recovery(outcome: Outcome, watch: _Watch, plan: Plan) -> float | None:
    """Seconds from the fault until the state was whole again; after the loss of the driver, the time of a start."""
    if not watch.operation:
        return None
    if watch.killed_driver:
        return outcome.starts[0] if outcome.starts else None
    ends = [began + seconds - watch.at for began, seconds, _kind in outcome.recoveries if began + seconds > watch.at]
    return round(min(ends), 3) if ends else None
