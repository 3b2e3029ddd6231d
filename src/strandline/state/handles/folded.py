"""Reducing and aggregating states: they fold all added values into one value per key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strandline.errors import StrandlineError
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.states import ValueState


class ReducingState:
    """One value per key: all added values, reduced pair by pair."""

    __slots__ = ("_reduce", "_value")

    def __init__(self, value: ValueState, reduce: Callable[[Any, Any], Any]) -> None:
        self._value = value
        self._reduce = reduce

    @property
    def descriptor(self) -> StateDescriptor:
        return self._value.descriptor

    def add(self, value: Any) -> None:
        """Replace the key's value by the reduction of it and `value`. The first value is stored unchanged."""
        held = self._value
        held.update(self._reduce(held.get(), value) if held.exists() else value)

    def get(self) -> Any:
        """The reduced value, or None if nothing was added."""
        return self._value.get()

    def clear(self) -> None:
        """Remove the key's value."""
        self._value.clear()

    def exists(self) -> bool:
        """Whether anything was added."""
        return self._value.exists()


class AggregatingState:
    """One accumulator per key. Its type may differ from the type of the added values and of the result."""

    __slots__ = ("_add", "_create", "_merge", "_result", "_value")

    def __init__(
        self,
        value: ValueState,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        result: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any] | None,
    ) -> None:
        self._value = value
        self._create = create
        self._add = add
        self._result = result
        self._merge = merge

    @property
    def descriptor(self) -> StateDescriptor:
        return self._value.descriptor

    def add(self, value: Any) -> None:
        """Add `value` to the key's accumulator, which is created if there is none."""
        held = self._value
        held.update(self._add(held.get() if held.exists() else self._create(), value))

    def merge(self, accumulator: Any) -> None:
        """Merge another accumulator into the key's. The state must be declared with `merge=`."""
        held = self._value
        if self._merge is None:
            raise StrandlineError(
                f"state {self.descriptor.name!r} cannot merge: declare it with merge=, a function of two accumulators"
            )
        held.update(self._merge(held.get(), accumulator) if held.exists() else accumulator)

    def get(self) -> Any:
        """The result of the key's accumulator, or None if nothing was added."""
        held = self._value
        return self._result(held.get()) if held.exists() else None

    def clear(self) -> None:
        """Remove the key's value."""
        self._value.clear()

    def exists(self) -> bool:
        """Whether anything was added."""
        return self._value.exists()
