"""The descriptor of a state: what a checkpoint must know of it to be read again."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from strandline.errors import JobDefinitionError

StateKind = Literal[
    "value", "list", "map", "reducing", "aggregating", "aggregate", "timers", "columns", "rows", "index"
]
"""`columns`: one row per key, as Arrow columns; `rows`: a join's rows per key; `index`: when entries of others end."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class StateDescriptor(msgspec.Struct, frozen=True):
    """One declared state of an operator; goes into checkpoint metadata as it is.

    Raises `JobDefinitionError` for a name that is not 1 to 64 letters, digits, `_`, `-` or `.`: the name is part of
    every stored key.
    """

    name: str
    kind: StateKind
    schema: str
    """Spark DDL or the JSON of a Spark struct."""
    key_schema: str | None = None
    """The schema of a map's keys; None for other kinds."""
    ttl_ms: int | None = None
    """How long a value lives; where it is set, every stored value begins with its expiry."""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise JobDefinitionError(
                f"{self.name!r} is no name for a state: use 1 to 64 of the characters A-Z a-z 0-9 _ - ."
            )
        if (self.key_schema is not None) != (self.kind == "map"):
            raise JobDefinitionError(f"state {self.name!r}: a key schema belongs to a map state, and only to one")
