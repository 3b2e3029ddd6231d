"""A run in one line and in one small table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import Finding
from strandline.runtime.driver.figures import RunSummary


def summary_text(run: RunSummary) -> str:
    """The text of `repr(run)`."""
    facts = [f"{name} {value}" for name, value in _facts(run) if name != "status"]
    return f"<JobRun {run.name!r} {run.status}: {', '.join(facts)}>"


def summary_html(run: RunSummary, health: Sequence[Finding] = (), ui_url: str | None = None) -> str:
    """A table for notebooks, with the rules of health that are broken and a link to the page; texts are escaped."""
    found = [(f"health: {one.severity}", f"{one.title}: {one.text} {one.remedy}") for one in health]
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _facts(run) + found)
    link = f'<tr><th>page</th><td><a href="{escape(ui_url)}">{escape(ui_url)}</a></td></tr>' if ui_url else ""
    return f"<table><caption>{escape(run.name)}</caption>{rows}{link}</table>"


def _facts(run: RunSummary) -> list[tuple[str, str]]:
    facts = [
        ("status", str(run.status)),
        ("generation", str(run.generation) if run.generation else "none"),
        ("batches", f"{run.batches:,}"),
        ("rows", f"{run.rows:,}"),
        ("last checkpoint", _checkpoint(run.last_checkpoint)),
    ]
    return facts if run.error is None else [*facts, ("error", _first_line(run.error))]


def _first_line(error: Exception) -> str:
    """The kind of an error and the beginning of its message, which may hold a whole traceback."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line[:200]}"


def _checkpoint(last: CheckpointStats | None) -> str:
    if last is None:
        return "none"
    ago = max(0.0, time.time() - last.end_time)
    return f"{last.id} ({ago:.0f} s ago, {last.full_bytes:,} bytes)"
