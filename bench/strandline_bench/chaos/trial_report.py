"""The report of many trials: a table per kind of fault, recovery times, and how to repeat what failed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from strandline_bench.chaos.machine import Trial
from strandline_bench.chaos.plan import WEIGHTS


def report(trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """All figures as plain values."""
    kinds = [kind for kind in ("none", *WEIGHTS) if any(trial.plan.kind == kind for trial in trials)]
    seconds = sorted(trial.seconds for trial in trials)
    return {
        "seed": seed,
        "trials": len(trials),
        "verdicts": dict(Counter(trial.verdict for trial in trials)),
        "kinds": {kind: _of_kind([trial for trial in trials if trial.plan.kind == kind]) for kind in kinds},
        "variants": dict(sorted(Counter(trial.plan.variant.name for trial in trials).items())),
        "seconds": {"p50": _at(seconds, 0.5), "p99": _at(seconds, 0.99), "sum": round(sum(seconds), 1)},
        "most_handles": max((trial.handles for trial in trials), default=0),
        "operations": len({trial.fired for trial in trials if trial.fired}),
        "failures": [failure(trial) for trial in trials if trial.verdict != "survived"],
    }


def _of_kind(trials: Sequence[Trial]) -> dict[str, Any]:
    verdicts = Counter(trial.verdict for trial in trials)
    recoveries = sorted(trial.recovery for trial in trials if trial.recovery is not None)
    return {
        "tried": len(trials),
        "fired": sum(1 for trial in trials if trial.fired),
        **{verdict: verdicts[verdict] for verdict in ("survived", "wrong", "died", "stuck")},
        "recoveries": len(recoveries),
        "recovery_p50_s": _at(recoveries, 0.5),
        "recovery_p99_s": _at(recoveries, 0.99),
    }


def failure(trial: Trial) -> dict[str, Any]:
    """What is needed to understand a failure, and to repeat it."""
    plan = trial.plan
    return {
        "verdict": trial.verdict,
        "kind": plan.kind,
        "variant": plan.variant.name,
        "seed": plan.seed,
        "operation": plan.operation,
        "fired": trial.fired,
        "problems": trial.problems,
        "notes": trial.notes,
        "folder": plan.folder,
        "repeat": f'strandline chaos repeat --seed {plan.seed} --variant {plan.variant.name} --kind "{plan.kind}"'
        + (f" --at '{plan.operation}'" if plan.operation else ""),
    }


def _at(ordered: Sequence[float], quantile: float) -> float | None:
    if len(ordered) < 2:
        return ordered[0] if ordered else None
    return round(statistics.quantiles(ordered, n=100, method="inclusive")[round(quantile * 100) - 1], 3)


HEADERS: Final = ("fault", "tried", "happened", "survived", "wrong", "died", "stuck", "recovery p50", "p99")


def _rows(result: dict[str, Any]) -> Iterator[list[str]]:
    for kind, one in result["kinds"].items():
        times = ["–" if one[name] is None else f"{one[name]:.2f} s" for name in ("recovery_p50_s", "recovery_p99_s")]
        names = ("tried", "fired", "survived", "wrong", "died", "stuck")
        yield [kind, *(str(one[name]) for name in names), *times]


def markdown(result: dict[str, Any]) -> str:
    """The table per kind of fault, as it stands in the documentation."""
    lines = [HEADERS, ("---", *("--:" for _ in HEADERS[1:])), *_rows(result)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `report`."""
    table = Table(title=f"{result['trials']} trials, seed {result['seed']}", title_justify="left")
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "fault" else "right")
    for cells in _rows(result):
        table.add_row(*cells)
    console.print(table)
    seconds = result["seconds"]
    if result["trials"]:
        console.print(
            f"{result['operations']} different operations. A trial took {seconds['p50']} s (median) and "
            f"{seconds['p99']} s (p99)."
        )
    else:
        console.print("No trial was run.")
    for one in result["failures"]:
        show_failure(one, console)


def show_failure(one: dict[str, Any], console: Console) -> None:
    """Print one failure."""
    texts = [f"{one['verdict']}: {one['kind']}, {one['variant']}: {one['fired'] or one['operation']}"]
    texts += [f"  {problem}" for problem in (*one["problems"], *(f"told: {note}" for note in one["notes"]))]
    texts += [f"  kept in {one['folder']}", f"  repeat: {one['repeat']}"]
    console.print("\n".join(texts), markup=False, highlight=False, soft_wrap=True)
