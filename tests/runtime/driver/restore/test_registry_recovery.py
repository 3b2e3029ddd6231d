"""Whoever may restore a checkpoint finds all its files, whatever was dropped, released or claimed before."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.checkpoint.coordinator import CheckpointCoordinator
from strandline.checkpoint.metadata import FORMAT_VERSION
from strandline.errors import FencedError
from strandline.runtime.driver.restore.registry_recovery import recover_registry
from tests.runtime.driver.restore.generations import (
    PATHS,
    Crash,
    Generation,
    Mortal,
    data_files,
    location,
    take_the_job_over,
    words,
)


@pytest.fixture
def storage(tmp_path: Path) -> Mortal:
    return Mortal(str(tmp_path / "checkpoints"))


def _die_after_the_entry_of(run: Generation, add: str, remove: str = "") -> int:
    """Take a checkpoint, and die before anything that it dropped is deleted."""
    run.change(add, remove)
    number = run.upload()
    run.storage.stops_at, run.storage.counts, run.storage.after = 0, "/log/", True
    with pytest.raises(Crash):
        run.complete(number)
    return number


def test_no_claim_after_a_crash_before_the_dropped_checkpoint_was_deleted(storage: Mortal) -> None:
    run = Generation(storage)
    run.checkpoint("ab")
    newest = _die_after_the_entry_of(run, "c", "b")
    again = Generation(storage, location(storage, newest))
    assert words(storage, newest) == {"a", "c"}
    mine = again.checkpoint("d")
    assert words(storage, mine) == {"a", "c", "d"}
    assert words(storage, newest) == {"a", "c"}
    assert not storage.exists(PATHS.metadata(newest - 1))


def test_claim_after_no_claim_leaves_the_older_released_checkpoint_whole(storage: Mortal) -> None:
    run = Generation(storage, num_retained=2)
    older = run.checkpoint("ab")
    newer = run.checkpoint("c", "b")
    Generation(storage, location(storage, newer))
    claimed = Generation(storage, location(storage, newer), "claim")
    claimed.checkpoint("d", "ac")
    assert not storage.exists(PATHS.metadata(newer))
    assert words(storage, older) == {"a", "b"}


def test_a_job_that_is_cancelled_deletes_its_checkpoints_and_not_those_of_the_user(storage: Mortal) -> None:
    run = Generation(storage, num_retained=2)
    older = run.checkpoint("ab")
    newer = run.checkpoint("c")
    Generation(storage, location(storage, newer))
    claimed = Generation(storage, location(storage, newer), "claim")
    claimed.checkpoint("d")
    claimed.cancel()
    assert words(storage, older) == {"a", "b"}
    assert len(data_files(storage)) == 5  # its metadata, two words, and two pieces of the source's log


def test_a_checkpoint_whose_metadata_the_user_deleted_is_nobodys_any_more(storage: Mortal) -> None:
    run = Generation(storage, num_retained=2)
    older = run.checkpoint("ab")
    newer = run.checkpoint("c", "b")
    Generation(storage, location(storage, newer))
    storage.delete([PATHS.metadata(older)])
    claimed = Generation(storage, location(storage, newer), "claim")
    last = claimed.checkpoint("d", "ac")
    assert words(storage, last) == {"d"}
    assert "a" not in {storage.read(path).decode(errors="ignore") for path in data_files(storage)}


def test_the_first_checkpoint_after_no_claim_refers_to_no_file_of_the_released_one(storage: Mortal) -> None:
    newest = Generation(storage).checkpoint("ab")
    theirs = data_files(storage)
    run = Generation(storage, location(storage, newest))
    number = run.checkpoint()
    assert words(storage, number) == {"a", "b"}
    assert len(data_files(storage) - theirs) == 5


def test_while_a_released_checkpoint_cannot_be_read_nothing_that_it_may_need_is_deleted(storage: Mortal) -> None:
    """It may be of a newer release, which can still restore it."""
    run = Generation(storage, num_retained=2)
    older = run.checkpoint("ab")
    newer = run.checkpoint("c", "b")
    Generation(storage, location(storage, newer))
    path = PATHS.metadata(older)
    data = storage.read(path)
    storage.write(path, data[:4] + (FORMAT_VERSION + 1).to_bytes(2, "big") + data[6:])
    claimed = Generation(storage, location(storage, newer), "claim")
    claimed.checkpoint("d", "ac")
    storage.write(path, data)
    assert words(storage, older) == {"a", "b"}


def test_a_driver_that_was_taken_over_meanwhile_deletes_nothing(storage: Mortal) -> None:
    run = Generation(storage)
    run.checkpoint("ab")
    _die_after_the_entry_of(run, "c", "b")
    before = data_files(storage)
    stalled = take_the_job_over(storage)
    take_the_job_over(storage)
    with pytest.raises(FencedError):
        recover_registry(CheckpointCoordinator(interval=1.0, subtasks=[]), stalled)
    assert data_files(storage) == before
