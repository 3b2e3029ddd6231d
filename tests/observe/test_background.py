"""Work in the background: what fails is logged, and not again and again."""

from __future__ import annotations

import pytest

from strandline.observe.background import Background
from tests.waiting import wait_until


def test_a_row_of_failures_is_logged_once_also_if_there_is_nothing_to_do_in_between(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = ["fail", "idle", "fail", "idle", "fail", "work", "idle", "fail"]

    def act(last: bool) -> bool:
        look = left.pop(0) if left else "idle"
        if look == "fail":
            raise OSError("the disk is full")
        return look == "work"

    background = Background("test-background", "the work", act, seconds=0.001)
    wait_until(lambda: not left, what="the looks")
    assert background.close()
    assert caplog.text.count("the work failed and is tried again") == 2
