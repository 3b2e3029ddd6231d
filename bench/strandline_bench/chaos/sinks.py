"""Faults for a job that writes into real targets: drivers, slots, Python workers and servers are killed and frozen.

A round has targets of its own, a job and one fault after the other. Then a last driver goes on where the others ended,
and the oracle looks at every target: rows, their order, and what was left behind.
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

from strandline_bench.chaos.disturbance import KILLS, OF_SERVERS, Disturbance, Say
from strandline_bench.chaos.sinks_job import SinksPlace
from strandline_bench.chaos.two_drivers import facts_of_log
from strandline_bench.servers.server import Server
from strandline_bench.targets import TARGETS, opened, servers

NAMES: Final = tuple(TARGETS)
ROUND: Final = 40.0
"""Seconds for which the job of a round is disturbed."""
TARGETS_OF_A_ROUND: Final = 3
OF_JOBS: Final = ("second driver", "freeze driver", *KILLS)


def run(
    minutes: float,
    seed: int,
    names: Sequence[str],
    say: Say,
    work_dir: Path | None = None,
) -> dict[str, Any]:
    """Rounds until the time is over, at least one. Returns what happened and what is wrong as plain values.

    Raises `ServerMissingError` where the server of a target is not installed.
    """
    chance = random.Random(seed)
    deadline = time.monotonic() + minutes * 60
    deck: list[str] = []
    rounds: list[dict[str, Any]] = []
    with servers(names) as running:
        while not rounds or time.monotonic() < deadline:
            deck += chance.sample(names, len(names))
            hand, deck = _dealt(deck, min(TARGETS_OF_A_ROUND, len(names)))
            one = _round(f"{seed}-{len(rounds)}", hand, running, min(ROUND, minutes * 60), work_dir)
            rounds.append(one)
            say(f"round {len(rounds)}: {', '.join(hand)}: {sum(one['faults'].values())} faults, {one['files']} files")
            for problem in one["problems"]:
                say(f"    {problem}")
    return _summary(minutes, seed, rounds)


def _dealt(deck: list[str], count: int) -> tuple[list[str], list[str]]:
    """So many different names from the top of the deck, and the rest."""
    hand = list(dict.fromkeys(deck))[:count]
    rest = list(deck)
    for name in hand:
        rest.remove(name)
    return hand, rest


def _summary(minutes: float, seed: int, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sinks: dict[str, Counter[str]] = {}
    for one in rounds:
        for name in one["sinks"]:
            counts = sinks.setdefault(name, Counter())
            counts.update({"rounds": 1, "wrong": bool(one["problems"])})
            counts.update({kind: count for kind, count in one["faults"].items() if not kind.startswith(OF_SERVERS)})
            counts.update({kind: one["faults"].get(f"{kind} {name}", 0) for kind in OF_SERVERS})
    totals = Counter[str]()
    for one in rounds:
        totals.update(
            {name: one[name] for name in ("files", "starts", "fenced", "refused", "takeovers", "checkpoints")}
        )
    return {
        "minutes": minutes,
        "seed": seed,
        "rounds": len(rounds),
        "faults": sum(sum(one["faults"].values()) for one in rounds),
        **totals,
        "sinks": {name: dict(counts) for name, counts in sorted(sinks.items())},
        "refusals": sorted({text for one in rounds for text in one["refusals"]}),
        "problems": [f"round {number}: {text}" for number, one in enumerate(rounds, 1) for text in one["problems"]],
        "folders": [one["folder"] for one in rounds if one["folder"]],
    }


def _round(
    seed: str, names: Sequence[str], running: dict[str, Server], seconds: float, work_dir: Path | None
) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="strandline-sinks-", dir=work_dir))
    chance = random.Random(seed)
    targets = {name: opened(name, home, running) for name in names}
    for target in targets.values():
        for table in ("changes", "newest"):
            target.make(table)
    place = SinksPlace(home, chance.randrange(1 << 31), chance.random() < 0.5, targets)
    used = {name: server for name, server in running.items() if name in names}
    addresses = {name: target.address for name, target in targets.items()}
    arguments = [str(home), place.seed, place.variant.changelog, addresses]
    trial = Disturbance(place, "strandline_bench.chaos.sinks_job", arguments, used, chance, OF_JOBS)
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
    result = {
        "sinks": list(names),
        "faults": dict(sorted(trial.faults.items())),
        "files": place.files(),
        "starts": len(trial.told("started")),
        "fenced": len(trial.told("fenced")),
        "refused": len(trial.told("refused")),
        "refusals": [line[:500] for line in trial.told("refused")],
        **facts_of_log(place),
        "problems": problems,
        "folder": str(home) if problems else None,
    }
    if not problems:
        shutil.rmtree(home, ignore_errors=True)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    """Print what `run` found."""
    kinds = (*OF_JOBS, *OF_SERVERS)
    table = Table(
        title=f"{result['rounds']} rounds, {result['faults']} faults, {result['files']} input files, "
        f"{result['takeovers']} takeovers, {result['fenced']} times fenced, {result['checkpoints']} checkpoints",
        title_justify="left",
    )
    for header in ("sink", "rounds", *kinds, "wrong"):
        table.add_column(header, justify="left" if header == "sink" else "right")
    for name, counts in result["sinks"].items():
        table.add_row(name, *(str(int(counts.get(one, 0))) for one in ("rounds", *kinds, "wrong")))
    console.print(table)
    for problem in result["problems"]:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)
    for folder in result["folders"]:
        console.print(f"kept: {folder}", markup=False, highlight=False, soft_wrap=True)
    if not result["problems"]:
        console.print("every target equals the batch computation, and nothing is left behind")
