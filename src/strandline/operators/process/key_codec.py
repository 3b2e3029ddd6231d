"""Encodes the keys of timers: a timer calls user code with a key when there are no rows to read it from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from pyspark.sql.types import ArrayType, DataType, StructField, StructType

from strandline.operators.columns.row_reader import row_factory
from strandline.operators.process.key_chunks import Key
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.values import rounds

_msgpack: Final = msgspec.msgpack.Encoder().encode


class KeyCodec:
    """Encodes and decodes keys in the form that user code gets them."""

    def __init__(self, struct: StructType, key_columns: Sequence[str], clock: str) -> None:
        # Without metadata: whether a key column carries event time does not change how a key is stored.
        key = StructType([StructField(name, struct[name].dataType, struct[name].nullable) for name in key_columns])
        self.schema = StructType([StructField(clock, key, False)])
        """The schema of the timers' state. It has the clock's name, so that a restore with another clock is refused."""
        codec = ValueCodec(self.schema, "the key of a timer")
        revive = [_reviver(field.dataType) for field in key.fields]
        self._revive = revive if any(revive) else None
        # Keys come from Arrow columns, so their types are right. Only nested keys and decimals need a conversion.
        self._fits = self._revive is None and not rounds(key)
        self._checked = codec.encode
        self._decode = codec.decode

    def encode(self, key: Key) -> bytes:
        """The bytes of a key."""
        return _msgpack((key,)) if self._fits else self._checked(key)

    def decode(self, data: bytes) -> Key:
        """The key of these bytes; nested structs are rows again."""
        key: Key = self._decode(data)
        if self._revive is None:
            return key
        return tuple(value if one is None else one(value) for one, value in zip(self._revive, key, strict=True))


def _reviver(data_type: DataType) -> Callable[[Any], Any] | None:
    """A function that turns the tuples of nested structs into rows; None if the type has no structs."""
    match data_type:
        case StructType():
            make = row_factory(data_type)
            inner = [_reviver(field.dataType) for field in data_type.fields]

            def revive_struct(value: Any) -> Any:
                if value is None:
                    return None
                return make(tuple(part if one is None else one(part) for one, part in zip(inner, value, strict=True)))

            return revive_struct
        case ArrayType():
            element = _reviver(data_type.elementType)
            if element is None:
                return None
            return lambda value: None if value is None else [element(part) for part in value]
        case _:
            return None  # Spark does not accept maps as keys
