"""Key groups, and the stored keys of state entries.

A stored key is `key group (2 bytes, big endian) | state name | 0x00 | key bytes | what the state adds`. Different keys
have different key bytes, and no key's bytes are a prefix of another's. So a scan over one key never meets another key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import JobDefinitionError, SchemaError
from strandline.state.coding.floats import canonical_floats

Bytes2D = npt.NDArray[np.uint8]

_msgpack: Final = msgspec.msgpack.Encoder()


# --- key groups ----------------------------------------------------------------------------------


def key_group_range(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """The key groups that `subtask` owns. The ranges of all subtasks together contain every key group once."""
    _check_parallelism(parallelism, max_parallelism)
    if not 0 <= subtask < parallelism:
        raise JobDefinitionError(f"there is no subtask {subtask} at parallelism {parallelism}")
    first = -(-subtask * max_parallelism // parallelism)
    end = -(-(subtask + 1) * max_parallelism // parallelism)
    return range(first, end)


def subtask_of(key_group: int, parallelism: int, max_parallelism: int) -> int:
    """The subtask that owns `key_group`."""
    _check_parallelism(parallelism, max_parallelism)
    if not 0 <= key_group < max_parallelism:
        raise JobDefinitionError(f"there is no key group {key_group} at max_parallelism {max_parallelism}")
    return key_group * parallelism // max_parallelism


def _check_parallelism(parallelism: int, max_parallelism: int) -> None:
    if not 1 <= parallelism <= max_parallelism <= 1 << 15:
        raise JobDefinitionError(
            f"parallelism {parallelism} and max_parallelism {max_parallelism} do not fit: "
            "1 <= parallelism <= max_parallelism <= 32768"
        )


def state_prefix(key_group: int, state: str) -> bytes:
    """The prefix of every stored key of `state` in `key_group`."""
    return key_group.to_bytes(2, "big") + state.encode() + b"\0"


# --- key bytes -----------------------------------------------------------------------------------


class EncodedKeys:
    """The keys of rows as bytes, without a state name. They are computed once; adding a state name is cheap.

    Keys of equal width (numbers, dates, ...) are a matrix, others an Arrow binary array.
    """

    __slots__ = ("_array", "_groups", "_matrix")

    def __init__(self, groups: Bytes2D, matrix: Bytes2D | None, array: Any) -> None:
        self._groups = groups
        self._matrix = matrix
        self._array = array

    def __len__(self) -> int:
        return len(self._groups)

    def take(self, indices: npt.NDArray[Any]) -> EncodedKeys:
        """The keys of the rows at `indices`."""
        if self._matrix is not None:
            return EncodedKeys(self._groups[indices], self._matrix[indices], None)
        return EncodedKeys(self._groups[indices], None, self._array.take(pa.array(indices)))

    def slice(self, start: int, stop: int | None = None) -> EncodedKeys:
        """The keys of the rows from `start` to `stop`."""
        rows = slice(start, stop)
        if self._matrix is not None:
            return EncodedKeys(self._groups[rows], self._matrix[rows], None)
        return EncodedKeys(self._groups[rows], None, self._array[rows])

    def starts(self) -> npt.NDArray[np.int64]:
        """The row at which each run of equal keys begins."""
        if len(self) == 0:
            return np.zeros(0, np.int64)
        changed = (self._groups[1:] != self._groups[:-1]).any(axis=1)
        if self._matrix is not None:
            changed |= (self._matrix[1:] != self._matrix[:-1]).any(axis=1)
        else:
            differs = pc.not_equal(self._array[1:], self._array[:-1])
            changed |= differs.to_numpy(zero_copy_only=False)
        return np.concatenate(([0], np.flatnonzero(changed) + 1))

    def order(self) -> npt.NDArray[np.int64]:
        """The row numbers in ascending order of stored keys, the same for every state. Equal keys keep their order."""
        if self._matrix is not None:
            whole = np.ascontiguousarray(np.hstack((self._groups, self._matrix)))
            # numpy ignores zeros at the end of a string. With equal widths this does not matter.
            return np.argsort(whole.view(f"S{whole.shape[1]}").ravel(), kind="stable")
        joined = _join([_to_binary(self._groups), self._array])
        return np.asarray(pc.sort_indices(joined).to_numpy()).astype(np.int64)

    def stored(self, state: str) -> list[bytes]:
        """The stored key of every row in `state`."""
        name = state.encode() + b"\0"
        if self._matrix is not None:
            rows, width = self._matrix.shape
            whole = np.empty((rows, 2 + len(name) + width), np.uint8)
            whole[:, :2] = self._groups
            whole[:, 2 : 2 + len(name)] = np.frombuffer(name, np.uint8)
            whole[:, 2 + len(name) :] = self._matrix
            return _matrix_to_list(whole)
        return bytes_list(_join([_to_binary(self._groups), pa.scalar(name, pa.binary()), self._array]))

    def one(self, row: int) -> bytes:
        """Key group and key bytes of one row, for comparison with another row."""
        rest = self._array[row].as_py() if self._matrix is None else self._matrix[row].tobytes()
        group: bytes = self._groups[row].tobytes()
        return group + bytes(rest)


class KeyEncoder:
    """Encodes the key columns of record batches as key bytes, column by column.

    Keys that Spark considers equal have equal bytes: all NaN are one key, and 0.0 equals -0.0. Null is a key too.
    """

    def __init__(self, schema: pa.Schema, key_columns: Sequence[str], key_group_column: str) -> None:
        missing = [name for name in key_columns if name not in schema.names]
        if missing or not key_columns:
            raise SchemaError(f"no key column {', '.join(missing) or 'at all'} among {', '.join(schema.names)}")
        self._columns = tuple(key_columns)
        self._key_group_column = key_group_column

    def encode(self, rows: Any) -> EncodedKeys:
        """The keys of the rows of a record batch or table with the key columns and the key group column."""
        numbers = _combined(rows.column(self._key_group_column)).to_numpy(zero_copy_only=False)
        groups = np.ascontiguousarray(numbers.astype(">u2")).view(np.uint8).reshape(-1, 2)
        pieces: list[Any] = []
        for name in self._columns:
            for piece in _pieces(_combined(rows.column(name))):
                if pieces and isinstance(piece, np.ndarray) and isinstance(pieces[-1], np.ndarray):
                    pieces[-1] = np.hstack((pieces[-1], piece))
                else:
                    pieces.append(piece)
        if len(pieces) == 1 and isinstance(pieces[0], np.ndarray):
            return EncodedKeys(groups, pieces[0], None)
        arrays = [_to_binary(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces]
        return EncodedKeys(groups, None, _join(arrays))


def canonical_column(column: Any) -> Any:
    """A float column with one form of NaN and without negative zeros. Other columns are returned unchanged."""
    if not pa.types.is_floating(column.type):
        return column
    zero = pa.scalar(0.0, column.type)
    nan = pa.scalar(float("nan"), column.type)
    return pc.if_else(pc.is_nan(column), nan, pc.add(column, zero))


def bytes_list(array: Any) -> list[bytes]:
    """An Arrow binary array without nulls as Python bytes."""
    values: list[bytes] = array.to_pylist()
    return values


def _matrix_to_list(matrix: Bytes2D) -> list[bytes]:
    if matrix.shape[0] == 0:
        return []
    # A void view keeps all bytes. A string view would drop zeros at the end.
    rows: list[bytes] = np.ascontiguousarray(matrix).view(f"V{matrix.shape[1]}").ravel().tolist()
    return rows


def _join(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.binary()))


def _to_binary(matrix: Bytes2D) -> Any:
    data = pa.py_buffer(np.ascontiguousarray(matrix))
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(matrix.shape[1]), len(matrix), [None, data])
    return fixed.cast(pa.binary())


def _combined(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column


def _pieces(column: Any) -> list[Any]:
    """The bytes of one column: a matrix for fixed width; a header matrix and a binary array for variable width."""
    kind = column.type
    present = column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
    if pa.types.is_null(kind):
        return [present.reshape(-1, 1)]
    if pa.types.is_decimal128(kind) or pa.types.is_decimal256(kind):
        return [np.hstack((present.reshape(-1, 1), _decimals(column, present)))]
    numbers = _numbers(column)
    if numbers is not None:
        return [np.hstack((present.reshape(-1, 1), numbers))]
    if not (_is_text(kind)):
        column = pa.array([None if v is None else _generic(v) for v in column.to_pylist()], pa.binary())
    content = column.cast(pa.binary())
    lengths = pc.fill_null(pc.binary_length(content), -1).to_numpy(zero_copy_only=False)
    header = np.ascontiguousarray((lengths.astype(np.int64) + 1).astype(">u4")).view(np.uint8).reshape(-1, 4)
    return [header, pc.fill_null(content, b"") if content.null_count else content]


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
    )


def _numbers(column: Any) -> Bytes2D | None:
    """Big-endian bytes that sort like the values, or None if the type is not a plain number."""
    kind, types = column.type, pa.types
    if types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif types.is_date32(kind) or types.is_time32(kind):
        column = column.view(pa.int32())
    elif types.is_timestamp(kind) or types.is_duration(kind) or types.is_date64(kind) or types.is_time64(kind):
        column = column.view(pa.int64())
    elif types.is_floating(kind) and kind.bit_width >= 32:
        column = canonical_column(column).view(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif not types.is_integer(kind):
        return None
    filled = pc.fill_null(column, 0) if column.null_count else column
    values = filled.to_numpy(zero_copy_only=False)
    width = values.dtype.itemsize
    if types.is_floating(kind):
        values = float_bits_in_order(values)
    if values.dtype.kind == "i":
        values = values.view(f"u{width}") ^ np.array(1 << (8 * width - 1), f"u{width}")
    return np.ascontiguousarray(values.astype(f">u{width}")).view(np.uint8).reshape(-1, width)


def float_bits_in_order(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The bits of floats as signed integers that sort like the floats. The function is its own inverse."""
    width = bits.dtype.itemsize * 8
    low = np.array((1 << (width - 1)) - 1, bits.dtype)
    ordered: npt.NDArray[Any] = bits ^ ((bits >> np.array(width - 1, bits.dtype)) & low)
    return ordered


def _decimals(column: Any, present: npt.NDArray[np.uint8]) -> Bytes2D:
    width = column.type.byte_width
    data = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
    matrix = data.reshape(-1, width)[:, ::-1] * present.reshape(-1, 1)
    matrix[:, 0] ^= 0x80
    return matrix


def _generic(value: Any) -> bytes:
    return _msgpack.encode(canonical_floats(value))
