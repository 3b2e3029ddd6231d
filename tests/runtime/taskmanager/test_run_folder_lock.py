"""The lock of a run's folder: local files of dead runs are deleted, also by several task managers at once."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from strandline.runtime.taskmanager.run_folder_lock import RUN_IS_DEAD_AFTER, RunFolderLock


def dead_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "alive.lock").touch()
    long_ago = time.time() - 2 * RUN_IS_DEAD_AFTER
    os.utime(folder / "alive.lock", (long_ago, long_ago))
    return folder


@pytest.fixture
def lock(tmp_path: Path) -> RunFolderLock:
    (tmp_path / "mine").mkdir()
    return RunFolderLock(tmp_path / "mine")


def test_folders_of_dead_runs_are_deleted_and_others_stay(tmp_path: Path, lock: RunFolderLock) -> None:
    dead = dead_run(tmp_path / "dead")
    living = dead_run(tmp_path / "living")
    other = RunFolderLock(living)
    lock.delete_dead_runs()
    assert not dead.exists()
    assert living.exists()
    assert other.release()


def test_a_folder_that_another_task_manager_deletes_meanwhile_does_no_harm(
    tmp_path: Path, lock: RunFolderLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = dead_run(tmp_path / "a"), dead_run(tmp_path / "b")
    now = time.time()

    def clock() -> float:  # asked between the look at the lock file and the look at its time
        for folder in (first, second):
            shutil.rmtree(folder, ignore_errors=True)
        return now

    monkeypatch.setattr("strandline.runtime.taskmanager.run_folder_lock.time", SimpleNamespace(time=clock))
    lock.delete_dead_runs()
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_a_run_whose_folder_was_deleted_lives_on(tmp_path: Path, lock: RunFolderLock) -> None:
    shutil.rmtree(tmp_path / "mine")
    lock.refresh()
    assert not lock.release()
