"""How rows become messages: which columns are the key, the value, the headers, the partition and the time.

Messages are made where rows are staged: in slots, or in Spark's tasks. So they are made in parallel, and an error in a
serializer of the user's fails the batch. It never stops the commit of a checkpoint.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from strandline.checkpoint.metadata import SinkFile
from strandline.errors import JobDefinitionError, UserCodeError
from strandline.sinks.base import Stager
from strandline.sinks.kafka.json_text import has_json, json_rows, json_text, json_values

Serializer = Callable[[pa.RecordBatch], Any]
"""Makes one content per row: a list of bytes, texts or None, or an Arrow array."""
Content = str | Sequence[str] | Serializer
"""One column as it is, several columns as a JSON object, or a function."""

BYTES = pa.large_binary()
HEADERS = pa.map_(pa.string(), BYTES)
BY_PARTITIONER = -1
"""In the place of a partition: the partitioner chooses."""
NOW = 0
"""In the place of a time: the time at which the message is produced."""


@dataclass(frozen=True, slots=True)
class PerRow:
    """A serializer that calls a function for every row."""

    function: Callable[[dict[str, Any]], bytes | str | None]

    def __call__(self, rows: pa.RecordBatch) -> list[bytes | str | None]:
        return [self.function(row) for row in rows.to_pylist()]


def per_row(function: Callable[[dict[str, Any]], bytes | str | None]) -> Serializer:
    """A serializer for `KafkaSink` that calls `function` with each row as a dictionary.

    A function that takes a whole `pyarrow.RecordBatch` is faster, and needs no `per_row`.
    """
    return PerRow(function)


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Makes messages of rows. It is pickled and sent to where rows are staged."""

    where: str
    """Names the job and the sink in errors."""
    key: Content | None = None
    value: Content | None = None
    headers: str | None = None
    partition: str | Callable[[pa.RecordBatch], Any] | None = None
    timestamp: str | None = None

    def bound(self, schema: pa.Schema) -> MessageForm:
        """This form for rows of a schema, with the columns of the value. Raises `JobDefinitionError`."""
        transport = (self.headers, self.partition)
        value = [name for name in schema.names if name not in transport] if self.value is None else self.value
        bound = replace(self, value=value)
        for what, content in (("key", self.key), ("value", value)):
            if not callable(content):
                for name in [content] if isinstance(content, str) else content or ():
                    kind = bound._type(schema, what, name)
                    if not has_json(kind):
                        raise JobDefinitionError(
                            f"{self.where}: {what}: the column {name!r} of type {kind} has no form in JSON; cast it "
                            "in a transform, leave it out, or give a serializer"
                        )
        if value == []:
            raise JobDefinitionError(f"{self.where}: value: no column is left for the value of a message")
        bound._check_transport(schema)
        return bound

    def _check_transport(self, schema: pa.Schema) -> None:
        if self.headers is not None and not _can_be_headers(self._type(schema, "headers", self.headers)):
            raise JobDefinitionError(
                f"{self.where}: headers={self.headers!r}: give a column of type MAP<STRING, BINARY>, MAP<STRING, "
                f"STRING>, or STRUCT; this one is {schema.field(self.headers).type}"
            )
        if isinstance(self.partition, str):
            kind = self._type(schema, "partition", self.partition)
            if not pa.types.is_integer(kind):
                raise JobDefinitionError(f"{self.where}: partition={self.partition!r}: {kind} is no integer")
        if self.timestamp is not None:
            kind = self._type(schema, "timestamp", self.timestamp)
            if not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind)):
                raise JobDefinitionError(
                    f"{self.where}: timestamp={self.timestamp!r}: give a timestamp, or an integer with milliseconds; "
                    f"this column is {kind}"
                )

    def _type(self, schema: pa.Schema, what: str, name: str) -> pa.DataType:
        if name not in schema.names:
            raise JobDefinitionError(f"{self.where}: {what}: there is no column {name!r}; the rows have {schema.names}")
        return schema.field(name).type

    def messages(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """One message per row, with the columns `key`, `value`, `headers`, `partition` and `timestamp` as needed."""
        columns = {"value": self._content("value", self.value, rows)}
        if self.key is not None:
            columns["key"] = self._content("key", self.key, rows)
        if self.headers is not None:
            columns["headers"] = _headers(rows.column(self.headers))
        if callable(self.partition):
            columns["partition"] = self._partitions(self._called("partition", self.partition, rows, pa.int64()))
        elif self.partition is not None:
            columns["partition"] = self._partitions(rows.column(self.partition))
        if self.timestamp is not None:
            columns["timestamp"] = _milliseconds(rows.column(self.timestamp))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _partitions(self, column: pa.Array) -> pa.Array:
        """Numbers that a partition can have. Rows with others could never be written, and would stay staged."""
        try:
            numbers = column.cast(pa.int32()).fill_null(BY_PARTITIONER)
        except pa.ArrowInvalid as error:
            raise UserCodeError(f"{self.where}: partition=: no topic has such a partition: {error}") from error
        least = pc.min(numbers).as_py()
        if least is not None and least < BY_PARTITIONER:
            raise UserCodeError(
                f"{self.where}: partition=: there is a row with the partition {least}. Give a number from 0, or null "
                "for the partition that follows from the key"
            )
        return numbers

    def _content(self, what: str, content: Content | None, rows: pa.RecordBatch) -> pa.Array:
        if callable(content):
            return self._called(what, content, rows, BYTES)
        if isinstance(content, str):
            return _as_bytes(rows.column(content))
        names = list(content or ())
        return pa.array(json_rows([rows.column(name) for name in names], names), BYTES)

    def _called(self, what: str, function: Serializer, rows: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
        """What a function of the user's makes of the rows."""
        where = f"{self.where}: the function of {what}="
        try:
            made = function(rows)
        except Exception as error:
            cause = "".join(traceback.format_exception_only(error)).strip()
            raise UserCodeError(f"{where} failed: {cause}\n{traceback.format_exc()}") from error
        try:
            column = made.cast(kind) if isinstance(made, pa.Array) else pa.array(made, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UserCodeError(
                f"{where} must return a list or an Arrow array of {kind} for a batch of rows: {error}"
            ) from error
        if len(column) != rows.num_rows:
            raise UserCodeError(f"{where} returned {len(column)} values for {rows.num_rows} rows")
        return column


@dataclass(frozen=True, slots=True)
class MessageStager(Stager):
    """Makes messages of the rows of a task, and has another stager put them aside."""

    form: MessageForm
    stager: Stager

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        messages = (self.form.messages(rows) for rows in batches if rows.num_rows)
        return self.stager.stage(messages, batch, partition)


def _as_bytes(column: pa.Array) -> pa.Array:
    """A text or a binary value as it is, and anything else as JSON. Null stays null."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.large_string()).cast(BYTES)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column.cast(BYTES)
    return pa.array(json_values(column), BYTES)


def _can_be_headers(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return bool(pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)) and has_json(
            kind.item_type
        )
    return bool(pa.types.is_struct(kind)) and has_json(kind)


def _headers(column: pa.Array) -> pa.Array:
    values = column.to_pylist()
    if pa.types.is_struct(column.type):
        values = [None if value is None else list(value.items()) for value in values]
    encoded = [None if value is None else [(name, _header(one)) for name, one in value] for value in values]
    return pa.array(encoded, HEADERS)


def _header(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json_text(value)


def _milliseconds(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type):
        column = pc.floor_temporal(column, unit="millisecond").cast(pa.timestamp("ms", column.type.tz))
    return column.cast(pa.int64()).fill_null(NOW)
