"""pandas frames for a `StatefulProcessor`: its input, read from Arrow, and its output, written to Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pandas.api.extensions import ExtensionDtype
from pyspark.sql.types import (
    BooleanType,
    IntegralType,
    StructField,
    StructType,
    TimestampType,
)

from strandline.errors import SchemaError
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.process.key_chunks import KeyChunk, KeyChunkReader
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.operators.spark.output_columns import OutputColumns
from strandline.pyspark_releases import PandasSettings, arrow_column, pandas_columns
from strandline.state.coding.values import shown

_WIDENED: Final = {"i": np.dtype(np.int64), "f": np.dtype(np.float64)}


class FrameReader(KeyChunkReader):
    """Reads one pandas frame per key and chunk: a chunk is converted once, as in Spark, and then cut into frames."""

    def __init__(
        self,
        struct: StructType,
        key_columns: Sequence[str],
        settings: PandasSettings,
        where: str,
        limits: ProcessLimits = DEFAULT_LIMITS,
    ) -> None:
        schema = arrow_schema(struct)
        super().__init__(struct, schema, key_columns, where, limits)
        self._settings = settings
        self._local = pa.schema(
            field.with_type(pa.timestamp("us", settings.time_zone)) if _is_instant(field.type) else field
            for field in schema
        )
        mixed = (BooleanType, IntegralType) if settings.extension_ints else BooleanType
        self._mixed_columns = [at for at, field in enumerate(struct.fields) if isinstance(field.dataType, mixed)]

    def chunk(self, rows: pa.RecordBatch) -> KeyChunk:
        """The chunk of a record batch that `fit` returned; each key has one item, its frame."""
        encoded = self._encoder.encode(rows)
        starts = encoded.starts()
        values = list(zip(*self._keys(rows.take(pa.array(starts))), strict=True))
        frames = _pieces(self._frame(rows), starts, self._mixed(rows))
        return KeyChunk(encoded.take(starts), values, [1] * len(starts), frames, rows.nbytes)

    def _frame(self, rows: pa.RecordBatch) -> pd.DataFrame:
        columns = [column.cast(field.type) for column, field in zip(rows.columns, self._local, strict=False)]
        local = pa.RecordBatch.from_arrays(columns, schema=self._local)
        try:
            series = pandas_columns(local, self._struct, self._settings)
        except Exception as error:  # noqa: BLE001  # PySpark's errors have no common base
            raise self._unreadable(local) or error from None
        # Spark builds its frames from Python values, so integers and floats have 64 bits.
        return pd.concat(
            map(_widened, series), axis=1
        ).copy()  # the copy stores columns of one type together, so that cutting is cheap

    def _unreadable(self, rows: pa.RecordBatch) -> SchemaError | None:
        """The error for the first column that pandas cannot hold."""
        for at, field in enumerate(self._struct.fields):
            try:
                pandas_columns(rows.select([at]), StructType([field]), self._settings)
            except Exception as error:  # noqa: BLE001  # PySpark's errors have no common base
                return SchemaError(
                    f"{self._where}: the input column {field.name!r} has a value that pandas cannot hold: {error}; "
                    "filter such rows, or drop the column, before the step"
                )
        return None

    def _mixed(self, rows: pa.RecordBatch) -> bool:
        """Whether a frame may get a better type than object for a column, if the key's rows have no nulls."""
        return any(rows.column(at).null_count for at in self._mixed_columns)


def _widened(series: pd.Series[Any]) -> pd.Series[Any]:
    kind: Any = series.dtype
    if kind.kind not in _WIDENED:
        return series
    nulls = isinstance(kind, ExtensionDtype) and series.hasnans
    return series.astype(object) if nulls else series.astype(_WIDENED[kind.kind])


def _is_instant(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) and kind.tz is not None


