"""Bytes that were read, as a bar shows them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from strandline.admin.reading import Reading, bytes_in
from strandline.progress import byte_bar


def test_files_that_are_being_read_count_and_nothing_counts_twice(tmp_path: Path) -> None:
    reading = Reading(100)
    reading.read(1, 10)
    reading.read(1, 20)
    reading.begin(2, lambda: bytes_in(tmp_path / "2"))
    assert reading.so_far() == (30, 100)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / ".part").write_bytes(b"x" * 20)
    assert reading.so_far() == (50, 100)
    (tmp_path / "2" / ".part").unlink()
    assert reading.so_far() == (50, 100)  # a bar does not go back
    reading.end(1, 60)
    reading.end(2, 60)
    assert reading.so_far() == (100, 100)


def test_without_a_terminal_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with byte_bar("restoring", lambda: (1, 2), after=0.0):
        pass
    assert written.getvalue() == ""
