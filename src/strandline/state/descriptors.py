"""The descriptor of a state: what a checkpoint stores about it, so that a restore can read its entries."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from strandline.errors import JobDefinitionError

StateKind = Literal[
    "value", "list", "map", "reducing", "aggregating", "aggregate", "timers", "columns", "rows", "index"
]
"""`columns`: one row per key, as Arrow columns. `rows`: the rows of a join per key. `index`: the times at which entries
of other states are due."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class StateDescriptor(msgspec.Struct, frozen=True):
    """One declared state of an operator. Checkpoint metadata stores it unchanged.

    The name is part of every stored key. Raises `JobDefinitionError` unless it is 1 to 64 letters, digits, `_`, `-` or
    `.`.
    """

    name: str
    kind: StateKind
    schema: str
    """Spark DDL or the JSON of a Spark struct."""
    key_schema: str | None = None
    """The schema of the keys of a map state; None for other kinds."""
    ttl_ms: int | None = None
    """The time to live of a value. If it is set, every stored value begins with its expiry time."""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise JobDefinitionError(
                f"{self.name!r} cannot be the name of a state: use 1 to 64 of the characters A-Z a-z 0-9 _ - ."
            )
        if (self.key_schema is not None) != (self.kind == "map"):
            raise JobDefinitionError(f"state {self.name!r}: a map state needs a key schema, and other states have none")
