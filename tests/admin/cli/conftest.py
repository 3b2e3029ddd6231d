"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Entries of runs of this test's own."""
    place = tmp_path / "registry"
    place.mkdir()
    monkeypatch.setenv("STRANDLINE_RUNS_DIR", str(place))
    monkeypatch.delenv("STRANDLINE_TOKEN", raising=False)
    return place
