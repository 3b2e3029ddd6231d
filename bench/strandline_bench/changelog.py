"""Rate-driven workloads with and without the changelog: the same rows in both modes, side by side."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from strandline_bench.rated_run import Mode, RatedRun, RatedWork, Settings, Timeline
from strandline_bench.report import machine
from strandline_bench.running import session
from strandline_bench.timing import Say

BATCHES_PER_S: Final = 50
"""More batches than a run can have, so that Spark keeps the progress report of each."""
PERCENTILES: Final = {"50%": "p50", "90%": "p90", "99%": "p99", "99.9%": "p99.9", "max": "max"}


class Outcome(NamedTuple):
    """What `run` has measured."""

    figures: dict[str, Any]
    """Plain values: `parameters`, `machine`, and for each workload `options`, `modes`, `ratios` and `bars`."""
    timelines: dict[str, dict[Mode, Timeline]]


def run(
    works: Sequence[RatedWork], modes: Sequence[Mode], settings: Settings, say: Say, work_dir: Path | None = None
) -> Outcome:
    """Measure every workload in every mode, after a short rehearsal, and check all results.

    Raises `WrongResultError` when an output is not what the rows lead to.
    """
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(settings.parallelism, round(settings.seconds) * BATCHES_PER_S)
    found: dict[str, Any] = {}
    timelines: dict[str, dict[Mode, Timeline]] = {}
    try:
        for work in works:
            RatedRun(work, modes[0], settings, spark, home / work.name / "rehearsal", say).rehearse()
            measured: dict[Mode, dict[str, Any]] = {}
            timelines[work.name] = {}
            for mode in modes:
                folder = home / work.name / mode
                one = RatedRun(work, mode, settings, spark, folder, say)
                measured[mode], timelines[work.name][mode] = one.measure()
                shutil.rmtree(folder)
            found[work.name] = {
                "options": work.options,
                "modes": measured,
                "ratios": ratios(measured),
                "bars": bars(measured, settings, work.most_full_bytes),
            }
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    return Outcome({"parameters": asdict(settings), "machine": about, "workloads": found}, timelines)


def ratios(modes: Mapping[Mode, Mapping[str, Any]]) -> dict[str, float]:
    """Each figure with the changelog, divided by the figure without it. Empty unless both modes were measured."""
    if len(modes) < 2:
        return {}
    on, off = (_compared(modes[mode]) for mode in ("on", "off"))
    return {name: round(on[name] / off[name], 3) for name in on if off.get(name)}


def bars(
    modes: Mapping[Mode, Mapping[str, Any]], settings: Settings, most_full_bytes: float
) -> dict[str, dict[str, Any]]:
    """The targets of the changelog, the measured values, and whether each target is met. Empty without both modes.

    Rows that do not wait for their time tell about throughput alone; those that do, about everything else.
    """
    ratio = ratios(modes)
    if not ratio:
        return {}
    if not settings.paced:
        return {"rows_per_s ratio": _at_least(ratio["rows_per_s"], 0.9)}
    durations = modes["on"]["checkpoints"]["barrier_to_completed_ms"]
    asked = {
        "checkpoint_p99_ms ratio": (ratio.get("checkpoint_p99_ms"), 1 / 3),
        "checkpoint_p99_ms": (durations["p99"], 300.0),
        "checkpoint_p50_ms": (durations["p50"], 60.0),
        "full_bytes_p99 ratio": (ratio.get("full_bytes_p99"), most_full_bytes),
        "recovery_ready_s ratio": (ratio.get("recovery_ready_s"), 1.2),
    }
    return {name: _at_most(value, bar) for name, (value, bar) in asked.items() if value is not None}


def _compared(figures: Mapping[str, Any]) -> dict[str, float]:
    checkpoints, recovery = figures["checkpoints"], figures["recovery"]
    return {
        "checkpoint_p50_ms": checkpoints["barrier_to_completed_ms"]["p50"],
        "checkpoint_p99_ms": checkpoints["barrier_to_completed_ms"]["p99"],
        "full_bytes_p99": checkpoints["full_bytes_after_warm_up"].get("p99", 0.0),
        "recovery_ready_s": recovery["ready_s"],
        "recovery_first_rows_s": recovery["first_rows_s"],
        "rows_per_s": figures["rows_per_s"],
    }


def _at_most(value: float, bar: float) -> dict[str, Any]:
    return {"value": value, "at_most": round(bar, 3), "met": value <= bar}


def _at_least(value: float, bar: float) -> dict[str, Any]:
    return {"value": value, "at_least": bar, "met": value >= bar}


# --- tables --------------------------------------------------------------------------------------------


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as tables, the modes side by side."""
    for name, work in figures["workloads"].items():
        modes = work["modes"]
        console.print(_summary(name, modes, work["ratios"]))
        console.print(_by_percentile(name, modes))
        if work["bars"]:
            console.print(_bar_table(name, work["bars"]))


