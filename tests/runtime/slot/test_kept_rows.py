"""Rows that a slot keeps are given up completely, whatever has failed before."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.runtime.slot.kept_rows import KeptRows, MemoryLimit

MEMORY = 200_000
ROWS = pa.record_batch({"x": pa.array(["y" * 1000] * 100)})


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB: every write after that fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_rows_that_no_longer_fit_on_disk_leave_neither_a_file_nor_taken_memory(tmp_path: Path) -> None:
    memory = MemoryLimit(MEMORY)
    rows = KeptRows(ROWS.schema, memory, tmp_path / "rows.arrow")
    rows.append(ROWS)
    with pytest.raises(OSError, match="too large"):
        rows.append(ROWS)
    rows.discard()
    rows.discard()
    assert list(tmp_path.iterdir()) == []
    assert memory.take(MEMORY)
