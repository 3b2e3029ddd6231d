"""The output of a step goes straight to the slots of the step that reads it, without Spark in between."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import msgspec
import pyarrow as pa

from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN, Operator
from strandline.operators.columns.schemas import arrow_schema, fitted
from strandline.runtime.delivery.deliveries import RowsForSlot, deliver
from strandline.runtime.protocol.exchange import Delivery, ExchangeHeader, partition_of_feed
from strandline.runtime.protocol.messages import FeedSpec, SlotSpec
from strandline.runtime.protocol.side_outputs import rows_of
from strandline.state.coding.spark_hash import key_groups

Begin = Callable[[ExchangeHeader, pa.Schema], RowsForSlot]
"""Begins the delivery to the slot that a header names."""


class Feed:
    """Delivers one output of a subtask to the subtasks of another step."""

    def __init__(self, feed: FeedSpec, source: Operator, reader: Operator, slot: SlotSpec) -> None:
        """`source` gives the rows, and `reader` gets them."""
        self._feed = feed
        self._source = source
        self._keys = reader.key_columns
        self._slot = slot
        whole = arrow_schema(reader.input_struct)
        self._schema = pa.schema([whole.field(name) for name, _value in feed.columns])
        self._where = f"step {reader.uid!r}, which reads {source.uid!r}"

    def forward(self, output: Iterator[pa.RecordBatch], header: ExchangeHeader, begin: Begin) -> list[Delivery]:
        """Deliver the rows of an output; the slots have them when this returns. `header` is that of the source."""
        slot, feed = self._slot, self._feed
        header = msgspec.structs.replace(
            header, operator=feed.operator, partition=partition_of_feed(feed.number, slot.index, slot.parallelism)
        )

        def to(subtask: int, schema: pa.Schema) -> RowsForSlot:
            return begin(msgspec.structs.replace(header, subtask=subtask, exchange=uuid.uuid4().hex), schema)

        return deliver(map(self._addressed, rows_of(output, self._source, feed.output)), to)

    def _addressed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that the reader wants, and for each row its key group and subtask."""
        count = rows.num_rows
        columns = [
            rows.column(value) if isinstance(value, str) else pa.repeat(pa.scalar(value, field.type), count)
            for field, (_name, value) in zip(self._schema, self._feed.columns, strict=True)
        ]
        mine = fitted(pa.RecordBatch.from_arrays(columns, self._schema.names), self._schema, self._where)
        groups = key_groups([mine.column(name) for name in self._keys], count, self._slot.max_parallelism)
        subtasks = groups * self._slot.parallelism // self._slot.max_parallelism
        return mine.append_column(KEY_GROUP_COLUMN, pa.array(groups, pa.int32())).append_column(
            SUBTASK_COLUMN, pa.array(subtasks, pa.int32())
        )
