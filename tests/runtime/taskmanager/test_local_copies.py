"""Local copies: found by identity, verified, pruned; and nothing that goes wrong with them goes further."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.checkpoint.metadata import FileHandle, StateFile
from strandline.runtime.slot.local_copies import find_copy
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.storage.checksums import checksum


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "copies"


def made(folder: Path, name: str, content: bytes) -> tuple[StateFile, Path]:
    path = folder / name
    path.write_bytes(content)
    return StateFile(name, f"id/{name}", True, FileHandle(f"job/shared/{name}", len(content), checksum(path))), path


def test_any_task_manager_of_the_host_may_have_the_copy(tmp_path: Path, home: Path) -> None:
    one, two = LocalCopies(home, "1"), LocalCopies(home, "2")
    first, path = made(tmp_path, "000001.sst", b"first")
    second, other = made(tmp_path, "000002.sst", b"second")
    one.keep(first.identity, path)
    one.keep(first.identity, path)
    two.keep(second.identity, other)
    path.unlink()
    for file, content in ((first, b"first"), (second, b"second")):
        assert find_copy(home, file, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == content
    third, _path = made(tmp_path, "000003.sst", b"third")
    assert not find_copy(home, third, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not find_copy(home, StateFile("MANIFEST", "id/m", False, None, b"inline"), tmp_path / "out")


@pytest.mark.parametrize("content", [b"firsT", b"first and more", b""])
def test_a_damaged_copy_is_not_used_and_goes(tmp_path: Path, home: Path, content: bytes) -> None:
    copies = LocalCopies(home, "1")
    file, path = made(tmp_path, "000001.sst", b"first")
    copies.keep(file.identity, path)
    (copy,) = (one for one in (home / "1").iterdir() if one.name != "lock")
    copy.unlink()
    copy.write_bytes(content)
    assert not find_copy(home, file, tmp_path / "out")
    assert not copy.exists()
    assert not (tmp_path / "out").exists()


def test_only_what_is_needed_stays_and_what_lost_task_managers_had_goes(tmp_path: Path, home: Path) -> None:
    mine, alive, lost = LocalCopies(home, "1"), LocalCopies(home, "2"), LocalCopies(home, "3")
    first, path = made(tmp_path, "000001.sst", b"first")
    second, other = made(tmp_path, "000002.sst", b"second")
    late, newest = made(tmp_path, "000003.sst", b"late")
    for copies in (mine, alive, lost):
        copies.keep(first.identity, path)
    mine.keep(second.identity, other)
    lost._lock.close()

    def needed() -> set[str]:
        mine.keep(late.identity, newest)  # by another thread, while the folder is being pruned
        return {second.identity}

    mine.prune(needed)
    assert len(list((home / "1").iterdir())) == 3
    assert find_copy(home, second, tmp_path / "out")
    assert find_copy(home, late, tmp_path / "out")
    assert find_copy(home, first, tmp_path / "out"), "it is another task manager's, which is alive"
    assert not (home / "3").exists()


def test_a_copy_that_cannot_be_made_is_counted(tmp_path: Path, home: Path) -> None:
    copies = LocalCopies(home, "1")
    copies.keep("id/gone", tmp_path / "gone")
    assert copies.failed == 1
