"""The demo as its users start it: a process of its own, judged by its facts, its checkpoints and its leftovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from strandline.errors import ConfigError
from strandline_bench.demo import DemoOptions
from strandline_bench.demo.clicks import ClickPlan
from tests.admin.cli.commands import strandline

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


@dataclass(frozen=True)
class Kept:
    """What a demo has printed, and the folder that it was told to keep."""

    ended: subprocess.CompletedProcess[str]
    folder: Path
    temporary: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@pytest.fixture(scope="class")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    home = tmp_path_factory.mktemp("demo")
    ended = subprocess.run(
        [*DEMO, "--json", "--keep", str(home / "kept")],
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    return Kept(ended, home / "kept", home)


def facts_of(*arguments: str | Path, code: int = 0) -> Any:
    return strandline(*arguments, "--json", code=code, columns=80).json


@pytest.mark.spark
@pytest.mark.faults
class TestADemo:
    """One demo, which takes a while, and the checkpoints of its job."""

    def test_it_kills_a_slot_and_its_output_equals_the_batch_computation(self, demo: Kept) -> None:
        facts: dict[str, Any] = json.loads(demo.ended.stdout)
        assert facts["equal"] is True
        assert (facts["rows"], facts["users"], facts["wrong_users"], facts["wrong_badges"]) == (60_000, 5000, 0, 0)
        assert facts["badges"] > 0
        assert facts["killed_pid"] in facts["processes"]["slots"]
        assert facts["killed_at_row"] >= 30_000
        assert facts["replaced_slots"] >= 1
        assert facts["restarts"] == 0
        assert facts["checkpoints"] >= 1
        assert facts["state_bytes"] > 0

        assert f"kill -9 {facts['killed_pid']}" in demo.ended.stderr
        assert "60,000 rows, 5,000 users: output equals the batch computation (max difference 0)" in demo.ended.stderr
        assert "Traceback" not in demo.ended.stderr
        assert "WARN" not in demo.ended.stderr

        assert len(facts["processes"]["slots"]) == 3
        assert facts["processes_left"] == []
        assert running([pid for pids in facts["processes"].values() for pid in pids]) == []
        assert leftovers(demo.temporary) == []

    @pytest.fixture
    def checkpoints(self, demo: Kept, tmp_path: Path) -> Path:
        """A copy of the kept checkpoints that a test may damage."""
        return Path(shutil.copytree(demo.checkpoints, tmp_path / "checkpoints"))

    def test_ls_gives_the_retained_checkpoints_of_a_job_or_of_a_checkpoint_dir(self, demo: Kept) -> None:
        found = facts_of("checkpoints", "ls", demo.checkpoints / "clicks")
        assert found == facts_of("checkpoints", "ls", f"{demo.checkpoints}/")
        assert 1 <= len(found) <= 3
        assert [checkpoint["id"] for checkpoint in found] == sorted(checkpoint["id"] for checkpoint in found)
        assert [checkpoint["latest"] for checkpoint in found] == [False] * (len(found) - 1) + [True]
        newest = found[-1]
        assert newest["job"] == "clicks"
        assert newest["generation"] == 1
        assert newest["files"] > 0
        assert newest["full_bytes"] > 0
        assert newest["time"] >= found[0]["time"] > 0
        assert newest["batch"] >= found[0]["batch"]
        assert Path(newest["path"], "_metadata").is_file()
        assert newest["problem"] is None

        text = strandline("checkpoints", "ls", demo.checkpoints, columns=80).stdout
        assert f"chk-{newest['id']} newest" in text
        assert str(demo.checkpoints / "clicks") in text

    def test_show_gives_the_subtasks_and_files_of_a_checkpoint(self, demo: Kept) -> None:
        place = demo.checkpoints / "clicks"
        newest = facts_of("checkpoints", "ls", place)[-1]
        shown = facts_of("checkpoints", "show", place)
        assert shown == facts_of("checkpoints", "show", place, str(newest["id"]))
        assert {name: shown[name] for name in ("id", "batch", "generation", "files", "full_bytes", "path")} == {
            name: newest[name] for name in ("id", "batch", "generation", "files", "full_bytes", "path")
        }
        assert shown["operators"] == ["counts", "badges"]
        assert [(s["operator"], s["subtask"], s["key_groups"]) for s in shown["subtasks"]] == [
            (operator, subtask, groups)
            for operator in ("counts", "badges")
            for subtask, groups in ((0, [0, 64]), (1, [64, 128]))
        ]
        for subtask in shown["subtasks"]:
            for file in subtask["files"]:
                if file["path"] is not None:
                    stored = (demo.checkpoints / file["path"]).stat().st_size
                    assert file["offset"] + file["size"] <= stored == (file["whole"] or file["size"])
        text = strandline("checkpoints", "show", place).stdout
        assert "job clicks" in text
        assert "rocksdb" in text

    def test_show_names_the_checkpoints_that_are_there_when_the_wanted_one_is_not(self, demo: Kept) -> None:
        text = strandline("checkpoints", "show", demo.checkpoints / "clicks", "9999", code=1).stderr
        newest = facts_of("checkpoints", "ls", demo.checkpoints)[-1]["id"]
        assert "no checkpoint 9999" in text
        assert str(newest) in text

    def test_several_jobs_in_a_checkpoint_dir_are_listed_and_told_apart(self, checkpoints: Path) -> None:
        for name in ("clicks0", "clicks-2"):
            shutil.copytree(checkpoints / "clicks", checkpoints / name)
        (checkpoints / "zz not a job").mkdir()
        (checkpoints / "zz not a job" / "file").touch()
        jobs = {checkpoint["job"] for checkpoint in facts_of("checkpoints", "ls", checkpoints)}
        assert jobs == {"clicks", "clicks0", "clicks-2"}
        assert "choose one with --job" in strandline("checkpoints", "show", checkpoints, code=1).stderr
        assert "no job 'other'" in strandline("checkpoints", "show", checkpoints, "--job", "other", code=1).stderr
        assert facts_of("checkpoints", "show", checkpoints, "--job", "clicks0")["id"] > 0

    def test_damaged_metadata_is_shown_as_a_problem_and_the_other_checkpoints_all_the_same(
        self, checkpoints: Path
    ) -> None:
        before = facts_of("checkpoints", "ls", checkpoints)
        metadata = Path(before[-1]["path"], "_metadata")
        metadata.write_bytes(metadata.read_bytes()[:-3])
        after = facts_of("checkpoints", "ls", checkpoints, code=1)
        assert after[:-1] == before[:-1]
        assert "truncated" in after[-1]["problem"]
        assert "truncated" in strandline("checkpoints", "ls", checkpoints, code=1).stdout
        assert "truncated" in strandline("checkpoints", "show", checkpoints, code=1).stderr
        metadata.unlink()
        assert "is missing" in facts_of("checkpoints", "ls", checkpoints, code=1)[-1]["problem"]


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
