"""Which columns of a stream carry event time; the metadata of a column says so.

The entry `strandline.event_time` of a column is its lag in milliseconds: in this column, rows that come later may be
behind the watermark of the stream by that much. Spark keeps the metadata when a column is selected or renamed, and
drops it when a column is computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import NullType, StructField, StructType

from strandline.operators.columns.names import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EVENT_TIME: Final = "strandline.event_time"
_DEFAULT: Final = "strandline.default_event_time"
_UNFIT: Final = "strandline.no_event_time"
SPARK_WATERMARK: Final = "spark.watermarkDelayMs"
"""Spark's own entry for the column of a `withWatermark`: the delay in milliseconds. It counts as a lag of 0."""
_OWN: Final = (EVENT_TIME, _DEFAULT, _UNFIT, SPARK_WATERMARK)


def lag_of(field: StructField) -> int | None:
    """The lag of a column in milliseconds; None if the column does not carry event time."""
    known = field.metadata.get(EVENT_TIME)
    if known is not None:
        return int(known)
    return 0 if SPARK_WATERMARK in field.metadata else None


def time_columns(schema: StructType) -> dict[str, int]:
    """The columns that carry event time, with their lags."""
    return {field.name: lag for field in schema.fields if (lag := lag_of(field)) is not None}


def default_time_column(schema: StructType) -> str | None:
    """The event time column that a step reads if the user names none; None if there is none, or no clear choice."""
    found = list(time_columns(schema))
    marked = [name for name in found if _is_default(schema[name])]
    best = marked or found
    return best[0] if len(best) == 1 else None


def why_unfit(field: StructField) -> str | None:
    """Why the column must not be used as event time; None if there is no such reason."""
    reason = field.metadata.get(_UNFIT)
    return None if reason is None else str(reason)


def with_time_columns(
    schema: StructType, lags: Mapping[str, int], default: str | None = None, unfit: Mapping[str, str] | None = None
) -> StructType:
    """The schema with the entries of its time columns, and without other such entries.

    `default` is the column that a step reads if the user names none. `unfit` has the columns that look like event time
    and must not be used as such, with the reason.
    """
    return StructType(
        [
            StructField(field.name, field.dataType, field.nullable, _metadata(field, lags, default, unfit or {}))
            for field in schema.fields
        ]
    )


def in_all(rows: DataFrame, schemas: Sequence[StructType]) -> DataFrame:
    """The rows of a union of streams with `schemas`, with the time columns that are true of all of them.

    A column of the union carries event time if it does so in every schema; its lag is the greatest one. Spark takes the
    metadata of all columns from the first schema.
    """
    from pyspark.sql import functions as F

    changed: dict[str, dict[str, Any]] = {}
    first, *others = schemas
    for field in first.fields:
        fields = [field, *(other[field.name] for other in others)]
        if all(_entries(one) == _entries(field) for one in fields):
            continue
        lags = [lag_of(one) for one in fields]
        known = {field.name: max(lag or 0 for lag in lags)} if None not in lags else {}
        default = field.name if all(map(_is_default, fields)) else None
        reasons = [reason for one in fields if (reason := why_unfit(one)) is not None]
        unfit = {field.name: reasons[0]} if reasons else {}
        # Never empty: Spark would keep the metadata of the first schema.
        changed[field.name] = {**_metadata(field, known, default, unfit), _DEFAULT: default is not None}
    if not changed:
        return rows
    return rows.select(*(F.col(quoted(name)).alias(name, metadata=changed.get(name)) for name in first.names))


def as_united(rows: DataFrame, columns: Sequence[Sequence[str]], lag_ms: int) -> DataFrame:
    """The rows of a transform with unions; `columns` has the metadata of each united column in every input, as JSON.

    Spark takes the metadata of a union from its first input. If another input says something else about time, all time
    columns of the result count as if they were computed: they have at least the lag `lag_ms`.
    """
    from pyspark.sql import functions as F

    inputs = [[StructField("", NullType(), metadata=json.loads(one)) for one in column] for column in columns]
    differing = [one for column in inputs if len(set(map(_entries, column))) > 1 for one in column]
    if not differing:
        return rows
    lags = {name: max(lag, lag_ms) for name, lag in time_columns(rows.schema).items()}
    unfit = {field.name: reason for field in rows.schema.fields if (reason := why_unfit(field)) is not None}
    for reason in filter(None, map(why_unfit, differing)):
        unfit |= dict.fromkeys(lags, reason)
    marked = with_time_columns(rows.schema, lags, default_time_column(rows.schema), unfit)
    return rows.select(*(F.col(quoted(one.name)).alias(one.name, metadata=one.metadata or None) for one in marked))


def with_source_time(rows: DataFrame, column: str) -> DataFrame:
    """The rows of a source whose event time is `column`."""
    from pyspark.sql import functions as F

    marks = with_time_columns(rows.schema, {column: 0}, column)[column].metadata
    names = rows.schema.names
    return rows.select(*(F.col(quoted(name)).alias(name, metadata=marks if name == column else None) for name in names))


def _metadata(
    field: StructField, lags: Mapping[str, int], default: str | None, unfit: Mapping[str, str]
) -> dict[str, Any]:
    entries: dict[str, Any] = {key: value for key, value in field.metadata.items() if key not in _OWN}
    if field.name in lags:
        entries[EVENT_TIME] = lags[field.name]
    if field.name == default:
        entries[_DEFAULT] = True
    if field.name in unfit:
        entries[_UNFIT] = unfit[field.name]
    return entries


def _is_default(field: StructField) -> bool:
    return bool(field.metadata.get(_DEFAULT, SPARK_WATERMARK in field.metadata))


def _entries(field: StructField) -> tuple[object, ...]:
    return lag_of(field), _is_default(field), why_unfit(field)
