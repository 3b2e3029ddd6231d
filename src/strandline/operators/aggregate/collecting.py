"""Accumulators that keep values: the first, the last or all values of a column."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strandline.operators.aggregate.accumulators import GroupAccumulator, Groups
from strandline.operators.columns.binary import binary_content, binary_spans

ARRIVAL_COLUMNS: Final = ("__sl_arrival_batch", "__sl_arrival_row")
"""Two columns that number the rows in the order of arrival: the batch id, and the place in the batch."""
_NO_ARRIVAL: Final = {False: np.iinfo(np.int64).max, True: np.iinfo(np.int64).min}


class OneByArrival(GroupAccumulator):
    """The value of the row that arrived first, or last.

    The arrival is stored with the value, because values are not merged in the order of arrival: the panes of a sliding
    window are merged in the order of event time.
    """

    def __init__(self, name: str, column: str, kind: pa.DataType, last: bool, ignore_nulls: bool) -> None:
        arrival = [pa.field(f"{name}:{part}", pa.int64()) for part in ("batch", "row")]
        super().__init__(name, (column, *ARRIVAL_COLUMNS), [pa.field(name, kind), *arrival])
        self._last = last
        self._ignore_nulls = ignore_nulls

    def partial(self, inputs: list[Any], groups: Groups) -> list[Any]:
        """The value of the earliest or latest row of each group; rows with a null do not count if nulls are ignored."""
        column = inputs[0]
        batches, rows = (part.to_numpy(zero_copy_only=False) for part in inputs[1:])
        if self._ignore_nulls and column.null_count:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            batches = np.where(missing, _NO_ARRIVAL[self._last], batches)
        return self._picked(column, batches, rows, groups)

    def merge(self, states: list[Any], groups: Groups) -> list[Any]:
        """The earliest or latest of the values of each group."""
        batches, rows = (part.fill_null(0).to_numpy(zero_copy_only=False) for part in states[1:])
        return self._picked(states[0], batches, rows, groups)

    def shown(self, states: list[Any]) -> Any:
        """The values, without their arrival."""
        return states[0]

    def _picked(
        self, column: Any, batches: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], groups: Groups
    ) -> list[Any]:
        extreme = np.maximum if self._last else np.minimum
        in_order = batches[groups.order]
        batch = extreme.reduceat(in_order, groups.edges[:-1])
        of_batch = in_order == np.repeat(batch, groups.counts)
        in_order = np.where(of_batch, rows[groups.order], _NO_ARRIVAL[self._last])
        row = extreme.reduceat(in_order, groups.edges[:-1])
        hits = np.flatnonzero(of_batch & (in_order == np.repeat(row, groups.counts)))
        ids = groups.ids[hits]
        hits = hits[np.concatenate(([True], ids[1:] != ids[:-1]))]
        return [column.take(pa.array(groups.order[hits])), pa.array(batch), pa.array(row)]


class ListOfFixed(GroupAccumulator):
    """All values of a column of fixed width except nulls, stored as their bytes."""

    def __init__(self, name: str, column: str, kind: pa.DataType) -> None:
        super().__init__(name, (column,), [pa.field(name, pa.binary())])
        self._kind = kind
        self._held = pa.uint8() if pa.types.is_boolean(kind) else kind

    def partial(self, inputs: list[Any], groups: Groups) -> list[Any]:
        """The list of each group, in the order of its rows."""
        values, edges = _present(inputs[0], groups)
        values = values.cast(self._held) if values.type != self._held else values
        return [binary_spans(values.buffers()[1], edges * (self._held.bit_width // 8))]

    def merge(self, states: list[Any], groups: Groups) -> list[Any]:
        """The lists of each group, joined."""
        return [_joined(states[0], groups)]

    def shown(self, states: list[Any]) -> Any:
        """The lists of values."""
        offsets, data = binary_content(states[0])
        edges = offsets // (self._held.bit_width // 8)
        values = pa.Array.from_buffers(self._held, int(edges[-1]), [None, data])
        return pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), values.cast(self._kind))


class ListOfText(GroupAccumulator):
    """All values of a string or binary column except nulls; their bytes and their lengths are two stored columns."""

    def __init__(self, name: str, column: str, kind: pa.DataType) -> None:
        super().__init__(name, (column,), [pa.field(name, pa.binary()), pa.field(f"{name}:lengths", pa.binary())])
        self._kind = kind

    def partial(self, inputs: list[Any], groups: Groups) -> list[Any]:
        """The list of each group, in the order of its rows."""
        values, edges = _present(inputs[0], groups)
        offsets, data = binary_content(values)
        lengths = np.diff(offsets).astype("<u4")
        return [binary_spans(data, offsets[edges]), binary_spans(pa.py_buffer(lengths), edges * 4)]

    def merge(self, states: list[Any], groups: Groups) -> list[Any]:
        """The lists of each group, joined."""
        return [_joined(state, groups) for state in states]

    def shown(self, states: list[Any]) -> Any:
        """The lists of values."""
        _, data = binary_content(states[0])
        offsets, lengths = binary_content(states[1])
        ends = np.cumsum(np.frombuffer(lengths, "<u4", int(offsets[-1]) // 4), dtype=np.int64)
        spans = [None, pa.py_buffer(np.concatenate(([0], ends)).astype(np.int64)), data]
        values = pa.Array.from_buffers(pa.large_binary(), len(ends), spans).cast(self._kind)
        return pa.ListArray.from_arrays(pa.array((offsets // 4).astype(np.int32)), values)


def _present(column: Any, groups: Groups) -> tuple[Any, npt.NDArray[np.int64]]:
    """The values that are not null, in the order of `groups`, and the edges of the groups among them."""
    if not column.null_count:
        return column.take(pa.array(groups.order)), groups.edges
    valid = column.is_valid().to_numpy(zero_copy_only=False)[groups.order]
    edges = np.concatenate(([0], np.cumsum(valid)))[groups.edges]
    return column.take(pa.array(groups.order[valid])), edges


def _joined(column: Any, groups: Groups) -> Any:
    offsets, data = binary_content(column.take(pa.array(groups.order)))
    return binary_spans(data, offsets[groups.edges])
