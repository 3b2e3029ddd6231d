"""What the commands say in words: durations, rates, moments, and names that came from elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from strandline.observe.words import duration
from strandline.redaction import without_controls

LONGEST_NAME: Final = 120


def one_line(text: str, longest: int = LONGEST_NAME) -> str:
    """A name or message from elsewhere, as one line of bounded length that a terminal can show."""
    shown = without_controls(text[: longest + 1].replace("\t", " ").replace("\n", " "))
    shown = shown.encode("utf-8", "backslashreplace").decode()
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def lasted(milliseconds: float) -> str:
    """A duration in milliseconds, in words."""
    return duration(milliseconds / 1000)


def rate(per_second: float) -> str:
    """A rate: `9,000/s`; a slow one with a decimal."""
    return f"{per_second:,.1f}/s" if 0 < per_second < 10 else f"{per_second:,.0f}/s"


def moment(milliseconds: float) -> str:
    """A moment of UTC. Beyond the years that Python knows, the number itself."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds:.0f} ms after 1970"


def plural(count: int, word: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
