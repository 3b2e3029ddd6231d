"""Rows as a `StatefulProcessor` gets and yields them: PySpark rows, or pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    MapType,
    StructField,
    StructType,
    TimestampType,
)

from strandline.errors import SchemaError
from strandline.operators.columns.rows import Convert, arrow_schema, column_reader
from strandline.operators.process.key_chunks import KeyChunk, KeyChunkReader
from strandline.pyspark_releases import arrow_column, pandas_columns
from strandline.state.coding.values import shown

_NESTED: Final = (ArrayType, MapType, StructType)
_UTC: Final = frozenset({"UTC", "Etc/UTC", "GMT"})
_WIDENED: Final = {"i": np.dtype(np.int64), "f": np.dtype(np.float64)}


# --- Arrow to user code --------------------------------------------------------------------------


class SparkRowReader(KeyChunkReader):
    """Rows as Spark's Python worker makes them: nested values as Arrow gives them, times in the session's zone."""

    def __init__(self, struct: StructType, key_columns: Sequence[str], time_zone: str, where: str) -> None:
        super().__init__(struct, arrow_schema(struct), key_columns, where)
        self._columns = [_spark_reader(field.dataType, time_zone) for field in struct.fields]


def _spark_reader(data_type: DataType, time_zone: str) -> Convert:
    if isinstance(data_type, _NESTED):
        return lambda column: column.to_pylist()
    read = column_reader(data_type)
    if isinstance(data_type, TimestampType) and time_zone not in _UTC:
        return partial(_zoned, read, ZoneInfo(time_zone))
    return read


def _zoned(read: Convert, zone: ZoneInfo, column: Any) -> list[Any]:
    return [None if value is None else value.astimezone(zone) for value in read(column)]


class FrameReader(KeyChunkReader):
    """One pandas frame per key and chunk: the chunk is converted once, as Spark does it, and cut into pieces."""

    def __init__(self, struct: StructType, key_columns: Sequence[str], time_zone: str, where: str) -> None:
        schema = arrow_schema(struct)
        super().__init__(struct, schema, key_columns, where)
        self._struct = struct
        self._time_zone = time_zone
        self._local = pa.schema(
            field.with_type(pa.timestamp("us", time_zone)) if _is_instant(field.type) else field for field in schema
        )
        self._booleans = [at for at, field in enumerate(struct.fields) if isinstance(field.dataType, BooleanType)]

    def chunk(self, rows: pa.RecordBatch) -> KeyChunk:
        """A record batch as `fit` gave it; each key has one item, its frame."""
        encoded = self._encoder.encode(rows)
        starts = encoded.starts()
        first = rows.take(pa.array(starts))
        keys = [self._columns[at](first.column(at)) for at in self._key_places]
        values = list(zip(*keys, strict=True))
        frames = _pieces(self._frame(rows), starts, self._mixed(rows))
        return KeyChunk(encoded.take(starts), values, [1] * len(starts), frames, rows.nbytes)

    def _frame(self, rows: pa.RecordBatch) -> pd.DataFrame:
        columns = [column.cast(field.type) for column, field in zip(rows.columns, self._local, strict=False)]
        local = pa.RecordBatch.from_arrays(columns, schema=self._local)
        series = pandas_columns(local, self._struct, self._time_zone)
        # Spark makes its frames of Python values, so that integers and floats are of 64 bits.
        wide = [one.astype(_WIDENED[one.dtype.kind]) if one.dtype.kind in _WIDENED else one for one in series]
        return pd.concat(wide, axis=1).copy()  # which puts columns of one type together, so that cutting is cheap

    def _mixed(self, rows: pa.RecordBatch) -> bool:
        """Whether a column of objects may be of a better type within one key."""
        return any(rows.column(at).null_count for at in self._booleans)


def _is_instant(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) and kind.tz is not None


def _pieces(frame: pd.DataFrame, starts: npt.NDArray[Any], mixed: bool) -> Iterator[pd.DataFrame]:
    """The frame cut at `starts`; every piece counts its rows from 0, as a frame of its own does."""
    # By way of the block manager: `iloc` and `reset_index` take ten times as long, more than most user code does.
    manager: Any = frame._mgr
    make: Any = frame._constructor_from_mgr
    for begin, end in pairwise([*starts.tolist(), len(frame)]):
        part = manager.get_slice(slice(begin, end), axis=1)
        part.axes[1] = pd.RangeIndex(end - begin)
        piece = make(part, part.axes)
        yield piece.infer_objects() if mixed else piece


def pandas_key(struct: StructType, key_columns: Sequence[str], time_zone: str) -> Callable[[Any], Any] | None:
    """Makes a key what pandas makes of it: timestamps are local and of pandas' own kind; None: nothing to do."""
    instants = [isinstance(struct[name].dataType, TimestampType) for name in key_columns]
    if not any(instants):
        return None
    zone = ZoneInfo(time_zone)

    def local(value: datetime | None) -> Any:
        return pd.NaT if value is None else pd.Timestamp(value.astimezone(zone).replace(tzinfo=None))

    return lambda key: tuple(local(value) if instant else value for instant, value in zip(instants, key, strict=True))


