"""What the writers of rows and of frames share: record batches that are checked for nulls, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    StructField,
    StructType,
)

from strandline.errors import SchemaError
from strandline.operators.columns.schemas import arrow_schema


class OutputColumns:
    """Builds a record batch from the columns of output; errors name the key and the column."""

    def __init__(self, struct: StructType, where: str) -> None:
        self._struct = struct
        self._arrow = arrow_schema(struct)
        self._where = where

    def _batch(self, arrays: list[Any], key_at: Callable[[int], object]) -> pa.RecordBatch:
        for array, field in zip(arrays, self._struct.fields, strict=True):
            if not field.nullable and array.null_count:
                at = array.is_null().to_pylist().index(True)
                raise self._misfit(key_at(at), field, "the value is null, but the column is declared not null")
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _misfit(self, key: object, field: StructField, because: object) -> SchemaError:
        return SchemaError(
            f"{self._where}, key {key}: output column {field.name!r} does not fit {field.dataType.simpleString()}: "
            f"{because}"
        )
