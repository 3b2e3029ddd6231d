"""The command line: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import strandline
from strandline import cli


@dataclass(frozen=True)
class Ended:
    """What a command printed."""

    stdout: str
    stderr: str


def strandline_cli(*arguments: str | Path, code: int = 0) -> Ended:
    """Run the command in this process, and check its exit code."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["strandline", *map(str, arguments)])
        patch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert (ended.value.code or 0) == code, output.getvalue() + errors.getvalue()
    return Ended(output.getvalue(), errors.getvalue())


def in_its_own_process(*arguments: str | Path, code: int = 0) -> Ended:
    """Run the command as a user does, and check its exit code."""
    ended = subprocess.run(
        [sys.executable, "-m", "strandline.cli", *map(str, arguments)], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return Ended(ended.stdout, ended.stderr)


def facts_of(*arguments: str | Path, code: int = 0) -> Any:
    return json.loads(strandline_cli(*arguments, "--json", code=code).stdout)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small demo, with the checkpoints of its job."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    in_its_own_process("demo", "--rows", "9000", "--users", "1000", "--no-kill", "--plain", "--keep", folder)
    return folder


@pytest.fixture
def checkpoints(kept: Path, tmp_path: Path) -> Path:
    """A copy of the kept checkpoints that a test may damage."""
    return Path(shutil.copytree(kept / "checkpoints", tmp_path / "checkpoints"))


def test_version() -> None:
    assert strandline_cli("version").stdout.strip() == strandline.__version__


def test_help_names_every_command() -> None:
    text = strandline_cli("--help").stdout
    for command in ("demo", "bench", "checkpoints", "version"):
        assert command in text


def test_an_error_is_one_message_without_a_traceback() -> None:
    ended = in_its_own_process("demo", "--rows", "5", "--users", "6", code=1)
    assert ended.stdout == ""
    assert ended.stderr.strip() == "error: --rows 5 is less than --users 6: every user clicks at least once"


def test_debug_shows_the_traceback_of_an_error() -> None:
    assert "Traceback" in in_its_own_process("--debug", "demo", "--rows", "5", "--users", "6", code=1).stderr


def test_an_unknown_command_or_option_is_a_usage_error() -> None:
    assert "No such command" in strandline_cli("dmeo", code=2).stderr
    assert "No such option" in strandline_cli("demo", "--rowz", "5", code=2).stderr


@pytest.mark.parametrize("command", ["ls", "show"])
def test_a_folder_without_checkpoints_is_an_error_that_says_what_to_give(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("something else")
    for place in (tmp_path, tmp_path / "missing"):
        text = strandline_cli("checkpoints", command, place, code=1).stderr
        assert str(place) in text
        assert "checkpoint_dir/job" in text
        assert "Traceback" not in text


@pytest.mark.spark
def test_ls_gives_the_retained_checkpoints_of_a_job_or_of_a_checkpoint_dir(kept: Path) -> None:
    found = facts_of("checkpoints", "ls", kept / "checkpoints" / "clicks")
    assert found == facts_of("checkpoints", "ls", f"{kept}/checkpoints/")
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

    text = strandline_cli("checkpoints", "ls", kept / "checkpoints").stdout
    assert f"chk-{newest['id']} newest" in text
    assert str(kept / "checkpoints" / "clicks") in text


@pytest.mark.spark
def test_show_gives_the_subtasks_and_files_of_a_checkpoint(kept: Path) -> None:
    place = kept / "checkpoints" / "clicks"
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
                assert (kept / "checkpoints" / file["path"]).stat().st_size == file["size"]
    text = strandline_cli("checkpoints", "show", place).stdout
    assert "job clicks" in text
    assert "rocksdb" in text


@pytest.mark.spark
def test_show_names_the_checkpoints_that_are_there_when_the_wanted_one_is_not(kept: Path) -> None:
    text = strandline_cli("checkpoints", "show", kept / "checkpoints" / "clicks", "9999", code=1).stderr
    newest = facts_of("checkpoints", "ls", kept / "checkpoints")[-1]["id"]
    assert "no checkpoint 9999" in text
    assert str(newest) in text


@pytest.mark.spark
def test_several_jobs_in_a_checkpoint_dir_are_listed_and_told_apart(checkpoints: Path) -> None:
    for name in ("clicks0", "clicks-2"):
        shutil.copytree(checkpoints / "clicks", checkpoints / name)
    (checkpoints / "zz not a job").mkdir()
    (checkpoints / "zz not a job" / "file").touch()
    jobs = {checkpoint["job"] for checkpoint in facts_of("checkpoints", "ls", checkpoints)}
    assert jobs == {"clicks", "clicks0", "clicks-2"}
    assert "choose one with --job" in strandline_cli("checkpoints", "show", checkpoints, code=1).stderr
    assert "no job 'other'" in strandline_cli("checkpoints", "show", checkpoints, "--job", "other", code=1).stderr
    assert facts_of("checkpoints", "show", checkpoints, "--job", "clicks0")["id"] > 0


@pytest.mark.spark
def test_damaged_metadata_is_shown_as_a_problem_and_the_other_checkpoints_all_the_same(checkpoints: Path) -> None:
    before = facts_of("checkpoints", "ls", checkpoints)
    metadata = Path(before[-1]["path"], "_metadata")
    metadata.write_bytes(metadata.read_bytes()[:-3])
    after = facts_of("checkpoints", "ls", checkpoints, code=1)
    assert after[:-1] == before[:-1]
    assert "truncated" in after[-1]["problem"]
    assert "truncated" in strandline_cli("checkpoints", "ls", checkpoints, code=1).stdout
    assert "truncated" in strandline_cli("checkpoints", "show", checkpoints, code=1).stderr
    metadata.unlink()
    assert "is missing" in facts_of("checkpoints", "ls", checkpoints, code=1)[-1]["problem"]


def test_a_storage_option_that_is_no_pair_is_refused(tmp_path: Path) -> None:
    assert "KEY=VALUE" in strandline_cli("checkpoints", "ls", tmp_path, "-o", "endpoint", code=1).stderr