def _pieces(frame: pd.DataFrame, starts: npt.NDArray[Any], mixed: bool) -> Iterator[pd.DataFrame]:
    """The frame cut at `starts`; the index of every piece begins with 0."""
    # The block manager cuts the frame. `iloc` and `reset_index` take ten times as long, more than most user code.
    manager: Any = frame._mgr
    make: Any = frame._constructor_from_mgr
    for begin, end in pairwise([*starts.tolist(), len(frame)]):
        part = manager.get_slice(slice(begin, end), axis=1)
        part.axes[1] = pd.RangeIndex(end - begin)
        piece = make(part, part.axes)
        yield piece.infer_objects() if mixed else piece


def pandas_key(struct: StructType, key_columns: Sequence[str], time_zone: str) -> Callable[[Any], Any] | None:
    """A function that converts timestamps in a key to local pandas timestamps; None if the key has no timestamps."""
    instants = [isinstance(struct[name].dataType, TimestampType) for name in key_columns]
    if not any(instants):
        return None
    zone = ZoneInfo(time_zone)

    def local(value: datetime | None) -> Any:
        return pd.NaT if value is None else pd.Timestamp(value.astimezone(zone).replace(tzinfo=None))

    return lambda key: tuple(local(value) if instant else value for instant, value in zip(instants, key, strict=True))


class FrameColumns:
    """The columns of frames that wait for their record batch; its length is the number of their rows."""

    __slots__ = ("_by_name", "_length", "_names", "_places", "columns")

    def __init__(self, names: list[str], by_name: bool = True) -> None:
        self._names = names
        self._by_name = by_name
        self._places: dict[tuple[Any, ...], list[int]] = {}
        self._length = 0
        self.columns: list[list[Any]] = [[] for _ in names]

    def append(self, frame: Any) -> None:
        """Copy the columns of a frame that user code yielded: it may change the frame and yield it again.

        The frame itself is not kept, because thousands of frames slow the garbage collector down.
        """
        if not isinstance(frame, pd.DataFrame):
            raise SchemaError(f'with rows="pandas", the processor must yield a pandas.DataFrame, got {shown(frame)}')
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
        """Remove all frames."""
        self.columns = [[] for _ in self._names]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def _places_of(self, labels: tuple[Any, ...]) -> list[int]:
        names = self._names
        by_name = self._by_name and any(isinstance(label, str) for label in labels)
        if labels and (any(name not in labels for name in names) if by_name else len(labels) < len(names)):
            raise SchemaError(
                f"an output frame must have the columns {', '.join(names)}; it has {', '.join(map(str, labels))}"
            )
        return list(map(labels.index, names)) if by_name else list(range(len(names)))


class FrameWriter(OutputColumns):
    """Writes frames as Spark does: columns are found by name, or by position if they have none; values are cast."""

    def __init__(self, struct: StructType, settings: PandasSettings, where: str) -> None:
        super().__init__(struct, where)
        self._settings = settings

    def waiting(self) -> FrameColumns:
        """A new container for frames that wait."""
        return FrameColumns(self._struct.names, self._settings.by_name)

    def build(self, rows: FrameColumns, key_at: Callable[[int], object]) -> pa.RecordBatch:
        """One record batch of the waiting frames."""
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
            arrow_column(_joined(list(same)), field, self._settings)
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
                because = f"{error} ({error.__cause__})" if error.__cause__ is not None else error
                return self._misfit(key_at(at), field, because)
        return None


def _joined(same: list[Any]) -> pd.Series[Any]:
    """Columns of one type, joined into one series."""
    if isinstance(same[0].dtype, np.dtype) and all(isinstance(values, np.ndarray) for values in same):
        return pd.Series(np.concatenate(same))
    joined: pd.Series[Any] = pd.concat([pd.Series(values) for values in same], ignore_index=True)
    return joined


def _with_places(parts: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Each part, and the row at which it begins."""
    at = 0
    for part in parts:
        yield part, at
        at += len(part)
