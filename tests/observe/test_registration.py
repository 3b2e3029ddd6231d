"""Runs that can be found: on this host and beside their checkpoints; live ones are told from dead ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from strandline.errors import AuthenticationError, UnsafeFolderError
from strandline.observe import registration
from strandline.observe.registration import Registration, local_runs, read_token, runs_in, token_path, user_runs_folder
from strandline.observe.run_entries import DEAD_SECONDS, MAX_ENTRY_BYTES, RunEntry, encode_entry, liveness, own_entry
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.liveness.processes import started_at
from strandline.runtime.protocol.user_folder import make_private
from strandline.storage import JobPaths, Storage, open_storage
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.observe.seen import Seen, seen
from tests.s3 import BUCKET, KEYS
from tests.waiting import wait_until

URL, TOKEN = "http://127.0.0.1:8081", "a-token-of-this-run"
NOW = 1_800_000_000.0


@pytest.fixture
def parent(tmp_path: Path) -> str:
    return str(tmp_path / "host")


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "checkpoints"))


@pytest.fixture
def job(storage: Storage) -> Seen:
    return seen(storage.url)


@pytest.fixture
def registered(job: Seen, storage: Storage, parent: str) -> Iterator[Registration]:
    made = Registration(job, storage, URL, TOKEN, parent=parent)
    wait_until(lambda: local_runs(parent) and runs_in(storage.url), what="the entries")
    yield made
    made.close()


def put(parent: str, entry: RunEntry) -> Path:
    path = make_private(user_runs_folder(parent)) / f"{entry.run}.json"
    path.write_bytes(encode_entry(entry))
    path.chmod(0o600)
    return path


def elsewhere(entry: RunEntry, beat: float) -> RunEntry:
    return msgspec.structs.replace(entry, host="elsewhere", host_id="elsewhere", beat_ms=int(beat * 1000))


# --- a run that is there ---------------------------------------------------------------------------


def test_a_run_is_found_on_its_host_and_in_storage_until_it_ends(
    registered: Registration, job: Seen, storage: Storage, parent: str
) -> None:
    (here,), (there,) = local_runs(parent), runs_in(storage.url)
    assert here.alive
    assert there.alive
    assert (here.entry.job, here.entry.job_id, here.entry.run) == (job.name, job.id, job.current.run)
    assert (here.entry.pid, here.entry.host, here.entry.rest_url) == (os.getpid(), socket.gethostname(), URL)
    assert here.entry.checkpoint_dir == storage.url
    assert read_token(here) == TOKEN
    job.become(RunStatus.STOPPED)
    registered.close()
    (here,), (there,) = local_runs(parent), runs_in(storage.url)
    assert here.liveness == there.liveness == "ended"
    assert here.entry.status == there.entry.status == RunStatus.STOPPED
    with pytest.raises(AuthenticationError, match="its run is over"):
        read_token(here)


def test_a_change_of_status_is_seen_soon(registered: Registration, job: Seen, storage: Storage, parent: str) -> None:
    job.become(RunStatus.RESTARTING)
    wait_until(lambda: local_runs(parent)[0].entry.status is RunStatus.RESTARTING)
    wait_until(lambda: runs_in(storage.url)[0].entry.status is RunStatus.RESTARTING)


def test_the_token_lies_in_a_file_of_its_own_for_its_user_alone_and_never_in_storage(
    registered: Registration, job: Seen, storage: LocalStorage, parent: str
) -> None:
    folder = user_runs_folder(parent)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert (TOKEN in path.read_text()) == (path == token_path(folder, job.current.run))
    assert all(TOKEN.encode() not in path.read_bytes() for path in storage.root.rglob("*") if path.is_file())


def test_an_entry_that_a_cleaner_of_tmp_deleted_comes_back_with_its_token(
    registered: Registration, job: Seen, parent: str
) -> None:
    folder = user_runs_folder(parent)
    for file in folder.iterdir():
        file.unlink()
    wait_until(lambda: len(list(folder.glob("[!.]*"))) == 2, what="the entry and the token")
    (found,) = local_runs(parent)
    assert (found.entry.run, read_token(found)) == (job.current.run, TOKEN)


def test_files_on_the_host_are_written_again_before_they_look_old(
    registered: Registration, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list(user_runs_folder(parent).glob("[!.]*"))
    for file in files:
        os.utime(file, (1.0, 1.0))
    monkeypatch.setattr(registration, "WRITE_AGAIN_SECONDS", 0.0)
    wait_until(lambda: all(file.stat().st_mtime > 1.0 for file in files), what="the files to be written again")


def test_the_heartbeat_is_renewed_in_storage(job: Seen, storage: Storage, parent: str) -> None:
    made = Registration(job, storage, parent=parent, beat_seconds=0.01)
    try:
        first = wait_until(lambda: runs_in(storage.url))[0].entry.beat_ms
        wait_until(lambda: runs_in(storage.url)[0].entry.beat_ms > first, what="a second beat")
    finally:
        made.close()


def test_a_storage_that_fails_is_logged_once_and_the_entry_on_the_host_stays(
    job: Seen, tmp_path: Path, parent: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = FaultyStorage(f"faulty+file://{tmp_path}/broken", {"fail_pattern": "^write "})
    made = Registration(job, broken, parent=parent, beat_seconds=0.0)
    try:
        wait_until(lambda: local_runs(parent))
        wait_until(lambda: "its entry in storage failed" in caplog.text)
        time.sleep(1.2)  # another beat
    finally:
        made.close()
    assert caplog.text.count("its entry in storage failed") == 1
    assert [run.liveness for run in local_runs(parent)] == ["alive"]


def test_a_folder_that_is_not_safe_is_logged_once_and_the_entry_in_storage_stays(
    job: Seen, storage: Storage, parent: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_private(user_runs_folder(parent)).parent.chmod(0o777)
    made = Registration(job, storage, parent=parent)
    try:
        wait_until(lambda: runs_in(storage.url))
        wait_until(lambda: "its entry on this host failed" in caplog.text)
    finally:
        made.close()
    with pytest.raises(UnsafeFolderError, match="others can write there"):
        local_runs(parent)


# --- a run that is gone ----------------------------------------------------------------------------


def test_a_run_whose_process_is_gone_is_dead(job: Seen, parent: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        entry = msgspec.structs.replace(
            own_entry(job.current), pid=process.pid, pid_started=started_at(process.pid), beat_ms=int(NOW * 1000)
        )
        put(parent, entry)
        assert [run.liveness for run in local_runs(parent)] == ["alive"]
        process.kill()
        process.wait()
        assert [run.liveness for run in local_runs(parent)] == ["dead"]


def test_a_run_whose_process_was_killed_is_dead_before_the_parent_of_the_process_knows(job: Seen) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        entry = msgspec.structs.replace(own_entry(job.current), pid=process.pid, pid_started=started_at(process.pid))
        assert liveness(entry, time.time()) == "alive"
        process.kill()
        wait_until(lambda: liveness(entry, time.time()) == "dead", what="the end of the process")
        assert started_at(process.pid) == entry.pid_started, "it is a zombie"
    finally:
        process.communicate()


def test_a_process_that_got_the_same_id_later_is_not_the_run(job: Seen, parent: str) -> None:
    put(parent, msgspec.structs.replace(own_entry(job.current), pid_started=1))
    (run,) = local_runs(parent)
    assert run.liveness == "dead"
    assert run.token_file is None


@pytest.mark.parametrize(
    ("beat", "modified", "expected"),
    [
        (NOW - 1, None, "alive"),
        (NOW - DEAD_SECONDS - 1, None, "dead"),
        (NOW + 3600, NOW + 3600, "alive"),  # a clock is wrong
        (NOW - 3600, NOW - 1, "alive"),  # the clock of the run was set back
        (NOW - 3600, NOW - 3600, "dead"),
    ],
)
def test_a_run_on_another_host_lives_as_long_as_its_heart_beats_by_any_clock(
    job: Seen, beat: float, modified: float | None, expected: str
) -> None:
    assert liveness(elsewhere(own_entry(job.current), beat), NOW, modified) == expected


def test_entries_of_runs_that_are_over_go_after_a_day_and_when_there_are_too_many(
    job: Seen, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_entry(job.current)
    put(parent, own)
    for number in range(6):
        path = put(parent, msgspec.structs.replace(own, run=f"{number}", pid_started=1))
        token_path(path.parent, f"{number}").write_text("left behind")
        age = 25 * 3600 if number == 5 else number * 60
        os.utime(path, (time.time() - age,) * 2)
    assert {run.entry.run for run in local_runs(parent)} == {own.run, "0", "1", "2", "3", "4"}
    monkeypatch.setattr(registration, "KEPT_ENTRIES", 2)
    assert {run.entry.run for run in local_runs(parent)} == {own.run, "0", "1"}
    assert {path.name for path in user_runs_folder(parent).glob("*.token")} == {"0.token", "1.token"}


# --- what somebody else put there ------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_entry_of_another_user_is_left_out(job: Seen, parent: str) -> None:
    path = put(parent, own_entry(job.current))
    os.chown(path, 12345, 12345)
    assert local_runs(parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_refused(job: Seen, parent: str) -> None:
    folder = put(parent, own_entry(job.current)).parent.parent
    os.chown(folder, 12345, 12345)
    with pytest.raises(UnsafeFolderError, match=r"it belongs to user 12345.* STRANDLINE_RUNS_DIR names another place"):
        local_runs(parent)


def test_a_link_is_not_followed(job: Seen, parent: str, tmp_path: Path) -> None:
    path = put(parent, own_entry(job.current))
    target = path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(target)
    assert local_runs(parent) == []


def test_a_token_that_others_could_read_or_that_is_a_link_is_not_used(
    registered: Registration, job: Seen, parent: str, tmp_path: Path
) -> None:
    (run,) = local_runs(parent)
    assert run.token_file is not None
    run.token_file.chmod(0o644)
    with pytest.raises(AuthenticationError, match="not this user's alone"):
        read_token(run)
    run.token_file.chmod(0o600)
    run.token_file.symlink_to(run.token_file.rename(tmp_path / "token"))
    with pytest.raises(AuthenticationError, match="not this user's alone"):
        read_token(run)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it is damaged"),
        (b"{", "it is damaged"),
        (b'{"version": 1}', "missing required field"),
        (b'{"version": 2, "more": []}', "a later release wrote it, in format version 2"),
        (b"[" * 50_000, "it is damaged"),
        (b'{"version": 1, "job": "\xff"}', "it is damaged"),
    ],
)
def test_an_entry_that_cannot_be_read_says_why_and_the_others_are_found(
    job: Seen, storage: Storage, parent: str, content: bytes, problem: str
) -> None:
    good = own_entry(job.current)
    put(parent, good)
    bad = put(parent, msgspec.structs.replace(good, run="bad"))
    bad.write_bytes(content)
    paths = JobPaths("visits")
    storage.write(paths.run_entry(good.started_ms, good.run), encode_entry(good))
    storage.write(paths.run_entry(1, "bad"), content)
    for found in (local_runs(parent), runs_in(storage.url)):
        by_run = {run.entry.run: run for run in found}
        assert by_run[good.run].alive
        assert problem in by_run["bad"].problem
        assert not by_run["bad"].alive


def test_a_huge_entry_is_not_read(job: Seen, storage: Storage, parent: str) -> None:
    put(parent, own_entry(job.current)).write_bytes(b" " * (MAX_ENTRY_BYTES + 1))
    storage.write(JobPaths("visits").run_entry(1, "huge"), b" " * (MAX_ENTRY_BYTES + 1))
    assert local_runs(parent) == []
    (run,) = runs_in(storage.url)
    assert "too many for an entry" in run.problem


def test_an_entry_that_was_copied_to_another_run_or_job_is_not_believed(
    job: Seen, storage: Storage, parent: str
) -> None:
    entry = own_entry(job.current)
    put(parent, entry).rename(user_runs_folder(parent) / "another.json")
    storage.write(JobPaths("visits").run_entry(1, "another"), encode_entry(entry))
    storage.write(JobPaths("theirs").run_entry(entry.started_ms, entry.run), encode_entry(entry))
    assert local_runs(parent) == []
    assert ["it is the entry of another run" in run.problem for run in runs_in(storage.url)] == [True, True]


def test_an_entry_in_storage_leads_to_no_other_place(job: Seen, storage: Storage) -> None:
    entry = msgspec.structs.replace(own_entry(job.current), checkpoint_dir="s3://another-bucket", job_id="0" * 32)
    storage.write(JobPaths("visits").run_entry(entry.started_ms, entry.run), encode_entry(entry))
    (run,) = runs_in(storage.url)
    assert (run.entry.checkpoint_dir, run.entry.job_id) == (storage.url, job.id)


# --- in storage ------------------------------------------------------------------------------------


def test_all_jobs_below_a_checkpoint_directory_are_found_newest_run_first(storage: Storage) -> None:
    for number, name in enumerate(["b", "a", "a", "a"]):
        entry = own_entry(seen(storage.url, name, seed=number).current)
        entry = msgspec.structs.replace(entry, started_ms=number)
        storage.write(JobPaths(name).run_entry(number, entry.run), encode_entry(entry))
    storage.write("no-job", b"")
    storage.write("other/folder/file", b"")
    found = runs_in(storage.url, newest=2)
    assert [(run.entry.job, run.entry.started_ms) for run in found] == [("a", 3), ("a", 2), ("b", 0)]


def test_runs_are_found_in_an_object_store(s3_endpoint: str, parent: str) -> None:
    options = {**KEYS, "endpoint": s3_endpoint}
    storage = open_storage(f"s3://{BUCKET}/registry", options)
    job = seen(storage.url)
    made = Registration(job, storage, URL, TOKEN, parent=parent)
    try:
        (run,) = wait_until(lambda: runs_in(storage.url, options))
        assert run.alive
        assert run.entry.job_id == job.id
    finally:
        made.close()
    job.become(RunStatus.FAILED)
    assert [run.liveness for run in runs_in(storage.url, options)] == ["alive"]
