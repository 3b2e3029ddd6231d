"""What to write here instead of a method of Spark's DataFrame or GroupedData."""

from __future__ import annotations

from typing import Final

_SINK: Final = "sink(sl.ParquetSink(path)) or sink(sl.ForeachBatchSink(function))"
_BY_KEY: Final = {
    "aggregate": "key_by(...).aggregate(...)",
    "deduplicate": "key_by(...).deduplicate(...)",
    "join": "key_by(...).join(other.key_by(...), ...)",
    "process": "key_by(...).process(...)",
    "process_arrow": "key_by(...).process_arrow(...)",
    "transform_with_state": "key_by(...).transform_with_state(...)",
    "window": "key_by(...).window(...)",
}
_ON_STREAMS: Final = {
    **_BY_KEY,
    **dict.fromkeys(("collect", "count", "first", "head", "show", "take", "toArrow", "toPandas"), _SINK),
    **dict.fromkeys(("columns", "dtypes", "printSchema"), "schema"),
    "agg": "key_by(...).aggregate(...)",
    "dropDuplicates": "key_by(...).deduplicate(...)",
    "dropDuplicatesWithinWatermark": "key_by(...).deduplicate(within=...)",
    "drop_duplicates": "key_by(...).deduplicate(...)",
    "groupBy": "key_by(...)",
    "groupby": "key_by(...)",
    "unionAll": "union(...)",
    "unionByName": "union(...)",
    "withWatermark": "job.source(df, event_time=..., watermark_delay=...)",
    "write": _SINK,
    "writeStream": _SINK,
}
_ON_KEYED_STREAMS: Final = {
    **dict.fromkeys(("agg", "avg", "count", "max", "mean", "min", "sum"), "aggregate(n=sl.count(), ...)"),
    "applyInPandasWithState": "process(...)",
    "transformWithState": "transform_with_state(...)",
    "transformWithStateInPandas": 'transform_with_state(..., rows="pandas")',
}


def no_such_attribute(kind: str, name: str, *, keyed: bool) -> AttributeError:
    """The error for an attribute that a `kind` of stream does not have. It says what is written here instead."""
    told = f"{kind!r} object has no attribute {name!r}"
    here = (_ON_KEYED_STREAMS if keyed else _ON_STREAMS).get(name)
    if here is None and not keyed and not name.startswith("_") and _is_of_frames(name):
        here = f"transform(lambda df: df.{name}(...))"
    return AttributeError(f"{told}; here it is {here}" if here is not None else told)


def _is_of_frames(name: str) -> bool:
    from pyspark.sql import DataFrame

    return callable(getattr(DataFrame, name, None))
