"""HyperLogLog: estimates the number of distinct values of a column, in at most 4 kB per key.

Design note 011 compares it with the `datasketches` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strandline.operators.aggregate.accumulators import GroupAccumulator, Groups
from strandline.operators.aggregate.limits import DEFAULT_LIMITS
from strandline.operators.columns.binary import binary_content, binary_spans
from strandline.state.coding.keys import canonical_column

_BITS: Final = 12
_REGISTERS: Final = 1 << _BITS
"""With 4096 registers the standard error is 1.04 / sqrt(4096), which is 1.6 %."""
_RANKS: Final = 64 - _BITS + 2
_ENTRY: Final = 3
_DENSE_ENTRIES: Final = _REGISTERS // _ENTRY
"""A sketch with more used registers than this is stored densely, with one byte for each register."""
_ALPHA: Final = 0.5 / np.log(2)

U64 = npt.NDArray[np.uint64]


class ApproxDistinct(GroupAccumulator):
    """One sketch per key. A small sketch is a list of (register, rank), 3 bytes each; a large one has all 4096 ranks.

    The length tells which, because 4096 is not a multiple of 3. Sketches of up to `chunk_bytes` are unpacked at a time.
    """

    def __init__(self, name: str, column: str, chunk_bytes: int = DEFAULT_LIMITS.sketch_bytes) -> None:
        super().__init__(name, (column,), [pa.field(name, pa.binary())])
        self._chunk_bytes = chunk_bytes

    def partial(self, inputs: list[Any], groups: Groups) -> list[Any]:
        """The sketches of the values of each group; nulls do not count."""
        column = inputs[0]
        hashes = hash_column(column)[groups.order]
        ids = groups.ids
        if column.null_count:
            valid = column.is_valid().to_numpy(zero_copy_only=False)[groups.order]
            hashes, ids = hashes[valid], ids[valid]
        registers = (hashes >> np.uint64(64 - _BITS)).astype(np.int64)
        return [_sketches(len(groups), ids, registers, _ranks(hashes))]

    def merge(self, states: list[Any], groups: Groups) -> list[Any]:
        """The sketches of each group, merged: each register keeps its greatest rank."""
        made = []
        for part in _chunks(states[0], groups, self._chunk_bytes):
            ids, registers, ranks = _entries(states[0].take(pa.array(part.order)))
            made.append(_sketches(len(part), part.ids[ids], registers, ranks))
        return [pa.concat_arrays(made)]

    def shown(self, states: list[Any]) -> Any:
        """The estimates."""
        column = states[0]
        alone = Groups(np.arange(len(column)), np.arange(len(column) + 1))
        made = [_estimates(column.take(pa.array(part.order))) for part in _chunks(column, alone, self._chunk_bytes)]
        return pa.array(np.concatenate(made) if made else [], pa.int64())


def hash_column(column: Any) -> U64:
    """A 64-bit hash of every value. Values that Spark treats as equal (0.0 and -0.0, all NaN) have equal hashes."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _hash_bytes(column)
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    column = canonical_column(column)
    width = column.type.bit_width // 8
    data = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
    words = np.zeros((len(column), -(-width // 8) * 8), np.uint8)
    words[:, :width] = data.reshape(-1, width)
    hashes = np.full(len(column), width, np.uint64)
    for word in words.view("<u8").T:
        hashes = _mixed(hashes ^ word)
    return hashes


def _hash_bytes(column: Any) -> U64:
    """A hash of each string: each byte value stands for a random number, and the hash is a polynomial over them."""
    offsets, data = binary_content(column)
    lengths = np.diff(offsets)
    sums = np.zeros(len(lengths), np.uint64)
    used = np.flatnonzero(lengths)
    if len(used):
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        powers = np.cumprod(np.full(int(lengths.max()), 0x9E3779B97F4A7C15, np.uint64))
        terms = _BYTE_VALUES[np.frombuffer(data, np.uint8)] * powers[place]
        sums[used] = np.add.reduceat(terms, offsets[:-1][used])
    return _mixed(sums ^ lengths.astype(np.uint64))


def _mixed(values: U64) -> U64:
    """The finalizer of splitmix64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


_BYTE_VALUES: Final = _mixed(np.arange(1, 257, dtype=np.uint64))


def _ranks(hashes: U64) -> npt.NDArray[np.int64]:
    """The rank of each hash: the number of leading zeros after the register number, plus one."""
    rest = hashes & np.uint64((1 << (64 - _BITS)) - 1)
    # A double holds 52 bits exactly, and its exponent is the place of the highest bit.
    _, exponents = np.frexp(rest.astype(np.float64))
    return (64 - _BITS + 1 - exponents).astype(np.int64)


def _sketches(count: int, ids: npt.NDArray[Any], registers: npt.NDArray[Any], ranks: npt.NDArray[Any]) -> Any:
    """The stored form of `count` sketches with these registers; the greatest rank of a register counts."""
    order = np.argsort((ids * _REGISTERS + registers) * 64 + ranks)
    places = (ids * _REGISTERS + registers)[order]
    last = np.flatnonzero(np.concatenate((places[1:] != places[:-1], [True]))) if len(places) else places
    ids, registers, ranks = ids[order][last], registers[order][last], ranks[order][last]
    used = np.bincount(ids, minlength=count)
    dense = used > _DENSE_ENTRIES
    sizes = np.where(dense, _REGISTERS, used * _ENTRY)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    data = np.zeros(int(offsets[-1]), np.uint8)
    in_dense = dense[ids]
    data[offsets[ids[in_dense]] + registers[in_dense]] = ranks[in_dense]
    firsts = np.cumsum(used) - used
    sparse = ~in_dense
    at = offsets[ids[sparse]] + (np.arange(len(ids)) - firsts[ids])[sparse] * _ENTRY
    data[at] = registers[sparse] >> 8
    data[at + 1] = registers[sparse] & 0xFF
    data[at + 2] = ranks[sparse]
    return binary_spans(pa.py_buffer(data), offsets)


def _entries(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row, register and rank of all used registers of stored sketches."""
    offsets, content = binary_content(column)
    data = np.frombuffer(content, np.uint8)
    sizes = np.diff(offsets)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    dense = (sizes == _REGISTERS)[rows]
    full = np.flatnonzero(dense & (data != 0))
    heads = np.flatnonzero(~dense)[::_ENTRY]
    registers = np.concatenate((full - offsets[rows[full]], data[heads].astype(np.int64) << 8 | data[heads + 1]))
    ranks = np.concatenate((data[full], data[heads + 2])).astype(np.int64)
    return np.concatenate((rows[full], rows[heads])), registers, ranks


def _chunks(column: Any, groups: Groups, most_bytes: int) -> Iterator[Groups]:
    """Parts of the groups; the sketches of a part have up to `most_bytes`, unless a single group has more."""
    offsets, _ = binary_content(column)
    sizes = np.cumsum(np.diff(offsets)[groups.order])
    start = 0
    while start < len(groups):
        before = sizes[groups.edges[start] - 1] if groups.edges[start] else 0
        fits = int(np.searchsorted(sizes[groups.edges[start + 1 :] - 1], before + most_bytes, "right"))
        stop = start + max(1, fits)
        edges = groups.edges[start : stop + 1]
        yield Groups(groups.order[edges[0] : edges[-1]], edges - edges[0])
        start = stop


def _estimates(column: Any) -> npt.NDArray[np.int64]:
    """Ertl's improved estimator (arXiv 1702.01284, algorithm 6), which is unbiased over the whole range."""
    ids, _, ranks = _entries(column)
    counts = np.bincount(ids * _RANKS + ranks, minlength=len(column) * _RANKS).reshape(-1, _RANKS)
    top = _RANKS - 1
    total = _REGISTERS * _tau(1 - counts[:, top] / _REGISTERS)
    for rank in range(top - 1, 0, -1):
        total = 0.5 * (total + counts[:, rank])
    unused = _REGISTERS - np.bincount(ids, minlength=len(column))
    with np.errstate(divide="ignore"):
        total = total + _REGISTERS * _sigma(unused / _REGISTERS)
        estimates: npt.NDArray[np.int64] = np.rint(_ALPHA * _REGISTERS * _REGISTERS / total).astype(np.int64)
    return estimates


def _sigma(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    y, total, power = 1.0, x.copy(), x.copy()
    total[x == 1.0] = np.inf
    for _ in range(64):
        power = power * power
        total = total + power * y
        y += y
    return total


def _tau(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    y, total, root = 1.0, 1 - x, x.copy()
    for _ in range(64):
        root = np.sqrt(root)
        y *= 0.5
        total = total - (1 - root) ** 2 * y
    return np.where((x == 0) | (x == 1), 0.0, total / 3)
