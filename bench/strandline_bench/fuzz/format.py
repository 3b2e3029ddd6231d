"""One format that is fuzzed: good samples, how its checksums are made, and everything that reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from strandline.state.coding.ddl import parse_schema
from strandline.state.descriptors import StateDescriptor
from strandline_bench.fuzz.mutation import mutated_bytes, mutated_tree

STATES = (
    StateDescriptor("total", "value", "n long"),
    StateDescriptor("seen", "map", parse_schema("t timestamp, s string").json(), key_schema="k string"),
)
MODES = ("plain", "sealed", "sealed values")
"""Bytes of the file; bytes inside it with right checksums; values inside it with right checksums."""


class Format(ABC):
    """One format. `read` is everything that may happen to a file of it; only a `StrandlineError` may come out."""

    name: str
    weight: float = 1.0
    """How many of the inputs are of this format, beside the weights of the others."""

    def __init__(self, folder: Path) -> None:
        """`folder` is empty, and the format's own."""
        self.folder = folder
        self.samples: tuple[bytes, ...] = ()

    def mutated(self, random: Random, mode: str) -> bytes:
        """A mutated sample. A format without checksums knows the mode `plain` only."""
        data = random.choice(self.samples)
        others = self.samples
        if mode == "sealed values":
            changed = self.sealed_values(random, data)
            if changed is not None:
                return changed
        elif mode == "sealed":
            changed = self.sealed(random, data, others)
            if changed is not None:
                return changed
        return mutated_bytes(random, data, others)

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes | None:
        """`data` with changed bytes and right checksums; None if the format has none."""
        return None

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        """`data` with changed values and right checksums; None if its content is not a tree of values."""
        return None

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Read a file with this content, and use what it holds."""


def sealed_tree(random: Random, body: bytes, seal: Callable[[bytes], bytes]) -> bytes | None:
    """Msgpack `body` with changed values, sealed; None if the values cannot be encoded."""
    tree: Any = mutated_tree(random, msgspec.msgpack.decode(body))
    try:
        return seal(msgspec.msgpack.encode(tree))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
