"""Figures in words: sizes, times and shares, the same wherever a person reads them."""

from __future__ import annotations

_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def size(count: float) -> str:
    """A number of bytes: `1.5 MB`."""
    for unit, factor in _UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A time in its two largest units: `40 ms`, `1.5 s`, `12 s`, `3 min 20 s`, `5 h`, `2 d 3 h`."""
    if round(seconds * 1000) < 1000:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for name, unit, part_name, part, below in (
        ("min", 60, "s", 1, 3600),
        ("h", 3600, "min", 60, 48 * 3600),
        ("d", 86400, "h", 3600, None),
    ):
        if below is None or whole < below:
            rest = whole % unit // part
            return f"{whole // unit} {name}" + (f" {rest} {part_name}" if rest else "")
    raise AssertionError("unreachable")


def percent(share: float) -> str:
    """A share of 1: `42 %`."""
    return f"{share * 100:.0f} %"
