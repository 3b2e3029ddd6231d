"""What is asked of a slot that samples its Python threads, and what it answers."""

from __future__ import annotations

from typing import Final

import msgspec

from strandline.runtime.protocol.figures import Facts

MOST_SECONDS: Final = 30.0
"""The longest time for which a slot samples."""
MOST_HZ: Final = 200.0
"""The most samples per second. Above this, sampling itself would show."""


class Profile(msgspec.Struct, frozen=True):
    """Asks a slot to sample its threads."""

    seconds: float
    hz: float = 100.0
    all_threads: bool = False
    """Whether threads count that do not work on an operator: those that answer calls, upload or wait."""


class Folded(Facts, frozen=True):
    """Sampled stacks of a slot's Python threads.

    Attributes:
        seconds: For how long was sampled.
        samples: How many samples were taken.
        stacks: How often each stack was seen, root first, frames joined by `;`, as flame graph tools read it. A sample
            in which no thread worked on an operator counts as the stack `idle`.
    """

    seconds: float
    samples: int
    stacks: dict[str, int]
