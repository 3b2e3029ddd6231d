"""Spark's `xxhash64` over Arrow columns: a slot finds the key group that Spark would find for a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

UInt64s = np.ndarray[tuple[int], np.dtype[np.uint64]]
Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

SEED: Final = 42
_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_P5: Final = np.uint64(0x27D4EB2F165667C5)
_LONG_DECIMAL: Final = 18
"""Spark hashes decimals with at most so many digits as longs."""
_STRIPE: Final = 32


def hashes_as_spark(kind: pa.DataType) -> bool:
    """Whether `spark_hash` takes columns of this type."""
    if pa.types.is_struct(kind):
        return all(hashes_as_spark(kind.field(at).type) for at in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return hashes_as_spark(kind.value_type)
    return pa.types.is_null(kind) or pa.types.is_decimal128(kind) or _values(kind) is not None


def spark_hash(columns: Sequence[pa.Array], rows: int) -> Int64s:
    """The value of Spark's `xxhash64` for every row, as signed numbers. A null leaves the hash as it is."""
    hashes = np.full(rows, SEED, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            _add(column, hashes, np.arange(rows))
    return hashes.view(np.int64)


def key_groups(columns: Sequence[pa.Array], rows: int, max_parallelism: int) -> Int64s:
    """The key group of every row."""
    return np.mod(spark_hash(columns, rows), np.int64(max_parallelism))


def _add(column: pa.Array, hashes: UInt64s, at: Int64s) -> None:
    """Go on with `hashes[at]`, by one value of `column` each."""
    kind = column.type
    if pa.types.is_null(kind):
        return
    if column.null_count:
        valid = pc.is_valid(column).to_numpy(zero_copy_only=False)
        column, at = column.drop_null(), at[valid]
    if not len(column):
        return
    if pa.types.is_struct(kind):
        for field in column.flatten():
            _add(field, hashes, at)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _add_lists(column, hashes, at)
    elif pa.types.is_decimal128(kind):
        _add_decimals(column, hashes, at)
    else:
        found = _values(kind)
        if found is None:
            raise TypeError(f"Spark's hash of a column of the type {kind} is not known")
        hashes[at] = found(column, hashes[at])


def _add_lists(column: pa.Array, hashes: UInt64s, at: Int64s) -> None:
    """The elements of a list count one after the other."""
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
    elements = column.flatten()
    for number in range(int(lengths.max())):
        longer = lengths > number
        _add(elements.take(pa.array(starts[longer] + number)), hashes, at[longer])


def _add_decimals(column: pa.Array, hashes: UInt64s, at: Int64s) -> None:
    unscaled = np.frombuffer(column.buffers()[1], "<i8").reshape(-1, 2)[column.offset : column.offset + len(column)]
    if column.type.precision <= _LONG_DECIMAL:
        hashes[at] = _of_longs(unscaled[:, 0].astype(np.int64), hashes[at])
        return
    numbers = [(int(high) << 64) | (int(low) & (1 << 64) - 1) for low, high in unscaled.tolist()]
    texts = pa.array([number.to_bytes(_bytes_of(number), "big", signed=True) for number in numbers], pa.binary())
    hashes[at] = _of_bytes(texts, hashes[at])


def _bytes_of(number: int) -> int:
    """The fewest bytes that hold a number with its sign."""
    return (number if number >= 0 else ~number).bit_length() // 8 + 1


def _values(kind: pa.DataType) -> Callable[[pa.Array, UInt64s], UInt64s] | None:
    """What hashes values of a type, none of them null."""
    types = pa.types
    if types.is_boolean(kind):
        return lambda column, seeds: _of_ints(column.to_numpy(zero_copy_only=False).astype(np.int32), seeds)
    if types.is_int8(kind) or types.is_int16(kind) or types.is_int32(kind):
        return lambda column, seeds: _of_ints(column.to_numpy().astype(np.int32), seeds)
    if types.is_date32(kind):
        return lambda column, seeds: _of_ints(column.cast(pa.int32()).to_numpy(), seeds)
    if types.is_int64(kind):
        return lambda column, seeds: _of_longs(column.to_numpy(), seeds)
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind):
        return lambda column, seeds: _of_longs(column.cast(pa.int64()).to_numpy(), seeds)
    if types.is_float32(kind):
        return lambda column, seeds: _of_ints(_same_bits(column.to_numpy()).view(np.int32), seeds)
    if types.is_float64(kind):
        return lambda column, seeds: _of_longs(_same_bits(column.to_numpy()).view(np.int64), seeds)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return _of_bytes
    return None


