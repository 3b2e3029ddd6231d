"""Compares slots that restore from local copies with slots that fetch their state from a slow storage.

In both cases every slot is killed and loses its working files, so that it begins with the last checkpoint. Storage is a
local folder whose downloads are slowed down to a given rate, all slots together.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.errors import ConfigError, StrandlineError
from strandline_bench.report import machine
from strandline_bench.restoring import LoadedJob
from strandline_bench.running import session
from strandline_bench.timing import Say

PATIENCE = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The size of the state, and the speed of storage."""

    keys: int = 2_000_000
    storage_mb_per_s: float = 50.0
    repeats: int = 3
    value_bytes: int = 100
    memory: str = "512mb"
    parallelism: int = 2
    changelog: bool = False

    def __post_init__(self) -> None:
        if min(self.keys, self.repeats, self.value_bytes, self.parallelism) < 1 or self.storage_mb_per_s <= 0:
            raise ConfigError("--keys, --repeats, --value-bytes, --parallelism and --storage-rate must be above 0")


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Measure, check the results, and return all figures as plain values. Raises `WrongResultError`."""
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(parameters.parallelism, parameters.keys // 100_000)
    try:
        figures: dict[str, Any] = {}
        for name, local in (("local", True), ("remote", False)):
            place = home / name
            place.mkdir()
            config = sl.Config(
                checkpoint_dir=f"faulty+file://{place}/checkpoints",
                storage_options={
                    "bytes_per_second": str(parameters.storage_mb_per_s * 1e6 / parameters.parallelism),
                    "slow_pattern": "^(download|read) .*/shared/",
                },
                checkpoint_interval="1h",
                state_memory=parameters.memory,
                parallelism=parameters.parallelism,
                changelog=parameters.changelog,
                local_recovery=local,
                local_dir=str(place / "local"),
                restart_delay=0,
                restart_attempts=-1,
            )
            loaded = LoadedJob(spark, place, parameters.keys, parameters.value_bytes, config)
            figures[name] = _recoveries(loaded, place, parameters.repeats, name, say)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    ratio = figures["local"]["duration_ms"] / figures["remote"]["duration_ms"]
    return {
        "parameters": asdict(parameters),
        "machine": about,
        **figures,
        "ratio": round(ratio, 3),
        "verified": True,
    }


def _recoveries(loaded: LoadedJob, place: Path, repeats: int, name: str, say: Say) -> dict[str, Any]:
    run_ = loaded.job().start()
    loaded.load(run_, loaded.files(), say)
    recoveries = []
    for number in range(repeats):
        recoveries.append(_lose_all_slots(run_, place))
        loaded.change(run_)
        say(f"recoveries, {name}", number + 1, repeats)
    run_.stop()
    return {
        "duration_ms": round(statistics.median(one.duration_ms for one in recoveries), 1),
        "local_bytes": int(statistics.median(one.local_bytes for one in recoveries)),
        "durable_bytes": int(statistics.median(one.durable_bytes for one in recoveries)),
        "durations_ms": [round(one.duration_ms, 1) for one in recoveries],
    }


def _lose_all_slots(run_: sl.JobRun, place: Path) -> sl.Recovery:
    """Kill every slot together with its working files, and wait until the run is back."""
    before = len(run_.recoveries())
    slots = {slot.index: slot.pid for slot in run_.processes().slots}
    for folder in (place / "local").glob("strandline-*/*/*/gen-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for pid in slots.values():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = run_.recoveries()[before:]
        if found and set(slots) == {slot for one in found for slot in one.slots}:
            return found[-1]
        time.sleep(0.05)
    raise StrandlineError(f"the run was not back after {PATIENCE:.0f} s: it is {run_.status}")


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    parameters = result["parameters"]
    table = Table(title=f"all slots lost, with {parameters['keys']:,} keys", title_justify="left")
    for header in ("", "seconds", "read locally (MB)", "read from storage (MB)"):
        table.add_column(header, justify="right" if header else "left")
    for text, name in (
        ("local copies", "local"),
        (f"storage of {parameters['storage_mb_per_s']:g} MB/s", "remote"),
    ):
        one = result[name]
        table.add_row(
            text,
            f"{one['duration_ms'] / 1000:.2f}",
            f"{one['local_bytes'] / 1e6:,.1f}",
            f"{one['durable_bytes'] / 1e6:,.1f}",
        )
    console.print(table)
    console.print(f"local ÷ remote: {result['ratio']:.2f}")
