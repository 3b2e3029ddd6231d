"""Commands that steer a job, against a real server: what they ask for, what they print, and how they end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from strandline.admin import rest_client
from strandline.admin.problems import NotReachedError
from strandline.admin.rest_client import RestClient
from strandline.observe.registration import local_runs, user_runs_folder
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.protocol.user_folder import make_private
from tests.admin.cli.commands import strandline
from tests.admin.cli.local_jobs import local_job, registered
from tests.observe.generated import generated_facts
from tests.rest.served import Client, GivenJob, serving
from tests.rest.steered import SteeredJob

FACTS = generated_facts(samples=0)


class EndingJob(SteeredJob):
    """A job that ends when it is cancelled."""

    view: GivenJob

    def cancel(self) -> None:
        super().cancel()
        self.view.given = generated_facts(samples=0, status=RunStatus.CANCELLED)


@pytest.fixture
def steered() -> SteeredJob:
    job = EndingJob()
    job.go_on.set()
    job.view = GivenJob(FACTS, job)
    return job


@pytest.fixture
def server(runs_dir: Path, steered: EndingJob) -> Iterator[Client]:
    with local_job(steered.view) as client:
        yield client


def test_a_savepoint_goes_where_the_user_says(server: Client, steered: SteeredJob, tmp_path: Path) -> None:
    ended = strandline("savepoint", "visits", tmp_path / "sp", "--type", "native")
    assert ended.stdout == f"Savepoint completed. Path: {tmp_path}/sp/savepoint-1\n"
    assert ended.stderr == 'Triggering native savepoint for job "visits".\n'
    assert steered.asked == [("savepoint", f"{tmp_path}/sp", "native")]


def test_a_folder_is_meant_as_the_user_sees_it(
    server: Client, steered: SteeredJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert strandline("savepoint", "visits", "sp", "--json").json == {
        "id": FACTS.id,
        "name": "visits",
        "path": f"{tmp_path}/sp/savepoint-1",
        "type": "canonical",
    }
    strandline("savepoint", "visits", "s3://bucket/sp")
    strandline("savepoint", "visits")
    assert [asked[1] for asked in steered.asked] == [f"{tmp_path}/sp", "s3://bucket/sp", None]


def test_a_detached_operation_is_not_waited_for(server: Client, steered: SteeredJob) -> None:
    steered.go_on.clear()
    request = strandline("savepoint", "visits", "/sp", "--detached", "--json").json["request-id"]
    assert server.get(f"/jobs/{FACTS.id}/savepoints/{request}")["status"]["id"] == "IN_PROGRESS"
    assert "Successfully triggered checkpoint, triggerId: " in strandline("checkpoint", "visits", "--detached").stdout
    steered.go_on.set()


def test_a_checkpoint_has_flinks_words(server: Client, steered: SteeredJob) -> None:
    text = strandline("checkpoint", FACTS.id[:8], "--full").stdout
    assert text == f"Checkpoint(FULL) 19 for job visits ({FACTS.id}) completed.\n"
    assert strandline("checkpoint", FACTS.id, "--json").json["checkpoint"] == 19
    assert steered.asked == [("checkpoint", True), ("checkpoint", False)]


def test_a_rescale_says_how_long_the_job_paused(server: Client, steered: SteeredJob) -> None:
    assert "from 2 to 4 subtasks in 1 ms; it paused for 1 ms." in strandline("rescale", "visits", "4").stdout
    assert strandline("rescale", "visits", "5", "--json").json["rescaling"]["moved_key_groups"] == 5
    assert "at most 128 subtasks" in strandline("rescale", "visits", "129", code=1).stderr
    strandline("rescale", "visits", "0", code=2)
    assert steered.asked == [("rescale", 4), ("rescale", 5)]


def test_a_stop_makes_a_savepoint_if_it_is_told_where(server: Client, steered: SteeredJob) -> None:
    ended = strandline("stop", "visits", "-p", "/sp")
    assert ended.stdout == "Savepoint completed. Path: /sp/savepoint-1\n"
    assert ended.stderr == 'Suspending job "visits" with a savepoint.\n'
    assert strandline("stop", "visits").stdout == f"Stopped job visits ({FACTS.id}).\n"
    drained = strandline("stop", "visits", "--drain")
    assert drained.stderr == 'Draining job "visits", then suspending it with a last checkpoint.\n'
    assert steered.asked == [
        ("stop", "/sp", "canonical", False),
        ("stop", None, "canonical", False),
        ("stop", None, "canonical", True),
    ]


def test_a_cancel_waits_for_the_end(server: Client, steered: SteeredJob) -> None:
    assert strandline("cancel", "visits").stdout == f"Cancelled job visits ({FACTS.id}).\n"
    assert steered.asked == [("cancel",)]


def test_an_operation_that_fails_says_why(server: Client) -> None:
    ended = strandline("savepoint", "visits", "/full", code=1)
    assert "the disk of /full has no space left; free some, and try again" in " ".join(ended.stderr.split())
    assert ended.stdout == ""


def test_an_unknown_job_is_answered_with_the_nearest(server: Client) -> None:
    error = strandline("savepoint", "vists", "/sp", code=3).stderr
    assert "there is no job 'vists' of this user on this host; the nearest is 'visits'" in " ".join(error.split())
    assert "nearest" not in strandline("savepoint", "sessions", "/sp", code=3).stderr
    with serving() as empty:
        assert "there is none at all" in strandline("cancel", "x", "--url", empty.served.url, code=3).stderr


def test_two_jobs_of_one_name_are_told_apart_by_their_ids(runs_dir: Path, steered: EndingJob) -> None:
    other = msgspec.structs.replace(FACTS, id="3f" + "0" * 30, run="1" * 32, checkpoint_dir="/other")
    with local_job(steered.view), registered(GivenJob(other)):
        error = strandline("cancel", "visits", code=3).stderr
        assert "2 jobs of this user on this host match 'visits'" in " ".join(error.split())
        assert FACTS.id in error
        assert other.id in error
        assert "2 jobs" in strandline("cancel", "3f", code=3).stderr
        strandline("checkpoint", FACTS.id[:3])
        assert "without a REST server" in strandline("cancel", other.id, code=5).stderr
    assert steered.asked == [("checkpoint", False)]


def test_a_job_that_has_ended_cannot_be_steered(runs_dir: Path) -> None:
    view = GivenJob(generated_facts(samples=0, status=RunStatus.STOPPED))
    with registered(view):
        for command in (
            ["rescale", "visits", "4"],
            ["stop", "visits"],
            ["savepoint", "visits", "sp"],
        ):
            error = strandline(*command, code=4).stderr
            assert error == "error: job 'visits' does not run: stopped\n"


def test_a_job_that_ended_a_moment_ago_is_not_taken_for_unreachable(runs_dir: Path) -> None:
    """The entry says that the job runs, the server is gone, and then the entry says that the job has ended."""
    view = GivenJob(FACTS, SteeredJob())
    with serving(view) as client:
        gone = client.served
    with registered(view, gone.url, gone.token):
        assert "does not answer" in strandline("checkpoint", "visits", code=5).stderr
        view.given = generated_facts(samples=0, status=RunStatus.FINISHED)
    assert "does not run: finished" in strandline("checkpoint", "visits", code=4).stderr


def test_a_server_that_is_silent_may_still_do_what_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_client, "LOST_AFTER", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = RestClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        with pytest.raises(NotReachedError, match="timed out; if it has got the request, it carries it out"):
            client.cancel("visits")
        with pytest.raises(NotReachedError, match="timed out; it has got the request, and carries it out if"):
            client.result("visits", "stop", "1", lambda _progress: None)
        with pytest.raises(NotReachedError, match=r"timed out$"):
            client.jobs()


def test_a_job_whose_token_cannot_be_read_is_not_steered(server: Client, steered: SteeredJob) -> None:
    (run,) = local_runs()
    assert run.token_file is not None
    run.token_file.chmod(0o644)
    error = strandline("cancel", "visits", code=5).stderr
    assert "there is no token for job 'visits'" in " ".join(error.split())
    assert server.served.token not in error
    assert steered.asked == []


def test_a_wrong_token_is_refused(server: Client, steered: SteeredJob, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    assert "the token is wrong" in strandline("cancel", "visits", "--token-file", wrong, code=5).stderr
    assert "cannot be read" in strandline("cancel", "visits", "--token-file", tmp_path / "none", code=2).stderr
    wrong.write_text("two words")
    assert "holds no token" in strandline("cancel", "visits", "--token-file", wrong, code=2).stderr
    assert steered.asked == []


def test_a_job_of_another_host_is_steered_by_its_address(
    runs_dir: Path, steered: EndingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(steered.view) as client:
        told = " ".join(strandline("checkpoint", "visits", "--url", client.served.url, code=5).stderr.split())
        assert "this needs the token of the job; give it with --token-file FILE or STRANDLINE_TOKEN" in told
        monkeypatch.setenv("STRANDLINE_TOKEN", client.served.token)
        strandline("checkpoint", "visits", "--url", f"{client.served.url}/")
        assert "there are: visits" in " ".join(
            strandline("checkpoint", "other", "--url", client.served.url, code=3).stderr.split()
        )
    assert "does not answer" in strandline("checkpoint", "visits", "--url", client.served.url, code=5).stderr
    assert "is no address of a server" in strandline("checkpoint", "x", "--url", "ftp://host", code=2).stderr
    assert "no user and password" in strandline("checkpoint", "x", "--url", "http://a:b@host", code=2).stderr


def test_entries_that_are_not_this_users_are_not_believed(runs_dir: Path) -> None:
    folder = make_private(user_runs_folder())
    (folder / f"{'a' * 32}.json").symlink_to("/etc/hostname")
    damaged = folder / f"{'b' * 32}.json"
    damaged.write_text('{"job": "visits\x1b[2J", ')
    damaged.chmod(0o600)
    if os.geteuid() == 0:  # only root can give files away
        foreign = folder / f"{'c' * 32}.json"
        foreign.write_bytes(damaged.read_bytes())
        os.chown(foreign, 12345, 12345)
    ended = strandline("list")
    assert "No jobs on this host" in ended.stdout
    assert "cannot be read" in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
    assert [entry["problem"] != "" for entry in strandline("list", "--json").json] == [True]
    strandline("cancel", "visits", code=3)
    os.chmod(runs_dir / folder.parent.name, 0o777)
    assert "others can write there" in " ".join(strandline("list", code=1).stderr.split())
