"""Runs the worker of the fuzz machine, and goes on behind an input that crashes or hangs it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from strandline.errors import StrandlineError
from strandline_bench.fuzz.formats import NAMES, make_formats
from strandline_bench.fuzz.worker import CURRENT, Counts, Finding, make_input

HANG_SECONDS = 30.0
KEPT_FINDINGS = 200


class _Line(msgspec.Struct):
    finding: Finding | None = msgspec.field(name="Finding", default=None)
    counts: Counts | None = msgspec.field(name="Counts", default=None)


@dataclass(slots=True)
class Result:
    """What the inputs did to the readers."""

    seed: int
    inputs: int = 0
    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    found: int = 0
    slowest: float = 0.0
    peak_bytes: int = 0
    seconds: float = 0.0

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it if there are not too many."""
        self.found += 1
        if len(self.findings) < KEPT_FINDINGS:
            self.findings.append(finding)


def fuzz(
    inputs: int,
    seed: int,
    *,
    first: int = 0,
    names: Sequence[str] = NAMES,
    tell: Callable[[int, Result], None] = lambda _done, _result: None,
) -> Result:
    """Read the inputs from number `first` on. A crash or a hang of the worker is a finding, and the rest goes on."""
    result = Result(seed)
    started = time.monotonic()
    at, end = first, first + inputs
    while at < end:
        at = _work(result, seed, range(at, end), names, tell)
    result.inputs = inputs
    result.seconds = time.monotonic() - started
    return result


def input_of(seed: int, number: int, names: Sequence[str] = NAMES) -> tuple[str, str, bytes]:
    """The format, the mode and the bytes of one input."""
    with tempfile.TemporaryDirectory(prefix="strandline-fuzz-") as folder:
        format, mode, data = make_input(make_formats(Path(folder), names), seed, number)
        return format.name, mode, data


def _work(result: Result, seed: int, numbers: range, names: Sequence[str], tell: Callable[[int, Result], None]) -> int:
    """Run one worker until it ends. Returns the number of the first input that it did not read."""
    with _folder() as folder:
        progress = folder / "progress"
        progress.write_bytes(numbers.start.to_bytes(8, "little"))
        arguments = [str(seed), str(numbers.start), str(numbers.stop), str(folder / "files"), str(progress), *names]
        with (folder / "errors").open("wb") as errors:
            worker = subprocess.Popen(
                [sys.executable, "-m", "strandline_bench.fuzz.worker", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        watch = _Watch(worker, progress)
        try:
            for line in _lines(worker):
                if line.finding is not None:
                    result.add(line.finding)
                if line.counts is not None:
                    _count(result, line.counts)
                    tell(watch.number(), result)
            code = worker.wait()
        finally:
            watch.stop()
            worker.kill()
            worker.wait()
        if code == 0:
            return numbers.stop
        number = watch.number()
        last = (folder / "errors").read_text(errors="replace")[-2000:]
        if not (folder / CURRENT).exists():
            raise StrandlineError(f"the worker of the fuzz machine could not begin: {last}")
        name, mode, data = (folder / CURRENT).read_bytes().split(b"\n", 2)
        kind = "hang" if watch.hung else "crash"
        result.add(Finding(number, name.decode(), mode.decode(), kind, f"exit code {code}\n{last}", data))
        return number + 1


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in memory if there is one: a million small files are written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="strandline-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def _lines(worker: subprocess.Popen[bytes]) -> Iterator[_Line]:
    assert worker.stdout is not None
    for line in worker.stdout:
        yield msgspec.json.decode(line, type=_Line)


def _count(result: Result, counts: Counts) -> None:
    for name, mode, read, refused in counts.rows:
        result.read[name, mode] += read
        result.refused[name, mode] += refused
    result.slowest = max(result.slowest, counts.slowest)
    result.peak_bytes = max(result.peak_bytes, counts.peak_bytes)


class _Watch:
    """Kills a worker that stays at one input for too long."""

    def __init__(self, worker: subprocess.Popen[bytes], progress: Path) -> None:
        self._worker = worker
        self._progress = progress
        self._ended = threading.Event()
        self.hung = False
        self._thread = threading.Thread(target=self._run, name="fuzz-watch", daemon=True)
        self._thread.start()

    def number(self) -> int:
        """The input that the worker is at."""
        return int.from_bytes(self._progress.read_bytes(), "little")

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        last, since = -1, time.monotonic()
        while not self._ended.wait(1.0):
            number = self.number()
            if number != last:
                last, since = number, time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS:
                self.hung = True
                self._worker.kill()
                return
