"""The slot that runs an operator in a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strandline.operators.base import Operator
from tests.operators.mini_slot import MiniSlot


@pytest.fixture
def slot(tmp_path: Path) -> Callable[[Operator], MiniSlot]:
    return lambda operator: MiniSlot(operator, tmp_path)
