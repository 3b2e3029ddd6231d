"""`strandline run`: the script runs as `python APP.py` does, and its jobs take the settings of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strandline.admin.cli.run_words import in_order
from tests.admin.cli.commands import in_its_own_process, strandline

OPTIONS = {"-s": True, "-p": True, "--parallelism": True, "-D": True, "-d": False, "--json": False, "--help": False}

SHOW = """
import json, sys
from neighbour import WORD
print(json.dumps({"name": __name__, "argv": sys.argv, "path": sys.path[0], "file": __file__, "word": WORD}))
import pickle
class Mine: pass
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
"""

JOBS = """
import json, sys
from strandline.job.overlay import StartArguments, overlaid
from strandline.config import Config
for name in sys.argv[1:]:
    config = overlaid().config(name, Config(checkpoint_dir="ckpt", num_retained=3))
    started = overlaid().start(name, StartArguments())
    print(json.dumps([name, config.num_retained, config.checkpoint_interval, started.parallelism, started.restore]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    (tmp_path / "app.py").write_text(SHOW)
    return tmp_path / "app.py"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["app.py", "in", "-p", "3"], ["app.py", "in", "-p", "3"]),
        (
            ["-p", "2", "app.py", "-s", "sp", "-d", "in", "-p", "3"],
            ["-p", "2", "-s", "sp", "-d", "app.py", "in", "-p", "3"],
        ),
        (["app.py", "-p4", "-Dk=v", "--parallelism=5", "x"], ["-p4", "-Dk=v", "--parallelism=5", "app.py", "x"]),
        (["app.py", "--", "-p", "3"], ["app.py", "-p", "3"]),
        (["app.py", "-d", "--", "-p", "3"], ["-d", "app.py", "-p", "3"]),
        (["app.py", "--help"], ["app.py", "--help"]),
        (["app.py", "--other", "-p", "3"], ["app.py", "--other", "-p", "3"]),
        (["--help"], ["--help"]),
        (["--", "app.py", "-d", "-p", "3"], ["--", "app.py", "-d", "-p", "3"]),
    ],
)
def test_options_stand_before_the_script_or_right_behind_it(words: list[str], expected: list[str]) -> None:
    assert in_order(words, OPTIONS) == expected


def test_a_script_runs_as_python_runs_it(script: Path, tmp_path: Path) -> None:
    ended = in_its_own_process("run", "app.py", "in", "-p", "--help", cwd=tmp_path)
    assert ended.json == {
        "name": "__main__",
        "argv": ["app.py", "in", "-p", "--help"],
        "path": str(tmp_path.resolve()),
        "file": "app.py",
        "word": "found",
    }


@pytest.mark.parametrize(
    ("last_line", "code", "message"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no input')", 1, "no input"),
        ("sys.exit()", 0, ""),
    ],
)
def test_the_end_of_the_script_is_the_end_of_the_command(script: Path, last_line: str, code: int, message: str) -> None:
    script.write_text(f"import sys\n{last_line}\n")
    ended = in_its_own_process("run", script, code=code)
    assert message in ended.stderr
    assert "admin/script.py" not in ended.stderr


def test_jobs_of_the_script_take_the_settings(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(JOBS)
    savepoint = str(tmp_path / "sp" / "1")
    Path(savepoint).mkdir(parents=True)
    (Path(savepoint) / "_metadata").touch()
    given = ["-p", "4", "-Dexecution.checkpointing.interval=3 s", "-s", savepoint]
    lines = in_its_own_process("run", *given, script, "visits", "visits").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [["visits", 3, 3.0, 4, savepoint], ["visits", 3, 3.0, 4, None]]
    lines = in_its_own_process("run", script, *given, "--job", "orders", "visits", "orders").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [["visits", 3, 10.0, None, None], ["orders", 3, 3.0, 4, savepoint]]


def test_settings_that_no_job_took_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(JOBS)
    assert "started no job, so nothing took" in in_its_own_process("run", "-p", "2", script, code=1).stderr
    ended = in_its_own_process("run", "--job", "vists", script, "visits", "orders", code=1)
    assert "started no job 'vists'; it started orders, visits; did you mean --job visits?" in " ".join(
        ended.stderr.split()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-Dcheckpoint_intervall=3s", "app.py"], "the nearest one is 'checkpoint_interval'"),
        (["-Dcheckpoint_interval", "app.py"], "is not KEY=VALUE"),
        (["-Dcheckpoint_interval=soon", "app.py"], "checkpoint_interval"),
        (["-Drest_token=0123456789abcdef", "app.py"], "everybody on this host can see"),
        (["-s", "sp/nowhere", "app.py"], "-s sp/nowhere: there is no checkpoint or savepoint"),
        (["-d", "-s", "file:///nowhere/chk-3", "app.py"], "-s file:///nowhere/chk-3: there is no checkpoint"),
        (["nowhere.py"], "cannot read the script nowhere.py"),
        (["-d", "nowhere.py"], "there is no script nowhere.py"),
        (["--json", "app.py"], "--json goes with --detached"),
        (["--timeout", "3s", "app.py"], "--timeout goes with --detached"),
        (["-p", "0", "app.py"], "-p"),
        (["--log-format", "xml", "app.py"], "--log-format"),
        ([], "Usage"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.py").write_text("raise SystemExit('it was started')")
    monkeypatch.chdir(tmp_path)
    ended = strandline("run", *arguments, code=2)
    shown = " ".join((ended.stdout + ended.stderr).split())
    assert message in shown
    assert "it was started" not in shown


def test_the_content_of_a_file_is_not_in_an_error(tmp_path: Path) -> None:
    """Files are the way to give secrets, and a secret may be given to the wrong option."""
    (tmp_path / "file").write_text("one-secret\nanother\n")
    error = strandline("run", "-D", f"parallelism=@{tmp_path}/file", tmp_path / "app.py", code=2).stderr
    assert "parallelism = *** is not valid; allowed: a whole number" in " ".join(error.split())
    assert "one-secret" not in error


def test_a_text_that_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_bytes(b"\0\xff")
    assert "is no Python script" in strandline("run", tmp_path / "app.py", code=2).stderr
    (tmp_path / "app.py").write_text("print('a')\ndef f(:\n")
    assert "    def f(:\n          ^\n" in strandline("run", tmp_path / "app.py", code=2).stderr


def test_a_detached_script_that_dies_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRANDLINE_RUNS_DIR", str(tmp_path))
    script = tmp_path / "app.py"
    script.write_text("print('reading the settings')\nraise ValueError('no \\x1b[31minput')\n")
    ended = strandline("run", "-d", script, code=1)
    assert "ended with exit code 1 before a job of it ran" in ended.stderr
    assert "reading the settings" in ended.stderr
    assert "ValueError: no \\x1b[31minput" in ended.stderr
    assert ended.stdout == ""


def test_a_detached_script_without_a_job_is_ended_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRANDLINE_RUNS_DIR", str(tmp_path))
    script, alive = tmp_path / "app.py", tmp_path / "alive"
    script.write_text(
        f"import os, time\nopen({str(alive)!r}, 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.1)\n"
    )
    ended = strandline("run", "-d", "--timeout", "5s", script, code=1)
    assert "no job of the script ran after 5 s; the script was ended" in " ".join(ended.stderr.split())
    if alive.exists():  # on a busy host it may not have come so far
        assert not Path(f"/proc/{alive.read_text()}").exists()
