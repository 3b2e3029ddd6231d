"""The worker of the fuzz machine: makes mutated inputs by number, reads them, and reports what came out.

    python -m strandline_bench.fuzz.worker SEED FIRST END FOLDER PROGRESS FORMAT...

Before each input its number goes into the file PROGRESS, which the machine reads after a crash. Findings and, at the
end, counts go to standard output, a JSON object a line.
"""

from __future__ import annotations

import gc
import mmap
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from traceback import format_exception

import msgspec

from strandline.errors import StrandlineError
from strandline_bench.fuzz.format import MODES, Format
from strandline_bench.fuzz.formats import make_formats

SLOW_SECONDS = 2.0
GROWTH_BYTES = 768 << 20
"""A finding: one input raises the peak of the process's memory by more than this."""
ADDRESS_SPACE = 8 << 30
REPORT_EVERY = 2000
CURRENT = "current"
"""The file beside PROGRESS that holds the format, the mode and the input, each on a line."""


class Finding(msgspec.Struct, frozen=True):
    """An input that broke a reader. `number` and the seed make it again."""

    number: int
    format: str
    mode: str
    kind: str
    """The class of the error; or `slow`, `memory`, `crash` (the process died), `hang`."""
    detail: str = ""
    data: bytes = b""
    """The input itself: samples of RocksDB's files differ from run to run."""


class Counts(msgspec.Struct, frozen=True):
    """How many inputs of each format and mode were read, and how many were refused, since the last report."""

    rows: list[tuple[str, str, int, int]]
    slowest: float
    peak_bytes: int


def make_input(formats: list[Format], seed: int, number: int) -> tuple[Format, str, bytes]:
    """The input with this number: its format, the mode of the mutation, and its bytes."""
    random = Random(f"{seed}:{number}")
    format = random.choices(formats, [format.weight for format in formats])[0]
    mode = random.choice(MODES)
    return format, mode, format.mutated(random, mode)


def judge(format: Format, mode: str, number: int, data: bytes) -> tuple[bool, Finding | None]:
    """Read one input. Returns whether it was refused, and what is wrong with the reader, if anything."""
    before = _peak()
    started = time.monotonic()
    refused = False
    finding = None
    try:
        format.read(data)
    except StrandlineError:
        refused = True
    except Exception as error:  # noqa: BLE001  # any other error is what is looked for
        trace = "".join(format_exception(error, limit=-6))
        finding = Finding(number, format.name, mode, type(error).__name__, trace[-3000:], data)
    seconds = time.monotonic() - started
    if finding is None and seconds > SLOW_SECONDS:
        finding = Finding(number, format.name, mode, "slow", f"{seconds:.1f} s", data)
    if finding is None and _peak() - before > GROWTH_BYTES:
        finding = Finding(number, format.name, mode, "memory", f"{(_peak() - before) >> 20} MB", data)
    return refused, finding


def run(seed: int, numbers: range, folder: Path, progress: Path, names: Sequence[str]) -> Iterator[Finding | Counts]:
    """Read all inputs. Yields findings as they come, and counts from time to time."""
    formats = make_formats(folder, names)
    counts: Counter[tuple[str, str, bool]] = Counter()
    slowest = 0.0
    current = progress.with_name(CURRENT)
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as place:
        for number in numbers:
            place[:] = number.to_bytes(8, "little")
            format, mode, data = make_input(formats, seed, number)
            current.write_bytes(f"{format.name}\n{mode}\n".encode() + data)
            started = time.monotonic()
            refused, finding = judge(format, mode, number, data)
            slowest = max(slowest, time.monotonic() - started)
            counts[format.name, mode, refused] += 1
            if finding is not None:
                yield finding
            if (number + 1) % REPORT_EVERY == 0 or number + 1 == numbers.stop:
                pairs = sorted({(name, mode) for name, mode, _refused in counts})
                rows = [(name, mode, counts[name, mode, False], counts[name, mode, True]) for name, mode in pairs]
                yield Counts(rows, slowest, _peak())
                counts.clear()
                gc.collect()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run as a process: see the module."""
    seed, first, end, folder, progress, *names = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for found in run(int(seed), range(int(first), int(end)), Path(folder), Path(progress), names):
        line = msgspec.json.encode({type(found).__name__: found})
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
