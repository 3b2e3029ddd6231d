"""The steps of the demo: start, count, kill a slot, recover, compare, clean up."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console

import strandline as sl
from strandline.errors import ConfigError, JobFailedError, StrandlineError
from strandline_bench.demo.clicks import ClickPlan, ClickStream
from strandline_bench.demo.job import Comparison, Folders, build, compare
from strandline_bench.demo.spark import quiet_spark
from strandline_bench.demo.view import LiveView, Picture, PlainView, SlotLine, View

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_EVERY = 0.15
_RATE_WINDOW = 6.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command. An impossible value raises `ConfigError`."""

    users: int = 100_000
    rows: int = 2_000_000
    keep: Path | None = None
    """A folder that is kept; None for a temporary one."""
    kill: bool = True
    plain: bool = False

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ConfigError(f"--users {self.users}: there must be at least one user")
        if self.rows < self.users:
            raise ConfigError(f"--rows {self.rows} is less than --users {self.users}: every user clicks at least once")
        if self.keep is not None and self.keep.exists() and not (self.keep.is_dir() and not any(self.keep.iterdir())):
            raise ConfigError(f"--keep {self.keep}: not an empty folder; give one that is empty or does not exist")


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the demo, shown on `console`, and return its facts; `equal` among them says whether it went well.

    Whatever happens (also Ctrl-C and SIGTERM), everything it started is stopped and its folder removed, unless it is to
    be kept. Raises `StrandlineError` when the job or Spark fails.
    """
    picture = Picture(options.rows)
    live = console.is_terminal and not options.plain
    view: View = LiveView(console, picture) if live else PlainView(console, picture)
    demo = _Demo(options, picture, view)
    with _terminable(), _folder(options.keep) as folders:
        with view, _logged(view, folders.log):
            demo.run(folders)
        facts = demo.facts(folders)
    facts["processes_left"] = _still_there(demo.started)
    return facts


class _Demo:
    """One run of the demo, and what it saw."""

    def __init__(self, options: DemoOptions, picture: Picture, view: View) -> None:
        self.started: dict[str, dict[int, float]] = {"jvm": {}, "task_managers": {}, "slots": {}}
        """Every process that was seen, by pid, with the time it was created."""
        self._options = options
        self._picture = picture
        self._view = view
        self._plan = ClickPlan(options.rows, options.users)
        self._earlier_batches = 0
        self._generation: int | None = None
        self._samples: deque[tuple[float, int]] = deque()
        self._first_batch: tuple[float, int] | None = None
        self._last_batch: tuple[float, int] | None = None
        self._killed: SlotLine | None = None
        self._kill_row = 0
        self._kill_time = 0.0
        self._recovery: float | None = None
        self._figures = sl.RunFigures(sl.RunStatus.STARTING)
        self._comparison: Comparison | None = None

    def run(self, folders: Folders) -> None:
        """Run all steps. When this returns or raises, every process has ended."""
        picture, view, plan = self._picture, self._view, self._plan
        folders.clicks.mkdir(parents=True)
        folders.scratch.mkdir()
        clicks = ClickStream(plan, folders.clicks, lambda: picture.batches)
        try:
            clicks.start()
            picture.phase = "starting Spark"
            view.event(f"starting Spark for {plan.rows:,} clicks of {plan.users:,} users in {plan.files} files")
            with quiet_spark(folders.scratch, folders.log) as (spark, jvm):
                self._saw("jvm", jvm)
                self._count(spark, folders, clicks)
                picture.phase = "comparing with a batch computation"
                view.event("reading the output back, and computing the same in one batch")
                self._comparison = compare(spark, folders)
            picture.phase = "done"
        finally:
            clicks.stop()

    def _count(self, spark: SparkSession, folders: Folders, clicks: ClickStream) -> None:
        """The streaming job, from its start to its orderly end."""
        picture, view = self._picture, self._view
        picture.phase = "starting the job"
        job = build(spark, folders)
        run = job.start()
        try:
            picture.phase = "counting clicks per user"
            view.event("the job runs")
            self._watch(run, clicks)
            picture.phase = "stopping the job"
            run.stop()
        except BaseException:
            with contextlib.suppress(StrandlineError):
                run.cancel()
            raise
        picture.checkpoints = tuple(run.checkpoints())
        picture.processes = tuple(replace(line, state="ended") for line in picture.processes)
        view.changed()
        view.event("the job has stopped")

    def _watch(self, run: sl.JobRun, clicks: ClickStream) -> None:
        """Look at the run until all clicks are processed and covered by a checkpoint."""
        rest: _Rest | None = None
        while rest is None or rest.is_alive():
            self._look(run, clicks)
            if clicks.error is not None:
                raise StrandlineError(f"the clicks could not be written: {clicks.error}") from clicks.error
            if run.error is not None:
                raise run.error
            if run.status not in ("starting", "running", "restarting"):
                raise JobFailedError(f"the job ended before its input did: it is {run.status}")
            if self._options.kill and self._killed is None and self._picture.rows_done * 2 >= self._plan.rows:
                self._kill_a_slot(run)
            if rest is None and clicks.done:
                rest = _Rest(run)
                rest.start()
            time.sleep(_LOOK_EVERY)
        if rest.error is not None:
            raise rest.error
        self._look(run, clicks)

    # --- killing and recovery ----------------------------------------------------------------------

    def _kill_a_slot(self, run: sl.JobRun) -> None:
        alive = [line for line in self._picture.processes if line.name.startswith("slot") and line.state == "running"]
        if not alive:
            return
        victim = alive[-1]
        self._killed = victim
        self._kill_row = self._picture.rows_done
        self._kill_time = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        self._view.event(f"kill -9 {victim.pid}: {victim.name} is gone, after {self._kill_row:,} rows", "bold red")
        self._picture.processes = tuple(
            SlotLine(line.name, line.pid, "killed") if line is victim else line for line in self._picture.processes
        )

    def _notice_recovery(self) -> None:
        if self._killed is None or self._recovery is not None or not self._figures.replaced_slots:
            return
        now = next((line for line in self._picture.processes if line.name == self._killed.name), None)
        if now is None or now.pid == self._killed.pid or now.state != "running":
            return
        self._recovery = time.monotonic() - self._kill_time
        self._view.event(
            f"{now.name} is back with its state as pid {now.pid}, after {self._recovery:.1f} s; "
            f"{self._figures.restarts} restarts",
            "bold green",
        )

    # --- looking -----------------------------------------------------------------------------------

    def _look(self, run: sl.JobRun, clicks: ClickStream) -> None:
        """Bring the picture up to date."""
        picture = self._picture
        figures = run.figures()
        if figures.generation:
            if self._generation is not None and figures.generation != self._generation:
                self._view.event(f"the job was restarted as generation {figures.generation}", "yellow")
                self._earlier_batches = picture.batches
            self._generation = figures.generation
            # After a restart some batches come again, so this is a bound; the comparison at the end is exact.
            batches = min(clicks.written, self._earlier_batches + figures.batches)
            if batches > picture.batches:
                self._last_batch = time.monotonic(), self._plan.rows_in(batches)
                self._first_batch = self._first_batch or self._last_batch
            picture.batches = max(picture.batches, batches)
            picture.rows_done = self._plan.rows_in(picture.batches)
            picture.state_bytes = figures.state_bytes + figures.state_memory_bytes
        picture.restarts, picture.replaced = figures.restarts, figures.replaced_slots
        picture.rows_arrived = self._plan.rows_in(clicks.written)
        picture.checkpoints = tuple(run.checkpoints())
        self._figures = figures
        self._see_processes(run)
        self._measure_rate()
        self._notice_recovery()
        self._view.changed()

    def _see_processes(self, run: sl.JobRun) -> None:
        lines = []
        for manager in run.processes().task_managers:
            self._saw("task_managers", manager.pid)
            lines.append(SlotLine("task manager", manager.pid, "running"))
            for slot in manager.slots:
                self._saw("slots", slot.pid)
                lines.append(self._slot_line(f"slot {slot.index}", slot.pid, slot.alive))
        if lines:
            self._picture.processes = tuple(lines)

    def _slot_line(self, name: str, pid: int, alive: bool) -> SlotLine:
        killed = self._killed
        if killed is not None and killed.name == name:
            if killed.pid == pid:
                return SlotLine(name, pid, "killed", "waiting for its replacement")
            if alive:
                took = "" if self._recovery is None else f", after {self._recovery:.1f} s"
                return SlotLine(name, pid, "running", f"in the place of pid {killed.pid}{took}")
        return SlotLine(name, pid, "running" if alive else "lost")

    def _saw(self, kind: str, pid: int) -> None:
        if pid not in self.started[kind]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.started[kind][pid] = psutil.Process(pid).create_time()

    def _measure_rate(self) -> None:
        now = time.monotonic()
        self._samples.append((now, self._picture.rows_done))
        while self._samples[0][0] < now - _RATE_WINDOW:
            self._samples.popleft()
        (then, before), (_, rows) = self._samples[0], self._samples[-1]
        if now > then:
            self._picture.rate = (rows - before) / (now - then)

    # --- what came out -----------------------------------------------------------------------------

    def facts(self, folders: Folders) -> dict[str, Any]:
        """The figures of the demo, as plain values."""
        assert self._comparison is not None
        done = [checkpoint for checkpoint in self._picture.checkpoints if checkpoint.status == "completed"]
        killed = self._killed
        return {
            **self._comparison.facts(),
            "rows_per_second": self._rows_per_second(),
            "seconds": round(self._picture.elapsed, 1),
            "batches": self._picture.batches,
            "restarts": self._figures.restarts,
            "replaced_slots": self._figures.replaced_slots,
            "rounds_repeated": self._figures.rounds_repeated,
            "killed_pid": killed.pid if killed else None,
            "killed_slot": killed.name if killed else None,
            "killed_at_row": self._kill_row if killed else None,
            "recovery_seconds": None if self._recovery is None else round(self._recovery, 2),
            "checkpoints": len(done),
            "checkpoint_ms_p50": round(statistics.median(c.barrier_to_completed_ms for c in done), 1) if done else None,
            "checkpoint_ms_max": round(max(c.barrier_to_completed_ms for c in done), 1) if done else None,
            "uploaded_bytes": sum(c.checkpointed_bytes for c in done),
            "state_bytes": done[-1].full_bytes if done else 0,
            "processes": {kind: list(pids) for kind, pids in self.started.items()},
            "folder": str(folders.root) if self._options.keep else None,
        }

    def _rows_per_second(self) -> int | None:
        """Rows per second from the end of the first batch, which warms up, to the end of the last."""
        if self._first_batch is None or self._last_batch is None or self._first_batch == self._last_batch:
            return None
        (began, before), (ended, rows) = self._first_batch, self._last_batch
        return round((rows - before) / (ended - began))


class _Rest(threading.Thread):
    """Waits for the last rows in a thread, so that the view stays live."""

    def __init__(self, run: sl.JobRun) -> None:
        super().__init__(daemon=True, name="rest")
        self.error: Exception | None = None
        self._job_run = run

    def run(self) -> None:
        try:
            self._job_run.process_all_available()
        except Exception as error:  # noqa: BLE001  (raised again by the demo's own thread)
            self.error = error


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Folders]:
    """The demo's folder on local disk. Scratch files are always deleted at the end."""
    root = Path(tempfile.mkdtemp(prefix="strandline-demo-")) if keep is None else keep.absolute()
    folders = Folders(root)
    try:
        yield folders
    finally:
        shutil.rmtree(root if keep is None else folders.scratch, ignore_errors=True)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM end the demo like Ctrl-C, so that it cleans up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _EventHandler(logging.Handler):
    """Shows the engine's log messages as events of the demo."""

    def __init__(self, view: View) -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.event(record.getMessage().splitlines()[0], "yellow")


@contextlib.contextmanager
def _logged(view: View, path: Path) -> Iterator[None]:
    """Our warnings are shown as events; those of libraries go to the file that has Spark's output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ours, root = logging.getLogger("strandline"), logging.getLogger()
    events, everything = _EventHandler(view), logging.FileHandler(path)
    everything.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = ours.level
    ours.addHandler(events)
    ours.setLevel(logging.INFO)
    root.addHandler(everything)
    try:
        yield
    finally:
        ours.removeHandler(events)
        ours.setLevel(before)
        root.removeHandler(everything)
        everything.close()


def _still_there(started: dict[str, dict[int, float]], patience: float = 10.0) -> list[int]:
    """The processes of the demo that have not ended after `patience` seconds; there should be none."""
    left = []
    for pids in started.values():
        for pid, created in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created:
                    left.append(process)
    _gone, alive = psutil.wait_procs(left, timeout=patience)
    return [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
