"""Jobs whose driver is gone: what `list`, `status`, `logs`, `stop` and `ui` still know of them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strandline.admin.found_jobs import Where, find_job
from strandline.observe.facts import JobFacts, job_id
from strandline.observe.history import HistoryWriter
from strandline.observe.registration import Registration, local_runs, runs_in, user_runs_folder
from strandline.rest.server import serve_jobs
from strandline.runtime.driver.restore.savepoints import SavepointFormat
from strandline.runtime.driver.status import RunStatus
from strandline.storage import JobPaths, open_storage
from tests.admin.cli.commands import strandline
from tests.observe.generated import generated_facts
from tests.rest.served import ANY_PORT, GivenJob, GivenJobs
from tests.rest.steered import SteeredJob
from tests.s3 import BUCKET, KEYS
from tests.waiting import wait_until


def facts_in(place: Path, **options: Any) -> JobFacts:
    facts = generated_facts(samples=0, **options)
    return msgspec.structs.replace(facts, checkpoint_dir=str(place), id=job_id(str(place), facts.name))


@contextmanager
def remembered(view: GivenJob, place: Path) -> Iterator[None]:
    """The history and both entries of a run, which ends with the block."""
    storage = open_storage(str(place))
    history, registration = HistoryWriter(view, storage), Registration(view, storage)
    try:
        yield
    finally:
        registration.close()
        history.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def stopped(runs_dir: Path, place: Path) -> JobFacts:
    facts = facts_in(place, status=RunStatus.STOPPED)
    with remembered(GivenJob(facts), place):
        pass
    return facts


def test_a_job_that_has_ended_is_known_by_its_name_and_by_its_directory(stopped: JobFacts, place: Path) -> None:
    assert "No jobs" in strandline("list", place).stdout
    assert "stopped" in strandline("list", "-a", place).stdout
    assert strandline("status", "visits").stdout.startswith("visits  stopped after 1 h")
    for run in local_runs():
        Path(run.source).unlink()
    strandline("status", "visits", code=3)
    assert strandline("status", "visits", "-c", str(place)).stdout.startswith("visits  stopped after 1 h")
    assert strandline("status", stopped.id[:6], "-c", str(place), "--json").json["status"] == "stopped"
    strandline("status", "visits", "-c", str(place), "--check", code=4)


def test_the_page_of_a_job_that_has_ended_is_in_its_history(stopped: JobFacts, place: Path) -> None:
    told = " ".join(strandline("ui", "visits", code=4).stderr.split())
    assert told == f"error: job 'visits' does not run: stopped; its page is in its history: strandline ui {place}"


def test_jobs_of_an_object_store_are_listed_and_shown(runs_dir: Path, tmp_path: Path, s3_endpoint: str) -> None:
    options, url = {**KEYS, "endpoint": s3_endpoint}, f"s3://{BUCKET}/cli-{uuid.uuid4().hex}"
    facts = generated_facts(samples=0, status=RunStatus.STOPPED)
    facts = msgspec.structs.replace(facts, checkpoint_dir=url, id=job_id(url, facts.name))
    storage = open_storage(url, options)
    history, registration = HistoryWriter(GivenJob(facts), storage), Registration(GivenJob(facts), storage)
    history.close()
    registration.close()
    given = []
    for name, value in options.items():
        (tmp_path / name).write_text(value)
        given += ["-o", f"{name}=@{tmp_path / name}"]
    assert strandline("list", "-a", "--json", url, *given).json[0]["id"] == facts.id
    assert strandline("status", "visits", "-c", url, *given).stdout.startswith("visits  stopped after 1 h")


def changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def entries(facts: JobFacts, place: Path) -> tuple[Path, Path]:
    """The entries of a run on this host and in storage."""
    stored = place / JobPaths(facts.name).run_entry(facts.start_ms, facts.run)
    return user_runs_folder() / f"{facts.run}.json", stored


def test_a_driver_that_was_killed_is_told_from_one_that_ended(runs_dir: Path, place: Path) -> None:
    facts = facts_in(place)
    with remembered(GivenJob(facts), place):
        pass
    for entry in entries(facts, place):
        changed(entry, pid_started=1)  # that process is gone; another one has its number
    assert [(job["name"], job["liveness"]) for job in strandline("list", "--json").json] == [("visits", "dead")]
    assert "driver lost" in " ".join(strandline("list", columns=200).stdout.split())
    assert "does not run: driver lost" in " ".join(strandline("cancel", "visits", code=4).stderr.split())
    assert strandline("list", "-r", "--json").json == []
    assert "driver lost, last seen running" in strandline("status", "visits").stdout


def test_a_damaged_history_is_said_and_harms_nobody(stopped: JobFacts, place: Path) -> None:
    for path in (place / "visits" / "history").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\x00damaged\x1b[2J")
    ended = strandline("status", "visits")
    assert "A part of the job's history cannot be read" in ended.stdout
    assert "[history-unreadable]" in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr
    for run in local_runs():
        Path(run.source).unlink()
    assert "cannot be read" in " ".join(strandline("list", "-a", place).stderr.split())


def test_a_job_of_another_host_is_shown_but_not_called(runs_dir: Path, place: Path) -> None:
    """Anybody who may write checkpoints can write an address there, so nothing is sent to it."""
    facts = facts_in(place)
    with remembered(GivenJob(facts), place):
        pass
    here, stored = entries(facts, place)
    here.unlink()
    now = int(time.time() * 1000)
    changed(stored, host="elsewhere", host_id="another", rest_url="http://192.0.2.1:8081", user="bob", beat_ms=now)
    strandline("cancel", "visits", code=3)
    assert strandline("list", place, "--json").json[0]["host"] == "elsewhere"
    assert "elsewhere" not in strandline("list").stdout
    shown = strandline("status", "visits", "-c", str(place)).stdout
    assert shown.startswith("visits  running")
    assert "there is no log of driver" in strandline("logs", "visits", "-c", str(place), code=1).stderr


def test_the_directory_that_the_user_named_is_read_and_no_other(stopped: JobFacts, place: Path, tmp_path: Path) -> None:
    """Anybody who may write checkpoints can write another directory into an entry."""
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    other = facts_in(tmp_path / "other", status=RunStatus.FAILED)
    with remembered(GivenJob(other), tmp_path / "other"):
        pass
    changed(entries(stopped, copy)[1], checkpoint_dir=str(tmp_path / "other"), job_id=other.id)
    for _own_entries in ("there", "gone"):
        (found,) = strandline("list", "-a", "--json", copy).json
        assert (found["checkpoint_dir"], found["id"]) == (str(copy), job_id(str(copy), "visits"))
        shown = strandline("status", "visits", "-c", copy, "--json").json
        assert (shown["status"], shown["checkpoint_dir"]) == ("stopped", str(copy))
        strandline("status", other.id, "-c", copy, code=3)
        for run in local_runs():
            Path(run.source).unlink()


def test_a_job_of_this_host_is_called_only_through_its_own_directory(
    runs_dir: Path, place: Path, tmp_path: Path
) -> None:
    url = "http://127.0.0.1:1"
    view = GivenJob(facts_in(place))
    registration = Registration(view, open_storage(str(place)), url, "a-token-of-this-run")
    try:
        wait_until(lambda: local_runs() and runs_in(str(place)), what="the entries")
        shutil.copytree(place, tmp_path / "copy")
        (tmp_path / "link").symlink_to(place)
        changed(entries(view.given, tmp_path / "copy")[1], rest_url="http://192.0.2.1:8081")
        assert find_job("visits", Where(checkpoint_dirs=(str(tmp_path / "copy"),))).served is None
        assert find_job("visits", Where(checkpoint_dirs=(str(tmp_path / "link"),))).steered().url == url
    finally:
        registration.close()


def test_the_savepoint_of_a_stop_is_known_when_the_driver_is_gone_first(runs_dir: Path, place: Path) -> None:
    view = GivenJob(facts_in(place))
    saved = replace(view.given.checkpoints.history[16], trigger_time=time.time(), path=f"{place}/sp-1")
    ended = msgspec.structs.replace(
        view.given,
        status=RunStatus.STOPPED,
        checkpoints=msgspec.structs.replace(view.given.checkpoints, last_savepoint=saved),
    )
    jobs = GivenJobs([view])
    served = serve_jobs(jobs, ANY_PORT)
    history = HistoryWriter(view, open_storage(str(place)))
    registration = Registration(view, None, served.url, served.token)

    class Gone(SteeredJob):
        def stop(self, directory: str | None, format: SavepointFormat, *, drain: bool = False) -> str | None:
            view.given = ended
            history.close()
            jobs.views.clear()
            registration.close()
            return "nobody learns this"

    view.control = Gone()
    try:
        wait_until(local_runs, what="the entry")
        assert strandline("stop", "visits", "-p", place).stdout == f"Savepoint completed. Path: {place}/sp-1\n"
    finally:
        served.close()


def test_the_page_of_jobs_that_ended_is_served_until_ctrl_c(stopped: JobFacts, place: Path) -> None:
    command = [sys.executable, "-m", "strandline.admin.cli.main", "ui", "--port", "0", "--json", str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            assert "Ctrl-C ends it" in server.stderr.readline()
            printed = "".join(iter(server.stdout.readline, "}\n")) + "}"
            link = json.loads(printed)
            ended = strandline("status", "visits", "--url", link["url"])
            assert ended.stdout.startswith("visits  stopped after 1 h")
            assert link["link"].startswith(f"{link['url']}/#token=")
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0
        finally:
            server.kill()
    assert "does not answer" in strandline("status", "visits", "--url", link["url"], code=5).stderr


def test_a_directory_that_is_not_there_is_no_directory_without_jobs(runs_dir: Path, tmp_path: Path) -> None:
    for command in (["ui"], ["list"], ["status", "visits", "-c"]):
        ended = strandline(*command, f"{tmp_path}/typo", code=1)
        assert f"there is no folder {tmp_path}/typo" in " ".join(ended.stderr.split())
    assert strandline("list", tmp_path).stdout.endswith("; -a also lists jobs that have ended.\n")
    assert strandline("list", "-a", tmp_path).stdout == f"No jobs in {tmp_path}.\n"
    strandline("ui", "--port", "80800", f"{tmp_path}/", code=2)
    strandline("ui", "s3//bucket", "--storage-option", "secret_key=1", code=1)
