"""Summarises measured figures and prints them as tables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from rich.console import Console
from rich.table import Table

PERCENTILES = (("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9))


def percentiles(values: Sequence[float] | npt.NDArray[np.float64], digits: int = 1) -> dict[str, float]:
    """The 50th, 90th, 99th and 99.9th percentile, interpolated, and the greatest value; empty if there are none."""
    if not len(values):
        return {}
    found = np.percentile(values, [*(at for _name, at in PERCENTILES), 100.0])
    names = (*(name for name, _at in PERCENTILES), "max")
    return {name: round(float(value), digits) for name, value in zip(names, found, strict=True)}


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures were measured with."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_at_start": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("pyspark", "rocksdict", "pyarrow", "strandline")},
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `value_state.run` as tables."""
    ours, peer = result["ours"], result["peer"]
    table = Table(title="throughput (rows/s)", title_justify="left")
    for column in (
        "",
        "rows measured",
        "rows/s",
        "median batch",
        "batch ms p50",
        "peer rows/s",
        "ratio",
        "ratio median",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name, figures in ours.items():
        speed = figures.get("throughput")
        if speed is None:
            continue
        other = (peer or {}).get(name, {}).get("throughput")
        ratio = result["ratios"].get(name, {})
        table.add_row(
            name,
            f"{speed['rows']:,}",
            f"{speed['rows_per_s']:,.0f}",
            f"{speed['steady_rows_per_s']:,.0f}",
            f"{speed['batch_ms'].get('p50', 0):,.0f}",
            f"{other['rows_per_s']:,.0f}" if other else "–",
            f"{ratio['rows_per_s']:.2f}" if ratio else "–",
            f"{ratio['steady_rows_per_s']:.2f}" if ratio else "–",
        )
    console.print(table)
    for name, figures in ours.items():
        console.print(_operator_table(name, figures))


def _operator_table(name: str, figures: dict[str, Any]) -> Table:
    checkpoints = figures["checkpoints"]
    table = Table(title=f"{name}: {checkpoints['count']} checkpoints while the rows came", title_justify="left")
    for column in ("", *(name for name, _at in PERCENTILES), "max"):
        table.add_column(column, justify="left" if not column else "right")
    for figure in ("barrier_to_completed_ms", "end_to_end_ms", "sync_ms", "async_ms"):
        table.add_row(figure.replace("_", " "), *_cells(checkpoints[figure], "{:,.1f}"))
    for figure in ("checkpointed_bytes", "full_bytes"):
        table.add_row(f"{figure.replace('_', ' ')} (MB)", *_cells(checkpoints[figure], "{:,.2f}", 1e6))
    table.add_section()
    unchanged, touched = figures["incremental"]["unchanged"], figures["incremental"]["touched"]
    table.add_row(
        "unchanged state uploads", _size(unchanged["checkpointed_bytes"]), "of", _size(unchanged["full_bytes"])
    )
    table.add_row(
        f"{touched['keys']:,} keys changed: uploads",
        _size(touched["checkpointed_bytes"]),
        "of",
        _size(touched["full_bytes"]),
        f"{touched['fraction']:.1%}",
        f"most: {_size(max(touched['all_checkpointed_bytes']))}",
    )
    if "recovery" in figures:
        recovery = figures["recovery"]
        table.add_row(
            "recovery: ready", f"{recovery['ready_s']:.2f} s", "then new rows", f"{recovery['first_rows_s']:.2f} s"
        )
    return table


def _cells(found: dict[str, float], form: str, unit: float = 1.0) -> list[str]:
    return [form.format(value / unit) for value in found.values()]


def _size(count: float) -> str:
    return f"{count / 1e6:,.3f} MB"
