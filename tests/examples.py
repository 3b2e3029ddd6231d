"""How many examples Hypothesis tries: all, some for a quick check, or many for a long search."""

from __future__ import annotations

import os

PERCENT = int(os.environ.get("STRANDLINE_EXAMPLES", "100"))
"""`make check` sets 30; set 1000 to look for something rare."""


def examples(count: int) -> int:
    """`max_examples` of a test that tries `count` in a whole run."""
    return max(5, count * PERCENT // 100)
