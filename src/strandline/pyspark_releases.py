"""The supported releases of PySpark, and the calls whose form differs between them.

Every room may import it. It imports nothing but `errors`, and PySpark only when a function is called.

Private Spark API: the conversions in `pyspark.sql.pandas` and `pyspark.sql.conversion` are not documented. Ours must
give user code the same values as Spark's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from strandline.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql.types import StructField, StructType

SUPPORTED: Final = ((4, 1), (4, 2), (4, 3))


def check_supported(version: str) -> None:
    """Raises `ConfigError` if `version` is a release of Spark that Strandline does not run on."""
    if _release(version) not in SUPPORTED:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise ConfigError(f"Spark {version} is not supported. Install a PySpark of one of the releases {known}.")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def has_realtime() -> bool:
    """Whether Python can be part of a query in real time."""
    return _installed() >= (4, 3)


@lru_cache
def _installed() -> tuple[int, ...]:
    import pyspark

    return _release(pyspark.__version__)


def arrow_schema(struct: StructType) -> pa.Schema:
    """Spark's Arrow schema for `struct`; instants are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if _installed() < (4, 2):
        return to_arrow_schema(struct)  # Spark 4.1 has no parameter for the zone: it is always UTC.
    return to_arrow_schema(struct, timezone="UTC")


def spark_schema(schema: pa.Schema) -> StructType:
    """Spark's schema for an Arrow schema; timestamps without a zone are `timestamp_ntz`."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)  # Spark 4.1 has another default.


@dataclass(frozen=True, slots=True)
class PandasSettings:
    """The settings of a Spark session that say how rows become pandas frames, and frames rows."""

    time_zone: str = "UTC"
    safe: bool = False
    """Whether a value that overflows the type of its column is an error."""
    ints_as_decimals: bool = False
    """Whether a column of integers fits a decimal of few digits."""
    by_name: bool = True
    """Whether the columns of a frame are found by their names, if they have names."""
    extension_ints: bool = False
    """Whether integers with nulls stay integers. Otherwise they become floats."""

    @classmethod
    def of(cls, conf: Callable[[str, str], str | None], time_zone: str) -> PandasSettings:
        """The settings of a session in its time zone; `conf` is its `conf.get`."""

        def is_on(name: str, default: bool = False) -> bool:
            return str(conf(f"spark.sql.{name}", str(default))).lower() == "true"

        return cls(
            time_zone,
            is_on("execution.pandas.convertToArrowArraySafely"),
            is_on("execution.pythonUDF.pandas.intToDecimalCoercionEnabled"),
            is_on("legacy.execution.pandas.groupedMap.assignColumnsByName", default=True),
            is_on("execution.pythonUDF.pandas.preferIntExtensionDtype"),
        )


def pandas_columns(rows: pa.RecordBatch, struct: StructType, settings: PandasSettings) -> list[pd.Series[Any]]:
    """The columns of `rows` as Spark hands them to user code in pandas: instants become local times.

    The instants in `rows` must have the zone of `settings`.
    """
    if _installed() < (4, 2):
        serializer = _pandas_serializer(settings)
        return [
            serializer.arrow_to_pandas(column, at, spark_type=field.dataType).rename(field.name)
            for at, (column, field) in enumerate(zip(rows.columns, struct.fields, strict=True))
        ]
    from pyspark.sql.conversion import ArrowBatchTransformer

    more: dict[str, Any] = {"prefer_int_ext_dtype": True} if settings.extension_ints else {}
    columns: list[Any] = ArrowBatchTransformer.to_pandas(rows, timezone=settings.time_zone, schema=struct, **more)
    return columns


def arrow_column(values: pd.Series[Any], field: StructField, settings: PandasSettings) -> pa.Array:
    """A pandas column as Spark takes it from user code: cast to the type of `field`."""
    from pyspark.sql.types import StructType

    if _installed() < (4, 2):
        kind = arrow_schema(StructType([field])).field(0).type
        return _pandas_serializer(settings)._create_array(values, kind, field.dataType, arrow_cast=True)
    from pyspark.sql.conversion import PandasToArrowConversion

    rows = PandasToArrowConversion.convert(
        [values],
        StructType([field]),
        timezone=settings.time_zone,
        safecheck=settings.safe,
        arrow_cast=True,
        int_to_decimal_coercion_enabled=settings.ints_as_decimals,
    )
    return rows.column(0)


@lru_cache
def _pandas_serializer(settings: PandasSettings) -> Any:
    """What Spark 4.1 has in place of `pyspark.sql.conversion`. It has no integers with nulls."""
    from pyspark.sql.pandas import serializers

    module: Any = serializers  # later releases do not have the class
    return module.ArrowStreamPandasSerializer(
        settings.time_zone, safecheck=settings.safe, int_to_decimal_coercion_enabled=settings.ints_as_decimals
    )


def trigger_available_now() -> type:
    """The mixin of a stream reader that supports `Trigger.AvailableNow`; a class without methods before Spark 4.2.

    See `needs_available_now_wrapper`.
    """
    if _installed() < (4, 2):
        return object
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    return SupportsTriggerAvailableNow


def needs_available_now_wrapper() -> bool:
    """Whether Spark's own wrapper must make up for a Python source that cannot support `Trigger.AvailableNow`.

    Without support in every source, Spark puts the rows of all sources into a single batch.
    """
    return _installed() < (4, 2)
