"""What is wrong with the rows of a target: which are missing, which should not be there, and what was done before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Row = tuple[str, int]

_NAMED = 10
"""How many rows of a kind are named."""
_STEPS = 12
"""How many of the last steps are told."""


def check_rows(found: Iterable[Row], expected: Iterable[Row], steps: Sequence[str] = ()) -> None:
    """Raise `AssertionError` unless a target has exactly the expected rows, in any order.

    The text names the rows that are missing, that should not be there, and that are there too often, and the last of
    the `steps` that were taken.
    """
    there, wanted = Counter(found), Counter(expected)
    missing = wanted - there
    extra = Counter({row: times for row, times in there.items() if row not in wanted})
    often = {row: times for row, times in there.items() if 0 < wanted[row] < times}
    wrong = [
        _named("missing", missing, [_times(row, times) for row, times in missing.items()]),
        _named("there and should not be", extra, [_times(row, times) for row, times in extra.items()]),
        _named("there too often", often, [f"{row} {times} times, not {wanted[row]}" for row, times in often.items()]),
    ]
    if any(wrong):
        raise AssertionError(
            f"the target has {there.total()} rows and should have {wanted.total()}: "
            + "; ".join(filter(None, wrong))
            + after(steps)
        )


def after(steps: Sequence[str]) -> str:
    """The last steps, for the end of a message."""
    if not steps:
        return ""
    first = max(0, len(steps) - _STEPS)
    told = [f"  {number}. {step}" for number, step in enumerate(steps[first:], first + 1)]
    return "\n".join(["\nafter these steps:", *(["  ..."] if first else []), *told])


def _named(what: str, rows: dict[Row, int], texts: Sequence[str]) -> str:
    if not rows:
        return ""
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return (
        f"{len(texts)} {'row is' if len(texts) == 1 else 'rows are'} {what}: {', '.join(sorted(texts)[:_NAMED])}{more}"
    )


def _times(row: Row, times: int) -> str:
    return str(row) if times == 1 else f"{row} {times} times"
