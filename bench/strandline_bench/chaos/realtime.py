"""Faults for a job that reads Kafka, mostly in real time: its processes and the broker are killed and frozen.

A round has a topic and a job of its own. Drivers change the mode and the number of slots, and take savepoints, while
one fault comes after the other. Then a last driver goes on where the others ended, and the oracle looks.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from strandline_bench.chaos.disturbance import FREEZES, KILLS, OF_SERVERS, Disturbance, Say
from strandline_bench.chaos.realtime_job import RealtimePlace
from strandline_bench.chaos.two_drivers import facts_of_log
from strandline_bench.servers.kafka import KafkaBroker, kafka_broker

ROUND: Final = 60.0
"""Seconds for which the job of a round is disturbed."""
FAULTS: Final = (*KILLS, *FREEZES, "second driver")
STEPS: Final = ("started realtime", "started batch", "rescaled", "savepoint")
"""What drivers do, beside what is done to them."""


def run(minutes: float, seed: int, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Rounds until the time is over, at least one. Returns what happened and what is wrong as plain values.

    Raises `ServerMissingError` if Kafka is not installed.
    """
    deadline = time.monotonic() + minutes * 60
    rounds: list[dict[str, Any]] = []
    with kafka_broker() as broker:
        while not rounds or time.monotonic() < deadline:
            one = _round(f"{seed}-{len(rounds)}", broker, min(ROUND, minutes * 60), work_dir)
            rounds.append(one)
            say(f"round {len(rounds)}: {sum(one['faults'].values())} faults, {one['rows']} rows, {one['steps']}")
            for problem in one["problems"]:
                say(f"    {problem}")
    return _summary(minutes, seed, rounds)


def _round(seed: str, broker: KafkaBroker, seconds: float, work_dir: Path | None) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="strandline-realtime-", dir=work_dir))
    chance = random.Random(seed)
    place = RealtimePlace(home, chance.randrange(1 << 31), chance.random() < 0.7, broker.servers)
    place.make()
    arguments = [str(home), place.seed, place.variant.changelog, broker.servers]
    module = "strandline_bench.chaos.realtime_job"
    trial = Disturbance(place, module, arguments, {"kafka": broker}, chance, FAULTS)
    problems: list[str] = []
    try:
        trial.disturb(seconds)
        problems += trial.finish()
        problems += place.problems()
    except Exception:  # noqa: BLE001 - whatever it is, it is a finding
        problems.append(traceback.format_exc())
    finally:
        trial.end()
    problems += [f"a run ended by itself: {line}" for line in trial.told("died")]
    problems += [f"an error that is not ours: {line}" for line in trial.told("foreign")]
    started = Counter(trial.told("started"))
    steps = {f"started {mode}": count for mode, count in started.items()}
    steps |= {what: len(trial.told(what)) for what in ("rescaled", "savepoint")}
    result = {
        "faults": dict(sorted(trial.faults.items())),
        "steps": steps,
        "rows": place.files() * len(place.rows_of(0)),
        "fenced": len(trial.told("fenced")),
        "refusals": sorted({line[:500] for line in trial.told("refused")}),
        **facts_of_log(place),
        "problems": problems,
        "folder": str(home) if problems else None,
    }
    if not problems:
        shutil.rmtree(home, ignore_errors=True)
    return result


def _summary(minutes: float, seed: int, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    faults, steps, totals = Counter[str](), Counter[str](), Counter[str]()
    for one in rounds:
        faults.update(one["faults"])
        steps.update(one["steps"])
        totals.update({name: one[name] for name in ("rows", "fenced", "takeovers", "checkpoints")})
    return {
        "minutes": minutes,
        "seed": seed,
        "rounds": len(rounds),
        **totals,
        "faults": dict(sorted(faults.items())),
        "steps": dict(sorted(steps.items())),
        "refusals": sorted({text for one in rounds for text in one["refusals"]}),
        "problems": [f"round {number}: {text}" for number, one in enumerate(rounds, 1) for text in one["problems"]],
        "folders": [one["folder"] for one in rounds if one["folder"]],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print what `run` found."""
    table = Table(
        title=f"{result['rounds']} rounds, {sum(result['faults'].values())} faults, {result['rows']} rows, "
        f"{result['takeovers']} takeovers, {result['fenced']} times fenced, {result['checkpoints']} checkpoints",
        title_justify="left",
    )
    table.add_column("what happened")
    table.add_column("times", justify="right")
    for kind in (*FAULTS, *(f"{kind} kafka" for kind in OF_SERVERS)):
        table.add_row(kind, str(result["faults"].get(kind, 0)))
    for step in STEPS:
        table.add_row(step, str(result["steps"].get(step, 0)))
    console.print(table)
    for line in (*result["problems"], *(f"kept: {folder}" for folder in result["folders"])):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not result["problems"]:
        console.print("the output equals the batch computation, and nothing is left behind")
