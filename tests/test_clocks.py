"""Durations are measured by a clock that nobody sets: the wall clock is read only where a time is shown or kept."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "strandline"
SHOWN = {
    "checkpointing.py": "the time of a checkpoint",
    "recoveries.py": "the time of a recovery",
    "run_records.py": "the time of a status and of a failure",
    "opening.py": "the time of a restore",
    "run_figures.py": "how far the watermark is behind the time of day",
    "run_summary.py": "how long ago the last checkpoint was",
    "acknowledgement.py": "the time of an acknowledgement",
    "background_uploads.py": "the time of a barrier",
    "slot_processes.py": "the time of a barrier; the name of a file",
    "changelog.py": "the time of a barrier",
    "epoch_log.py": "when a file of epochs was written",
    "merged_checkpoint.py": "the time of a checkpoint",
    "opentelemetry_listener.py": "the time of a span, if the report of a batch has none",
}
KEPT = {
    "launcher.py": "the name of a task manager",
    "job_log.py": "the time of an entry, and of the generation",
    "materializer.py": "the number of a snapshot, which grows also when the clock is set back",
    "clock.py": "processing time; the content of a file that must change",
    "operator_slot.py": "processing time",
    "run_folder_lock.py": "compared with the age of a file",
}
"""The modules that read the wall clock, and what for."""


def reads_the_wall_clock(source: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("time", "time_ns")
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
        for node in ast.walk(ast.parse(source))
    )


def test_the_wall_clock_is_read_only_to_be_shown_or_kept() -> None:
    runtime = [path for part in ("runtime", "job", "checkpoint") for path in (PACKAGE / part).rglob("*.py")]
    reading = {path.name for path in runtime if reads_the_wall_clock(path.read_text())}
    assert reading - SHOWN.keys() - KEPT.keys() == set(), "measure durations with time.monotonic(), or say why not here"
