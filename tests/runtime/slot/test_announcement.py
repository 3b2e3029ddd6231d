"""What a slot says while it starts."""

from __future__ import annotations

import os
import threading

from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.slot_calls import SlotFailed
from strandline.runtime.slot.process import Announcement


def test_the_sign_of_life_does_not_wait_for_the_disk() -> None:
    reading, writing = os.pipe()
    disk, asked = threading.Event(), threading.Event()
    answers = iter([7])

    def so_far() -> int:
        for answer in answers:
            return answer
        asked.set()
        disk.wait(60)  # it is saturated
        return 9

    ready = Announcement(os.fdopen(writing, "wb"))
    ready.restores(so_far)
    with os.fdopen(reading, "rb") as lines:
        while not asked.is_set():
            lines.readline()
        assert [lines.readline() for _ in range(2)] == [b"7\n", b"7\n"]
        disk.set()
        while lines.readline() != b"9\n":
            pass
        ready.tell(SlotFailed(Failure("StrandlineError", "enough")))
        while b"enough" not in lines.readline():
            pass
