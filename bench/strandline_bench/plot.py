"""Checkpoints over time as a picture: how long each took, and how large the state was."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from strandline.errors import ConfigError
from strandline_bench.rated_run import Mode, Timeline

COLORS: Mapping[Mode, str] = {"on": "#0072b2", "off": "#d55e00"}


def check_available(file: Path) -> None:
    """Raises `ConfigError` if matplotlib is missing, or if `file` cannot hold the picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package matplotlib. Install it: pip install matplotlib")
    if file.suffix != ".png":
        raise ConfigError(f"--plot {file}: the picture is a PNG; give a name that ends in .png")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no such folder; make it first")


def draw(timelines: Mapping[str, Mapping[Mode, Timeline]], file: Path) -> None:
    """Draw a column for each workload, every mode in its own colour."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(7 * len(timelines), 7), layout="constrained")
    axes = figure.subplots(2, len(timelines), sharex="col", squeeze=False)
    for column, (name, modes) in enumerate(timelines.items()):
        durations, sizes = axes[0, column], axes[1, column]
        for mode, line in modes.items():
            for panel, values in ((durations, line.duration_ms), (sizes, [size / 1e6 for size in line.full_bytes])):
                panel.plot(
                    line.at_s, values, ".-", label=f"changelog {mode}", color=COLORS[mode], linewidth=0.8, markersize=3
                )
        durations.set_title(name)
        durations.set_yscale("log")
        for ticks in (durations.yaxis.set_major_formatter, durations.yaxis.set_minor_formatter):
            ticks(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        durations.set_ylabel("barrier to completion (ms)")
        sizes.set_ylabel("full checkpoint (MB)")
        sizes.set_ylim(bottom=0)
        sizes.set_xlim(left=0)
        sizes.set_xlabel("seconds since the first row")
        for panel in (durations, sizes):
            panel.grid(True, which="both", alpha=0.25)
            panel.legend(loc="upper left")
    figure.savefig(file, dpi=120)
