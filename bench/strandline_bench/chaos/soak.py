"""The soak: steady load and a kill every minute, while everything that could grow is measured."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from strandline.errors import StrandlineError
from strandline_bench.chaos.machine import JVM_OPTIONS
from strandline_bench.chaos.oracle import files_below
from strandline_bench.chaos.processes import MARK, end_all, marked
from strandline_bench.chaos.soak_job import JOB, output_problems, write_input
from strandline_bench.timing import Say

VICTIMS: Final = ("slot", "taskmanager", "relay")
LATE_VICTIMS: Final = ("slot", "relay")
"""Who is killed after the first third. The task manager and its oldest slot live on, so that a leak in them shows."""
FILE_EVERY: Final = 1.0
"""Seconds between two input files."""
MARGIN: Final = 1.25
"""A quantity is flat if its median in the last third is at most so many times the one in the second third."""
LEAST_SAMPLES: Final = 10
"""A third with fewer samples says nothing."""
PATIENCE: Final = 180.0

QUANTITIES: Final = {
    "driver_mb": "memory of the driver (MB)",
    "jvm_mb": "memory of the JVM (MB)",
    "workers_mb": "memory of task manager and slots (MB)",
    "slot_mb": "memory of the oldest slot (MB)",
    "threads": "threads, all processes",
    "handles": "open handles, all processes",
    "local_mb": "local disk (MB)",
    "durable_files": "files of the checkpoints",
    "metadata_kb": "size of _metadata (kB)",
    "recovery_s": "loss until whole again (s)",
}
"""What is sampled, and its title in the picture."""

Sample = dict[str, float | None]


def run(
    minutes: float,
    seed: int,
    say: Say,
    *,
    kill_every: float = 60.0,
    changelog: bool = True,
    work_dir: Path | None = None,
) -> dict[str, Any]:
    """Run the soak, and return all samples and what they show as plain values."""
    home = Path(tempfile.mkdtemp(prefix="strandline-soak-", dir=work_dir))
    for name in ("in", "out", "spark"):
        (home / name).mkdir()
    soak = _Soak(home, seed, changelog)
    try:
        soak.begin()
        soak.load(minutes * 60, kill_every, say)
        problems = soak.end()
    finally:
        soak.kill()
    checkpoints = soak.facts()["checkpoints"]
    flat = {name: judged([one[name] for one in soak.samples]) for name in QUANTITIES}
    problems += growth_problems(flat)
    if not problems:
        shutil.rmtree(home, ignore_errors=True)
    return {
        "minutes": minutes,
        "seed": seed,
        "changelog": changelog,
        "files": soak.files,
        "kills": soak.kills,
        "checkpoints": checkpoints,
        "flat": flat,
        "problems": problems,
        "folder": str(home) if problems else None,
        "samples": soak.samples,
    }


class _Soak:
    """The driver process of a soak, its load and its samples."""

    def __init__(self, home: Path, seed: int, changelog: bool) -> None:
        self._home = home
        self._seed = seed
        self._chance = random.Random(seed)
        self._mark = os.urandom(6).hex()
        self._facts: dict[str, Any] = {"recoveries": [], "checkpoints": 0}
        self._began = 0.0
        self.files = 0
        self.kills: list[dict[str, Any]] = []
        self.samples: list[Sample] = []
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            **os.environ,
            MARK: self._mark,
            "SPARK_SUBMIT_OPTS": JVM_OPTIONS,
        }
        how = "changelog" if changelog else "snapshots"
        with (home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "strandline_bench.chaos.soak_job", str(home), how],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def begin(self) -> None:
        """Wait until the first checkpoint is complete."""
        write_input(self._home / "in", self._seed, 0)
        self.files = 1
        deadline = time.monotonic() + PATIENCE
        while not self.facts()["checkpoints"]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StrandlineError(f"the driver did not start; its log ends:\n{self._tail()}")
            time.sleep(0.1)
        self._began = time.monotonic()

    def load(self, seconds: float, kill_every: float, say: Say) -> None:
        """Files at a fixed rate, kills, and a sample every ten seconds."""
        next_kill, next_sample, next_file = kill_every / 2, 5.0, 0.0
        while (now := time.monotonic() - self._began) < seconds and self._process.poll() is None:
            if now >= next_file:
                write_input(self._home / "in", self._seed, self.files)
                self.files += 1
                next_file += FILE_EVERY
            if now >= next_kill:
                self._lose_somebody(now, late=now > seconds / 3)
                next_kill += kill_every
            if now >= next_sample:
                self.samples.append(self._sample(now))
                next_sample += 10.0
                say("soak, minutes", int(now / 60), int(seconds / 60))
            time.sleep(0.05)
        say("soak, minutes", int(seconds / 60), int(seconds / 60))

    def end(self) -> list[str]:
        """Let the job process what is left. Returns what is wrong."""
        (self._home / "enough").touch()
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return ["the driver did not end"]
        if code != 0:
            return [f"the driver ended with code {code}; its log ends:\n{self._tail()}"]
        deadline = time.monotonic() + 15.0
        while (left := [*marked(self._mark, "slot"), *marked(self._mark, "taskmanager")]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        problems = [f"process {process.pid} is left" for process in left]
        problems += [f"{path} is left" for path in files_below(self._home / "local")]
        return problems + output_problems(self._home, self._seed, self.files)

    def kill(self) -> None:
        """Leave no process behind, whatever happened."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        end_all(self._mark)

    def facts(self) -> dict[str, Any]:
        """What the driver told last."""
        with suppress(OSError):
            self._facts = json.loads((self._home / "facts.json").read_text())
        return self._facts

    def _tail(self) -> str:
        return (self._home / "log").read_text(errors="replace")[-3000:]

    def _lose_somebody(self, now: float, *, late: bool) -> None:
        kinds = LATE_VICTIMS if late else VICTIMS
        kind = kinds[len(self.kills) % len(kinds)]
        victims = marked(self._mark, kind)
        if late and kind == "slot":
            victims = _by_age(victims)[1:]
        if victims:
            victim = self._chance.choice(victims)
            with suppress(psutil.Error):
                victim.send_signal(signal.SIGKILL)
            self.kills.append({"at_s": round(now, 1), "time": time.time(), "victim": kind})

    def _sample(self, now: float) -> Sample:
        driver = psutil.Process(self._process.pid)
        jvms = [child for child in driver.children() if "java" in child.name()]
        slots = _by_age(marked(self._mark, "slot"))
        own = [*slots, *marked(self._mark, "taskmanager")]
        everybody = [driver, *jvms, *own]
        metadata = sorted(
            (self._home / "ckpt" / JOB).glob("chk-*/_metadata"), key=lambda path: int(path.parent.name[4:])
        )
        return {
            "at_s": round(now, 1),
            "driver_mb": _total([driver], lambda one: one.memory_info().rss / 1e6),
            "jvm_mb": _total(jvms, lambda one: one.memory_info().rss / 1e6),
            "workers_mb": _total(own, lambda one: one.memory_info().rss / 1e6),
            "slot_mb": _total(slots[:1], lambda one: one.memory_info().rss / 1e6) or None,
            "threads": _total(everybody, lambda one: one.num_threads()),
            "handles": _total(everybody, lambda one: one.num_fds()),
            "local_mb": round(sum(map(_size, files_below(self._home / "local"))) / 1e6, 2),
            "durable_files": sum(1 for _ in files_below(self._home / "ckpt")),
            "metadata_kb": round(_size(metadata[-1]) / 1e3, 2) if metadata else None,
            "recovery_s": self._last_recovery(),
        }

    def _last_recovery(self) -> float | None:
        """Seconds from the last kill of a slot or task manager until the state was whole again."""
        losses = [kill["time"] for kill in self.kills if kill["victim"] != "relay"]
        if not losses:
            return None
        ends = [began + ms / 1000 for began, ms, _kind in self.facts()["recoveries"] if began + ms / 1000 > losses[-1]]
        return round(min(ends) - losses[-1], 2) if ends else None


