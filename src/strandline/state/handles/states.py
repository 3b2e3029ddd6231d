"""The handles through which user code reads and writes the state of the current key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Self

from pyspark.sql.types import StructType

from strandline.errors import SchemaError, StrandlineError
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.keys import EncodedKeys
from strandline.state.descriptors import StateDescriptor

LIST_ENTRY_BYTES: Final = 64 << 10
"""The size of a stored list entry. A long list is split into entries, so that no stored value becomes large."""


class KeyScope:
    """The current key of the handles of one operator subtask.

    The operator loads the keys of a chunk of rows, which reads all their value states at once. Then it moves `index`
    from key to key. While no key is current, `index` is -1 and the handles refuse access.
    """

    __slots__ = ("_handles", "batch_id", "changes", "error_class", "index", "keys", "now_ms", "unflushed", "values")

    def __init__(self) -> None:
        self.index = -1
        self.error_class: type[StrandlineError] = StrandlineError
        """The class of the error for a handle that is used while no key is current."""
        self.changes: ChangeSet | None = None
        self.batch_id = 0
        self.now_ms = 0
        self.values: Sequence[tuple[Any, ...]] = ()
        """The loaded keys as tuples of Python values."""
        self.unflushed: list[ListState] = []
        self._handles: list[ValueState | ListState | MapState] = []
        self.keys: EncodedKeys | None = None

    def add(self, handle: ValueState | ListState | MapState) -> None:
        """Attach `handle` to this scope."""
        self._handles.append(handle)

    def begin(self, changes: ChangeSet, batch_id: int, now_ms: int = 0) -> None:
        """Start a batch. Handles read and write through `changes`; values expire at `now_ms`."""
        self.index = -1
        self.changes = changes
        self.batch_id = batch_id
        self.now_ms = now_ms
        self.unflushed.clear()
        for handle in self._handles:
            handle._begin()

    def load(self, keys: EncodedKeys, values: Sequence[tuple[Any, ...]] = ()) -> int:
        """Load the keys that `index` selects from, and read their value states in one call. Returns the bytes read."""
        self.index = -1
        self.keys = keys
        self.values = values
        order: list[int] | None = None
        size = 0
        for handle in self._handles:
            handle._forget()
            if isinstance(handle, ValueState):
                order = keys.order().tolist() if order is None else order
                size += handle._prefetch(keys, order)
        return size

    def flush(self) -> None:
        """Write the collected values of list states. The operator calls it after each key."""
        for handle in self.unflushed:
            handle._flush()
        self.unflushed.clear()

    def end(self) -> None:
        """End the batch. No key is current any more."""
        self.index = -1
        self.changes = None
        self.keys = None
        self.values = ()
        self.unflushed.clear()
        for handle in self._handles:
            handle._forget()

    def stored_keys(self, state: str) -> list[bytes]:
        """The stored keys of `state` for the loaded keys."""
        return [] if self.keys is None else self.keys.stored(state)

    def writable(self, descriptor: StateDescriptor) -> ChangeSet:
        """The change set. Raises `StrandlineError` if no key is current."""
        if self.changes is None or self.index < 0:
            raise self.outside_of_key(descriptor)
        return self.changes

    def outside_of_key(self, descriptor: StateDescriptor) -> StrandlineError:
        """The error of a state that is used while no key is current."""
        return self.error_class(
            f"state {descriptor.name!r} was used outside of process(): a state belongs to the key that is being "
            "processed; do not use it in open(), in close() or after the batch"
        )


class ValueState:
    """One row per key."""

    __slots__ = ("_codec", "_decode", "_encode", "_keys", "_known", "_scope", "descriptor")

    def __init__(self, descriptor: StateDescriptor, schema: StructType, scope: KeyScope, where: str) -> None:
        self.descriptor = descriptor
        self._codec = ValueCodec(schema, where)
        self._encode = self._codec.encode
        self._decode = self._codec.decode
        self._scope = scope
        self._keys: list[bytes] = []
        self._known: dict[bytes, bytes | None] = {}
        scope.add(self)

    def as_rows(self) -> Self:
        """Accept and return rows of one column only as tuples of one, never as plain values."""
        self._codec.as_rows()
        return self

    def get(self) -> Any:
        """The key's value: a tuple, or the plain value if the state has one column; None if there is no value."""
        at = self._scope.index
        if at < 0:
            raise self._scope.outside_of_key(self.descriptor)
        data = self._known[self._keys[at]]
        return None if data is None else self._decode(data)

    def update(self, value: Any) -> None:
        """Set the key's value; None clears it. Raises `SchemaError`, and changes nothing, if the value does not fit."""
        scope = self._scope
        if scope.index < 0 or scope.changes is None:
            raise self._scope.outside_of_key(self.descriptor)
        data = None if value is None else self._encode(value)
        key = self._keys[scope.index]
        self._known[key] = data
        scope.changes.put(key, data)

    def clear(self) -> None:
        """Remove the key's value."""
        self.update(None)

    def exists(self) -> bool:
        """Whether the key has a value."""
        at = self._scope.index
        if at < 0:
            raise self._scope.outside_of_key(self.descriptor)
        return self._known[self._keys[at]] is not None

    def _begin(self) -> None:
        pass

    def _forget(self) -> None:
        self._keys = []
        self._known = {}

    def _prefetch(self, keys: EncodedKeys, order: list[int]) -> int:
        changes = self._scope.changes
        assert changes is not None
        self._keys = stored = keys.stored(self.descriptor.name)
        ascending = [stored[at] for at in order]
        values = changes.get_many(ascending)
        self._known = dict(zip(ascending, values, strict=True))
        return sum(map(len, filter(None, values)))


