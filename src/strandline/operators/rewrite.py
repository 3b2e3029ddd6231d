"""Rewriting of stored entries, so that the state of a changed step is what the step itself would have written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from strandline.errors import DamagedFileError, SchemaError
from strandline.state.backends.base import StateBackend
from strandline.state.chunks import chunked
from strandline.state.coding.keys import state_prefix
from strandline.state.key_ranges import prefix_end

ConvertMany = Callable[[list[bytes]], list[bytes]]


class Rewrite(ABC):
    """Rewrites the entries of some states of an operator."""

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """The states whose declaration may differ from the checkpoint's, because this rewrites their entries."""

    @abstractmethod
    def apply(self, backend: StateBackend, key_groups: range) -> None:
        """Rewrite the entries of `key_groups`. Called once, when all old entries are in the backend, and no new one."""


@dataclass(frozen=True, slots=True)
class ConvertedValues(Rewrite):
    """Converts the value of every entry of a state. Keys stay."""

    state: str
    convert: ConvertMany

    @property
    def states(self) -> tuple[str, ...]:
        return (self.state,)

    def apply(self, backend: StateBackend, key_groups: range) -> None:
        """Convert all values, chunk by chunk."""
        for start, end in state_ranges(key_groups, self.state):
            for keys, values in chunked(backend.scan(start, end)):
                try:
                    backend.apply(keys, self.convert(values))
                except (msgspec.MsgspecError, SchemaError, ValueError, ArithmeticError) as error:
                    raise DamagedFileError(
                        f"state {self.state!r}: a stored value does not have the columns that the checkpoint "
                        f"declares: {error}. Restore from another checkpoint."
                    ) from error


def state_ranges(key_groups: range, state: str) -> Iterator[tuple[bytes, bytes]]:
    """The key ranges of a state, one for each key group."""
    for group in key_groups:
        prefix = state_prefix(group, state)
        end = prefix_end(prefix)
        assert end is not None  # the prefix ends with a zero byte, so there is a next prefix
        yield prefix, end
