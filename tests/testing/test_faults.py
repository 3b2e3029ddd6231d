"""The storage with faults is a storage like any other until it is told to be slow or to fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from strandline.errors import ConfigError, NotFoundError, StorageError
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
    assert (tmp_path / "journal").read_text().splitlines() == ["write a", "failed write b", "delete a", "delete b"]


@pytest.mark.parametrize(
    "option", [{"bytes_per_second": "fast"}, {"bytes_per_second": "0"}, {"fail_times": "x"}, {"fail_pattern": "("}]
)
def test_an_option_that_cannot_be_used_is_named(tmp_path: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        opened(tmp_path, **option)