# --- user code to Arrow --------------------------------------------------------------------------


class _OutputColumns:
    """What both kinds of output share: one column after the other, and whose fault it is where one does not fit."""

    def __init__(self, struct: StructType, where: str) -> None:
        self._struct = struct
        self._arrow = arrow_schema(struct)
        self._where = where

    def _batch(self, arrays: list[Any], key_at: Callable[[int], object]) -> pa.RecordBatch:
        for array, field in zip(arrays, self._struct.fields, strict=True):
            if not field.nullable and array.null_count:
                at = array.is_null().to_pylist().index(True)
                raise self._misfit(key_at(at), field, "it is null, and declared not null")
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _misfit(self, key: object, field: StructField, because: object) -> SchemaError:
        return SchemaError(
            f"{self._where}, key {key}: output column {field.name!r} does not fit {field.dataType.simpleString()}: "
            f"{because}"
        )


class SparkRowWriter(_OutputColumns):
    """Takes the rows that user code yields as Spark does: by name; a missing column is null, others are ignored."""

    def __init__(self, struct: StructType, where: str) -> None:
        super().__init__(struct, where)
        self._nested = any(isinstance(field.dataType, _NESTED) for field in struct.fields)

    def waiting(self) -> list[Any]:
        """A place for rows that wait."""
        return _Dicts() if self._nested else []

    def build(self, rows: list[Any], key_at: Callable[[int], object]) -> pa.RecordBatch:
        """One record batch of `rows`."""
        arrays = []
        for at, (field, values) in enumerate(zip(self._struct.fields, self._columns(rows, key_at), strict=True)):
            kind = self._arrow.field(at).type
            try:
                arrays.append(pa.array(values, kind))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise self._first_misfit(values, field, kind, key_at) or error from None
        return self._batch(arrays, key_at)

    def _columns(self, rows: list[Any], key_at: Callable[[int], object]) -> list[Sequence[Any]]:
        wanted = self._struct.names
        if self._nested:
            return [[row.get(name) for row in rows] for name in wanted]
        names = None
        for at, row in enumerate(rows):
            fields = _fields_of(row)
            if fields is None:
                raise SchemaError(f"{self._where}, key {key_at(at)}: {_no_row(row)}")
            if names is None:
                names = fields
            elif fields != names:
                dicts = [row.asDict() for row in rows if _fields_of(row)]
                if len(dicts) == len(rows):
                    return [[row.get(name) for row in dicts] for name in wanted]
        known = dict(zip(names or (), zip(*rows, strict=True), strict=True))
        nothing = [None] * len(rows)
        return [known.get(name, nothing) for name in wanted]

    def _first_misfit(
        self, values: Sequence[Any], field: StructField, kind: pa.DataType, key_at: Callable[[int], object]
    ) -> SchemaError | None:
        for at, value in enumerate(values):
            try:
                pa.array([value], kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                return self._misfit(key_at(at), field, error)
        return None


class _Dicts(list[Any]):
    """Rows with nested values, as they are when user code yields them: it may change a list of its own later."""

    def append(self, row: Any) -> None:
        if _fields_of(row) is None:
            raise SchemaError(_no_row(row))
        super().append(row.asDict(True))


def _fields_of(row: Any) -> list[str] | None:
    """The names of a row's columns; None if it is none, or has no names."""
    fields: list[str] | None = getattr(row, "__fields__", None)
    return fields if fields is not None and len(fields) == len(row) else None


def _no_row(row: Any) -> str:
    return f"an output row must be a pyspark.sql.Row with the names of its columns, got {shown(row)}"


class FrameColumns:
    """The columns of frames that wait to become a record batch; its length is the number of their rows."""

    __slots__ = ("_length", "_names", "_places", "columns")

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._places: dict[tuple[Any, ...], list[int]] = {}
        self._length = 0
        self.columns: list[list[Any]] = [[] for _ in names]

    def append(self, frame: Any) -> None:
        """Take what user code yielded, as it is now: it may change and yield the same frame again.

        The columns are kept, not the frame: thousands of frames that wait would slow the garbage collector down.
        """
        if not isinstance(frame, pd.DataFrame):
            raise SchemaError(f'with rows="pandas", the processor must yield pandas.DataFrame, got {shown(frame)}')
        if not len(frame):
            return
        labels = tuple(frame.columns.tolist())
        places = self._places.get(labels)
        if places is None:
            places = self._places[labels] = self._places_of(labels)
        read: Any = frame._get_column_array  # a series each would cost 30 us
        nulls = None if labels else np.full(len(frame), None, object)
        for place, column in zip(places, self.columns, strict=True):
            column.append(read(place).copy() if nulls is None else nulls)
        self._length += len(frame)

    def clear(self) -> None:
        """Forget all frames."""
        self.columns = [[] for _ in self._names]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def _places_of(self, labels: tuple[Any, ...]) -> list[int]:
        names = self._names
        by_name = any(isinstance(label, str) for label in labels)
        if labels and (any(name not in labels for name in names) if by_name else len(labels) < len(names)):
            raise SchemaError(
                f"an output frame must have the columns {', '.join(names)}, it has {', '.join(map(str, labels))}"
            )
        return list(map(labels.index, names)) if by_name else list(range(len(names)))


class FrameWriter(_OutputColumns):
    """Takes frames as Spark does: by name if a column has one, by position otherwise; types are cast, unchecked."""

    def __init__(self, struct: StructType, time_zone: str, where: str) -> None:
        super().__init__(struct, where)
        self._time_zone = time_zone

    def waiting(self) -> FrameColumns:
        """A place for frames that wait."""
        return FrameColumns(self._struct.names)

    def build(self, rows: FrameColumns, key_at: Callable[[int], object]) -> pa.RecordBatch:
        """One record batch of all that waits."""
        arrays = []
        for field, column in zip(self._struct.fields, rows.columns, strict=True):
            try:
                arrays.append(self._array(column, field))
            except Exception as error:  # noqa: BLE001  # PySpark's errors have no common base
                raise self._first_misfit(column, field, key_at) or error from None
        return self._batch(arrays, key_at)

    def _array(self, column: Sequence[Any], field: StructField) -> Any:
        kind = self._arrow.field(field.name).type
        arrays = [
            arrow_column(_joined(list(same)), field, self._time_zone)
            for _, same in groupby(column, lambda values: values.dtype)
        ]
        array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        return array if array.type == kind else array.cast(kind)

    def _first_misfit(
        self, column: Sequence[Any], field: StructField, key_at: Callable[[int], object]
    ) -> SchemaError | None:
        for values, at in _with_places(column):
            try:
                self._array([values], field)
            except Exception as error:  # noqa: BLE001  # PySpark's errors have no common base
                return self._misfit(key_at(at), field, error.__cause__ or error)
        return None


def _joined(same: list[Any]) -> pd.Series[Any]:
    """Columns of one type as one series."""
    if isinstance(same[0].dtype, np.dtype) and all(isinstance(values, np.ndarray) for values in same):
        return pd.Series(np.concatenate(same))
    joined: pd.Series[Any] = pd.concat([pd.Series(values) for values in same], ignore_index=True)
    return joined


def _with_places(parts: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Each part, and at which row it begins."""
    at = 0
    for part in parts:
        yield part, at
        at += len(part)
