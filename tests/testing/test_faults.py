"""The storage with faults is a storage like any other until it is told to be slow or to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strandline.errors import AlreadyExistsError, ConfigError, NotFoundError, StorageError, UnknownOutcomeError
from strandline.storage import Storage, is_local, open_storage
from strandline.testing.faults import FaultyStorage
from strandline.testing.storage import StorageContract


class TestFaultyStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path_factory: pytest.TempPathFactory) -> Storage:
        return open_storage(f"faulty+file://{tmp_path_factory.mktemp('durable')}/root")

    def test_the_storage_behind_it_names_a_missing_file(self, storage: Storage) -> None:
        """So the path has no prefix `faulty+`."""
        with pytest.raises(NotFoundError, match="/root/nowhere/file"):
            storage.read("nowhere/file")


def opened(folder: Path, **options: str) -> Storage:
    return open_storage(f"faulty+file://{folder}/root", options)


def test_its_url_opens_the_same_place_with_faults(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    storage.write("a", b"1")
    again = open_storage(storage.url)
    assert isinstance(again, FaultyStorage)
    assert again.url == storage.url
    assert again.read("a") == b"1"
    assert open_storage(f"{tmp_path}/root").read("a") == b"1"
    assert not is_local(storage.url)


def test_uploads_share_the_rate(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1000))
    storage = opened(tmp_path, bytes_per_second="10000")
    started = time.monotonic()
    for name in "abc":
        storage.upload(source, name)
    assert time.monotonic() - started >= 0.3
    assert [file.size for file in storage.list()] == [1000] * 3


def test_a_switch_turns_the_faults_of_all_processes_on_and_off(tmp_path: Path) -> None:
    switch = tmp_path / "on"
    one, other = (opened(tmp_path, fail_pattern="^write a", switch=str(switch)) for _ in range(2))
    one.write("a", b"1")
    switch.touch()
    for storage in (one, other):
        with pytest.raises(StorageError, match="fails on purpose"):
            storage.write("a", b"2")
        storage.write("b", b"3")
    switch.unlink()
    assert other.read("a") == b"1"
    other.write("a", b"4")


def test_failures_are_counted_over_all_processes_that_have_one_switch(tmp_path: Path) -> None:
    switch = tmp_path / "on"
    switch.touch()
    one, other = (opened(tmp_path, fail_pattern="^write", fail_times="2", switch=str(switch)) for _ in range(2))
    for storage in (one, other):
        with pytest.raises(StorageError, match="fails on purpose"):
            storage.write("a", b"1")
    one.write("a", b"1")
    other.write("b", b"2")
    switch.unlink()
    switch.touch()
    with pytest.raises(StorageError, match="fails on purpose"):
        one.write("a", b"1")


def test_the_journal_tells_how_every_call_ended(tmp_path: Path) -> None:
    storage = opened(tmp_path, fail_pattern="^write b", journal=str(tmp_path / "journal"))
    storage.write("a", b"1")
    with pytest.raises(StorageError):
        storage.write("b", b"1")
    storage.delete(["a", "b"])
    assert (tmp_path / "journal").read_text().splitlines() == [
        "write a",
        f"fault before {os.getpid()} write b",
        "failed write b",
        "delete a",
        "delete b",
    ]


def test_a_call_that_fails_after_it_took_effect_has_an_unknown_outcome(tmp_path: Path) -> None:
    storage = opened(tmp_path, fail_pattern=".", fail_mode="after")
    source = tmp_path / "source"
    source.write_bytes(b"1")
    writes: list[Callable[[], None]] = [
        lambda: storage.write("a", b"1"),
        lambda: storage.create("b", b"1"),
        lambda: storage.create("b", b"2"),  # nobody learns that it exists
        lambda: storage.upload(source, "c"),
        lambda: storage.rename("c", "d"),
    ]
    for write in writes:
        with pytest.raises(UnknownOutcomeError, match="fails on purpose"):
            write()
    with pytest.raises(StorageError, match="fails on purpose"):
        storage.delete(["a"])
    with pytest.raises(StorageError, match="fails on purpose"):
        storage.read("nowhere")
    truth = open_storage(f"{tmp_path}/root")
    assert {file.path: truth.read(file.path) for file in truth.list()} == {"b": b"1", "d": b"1"}


def test_an_unknown_outcome_may_be_that_nothing_happened(tmp_path: Path) -> None:
    storage = opened(tmp_path, fail_pattern="^create", fail_mode="unknown")
    with pytest.raises(UnknownOutcomeError):
        storage.create("a", b"1")
    assert not storage.exists("a")


def failures(storages: list[Storage], calls: int) -> list[int]:
    """The numbers of the calls that fail, from 1 on, with calls of several storages in turn."""
    failed = []
    for call in range(1, calls + 1):
        try:
            storages[call % len(storages)].exists("a")
        except StorageError:
            failed.append(call)
    return failed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fail_from": "7", "fail_times": "1"}, [7]),
        ({"fail_from": "18"}, [18, 19, 20]),
        ({"fail_every": "8"}, [1, 9, 17]),
        ({"fail_from": "3", "fail_times": "2", "fail_every": "10"}, [3, 4, 13, 14]),
        ({"fail_times": "0"}, []),
    ],
)
def test_the_calls_that_fail_are_counted_over_all_processes(
    tmp_path: Path, options: dict[str, str], expected: list[int]
) -> None:
    counter = tmp_path / "counter"
    storages = [opened(tmp_path, fail_pattern="^exists", counter=str(counter), **options) for _ in range(3)]
    assert failures(storages, 20) == expected
    assert counter.stat().st_size == 20


def test_a_call_hangs_until_the_switch_is_deleted(tmp_path: Path) -> None:
    switch = tmp_path / "on"
    switch.touch()
    storage = opened(tmp_path, fail_pattern="^write", fail_mode="hang", switch=str(switch))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(storage.write, "a", b"1")
        assert not storage.exists("a")
        switch.unlink()
        writing.result(10)
    assert storage.read("a") == b"1"
    opened(tmp_path, fail_pattern="^write", fail_mode="hang-after", hang_seconds="0.01").write("b", b"1")


@pytest.mark.parametrize(("mode", "there"), [("kill", False), ("kill-after", True), ("stop", False)])
def test_the_process_that_makes_the_call_is_killed_or_stopped(tmp_path: Path, mode: str, there: bool) -> None:
    journal = tmp_path / "journal"
    options = {"fail_pattern": "^write", "fail_mode": mode, "journal": str(journal)}
    code = (
        "from strandline.storage import open_storage\n"
        f"open_storage('faulty+file://{tmp_path}/root', {options}).write('a', b'1')"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        if mode == "stop":
            _pid, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert not open_storage(f"{tmp_path}/root").exists("a")
            process.send_signal(signal.SIGCONT)
            assert process.wait(30) == 0
            there = True
        else:
            assert process.wait(30) == -signal.SIGKILL
        assert journal.read_text().splitlines()[0] == f"fault {mode} {process.pid} write a"
    assert open_storage(f"{tmp_path}/root").exists("a") == there


def test_a_stale_storage_shows_every_file_as_it_was_before_its_last_change(tmp_path: Path) -> None:
    switch = tmp_path / "on"
    for name in ("replaced", "deleted", "moved"):
        opened(tmp_path).write(f"dir/{name}", b"old")
    options = {"stale_folder": f"{tmp_path}/stale", "stale_seconds": "3600", "switch": str(switch)}
    one, other = (opened(tmp_path, **options) for _ in range(2))
    switch.touch()
    one.write("dir/replaced", b"new one")
    one.delete(["dir/deleted"])
    one.rename("dir/moved", "dir/there")
    one.create("dir/new", b"1")
    for storage in (one, other):
        assert [(file.path, file.size) for file in storage.list("dir")] == [
            ("dir/deleted", 3),
            ("dir/moved", 3),
            ("dir/replaced", 3),
        ]
        assert storage.read("dir/replaced") == b"old"
        assert storage.read_range("dir/deleted", 1, 1) == b"l"
        assert not storage.exists("dir/new")
        with pytest.raises(NotFoundError, match="dir/there"):
            storage.download("dir/there", tmp_path / "target")
        with pytest.raises(AlreadyExistsError):
            storage.create("dir/new", b"2")
    switch.unlink()
    assert [file.path for file in other.list()] == ["dir/new", "dir/replaced", "dir/there"]
    assert other.read("dir/replaced") == b"new one"


def test_a_change_is_seen_when_its_time_is_over(tmp_path: Path) -> None:
    storage = opened(tmp_path, stale_folder=f"{tmp_path}/stale", stale_seconds="0", stale_pattern="^(read|list)")
    storage.write("a", b"1")
    assert [file.path for file in storage.list()] == ["a"]
    storage = opened(tmp_path, stale_folder=f"{tmp_path}/stale", stale_seconds="3600", stale_pattern="^list")
    storage.write("b", b"1")
    assert [file.path for file in storage.list()] == ["a"]
    assert storage.read("b") == b"1"


def test_reads_are_slow_to_the_byte(tmp_path: Path) -> None:
    opened(tmp_path).write("a", bytes(1000))
    storage = opened(tmp_path, bytes_per_second="10000", slow_pattern="^read", delay_seconds="0.1")
    started = time.monotonic()
    storage.read("a")
    storage.read_range("a", 0, 1000)
    assert time.monotonic() - started >= 0.4


@pytest.mark.parametrize(
    "option",
    [
        {"bytes_per_second": "fast"},
        {"bytes_per_second": "0"},
        {"fail_times": "x"},
        {"fail_from": "-1"},
        {"hang_seconds": "nan"},
        {"fail_mode": "sometimes"},
        {"fail_pattern": "("},
    ],
)
def test_an_option_that_cannot_be_used_is_named(tmp_path: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        opened(tmp_path, **option)
