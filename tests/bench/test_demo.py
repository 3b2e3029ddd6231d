"""The demo as its users start it: a process of its own, judged by its facts and by what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from strandline.errors import ConfigError
from strandline_bench.demo import DemoOptions
from strandline_bench.demo.clicks import ClickPlan

DEMO = [sys.executable, "-m", "strandline.admin.cli.main", "demo", "--rows", "60000", "--users", "5000", "--plain"]


def environment(temporary: Path) -> dict[str, str]:
    """Temporary folders of the demo go where the test can see them."""
    return {**os.environ, "TMPDIR": str(temporary)}


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def leftovers(temporary: Path) -> list[str]:
    return [path.name for path in temporary.iterdir() if path.name.startswith("strandline-demo")]


# --- the input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "users"), [(1000, 1000), (60_000, 5000), (250_001, 777), (9, 2), (1, 1)])
def test_every_user_clicks_at_least_once_and_every_row_is_there(rows: int, users: int) -> None:
    plan = ClickPlan(rows, users)
    tables = [plan.table(number) for number in range(plan.files)]
    assert sum(table.num_rows for table in tables) == rows == plan.rows_in(plan.files)
    seen = np.unique(np.concatenate([table["user"].to_numpy(zero_copy_only=False) for table in tables]))
    assert len(seen) == users


def test_the_same_plan_gives_the_same_rows() -> None:
    assert ClickPlan(5000, 100).table(3).equals(ClickPlan(5000, 100).table(3))


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than --users"):
        DemoOptions(rows=10, users=11)
    with pytest.raises(ConfigError, match="at least one user"):
        DemoOptions(rows=10, users=0)
    (tmp_path / "something").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        DemoOptions(keep=tmp_path)


# --- the demo itself -----------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.faults
def test_the_demo_kills_a_slot_and_its_output_equals_the_batch_computation(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*DEMO, "--json"], env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    facts: dict[str, Any] = json.loads(ended.stdout)
    assert facts["equal"] is True
    assert (facts["rows"], facts["users"], facts["wrong_users"], facts["wrong_badges"]) == (60_000, 5000, 0, 0)
    assert facts["badges"] > 0
    assert facts["killed_pid"] in facts["processes"]["slots"]
    assert facts["killed_at_row"] >= 30_000
    assert facts["replaced_slots"] >= 1
    assert facts["restarts"] == 0
    assert facts["checkpoints"] >= 1
    assert facts["state_bytes"] > 0

    assert f"kill -9 {facts['killed_pid']}" in ended.stderr
    assert "60,000 rows, 5,000 users: output equals the batch computation (max difference 0)" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "WARN" not in ended.stderr

    assert len(facts["processes"]["slots"]) == 3
    assert facts["processes_left"] == []
    assert running([pid for pids in facts["processes"].values() for pid in pids]) == []
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        DEMO, env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "the job runs" in line:
                break
        children = [process.pid for process in psutil.Process(demo.pid).children(recursive=True)]
        time.sleep(0.5)  # the signal meets a batch or a checkpoint
        demo.send_signal(number)
        output, errors = demo.communicate(timeout=90)
    finally:
        demo.kill()
    assert demo.returncode == 130, errors
    assert "interrupted" in output
    assert "Traceback" not in errors
    assert children
    _gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in running(children)], timeout=10)
    assert alive == []
    assert leftovers(tmp_path) == []