def _summary(name: str, modes: Mapping[Mode, Mapping[str, Any]], ratio: Mapping[str, float]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("")
    for mode in modes:
        table.add_column(f"changelog {mode}", justify="right")
    table.add_column("on ÷ off", justify="right")

    def row(text: str, form: str, *path: str, unit: float = 1.0, compared: str = "") -> None:
        cells = (_cell(figures, form, unit, path) for figures in modes.values())
        table.add_row(text, *cells, f"{ratio[compared]:.2f}" if compared in ratio else "")

    row("records", "{:,.0f}", "records")
    row("rows/s", "{:,.0f}", "rows_per_s", compared="rows_per_s")
    row("lag of the last row (s)", "{:.2f}", "lag_s")
    row("checkpoints made", "{:,.0f}", "checkpoints", "completed")
    row("checkpoints failed", "{:,.0f}", "checkpoints", "failed")
    for text, key in (("50%", "p50"), ("99%", "p99")):
        compared = f"checkpoint_{key}_ms"
        row(
            f"barrier to completion, {text} (ms)",
            "{:,.1f}",
            "checkpoints",
            "barrier_to_completed_ms",
            key,
            compared=compared,
        )
    full = ("checkpoints", "full_bytes_after_warm_up", "p99")
    row("full size after the warm-up, 99% (MB)", "{:,.2f}", *full, unit=1e6, compared="full_bytes_p99")
    for text, key in (("50%", "p50"), ("90%", "p90"), ("99%", "p99")):
        row(f"arrival to completion, {text} (ms)", "{:,.0f}", "row_latency_ms", key)
    row("batch, 50% (ms)", "{:,.0f}", "batch_ms", "p50")
    row("recovery: ready (s)", "{:.2f}", "recovery", "ready_s", compared="recovery_ready_s")
    row("recovery: first rows (s)", "{:.2f}", "recovery", "first_rows_s", compared="recovery_first_rows_s")
    return table


def _by_percentile(name: str, modes: Mapping[Mode, Mapping[str, Any]]) -> Table:
    table = Table(title=f"{name}: changelog {' / '.join(modes)}", title_justify="left")
    table.add_column("percentile")
    columns = (
        ("barrier to completion (ms)", "barrier_to_completed_ms", "{:,.1f}", 1.0),
        ("end to end (ms)", "end_to_end_ms", "{:,.1f}", 1.0),
        ("checkpointed data (MB)", "checkpointed_bytes", "{:,.3f}", 1e6),
        ("full checkpoint (MB)", "full_bytes", "{:,.2f}", 1e6),
    )
    for text, *_rest in columns:
        table.add_column(text, justify="right")
    for text, key in PERCENTILES.items():
        cells = (
            " / ".join(_cell(figures, form, unit, ("checkpoints", figure, key)) for figures in modes.values())
            for _text, figure, form, unit in columns
        )
        table.add_row(text, *cells)
    return table


def _bar_table(name: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=f"{name}: what is asked of the changelog", title_justify="left")
    for text in ("", "measured", "asked", "met"):
        table.add_column(text, justify="right" if text else "left")
    for text, bar in found.items():
        asked = f"≤ {bar['at_most']:g}" if "at_most" in bar else f"≥ {bar['at_least']:g}"
        table.add_row(text.replace("_", " "), f"{bar['value']:,.3f}", asked, "yes" if bar["met"] else "no")
    return table


def _cell(figures: Mapping[str, Any], form: str, unit: float, path: Sequence[str]) -> str:
    value: Any = figures
    for key in path:
        value = value.get(key) if value else None
    return "–" if value is None else form.format(value / unit)
