"""The end of a run prints nothing, however it ends: stopped, cancelled in a batch, or left alone by its script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_runs_that_are_stopped_cancelled_or_left_alone_end_in_silence(tmp_path: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.noisy_script", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        start_new_session=True,
    )
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == "WAITING\n", (tmp_path / "stderr").read_text()
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does it: Spark's processes get the signal, too
        out, _ = script.communicate(timeout=90)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
    assert out == ""
    printed = (tmp_path / "stderr").read_text().split("BEGIN\n", 1)[1]
    # The one traceback is that of Ctrl-C, which the script does not catch.
    assert len(re.findall(r"^Traceback .*\n(?:  .*\n|\n)*KeyboardInterrupt$", printed, re.MULTILINE)) == 1, printed
    noise = [
        line for line in printed.splitlines() if re.search(r"^Traceback|\bERROR\b|^\tat |BrokenPipe|Exception", line)
    ]
    assert noise == ["Traceback (most recent call last):"], printed
    assert script.returncode in (1, -signal.SIGINT, 130)
    assert (tmp_path / "witnessed").read_text() == "stopped"  # the listener of the run that was left alone
