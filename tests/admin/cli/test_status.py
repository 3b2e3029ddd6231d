"""What `list`, `status`, `top`, `logs` and `ui` print of a job, against a real server over generated facts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from strandline.admin.cli.logs import added
from strandline.admin.cli.words import lasted, one_line
from strandline.observe.facts import Finding, JobFacts
from strandline.observe.registration import Registration, local_runs
from strandline.observe.views import LogText
from strandline.rest.server import Served
from strandline.runtime.driver.figures import RunFigures, SourceFigures
from strandline.runtime.driver.status import RunStatus
from tests.admin.cli.commands import strandline
from tests.admin.cli.local_jobs import local_job, registered
from tests.observe.generated import generated_facts
from tests.rest.served import GivenJob, serving
from tests.waiting import wait_until

HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\u202e[bold]\nline"
PRESSED = Finding(
    "back-pressure",
    "critical",
    "Back pressure",
    "subtask 1 waited 80 % of the time",
    "Give the step more subtasks.",
    "counts",
)
NOTE = Finding("local-recovery", "info", "Local recovery is off", "text", "remedy")


def status(facts: JobFacts, *arguments: str, code: int = 0) -> str:
    with local_job(GivenJob(facts)):
        return strandline("status", facts.id, *arguments, code=code).stdout


def test_the_first_words_are_about_health(runs_dir: Path) -> None:
    lines = status(generated_facts()).splitlines()
    assert lines[0].startswith("visits  running for 1 h")
    assert "✔ healthy" in lines[2]
    broken = status(msgspec.structs.replace(generated_facts(), health=(PRESSED, NOTE)))
    assert "✖ Back pressure (counts): subtask 1 waited 80 % of the time" in broken
    assert "→ Give the step more subtasks. [back-pressure]" in broken
    assert "healthy" not in broken


def test_one_screen_has_every_figure(runs_dir: Path) -> None:
    shown = " ".join(status(generated_facts()).split())
    for words in (
        "rows in 9,000/s in the last minute, 4,000,000 in all",
        "watermark 20 s behind; 17 late rows",
        "source FileStreamSource[file:/in/clicks]: 3,000,000 rows",
        "state 2",
        "checkpoint number 19, 20 s ago, in",
        "back pressure OK: at most",
        "recovered 1 restart, 1 slot replaced, 1 rescale; generation 3",
        "catching up After a loss of",
        "enrich 2",
        "busiest subtasks",
    ):
        assert words in shown, shown


def test_a_thousand_subtasks_fit_on_one_screen(runs_dir: Path) -> None:
    facts = generated_facts(parallelism=500, checkpoints=200)
    shown = status(facts)
    assert len(shown.splitlines()) < 45
    assert "10 of 1,000 subtasks" in shown
    assert len(re.findall(r"^ (?:enrich|counts) \d+ ", status(facts, "--subtasks", "30"), re.MULTILINE)) == 30


def test_json_is_one_document_without_plots(runs_dir: Path) -> None:
    facts = generated_facts(parallelism=500, checkpoints=200)
    with local_job(GivenJob(facts)):
        document = strandline("status", "visits", "--json", "--loss", "5min").json
    assert (document["id"], document["runs"], document["healthy"]) == (facts.id, True, True)
    assert document["figures"]["rows"] == 1_000_000_000
    assert len(document["subtasks"]) == 1000
    assert document["catching_up"]["lost_s"] == 300
    assert document["checkpoints"]["last_completed"]["id"] == 199
    assert "history" not in document["checkpoints"]
    assert "samples" not in document


@pytest.mark.parametrize(
    ("health", "run_status", "code"),
    [
        ((), RunStatus.RUNNING, 0),
        ((NOTE,), RunStatus.RUNNING, 0),
        ((NOTE, PRESSED), RunStatus.RUNNING, 1),
        ((), RunStatus.FAILED, 4),
    ],
)
def test_a_script_can_ask_whether_a_job_is_healthy(
    runs_dir: Path, health: tuple[Finding, ...], run_status: RunStatus, code: int
) -> None:
    facts = msgspec.structs.replace(generated_facts(status=run_status), health=health)
    with serving(GivenJob(facts)) as client:
        strandline("status", "visits", "--url", client.served.url, "--check", code=code)
        strandline("status", "visits", "--url", client.served.url)


def test_a_failed_job_shows_its_error_first(runs_dir: Path) -> None:
    with serving(GivenJob(generated_facts(status=RunStatus.FAILED))) as client:
        lines = strandline("status", "visits", "--url", client.served.url).stdout.splitlines()
    assert lines[0].startswith("visits  failed after 1 h")
    assert lines[2] == "✖ OperatorError: step 'counts', subtask 1: ZeroDivisionError"


def test_a_lost_driver_is_said(runs_dir: Path) -> None:
    facts = msgspec.structs.replace(generated_facts(), driver_lost=True)
    with serving(GivenJob(facts)) as client:
        shown = strandline("status", "visits", "--url", client.served.url).stdout
        listed = strandline("list", "--url", client.served.url).stdout
        assert "No jobs" in strandline("list", "-r", "--url", client.served.url).stdout
    assert "driver lost, last seen running" in shown
    assert "the driver is gone" in shown
    assert "driver lost, last seen running" in listed


def test_names_cannot_steer_the_terminal(runs_dir: Path) -> None:
    facts = generated_facts()
    assert facts.figures is not None
    figures: RunFigures = msgspec.structs.replace(facts.figures, sources=(SourceFigures(HOSTILE),))
    graph = tuple(msgspec.structs.replace(vertex, name=HOSTILE) for vertex in facts.graph)
    subtasks = tuple(msgspec.structs.replace(one, host=HOSTILE) for one in facts.subtasks)
    finding = Finding(HOSTILE, "warning", HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    driver = msgspec.structs.replace(facts.driver, user=HOSTILE, host=HOSTILE, ui_url=HOSTILE)
    evil = msgspec.structs.replace(
        facts,
        name=HOSTILE,
        error=HOSTILE,
        driver=driver,
        figures=figures,
        graph=graph,
        subtasks=subtasks,
        health=(finding,),
    )
    logs = {"driver": f"{HOSTILE}\n"}
    with local_job(GivenJob(evil, logs=logs)) as client:
        outputs = [
            strandline("status", evil.id),
            strandline("top", evil.id),
            strandline("list"),
            strandline("list", "--url", client.served.url),
            strandline("logs", evil.id),
            strandline("cancel", "nothing", code=3),
            strandline("cancel", evil.id, code=4),
        ]
        documents = [strandline("status", evil.id, "--json").json, strandline("list", "--json").json[0]]
    for ended in outputs:
        shown = ended.stdout + ended.stderr
        assert "owned" in shown
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}, repr(shown)
    assert [document["name"] for document in documents] == [HOSTILE, HOSTILE]


def test_top_without_a_terminal_is_one_snapshot(runs_dir: Path) -> None:
    with local_job(GivenJob(generated_facts())):
        shown = strandline("top", "visits").stdout
    assert shown.count("visits  running") == 1
    assert "q leaves" not in shown


def test_live_and_dead_jobs_are_told_apart(runs_dir: Path) -> None:
    ended = generated_facts(name="orders", status=RunStatus.CANCELLED, seed=8)
    with local_job(GivenJob(generated_facts())) as client, registered(GivenJob(ended)):
        shown = strandline("list", columns=140).stdout
        assert "visits" in shown
        assert client.served.url in shown
        assert "orders" not in shown
        everything = strandline("list", "-a", "--json").json
    assert [(job["name"], job["liveness"], job["status"]) for job in everything] == [
        ("visits", "alive", "running"),
        ("orders", "ended", "cancelled"),
    ]
    assert strandline("list", "-r", "--json").json == []


def test_the_log_of_a_process_is_chosen_by_its_role(runs_dir: Path) -> None:
    logs = {"driver": "a\nb\nc\n", "slot-1": "slot\n", "slot-2": "", "task-manager-x": "manager\n"}
    with local_job(GivenJob(generated_facts(), logs=logs)):
        assert strandline("logs", "visits", "--lines", "2").stdout == "b\nc\n"
        assert strandline("logs", "visits", "--subtask", "1").stdout == "slot\n"
        assert "The log of slot-2 is empty." in strandline("logs", "visits", "--subtask", "2").stderr
        assert strandline("logs", "visits", "--task-manager", "x").stdout == "manager\n"
        assert strandline("logs", "visits", "--lines", "1", "--json").json == {
            "process": "driver",
            "cut": True,
            "lines": ["c"],
        }
        missing = " ".join(strandline("logs", "visits", "--subtask", "7", code=1).stderr.split())
        strandline("logs", "visits", "--subtask", "1", "--driver", code=2)
    assert "there is no log of slot-7; there are logs of: driver, slot-1, slot-2, task-manager-x" in missing


def test_the_page_of_a_running_job_is_opened_with_its_token(runs_dir: Path) -> None:
    with local_job(GivenJob(generated_facts())) as client:
        assert strandline("ui", "visits").stdout == f"{client.served.url_with_token}\n"
        assert strandline("ui", "--json").json["url"] == client.served.url
    assert "no job of this user runs on this host; for jobs that have ended or run elsewhere" in " ".join(
        strandline("ui", code=3).stderr.split()
    )
    assert "give one job, or" in " ".join(strandline("ui", "visits", "./ckpt", code=2).stderr.split())


def test_following_a_log_ends_with_the_job(runs_dir: Path) -> None:
    """The log has grown when it is read again, and the job has ended when it is read a third time."""
    reads = []

    class Growing(GivenJob):
        def log(self, process: str, max_bytes: int = 100_000) -> LogText:
            reads.append(process)
            if len(reads) == 3:
                self.given = generated_facts(status=RunStatus.FINISHED)
                registration.close()
            return LogText(process, "".join(f"line {number}\n" for number in range(len(reads))))

    def closes_after_four_reads(served: Served) -> None:
        wait_until(lambda: len(reads) > 3)
        served.close()

    view = Growing(generated_facts())
    with serving(view) as client:
        registration = Registration(view, None, client.served.url, client.served.token)
        wait_until(local_runs, what="the entry")
        closing = threading.Thread(target=closes_after_four_reads, args=(client.served,))
        closing.start()
        shown = strandline("logs", "visits", "--follow").stdout.splitlines()
        closing.join(30)
    assert shown[:4] == [f"line {number}" for number in range(4)]


def test_the_shell_completes_commands_and_the_names_of_jobs(runs_dir: Path) -> None:
    def completed(words: str) -> list[str]:
        environment = {"_STRANDLINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"}
        if words.count(" ") > 1:
            environment["COMP_CWORD"] = "2"
        command = "from strandline.admin.cli.main import app; app(prog_name='strandline')"
        ended = subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ended.stdout.split()

    with local_job(GivenJob(generated_facts())):
        assert completed("strandline resc") == ["rescale"]
        assert completed("strandline status vi") == ["visits"]


def test_a_wrong_command_line_is_a_usage_error(runs_dir: Path) -> None:
    strandline("status", "visits", "--loss", "soon", code=2)
    strandline("status", "visits", "--url", "http://127.0.0.1:1", "-c", "ckpt", code=2)
    strandline("savepoint", "--dispose", "sp/1", "more", code=2)
    strandline("stop", code=2)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(-5, "0 ms"), (999, "999 ms"), (1234, "1.2 s"), (59_000, "59 s"), (3_725_000, "1 h 2 min"), (2e8, "2 d 7 h")],
)
def test_durations_have_two_units_at_most(milliseconds: float, text: str) -> None:
    assert lasted(milliseconds) == text


def test_a_name_from_elsewhere_stays_on_one_line() -> None:
    assert one_line("a\nb\tc\x1b[0m") == "a b c\\x1b[0m"
    assert one_line("x" * 500) == "x" * 119 + "…"
    assert one_line("\ud800") == "\\ud800"


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [("", "a\n", "a\n"), ("a\n", "a\nb\n", "b\n"), ("a\nb\n", "b\nc\n", "b\nc\n"), ("x" * 3000, "x" * 2500 + "y", "y")],
)
def test_following_a_log_prints_what_was_added(before: str, now: str, new: str) -> None:
    assert added(before, now) == new


def test_a_server_of_somebody_else_is_not_believed(runs_dir: Path, client_of_html: str) -> None:
    assert "does not answer as a server of Strandline" in " ".join(
        strandline("status", "visits", "--url", client_of_html, code=5).stderr.split()
    )


@pytest.fixture
def client_of_html() -> Iterator[str]:
    """The address of a server that answers every path with a page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)
