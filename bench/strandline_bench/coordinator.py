"""What a checkpoint costs the coordinator itself, from acknowledgements to rebuilding: no Spark, no storage."""

from __future__ import annotations

import gc
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from strandline.checkpoint import (
    CheckpointCoordinator,
    CheckpointMetadata,
    JobShape,
    SourcePosition,
    SubtaskAck,
)
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import decode, encode
from strandline.errors import ConfigError
from strandline.storage import JobPaths
from strandline_bench.report import machine
from strandline_bench.timing import Say

OPERATOR = "count"
PATHS = JobPaths("bench-coordinator")
FILE_BYTES = 4_000_000
STEPS = ("acknowledge_s", "prepare_s", "encode_s", "confirm_s")
"""The coordinator's part of a checkpoint; `receive_s`, turning messages into values, comes before it."""

_SPREAD = 0x9E3779B97F4A7C15F39CC0605CEDC835
_MASK = (1 << 128) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The size of the job whose coordinator is measured."""

    subtasks: int = 10_000
    files: int = 100
    new: int = 5
    retained: int = 10

    def __post_init__(self) -> None:
        if self.subtasks < 2 or self.retained < 1:
            raise ConfigError("--subtasks must be at least 2, and --retained at least 1")
        if not 1 <= self.new <= self.files:
            raise ConfigError(
                f"--new is {self.new}, but must be at least 1, and at most --files, which is {self.files}: "
                "new files are among those of the checkpoint"
            )


def run(parameters: Parameters, say: Say) -> dict[str, Any]:
    """Measure the job at half its size, then at its size; `growth` is how many times the figures grew.

    A cost that is linear in the number of files grows by 2. Seconds are CPU seconds, so what else runs on the machine
    hardly counts. Everything runs in this process, the smaller job first, because the peak of memory is that of the
    process so far.
    """
    machine_now = machine()
    sizes = {"half": parameters.subtasks // 2, "full": parameters.subtasks}
    measured = {name: _measure(name, subtasks, parameters, say) for name, subtasks in sizes.items()}
    half, full = measured["half"], measured["full"]
    figures = ("referenced_files", "complete_s", "drop_s", "rebuild_s", "metadata_bytes", "peak_memory_bytes")
    return {
        "parameters": asdict(parameters),
        "machine": machine_now,
        **measured,
        "growth": {figure: round(full[figure] / half[figure], 2) for figure in figures if half[figure]},
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    table = Table(title="coordinator", title_justify="left")
    for column in ("", "half", "full", "times"):
        table.add_column(column, justify="left" if not column else "right")
    for figure in ("subtasks", "referenced_files", "acknowledgements_per_s"):
        table.add_row(figure.replace("_", " "), *(f"{result[size][figure]:,.0f}" for size in ("half", "full")))
    table.add_section()
    for figure in ("first_complete_s", "complete_s", *STEPS, "receive_s", "drop_s", "rebuild_s", "rebuild_decode_s"):
        table.add_row(
            f"{figure.removesuffix('_s').replace('_', ' ')} (s)",
            *(f"{result[size][figure]:.3f}" for size in ("half", "full")),
            *([f"{result['growth'][figure]:.2f}"] if figure in result["growth"] else []),
        )
    table.add_section()
    for figure in ("metadata_bytes", "peak_memory_bytes"):
        table.add_row(
            f"{figure.removesuffix('_bytes').replace('_', ' ')} (MB)",
            *(f"{result[size][figure] / 1e6:,.1f}" for size in ("half", "full")),
            f"{result['growth'][figure]:.2f}",
        )
    console.print(table)


def _measure(name: str, subtasks: int, parameters: Parameters, say: Say) -> dict[str, Any]:
    job = _Job(subtasks, parameters)
    count = parameters.retained
    with tempfile.TemporaryDirectory(prefix="strandline-bench-") as folder:
        taken: list[dict[str, float]] = []
        say(f"{name}: checkpoints", 0, count + 1)
        for number in range(1, count + 2):  # the last one drops the first
            taken.append(job.take(number, Path(folder)))
            say(f"{name}: checkpoints", number, count + 1)
        job.coordinator = _coordinator(subtasks, count, count + 2)
        say(f"{name}: rebuild", 0, 1)
        rebuilt = job.rebuild(list(range(2, count + 2)), Path(folder))
        say(f"{name}: rebuild", 1, 1)
    later = taken[1:]
    middle = {figure: round(median(one[figure] for one in later), 4) for figure in later[0]}
    complete = round(median(sum(one[step] for step in STEPS) for one in later), 4)
    return {
        "subtasks": subtasks,
        "referenced_files": subtasks * parameters.files,
        "new_files": subtasks * parameters.new,
        "acknowledgements_per_s": round(subtasks / max(middle["acknowledge_s"] + middle["receive_s"], 1e-9)),
        "first_complete_s": round(sum(taken[0][step] for step in STEPS), 4),
        "complete_s": complete,
        **middle,
        "metadata_bytes": int(middle["metadata_bytes"]),
        "last_complete_s": round(sum(later[-1][step] for step in STEPS), 4),
        "files_freed": int(later[-1]["freed"]),
        **rebuilt,
        "peak_memory_bytes": _peak_memory(),
    }


class _Job:
    """The subtasks of a job, and the coordinator that they report to."""

    def __init__(self, subtasks: int, parameters: Parameters) -> None:
        self._subtasks = subtasks
        self._parameters = parameters
        self._shape = JobShape(PATHS.job, 1, subtasks, subtasks, (OPERATOR,))
        self.coordinator = _coordinator(subtasks, parameters.retained, 1)

    def take(self, number: int, folder: Path) -> dict[str, float]:
        """One checkpoint from its barrier to its completion; the seconds of every step."""
        coordinator, clock = self.coordinator, time.process_time
        receive = acknowledge = 0.0
        coordinator.trigger(float(number), float(number), batch=number)
        for subtask in range(self._subtasks):
            message = self._message(number, subtask)
            start = clock()
            ack = msgspec.convert(msgspec.msgpack.decode(message), SubtaskAck)
            received = clock()
            coordinator.acknowledge(number, OPERATOR, subtask, ack)
            acknowledge += clock() - received
            receive += received - start
        times = [clock()]
        plan = coordinator.prepare_completion(
            number, float(number), shape=self._shape, source=SourcePosition(number, {"offsets/0": b"{}"})
        )
        times.append(clock())
        data = encode(plan.metadata)
        times.append(clock())
        decision = coordinator.confirm_completion(number, float(number), PATHS.metadata(number))
        times.append(clock())
        (folder / str(number)).write_bytes(data)
        prepare, encoded, confirm = (after - before for before, after in pairwise(times))
        return {
            "receive_s": receive,
            "acknowledge_s": acknowledge,
            "prepare_s": prepare,
            "encode_s": encoded,
            "confirm_s": confirm,
            "metadata_bytes": len(data),
            "freed": len(decision.delete),
        }

    def rebuild(self, retained: list[int], folder: Path) -> dict[str, float]:
        """A new coordinator that learns of the retained checkpoints, newest first, then drops the oldest."""
        gc.collect()
        clock, decoding = time.process_time, 0.0

        def read() -> Iterator[CheckpointMetadata]:
            nonlocal decoding
            for number in reversed(retained):
                data = (folder / str(number)).read_bytes()
                start = clock()
                metadata = decode(data, PATHS.metadata(number), Home(PATHS.job, number))
                decoding += clock() - start
                yield metadata

        start = clock()
        self.coordinator.recover(read())
        rebuilt = clock()
        freed = self.coordinator.registry.drop(retained[0])
        dropped = clock()
        return {
            "rebuild_s": round(rebuilt - start, 4),
            "rebuild_decode_s": round(decoding, 4),
            "drop_s": round(dropped - rebuilt, 4),
            "drop_freed": len(freed),
        }

    def _message(self, checkpoint: int, subtask: int) -> bytes:
        """The acknowledgement as it arrives: it shares no object with what the coordinator knows.

        Every checkpoint has replaced the oldest of the subtask's files by new ones, as compactions do. One of the new
        ones is the checkpoint's alone, as a manifest is.
        """
        files, new = self._parameters.files, self._parameters.new
        newest = files + (checkpoint - 1) * (new - 1) - 1
        first = newest - files + 1
        states = [_file(subtask, number, True, PATHS.shared) for number in range(first + 1, newest + 1)]
        manifest = _file(subtask, -checkpoint, False, lambda unique: PATHS.exclusive(checkpoint, unique))
        states.append(manifest)
        uploaded = [state[3] for state in (states if checkpoint == 1 else states[-new:])]
        body = {
            "state": [OPERATOR, subtask, subtask, subtask + 1, "rocksdb", True, states, []],
            "uploaded": uploaded,
            "barrier_time": float(checkpoint),
            "ack_time": float(checkpoint),
            "sync_ms": 1.0,
            "async_ms": 10.0,
            "checkpointed_bytes": len(uploaded) * FILE_BYTES,
            "full_bytes": files * FILE_BYTES,
        }
        return msgspec.msgpack.encode(body)


def _file(subtask: int, number: int, shared: bool, path: Callable[[str], str]) -> list[Any]:
    """A state file as it is sent. Its names are as long and as different as real ones."""
    unique = f"{((subtask << 32) + number + 1) * _SPREAD & _MASK:032x}"
    name = f"{number:06d}.sst" if shared else f"MANIFEST-{-number:06d}"
    return [name, f"{unique[16:]}-{name}", shared, [path(unique), FILE_BYTES, f"crc32:{unique[8:16]}"]]


def _coordinator(subtasks: int, retained: int, first: int) -> CheckpointCoordinator:
    return CheckpointCoordinator(
        interval=0.0,
        subtasks=[(OPERATOR, index) for index in range(subtasks)],
        num_retained=retained,
        first_checkpoint_id=first,
    )


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
