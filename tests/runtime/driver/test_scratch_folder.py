"""A scratch folder goes with its driver, and no other driver takes a living one's folder for abandoned."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.runtime.driver.scratch_folder import ScratchFolder

_DRIVER = """
import sys
from strandline.runtime.driver.scratch_folder import ScratchFolder
folder = ScratchFolder(sys.argv[1], "visits", 1)
(folder.path / "offsets").mkdir()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another driver, which has made a scratch folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def _folder_of(driver: subprocess.Popen[str]) -> Path:
    assert driver.stdout is not None
    return Path(driver.stdout.readline().strip())


def test_the_folder_of_a_living_driver_stays_whatever_its_process_id_means_here(
    driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    other = _folder_of(driver)
    mine = ScratchFolder(str(tmp_path), "visits", 1)
    assert (other / "offsets").is_dir()
    assert str(driver.pid) not in other.name.split("-")
    mine.remove()
    assert (other / "offsets").is_dir()


def test_the_folder_of_a_killed_driver_is_removed(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    other = _folder_of(driver)
    driver.kill()
    driver.wait()
    mine = ScratchFolder(str(tmp_path), "visits", 2)
    assert not other.exists()
    mine.remove()
    mine.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_lock_is_left_alone(tmp_path: Path) -> None:
    strange = tmp_path / "strandline-spark-99999999-visits-1-x"
    strange.mkdir()
    ScratchFolder(str(tmp_path), "visits", 1).remove()
    assert strange.is_dir()


def test_a_pipe_with_the_name_of_a_lock_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "strandline-spark-x.lock")
    ScratchFolder(str(tmp_path), "visits", 1).remove()


def test_where_users_share_a_place_the_folder_is_in_one_of_this_users_own() -> None:
    folder = ScratchFolder(None, "visits", 1)
    try:
        assert folder.path.parent.name == f"strandline-{os.geteuid()}"
        assert folder.path.parent.stat().st_mode & 0o777 == 0o700
    finally:
        folder.remove()
