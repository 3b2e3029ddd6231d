"""Side outputs: the main rows and the side rows of a step travel in one frame, each kind in a struct column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from strandline.operators.base import Operator, Output, SideRows
from strandline.operators.columns.schemas import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_MAIN = "main"


def _column(name: str | None) -> str:
    return _MAIN if name is None else f"side_{name}"


def output_schema_of(operator: Operator) -> pa.Schema:
    """The schema of all output of `operator`, as a slot keeps it."""
    if not operator.side_outputs:
        return operator.output_schema
    kinds = {None: operator.output_schema} | {name: arrow_schema(s) for name, s in operator.side_outputs.items()}
    return pa.schema([pa.field(_column(name), pa.struct(list(schema))) for name, schema in kinds.items()])


def combined(produced: Output, schema: pa.Schema, operator: Operator) -> pa.RecordBatch:
    """Rows that an operator yielded, in the schema of all its output."""
    if not operator.side_outputs:
        assert not isinstance(produced, SideRows)
        return produced
    name, rows = (produced.name, produced.rows) if isinstance(produced, SideRows) else (None, produced)
    own = _column(name)
    columns = [
        pa.StructArray.from_arrays(rows.columns, fields=list(field.type))
        if field.name == own
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def rows_of(batches: Iterable[pa.RecordBatch], operator: Operator, name: str | None) -> Iterator[pa.RecordBatch]:
    """One kind of rows out of those that `combined` made; None for the main output."""
    for batch in batches:
        if not operator.side_outputs:
            yield batch
            continue
        column = batch.column(_column(name))
        rows = column.drop_null() if column.null_count else column
        if len(rows):
            yield pa.RecordBatch.from_struct_array(rows)


def output_struct(operator: Operator, output: StructType) -> StructType:
    """The schema of all output as Spark's type; `output` is the schema of the main rows."""
    from pyspark.sql.types import StructField, StructType

    if not operator.side_outputs:
        return output
    kinds = {None: output} | dict(operator.side_outputs)
    return StructType([StructField(_column(name), schema) for name, schema in kinds.items()])


def selected(frame: DataFrame, name: str | None) -> DataFrame:
    """One kind of rows out of the combined frame; None for the main output."""
    return frame.filter(f"`{_column(name)}` is not null").select(f"`{_column(name)}`.*")
