"""The coordinator benchmark reports what it says, at both sizes."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from strandline.errors import ConfigError
from strandline_bench.cli import app
from strandline_bench.coordinator import STEPS, Parameters, run, show


def test_a_small_run_reports_every_figure_at_both_sizes() -> None:
    said: list[tuple[str, int, int]] = []
    result = run(Parameters(subtasks=50, files=10, new=3, retained=2), lambda *what: said.append(what))
    assert set(result) == {"parameters", "machine", "half", "full", "growth"}
    for size, subtasks in (("half", 25), ("full", 50)):
        figures = result[size]
        assert figures["subtasks"] == subtasks
        assert figures["referenced_files"] == subtasks * 10
        assert figures["new_files"] == subtasks * 3
        # The last checkpoint drops the first: of every subtask two replaced files go, and its manifest.
        assert figures["files_freed"] == subtasks * 3
        assert figures["drop_freed"] == subtasks * 3
        assert figures["metadata_bytes"] > 0
        assert figures["peak_memory_bytes"] > 1_000_000
        assert figures["acknowledgements_per_s"] > 0
        assert all(figures[step] >= 0 for step in (*STEPS, "receive_s", "complete_s", "drop_s", "rebuild_s"))
    assert result["growth"]["referenced_files"] == 2.0
    assert ("full: checkpoints", 3, 3) in said
    page = io.StringIO()
    show(result, Console(file=page, width=120))
    assert "rebuild (s)" in page.getvalue()


def test_the_command_prints_one_json_object() -> None:
    done = CliRunner().invoke(app, ["coordinator", "--subtasks", "10", "--files", "4", "--new", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["parameters"] == {"subtasks": 10, "files": 4, "new": 2, "retained": 10}


def test_more_new_files_than_files_are_refused() -> None:
    with pytest.raises(ConfigError, match="--new is 5"):
        Parameters(files=4, new=5)
