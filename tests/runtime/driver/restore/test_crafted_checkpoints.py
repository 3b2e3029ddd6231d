"""A crafted checkpoint folder: nothing outside the job's folder is read or deleted because of it."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from strandline.admin.garbage import find_garbage
from strandline.admin.verification import Verification
from strandline.checkpoint.coordinator import CheckpointCoordinator
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, StateFile, SubtaskState, encode
from strandline.errors import CheckpointError, MetadataError
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.runtime.driver.restore.registry_recovery import recover_registry
from strandline.runtime.driver.restore.takeover import Claim
from strandline.storage import JobPaths
from strandline.storage.local import LocalStorage
from tests.factories import checkpoint_metadata

PATHS = JobPaths("visits")
SECRET = b"the user's own file"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user in a folder that looks like a job's, but is not the job's."""
    file = tmp_path / "home" / "visits" / "shared" / "diary"
    file.parent.mkdir(parents=True)
    file.write_bytes(SECRET)
    return file


@pytest.fixture
def storage(tmp_path: Path, victim: Path) -> LocalStorage:
    """A job whose checkpoint 1 was dropped and whose checkpoint 2 is retained; both are crafted to name the victim."""
    storage = LocalStorage(str(tmp_path / "checkpoints"))
    store = JobLogStore(storage, PATHS)
    store.take_over()
    store.complete(1, PATHS.metadata(1), 1, (1,), ())
    store.complete(2, PATHS.metadata(2), 2, (2,), (1,))
    for number in (1, 2):
        storage.write(PATHS.metadata(number), encode(crafted(number, f"{tmp_path / 'home'}//visits/shared/diary")))
    return storage


def crafted(number: int, path: str) -> CheckpointMetadata:
    handle = FileHandle(path, len(SECRET), f"crc32:{zlib.crc32(SECRET):08x}")
    files = (StateFile("state.full", "i", False, handle),)
    state = SubtaskState("count", 0, 0, 128, "heap", False, files)
    return checkpoint_metadata(number, operators=("count",), subtasks=(state,))


def test_a_takeover_deletes_nothing_that_a_crafted_dropped_checkpoint_names(
    storage: LocalStorage, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobLogStore(storage, PATHS)
    store.load()
    claim = Claim(storage, PATHS, store, {}, None)
    recover_registry(CheckpointCoordinator(interval=1.0, subtasks=[("count", 0)]), claim)
    assert victim.read_bytes() == SECRET
    assert "leads elsewhere" in caplog.text


def test_a_storage_that_the_job_names_is_trusted(storage: LocalStorage, victim: Path) -> None:
    trusted = str(victim.parents[2])
    assert read_metadata(storage, PATHS, 2, (trusted,)).checkpoint_id == 2
    with pytest.raises(MetadataError, match="leads elsewhere"):
        read_metadata(storage, PATHS, 2, ())


def test_verify_reports_a_path_outside_and_does_not_read_the_file(storage: LocalStorage, victim: Path) -> None:
    verification = Verification.of_job(storage, "visits")
    assert verification.handles == set()
    (found,) = verification.run()
    assert [damage.path for damage in found.damage] == [PATHS.metadata(2)]
    assert "leads elsewhere" in found.damage[0].problem
    (found,) = Verification.of_job(storage, "visits", others=(str(victim.parents[2]),)).run()
    assert (found.files, found.damage) == (1, ())


def test_gc_does_not_look_into_a_storage_that_only_a_checkpoint_names(storage: LocalStorage, victim: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was deleted"):
        find_garbage(storage, "visits", now=1e12, min_age=0, take_over=True)
    garbage = find_garbage(storage, "visits", now=1e12, min_age=0, take_over=True, others=(str(victim.parents[2]),))
    assert [file.path for file in garbage.files.orphans] == [PATHS.metadata(1)]
