"""HyperLogLog: estimates the number of distinct values of a column, in at most 4 kB per key.

Design note 011 compares it with the `datasketches` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from strandline.operators.aggregate.accumulators import GroupAccumulator, Groups
from strandline.operators.aggregate.limits import DEFAULT_LIMITS
from strandline.operators.columns.binary import binary_content, binary_spans
from strandline.state.coding.keys import canonical_column

_BITS: Final = 12
_REGISTERS: Final = 1 << _BITS
"""With 4096 registers the standard error is 1.04 / sqrt(4096), which is 1.6 %."""
_LAST_RANK: Final = 64 - _BITS + 1
_ENTRY: Final = 3
_DENSE_ENTRIES: Final = _REGISTERS // _ENTRY
"""A sketch with more used registers than this is stored densely, with one byte for each register."""
_ALPHA: Final = 0.5 / np.log(2)
_BASE: Final = 0x9E3779B97F4A7C15

U64 = npt.NDArray[np.uint64]


class ApproxDistinct(GroupAccumulator):
    """One sketch per key. A small sketch is a list of (register, rank), 3 bytes each; a large one has all 4096 ranks.

    The length tells which, because 4096 is not a multiple of 3. Sketches of up to `chunk_bytes` are unpacked at a time.
    """

    combinable = True

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
            made.append(_merged(states[0].take(pa.array(part.order)), part))
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
    """A hash of each string: each byte value stands for a random number, and the hash is a polynomial over them.

    A byte needs about 50 bytes of working memory, so the strings are hashed in pieces. A piece may begin and end inside
    a string.
    """
    offsets, data = binary_content(column)
    content = np.frombuffer(data, np.uint8)
    sums = np.zeros(len(offsets) - 1, np.uint64)
    for begin in range(0, len(content), _PIECE):
        end = min(begin + _PIECE, len(content))
        first, last = np.searchsorted(offsets, (begin, end - 1), "right").tolist()
        rows = slice(first - 1, last)
        starts = np.maximum(offsets[rows], begin)
        sizes = np.minimum(offsets[rows.start + 1 : rows.stop + 1], end) - starts
        place = np.arange(begin, end) - np.repeat(starts, sizes)
        terms = _BYTE_VALUES[content[begin:end]] * _POWERS[place]
        used = np.flatnonzero(sizes)
        parts = np.add.reduceat(terms, starts[used] - begin)
        parts[:1] *= np.uint64(pow(_BASE, begin - int(offsets[rows.start]), 1 << 64))  # the string began before
        sums[rows.start + used] += parts
    return _mixed(sums ^ np.diff(offsets).astype(np.uint64))


def _mixed(values: U64) -> U64:
    """The finalizer of splitmix64."""
    mixed = values + np.uint64(_BASE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


_BYTE_VALUES: Final = _mixed(np.arange(1, 257, dtype=np.uint64))
_PIECE: Final = 1 << 15
_POWERS: Final = np.cumprod(np.full(_PIECE, _BASE, np.uint64))


def _ranks(hashes: U64) -> npt.NDArray[np.int64]:
    """The rank of each hash: the number of leading zeros after the register number, plus one."""
    rest = hashes & np.uint64((1 << (64 - _BITS)) - 1)
    # A double holds 52 bits exactly, and its exponent is the place of the highest bit.
    _, exponents = np.frexp(rest.astype(np.float64))
    return (64 - _BITS + 1 - exponents).astype(np.int64)


def _sketches(count: int, ids: npt.NDArray[Any], registers: npt.NDArray[Any], ranks: npt.NDArray[Any]) -> Any:
    """The stored form of `count` sketches with these registers; the greatest rank of a register counts."""
    entries = (ids * _REGISTERS + registers) * 64 + ranks
    entries.sort()
    places = entries // 64
    entries = entries[np.concatenate((places[1:] != places[:-1], [True]))] if len(entries) else entries
    ids, registers, ranks = entries // (64 * _REGISTERS), entries // 64 % _REGISTERS, entries % 64
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


def _merged(column: Any, groups: Groups) -> Any:
    """The sketches of each group, merged; `column` has them in the order of the groups."""
    ids = groups.ids
    dense = pc.binary_length(column).to_numpy() == _REGISTERS
    if not dense.any():
        rows, registers, ranks = _entries(column)
        return _sketches(len(groups), ids[rows], registers, ranks)
    # A group with a dense sketch has a dense result. Sorting 4096 entries per sketch would take far too long.
    owners, starts = np.unique(ids[dense], return_index=True)
    every = np.frombuffer(binary_content(column.filter(pa.array(dense)))[1], np.uint8).reshape(-1, _REGISTERS)
    full = np.maximum.reduceat(every, starts)
    rows, registers, ranks = _entries(column.filter(pa.array(~dense)))
    entry_ids = ids[~dense][rows]
    place = np.full(len(groups), -1)
    place[owners] = np.arange(len(owners))
    inside = place[entry_ids] >= 0
    np.maximum.at(full, (place[entry_ids[inside]], registers[inside]), ranks[inside].astype(np.uint8))
    small = _sketches(len(groups), entry_ids[~inside], registers[~inside], ranks[~inside])
    large = binary_spans(pa.py_buffer(full), np.arange(len(owners) + 1) * _REGISTERS)
    picked = np.where(place >= 0, len(groups) + place, np.arange(len(groups)))
    return pa.concat_arrays([small, large]).take(pa.array(picked))


def _entries(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row, register and rank of all used registers of stored sketches."""
    offsets, content = binary_content(column)
    data = np.frombuffer(content, np.uint8)
    sizes = np.diff(offsets)
    dense = sizes == _REGISTERS
    used = np.where(dense, 0, sizes // _ENTRY)
    rows = np.repeat(np.arange(len(sizes)), used)
    heads = np.repeat(offsets[:-1] - _ENTRY * (np.cumsum(used) - used), used) + _ENTRY * np.arange(len(rows))
    registers = data[heads].astype(np.int64) << 8 | data[heads + 1]
    ranks = data[heads + 2].astype(np.int64)
    if not dense.any():
        return rows, registers, ranks
    full = np.flatnonzero(dense)
    every = data[(offsets[full][:, None] + np.arange(_REGISTERS))]
    which, where = np.nonzero(every)
    return (
        np.concatenate((full[which], rows)),
        np.concatenate((where, registers)),
        np.concatenate((every[which, where].astype(np.int64), ranks)),
    )


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
    full = ranks == _LAST_RANK
    total = np.asarray(np.bincount(ids[~full], np.ldexp(1.0, -ranks[~full]), len(column)), np.float64)
    for row, saturated in zip(*np.unique(ids[full], return_counts=True), strict=True):
        total[row] += _REGISTERS * _tau(1 - saturated / _REGISTERS) * 2.0 ** (1 - _LAST_RANK)
    unused = _REGISTERS - np.bincount(ids, minlength=len(column))
    with np.errstate(divide="ignore"):
        total = total + _REGISTERS * _sigma(unused / _REGISTERS)
        estimates: npt.NDArray[np.int64] = np.rint(_ALPHA * _REGISTERS * _REGISTERS / total).astype(np.int64)
    return estimates


def _sigma(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ertl's sigma: x + the sum of x ** (2 ** k) * 2 ** (k - 1), for k from 1."""
    y, total, power = 1.0, x.copy(), x.copy()
    empty = x == 1.0
    power[empty] = 0.0
    while power.any():
        power = power * power
        total += power * y
        y += y
    total[empty] = np.inf
    return total


def _tau(x: float) -> float:
    """Ertl's tau, for registers whose rank is the last one; such a hash is one of 2 ** 52."""
    if x in (0.0, 1.0):
        return 0.0
    y, total, root = 1.0, 1 - x, x
    while root < 1.0:
        root = root**0.5
        y *= 0.5
        total -= (1 - root) ** 2 * y
    return total / 3
