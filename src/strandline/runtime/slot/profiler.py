"""Samples the Python threads of a slot on request, for a flame graph. It costs nothing while nobody asks."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from strandline.errors import StrandlineError
from strandline.runtime.protocol.profiles import MOST_HZ, MOST_SECONDS, Folded, Profile
from strandline.runtime.slot import operator_slot

MOST_STACKS: Final = 10_000
"""How many distinct stacks are kept. Further ones count as `OTHER`."""
MOST_FRAMES: Final = 200
"""How many frames of a stack are kept, beginning at its root. Recursion can be deeper."""
OTHER: Final = "other stacks"
IDLE: Final = "idle"
"""The stack of a sample in which no thread worked on an operator."""

_OPERATOR_WORK: Final = operator_slot.__file__
"""Threads work on an operator while a function of this file is on their stack."""


class Profiler:
    """Takes one profile at a time."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def profile(self, request: Profile) -> Folded:
        """Sample for as long as the request says. Raises `StrandlineError` if another profile is being taken."""
        if not 0 < request.seconds <= MOST_SECONDS or not 1 <= request.hz <= MOST_HZ:
            raise StrandlineError(
                f"a profile of {request.seconds:g} s with {request.hz:g} samples per second cannot be taken; allowed: "
                f"up to {MOST_SECONDS:g} s, and 1 to {MOST_HZ:g} samples per second"
            )
        if not self._busy.acquire(blocking=False):
            raise StrandlineError("a profile of this slot is being taken already; try again when it is done")
        try:
            return _sample(request)
        finally:
            self._busy.release()


def _sample(request: Profile) -> Folded:
    stacks: Counter[str] = Counter()
    names: dict[CodeType, str] = {}
    began = time.monotonic()
    samples = 0
    while (now := time.monotonic() - began) < request.seconds:
        samples += 1
        for stack in _stacks_now(request.all_threads, names):
            stacks[stack if stack in stacks or len(stacks) < MOST_STACKS else OTHER] += 1
        # The next sample is due by the clock, so that the time of sampling does not add up.
        time.sleep(max(0.0, samples / request.hz - now))
    return Folded(time.monotonic() - began, samples, dict(stacks))


def _stacks_now(all_threads: bool, names: dict[CodeType, str]) -> list[str]:
    """The folded stacks of the threads that count; `IDLE` if there is none."""
    own = threading.get_ident()
    found = []
    # Private Python API in name only: `sys._current_frames` is documented.
    for ident, frame in sys._current_frames().items():
        if ident != own and (stack := _folded(frame, all_threads, names)):
            found.append(stack)
    return found or [IDLE]


def _folded(frame: FrameType | None, all_threads: bool, names: dict[CodeType, str]) -> str:
    """A stack, root first. Of a thread that works on an operator, what is above that work is left out."""
    codes: list[CodeType] = []
    root = 0
    while frame is not None:
        codes.append(frame.f_code)
        if frame.f_code.co_filename == _OPERATOR_WORK:
            root = len(codes)
        frame = frame.f_back
    if not root and not all_threads:
        return ""
    kept = codes[: root or len(codes)][::-1][:MOST_FRAMES]
    return ";".join(names.get(code) or names.setdefault(code, _name(code)) for code in kept)


def _name(code: CodeType) -> str:
    """A frame as flame graphs show it: `Visits.process (app.py:12)`."""
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})".replace(";", ",")
