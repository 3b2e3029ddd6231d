"""States that fold what is added to them into one value per key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strandline.errors import StrandlineError
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.states import ValueState


class ReducingState:
    """One value per key: all values that were added, reduced two by two."""

    __slots__ = ("_reduce", "_value")

    def __init__(self, value: ValueState, reduce: Callable[[Any, Any], Any]) -> None:
        self._value = value
        self._reduce = reduce

    @property
    def descriptor(self) -> StateDescriptor:
        return self._value.descriptor

    def add(self, value: Any) -> None:
        """Reduce the key's value and `value` to the new one; the first value is taken as it is."""
        held = self._value
        held.update(self._reduce(held.get(), value) if held.exists() else value)

    def get(self) -> Any:
        """The reduced value, None where nothing was added."""
        return self._value.get()

    def clear(self) -> None:
        """Forget what was added."""
        self._value.clear()

    def exists(self) -> bool:
        """Whether anything was added."""
        return self._value.exists()


class AggregatingState:
    """One accumulator per key; it may be of another type than what is added and than what comes out."""

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
        """Add `value` to the key's accumulator, a new one where there is none."""
        held = self._value
        held.update(self._add(held.get() if held.exists() else self._create(), value))

    def merge(self, accumulator: Any) -> None:
        """Merge another accumulator into the key's; needs the state to be declared with `merge=`."""
        held = self._value
        if self._merge is None:
            raise StrandlineError(
                f"state {self.descriptor.name!r} cannot merge: declare it with merge=, a function of two accumulators"
            )
        held.update(self._merge(held.get(), accumulator) if held.exists() else accumulator)

    def get(self) -> Any:
        """The result of the key's accumulator, None where nothing was added."""
        held = self._value
        return self._result(held.get()) if held.exists() else None

    def clear(self) -> None:
        """Forget what was added."""
        self._value.clear()

    def exists(self) -> bool:
        """Whether anything was added."""
        return self._value.exists()
