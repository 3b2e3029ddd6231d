"""The description of a stateful step that a checkpoint stores, so that a restore notices a changed step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec

StepKind = Literal["process", "spark", "arrow", "aggregate", "window", "session", "deduplicate", "join"]
"""`process`, `arrow` and `spark` run user code: a `KeyedProcessor`, an `ArrowProcessor`, a `StatefulProcessor`."""

Number = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)]
Column: TypeAlias = tuple[str, str]
"""The name of a column, and its type in Spark's notation without nullability and comments."""


class ShownAggregate(msgspec.Struct, frozen=True, array_like=True):
    """An aggregate under the name that the job gives it. A restore does not compare it: names do not change state."""

    name: str
    function: str
    """`count`, `sum` and so on; `user` for an `ArrowAggregate`."""
    column: str | None = None
    type: str = ""
    """The type of the column in Spark's notation."""
    ignore_nulls: bool = False


class StepDescription(msgspec.Struct, frozen=True, array_like=True):
    """A stateful step as it was when the checkpoint was taken.

    Comparing is all that a restore does with the texts. It never parses or evaluates them; the state reader parses
    types and names. Fields may be added at the
    end with a default, but never moved or removed.
    """

    operator: str
    """The uid of the step."""
    kind: StepKind
    keys: tuple[Column, ...]
    """The key columns in their order; those of the left side for a join."""
    times: tuple[Column, ...] = ()
    """The columns by which state is kept; both sides' for a join. Empty if state does not depend on event time."""
    parameters: dict[str, Number | str | None] = {}
    """The specification. A name that ends in `_ms` is a duration in milliseconds; None stands for "no limit"."""
    columns: dict[str, tuple[Column, ...]] = {}
    """Named lists of columns, such as the accumulators of an aggregation or the sides of a join."""
    results: tuple[ShownAggregate, ...] = ()
    """The aggregates of the step, for readers of its state."""

    def line(self) -> str:
        """The description in one line for people, such as `visits: window by user string, time ts timestamp, …`."""
        parts = [f"{self.operator}: {self.kind} by {columns_text(self.keys)}"]
        if self.times:
            parts.append(f"time {columns_text(self.times)}")
        parts += [f"{parameter_label(name)} {parameter_text(name, value)}" for name, value in self.parameters.items()]
        parts += [f"{name} ({columns_text(columns)})" for name, columns in self.columns.items()]
        return printable("; ".join(parts))


def columns_text(columns: Iterable[Column]) -> str:
    """Columns for people: `user string, n int`."""
    return ", ".join(f"{name} {kind}".rstrip() for name, kind in columns)


def parameter_label(name: str) -> str:
    """The name of a parameter for people: `allowed lateness` for `allowed_lateness_ms`."""
    return name.removesuffix("_ms").replace("_", " ")


def parameter_text(name: str, value: int | str | None) -> str:
    """The value of a parameter for people: `1 min` for a `size_ms` of 60000."""
    if value is None:
        return "none"
    return duration_text(value) if name.endswith("_ms") and isinstance(value, int) else str(value)


def duration_text(milliseconds: int) -> str:
    """A duration in the largest unit that fits a whole number of times: `90 s`, `2 h`."""
    for unit, name in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if milliseconds and milliseconds % unit == 0:
            return f"{milliseconds // unit} {name}"
    return f"{milliseconds} ms" if milliseconds else "0"


def printable(text: str) -> str:
    """The text without control characters. A crafted checkpoint must not move the cursor of a terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)