def _same_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Equal numbers with equal bits: there is one zero, and one value that is no number."""
    found: np.ndarray[Any, Any] = values + values.dtype.type(0)  # minus zero becomes zero
    found[np.isnan(found)] = np.nan
    return found


def _rotated(values: UInt64s, bits: int) -> UInt64s:
    found: UInt64s = (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
    return found


def _mixed(hashes: UInt64s) -> UInt64s:
    hashes = (hashes ^ (hashes >> np.uint64(33))) * _P2
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _P3
    found: UInt64s = hashes ^ (hashes >> np.uint64(32))
    return found


def _of_ints(values: np.ndarray[Any, np.dtype[np.int32]], seeds: UInt64s) -> UInt64s:
    hashes = seeds + _P5 + np.uint64(4)
    hashes ^= values.view(np.uint32).astype(np.uint64) * _P1
    return _mixed(_rotated(hashes, 23) * _P2 + _P3)


def _of_longs(values: Int64s, seeds: UInt64s) -> UInt64s:
    hashes = seeds + _P5 + np.uint64(8)
    return _mixed(_with_word(hashes, values.view(np.uint64)))


def _with_word(hashes: UInt64s, words: UInt64s) -> UInt64s:
    return _rotated(hashes ^ (_rotated(words * _P2, 31) * _P1), 27) * _P1 + _P4


def _of_bytes(column: pa.Array, seeds: UInt64s) -> UInt64s:
    """XXH64 of texts and bytes, for all rows at once: step by step, as long as some row has bytes left."""
    wide = column.type in (pa.large_string(), pa.large_binary())
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int64 if wide else np.int32)[column.offset : column.offset + len(column) + 1]
    bounds = bounds.astype(np.int64)
    stored = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if data is not None else np.empty(0, np.uint8)
    padded = np.concatenate((stored, np.zeros(8, np.uint8)))
    eights = np.lib.stride_tricks.sliding_window_view(padded, 8)

    def words(at: Int64s) -> UInt64s:
        return np.ascontiguousarray(eights[at]).view("<u8").ravel()

    at = bounds[:-1] - bounds[0]
    ends = bounds[1:] - bounds[0]
    lengths = ends - at
    hashes = seeds + _P5
    long = np.flatnonzero(lengths >= _STRIPE)
    if len(long):
        hashes[long], at[long] = _of_stripes(seeds[long], at[long], ends[long], words)
    hashes += lengths.view(np.uint64)
    while len(more := np.flatnonzero(at + 8 <= ends)):
        hashes[more] = _with_word(hashes[more], words(at[more]))
        at[more] += 8
    more = np.flatnonzero(at + 4 <= ends)
    hashes[more] ^= (words(at[more]) & np.uint64(0xFFFFFFFF)) * _P1
    hashes[more] = _rotated(hashes[more], 23) * _P2 + _P3
    at[more] += 4
    while len(more := np.flatnonzero(at < ends)):
        hashes[more] ^= padded[at[more]].astype(np.uint64) * _P5
        hashes[more] = _rotated(hashes[more], 11) * _P1
        at[more] += 1
    return _mixed(hashes)


def _of_stripes(seeds: UInt64s, at: Int64s, ends: Int64s, words: Callable[[Int64s], UInt64s]) -> tuple[UInt64s, Int64s]:
    """The hashes after all whole stripes of 32 bytes, and where the bytes after them begin."""
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    while len(more := np.flatnonzero(at + _STRIPE <= ends)):
        for number, lane in enumerate(lanes):
            lane[more] = _rotated(lane[more] + words(at[more] + 8 * number) * _P2, 31) * _P1
        at[more] += _STRIPE
    hashes = _rotated(lanes[0], 1) + _rotated(lanes[1], 7) + _rotated(lanes[2], 12) + _rotated(lanes[3], 18)
    for lane in lanes:
        hashes = (hashes ^ (_rotated(lane * _P2, 31) * _P1)) * _P1 + _P4
    return hashes, at
