"""Runs commands of the command line in this process or in one of their own."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strandline.admin.cli import main as cli


@dataclass(frozen=True)
class Ended:
    """What a command printed."""

    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Its output, which must be one JSON document."""
        return json.loads(self.stdout)


def strandline(*arguments: str | Path, code: int = 0, columns: int = 100) -> Ended:
    """Run a command in this process, and check its exit code."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["strandline", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert (ended.value.code or 0) == code, output.getvalue() + errors.getvalue()
    return Ended(output.getvalue(), errors.getvalue())


def in_its_own_process(*arguments: str | Path, code: int = 0, cwd: Path | None = None) -> Ended:
    """Run a command as a user does, and check its exit code."""
    ended = subprocess.run(
        [sys.executable, "-m", "strandline.admin.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return Ended(ended.stdout, ended.stderr)