class _Entries:
    """The common part of list and map states: entries below the prefix of the key."""

    __slots__ = ("_keys", "_scope", "descriptor")

    def __init__(self, descriptor: StateDescriptor, scope: KeyScope) -> None:
        self.descriptor = descriptor
        self._scope = scope
        self._keys: list[bytes] | None = None

    def _prefix(self) -> bytes:
        at = self._scope.index
        if at < 0:
            raise self._scope.outside_of_key(self.descriptor)
        if self._keys is None:
            self._keys = self._scope.stored_keys(self.descriptor.name)
        return self._keys[at]

    def _scan(self) -> Iterator[tuple[bytes, bytes]]:
        return self._scope.writable(self.descriptor).scan(self._prefix())

    def _remove_all(self) -> None:
        changes = self._scope.writable(self.descriptor)
        keys = [key for key, _ in changes.scan(self._prefix())]
        changes.put_many(keys, [None] * len(keys))

    def _begin(self) -> None:
        pass

    def _forget(self) -> None:
        self._keys = None


class ListState(_Entries):
    """A list of rows per key. Appending reads nothing: every batch adds an entry of its own, named by the batch.

    Appended values are collected up to `entry_bytes` before they are written as one entry.
    """

    __slots__ = ("_bytes", "_codec", "_count", "_entry_bytes", "_held")

    def __init__(
        self,
        descriptor: StateDescriptor,
        schema: StructType,
        scope: KeyScope,
        where: str,
        *,
        entry_bytes: int = LIST_ENTRY_BYTES,
    ) -> None:
        super().__init__(descriptor, scope)
        self._entry_bytes = entry_bytes
        self._codec = ValueCodec(schema, where)
        self._held: list[bytes] = []
        self._bytes = 0
        self._count = 0
        scope.add(self)

    def as_rows(self) -> Self:
        """Accept and return rows of one column only as tuples of one, never as plain values."""
        self._codec.as_rows()
        return self

    def get(self) -> Iterator[Any]:
        """The key's values as of this call, oldest first."""
        self._flush()
        entries, decode = self._scan(), self._codec.decode_list
        return chain.from_iterable(decode(data) for _, data in entries)

    def append_value(self, value: Any) -> None:
        """Add one value at the end."""
        if self._scope.index < 0:
            raise self._scope.outside_of_key(self.descriptor)
        self._hold(self._codec.encode(value))

    def append(self, values: Iterable[Any]) -> None:
        """Add several values at the end. If one does not fit, none is added."""
        if self._scope.index < 0:
            raise self._scope.outside_of_key(self.descriptor)
        for data in [self._codec.encode(value) for value in values]:
            self._hold(data)

    def put(self, values: Iterable[Any]) -> None:
        """Replace the whole list."""
        encoded = [self._codec.encode(value) for value in values]
        self.clear()
        for data in encoded:
            self._hold(data)

    def clear(self) -> None:
        """Remove the whole list."""
        self._remove_all()
        self._held.clear()
        self._bytes = 0

    def exists(self) -> bool:
        """Whether the list has a value."""
        if self._scope.index >= 0 and self._held:
            return True
        return next(self._scan(), None) is not None

    def _hold(self, data: bytes) -> None:
        if not self._held:
            self._scope.unflushed.append(self)
        self._held.append(data)
        self._bytes += len(data)
        if self._bytes >= self._entry_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            # The count continues from key to key within a batch, so that no entry of the batch is overwritten.
            suffix = self._scope.batch_id.to_bytes(8, "big") + self._count.to_bytes(4, "big")
            self._scope.writable(self.descriptor).put(self._prefix() + suffix, self._joined())
            self._count += 1
            self._held.clear()
            self._bytes = 0

    def _joined(self) -> bytes:
        return self._codec.join(self._held)

    def _begin(self) -> None:
        self._held.clear()
        self._bytes = 0
        self._count = 0


