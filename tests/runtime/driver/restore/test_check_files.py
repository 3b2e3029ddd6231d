"""A takeover checks that the files of a checkpoint are there, and believes no listing that may be late."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    SourceLog,
    SourceLogPiece,
    SourcePosition,
    StateFile,
    SubtaskState,
)
from strandline.errors import DamagedFileError
from strandline.runtime.driver.restore.candidates import check_files
from strandline.storage import Storage, open_storage
from tests.factories import checkpoint_metadata

PATH = "visits/shared/1.sst"


def checkpoint(size: int) -> CheckpointMetadata:
    file = StateFile("1.sst", "id", True, FileHandle(PATH, size, "crc32:0"), None)
    state = SubtaskState("sums", 0, 0, 128, "rocksdb", True, (file,))
    return checkpoint_metadata(1, subtasks=(state,))


@pytest.fixture
def late(tmp_path: Path) -> Storage:
    """Its listings show the state of an hour ago."""
    options = {"stale_folder": f"{tmp_path}/stale", "stale_seconds": "3600", "stale_pattern": "^list"}
    return open_storage(f"faulty+file://{tmp_path}/durable", options)


def test_a_file_that_is_not_listed_yet_is_not_missing(late: Storage) -> None:
    late.write(PATH, b"12345")
    assert list(late.list()) == []
    check_files(late, checkpoint(5))


def test_a_piece_of_a_source_log_that_is_not_listed_yet_is_not_missing(late: Storage, tmp_path: Path) -> None:
    log = SourceLog(0, (("0", 5),), (SourceLogPiece("id", 5, FileHandle(PATH, 5, "crc32:0")),))
    metadata = checkpoint_metadata(1, source=SourcePosition(0, {}, (log,)))
    late.write(PATH, b"12345")
    check_files(late, metadata)
    open_storage(f"{tmp_path}/durable").delete([PATH])
    with pytest.raises(DamagedFileError, match="is missing"):
        check_files(late, metadata)


def test_a_file_that_is_missing_or_too_short_is_damage(late: Storage, tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="is missing"):
        check_files(late, checkpoint(5))
    exact = open_storage(f"{tmp_path}/durable")
    exact.write(PATH, b"123")
    with pytest.raises(DamagedFileError, match="has 3 bytes instead of 5"):
        check_files(exact, checkpoint(5))