def _by_age(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Oldest first."""
    found = []
    for process in processes:
        with suppress(psutil.Error):  # it has just been killed
            found.append((process.create_time(), process.pid, process))
    return [process for _began, _pid, process in sorted(found)]


def _total(processes: Sequence[psutil.Process], figure: Any) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):  # it has just been killed
            total += figure(process)
    return round(total, 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it was deleted meanwhile
        return 0


def judged(values: Sequence[float | None]) -> dict[str, Any]:
    """The medians of the second and of the last third, and whether the quantity stayed flat."""
    third = len(values) // 3
    before, after = (
        [one for one in part if one is not None] for part in (values[third : 2 * third], values[2 * third :])
    )
    if min(len(before), len(after)) < LEAST_SAMPLES:
        return {"before": None, "after": None, "flat": None}
    middle, last = statistics.median(before), statistics.median(after)
    return {"before": middle, "after": last, "flat": last <= middle * MARGIN}


def growth_problems(flat: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A text for each quantity that did not stay flat."""
    return [
        f"not flat: {QUANTITIES[name]}: {one['before']:,.1f} in the second third, {one['after']:,.1f} in the last third"
        for name, one in flat.items()
        if one["flat"] is False
    ]


def draw(result: dict[str, Any], file: Path) -> None:
    """A picture with a panel for each quantity, and a line for each kill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 12), layout="constrained")
    panels = figure.subplots(5, 2, sharex=True)
    minutes = [sample["at_s"] / 60 for sample in result["samples"]]
    for panel, (name, title) in zip(panels.flat, QUANTITIES.items(), strict=True):
        values = [sample[name] for sample in result["samples"]]
        known = [float("nan") if one is None else one for one in values]
        panel.plot(minutes, known, ".-", color="#0072b2", linewidth=0.8, markersize=2)
        for kill in result["kills"]:
            panel.axvline(kill["at_s"] / 60, color="#d55e00", alpha=0.15, linewidth=0.8)
        panel.set_title(title, fontsize=9)
        panel.set_ylim(0, 1.15 * max([one for one in values if one is not None], default=1.0) or 1.0)
        panel.tick_params(labelsize=8)
        panel.grid(True, alpha=0.25)
    for panel in panels[-1]:
        panel.set_xlabel("minutes", fontsize=8)
    figure.savefig(file, dpi=80)


def show(result: dict[str, Any], console: Console) -> None:
    """Print what the samples show."""
    table = Table(
        title=f"{result['minutes']:g} minutes, {len(result['kills'])} kills, {result['files']} input files, "
        f"{result['checkpoints']} checkpoints",
        title_justify="left",
    )
    for header in ("", "second third", "last third", "flat"):
        table.add_column(header, justify="right" if header else "left")
    for name, title in QUANTITIES.items():
        one = result["flat"][name]
        cells = ["–" if one[part] is None else f"{one[part]:,.1f}" for part in ("before", "after")]
        table.add_row(title, *cells, {True: "yes", False: "NO", None: "–"}[one["flat"]])
    console.print(table)
    for problem in result["problems"]:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)
    if not result["problems"]:
        console.print("output equals the batch computation; no process is left; nothing has grown")