class MapState(_Entries):
    """A map per key. Every map key is an entry of its own, so that access to one does not touch the others."""

    __slots__ = ("_codec", "_key_codec")

    def __init__(
        self, descriptor: StateDescriptor, key_schema: StructType, schema: StructType, scope: KeyScope, where: str
    ) -> None:
        super().__init__(descriptor, scope)
        self._key_codec = ValueCodec(key_schema, f"{where}, map key", canonical=True)
        self._codec = ValueCodec(schema, where)
        scope.add(self)

    def as_rows(self) -> Self:
        """Accept and return rows of one column only as tuples of one, never as plain values."""
        self._codec.as_rows()
        self._key_codec.as_rows()
        return self

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a map key, or `default`."""
        data = self._scope.writable(self.descriptor).get(self._entry(key))
        return default if data is None else self._codec.decode(data)

    def put(self, key: Any, value: Any) -> None:
        """Set the value of a map key."""
        changes = self._scope.writable(self.descriptor)
        entry = self._entry(key)
        changes.put(entry, self._codec.encode(value))

    def contains(self, key: Any) -> bool:
        """Whether the map has that key."""
        return self._scope.writable(self.descriptor).get(self._entry(key)) is not None

    def remove(self, key: Any) -> None:
        """Remove a map key; a missing key is not an error."""
        self._scope.writable(self.descriptor).put(self._entry(key), None)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The map's keys and values as of this call, in the order of their stored bytes."""
        entries, length = self._scan(), len(self._prefix())
        key_of, value_of = self._key_codec.decode, self._codec.decode
        return ((key_of(entry[length:]), value_of(data)) for entry, data in entries)

    def keys(self) -> Iterator[Any]:
        """The map's keys as of this call."""
        entries, length = self._scan(), len(self._prefix())
        key_of = self._key_codec.decode
        return (key_of(entry[length:]) for entry, _ in entries)

    def values(self) -> Iterator[Any]:
        """The map's values as of this call."""
        entries, value_of = self._scan(), self._codec.decode
        return (value_of(data) for _, data in entries)

    def clear(self) -> None:
        """Remove the whole map."""
        self._remove_all()

    def exists(self) -> bool:
        """Whether the map has a key."""
        return next(self._scan(), None) is not None

    def _entry(self, key: Any) -> bytes:
        if key is None:
            raise SchemaError(f"{self._key_codec.where}: null cannot be a key of a map")
        return self._prefix() + self._key_codec.encode(key)
