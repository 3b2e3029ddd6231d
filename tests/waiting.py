"""Waiting for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float = 30.0, what: str = "the condition") -> T:
    """Return the condition's value as soon as it is true; fail if it is not within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)  # between two looks, not instead of one
    raise AssertionError(f"{what} did not come within {seconds} s")
