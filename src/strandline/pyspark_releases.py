"""The supported releases of PySpark, and the calls whose form differs between them.

Every room may import it. It imports nothing but `errors`, and PySpark only when a function is called.

Private Spark API: the conversions in `pyspark.sql.pandas` and `pyspark.sql.conversion` are not documented. Ours must
give user code the same values as Spark's.
"""

from __future__ import annotations

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


def pandas_columns(rows: pa.RecordBatch, struct: StructType, time_zone: str) -> list[pd.Series[Any]]:
    """The columns of `rows` as Spark hands them to user code in pandas: instants become local times.

    The instants in `rows` must have `time_zone` as their zone.
    """
    if _installed() < (4, 2):
        serializer = _pandas_serializer(time_zone)
        return [
            serializer.arrow_to_pandas(column, at, spark_type=field.dataType).rename(field.name)
            for at, (column, field) in enumerate(zip(rows.columns, struct.fields, strict=True))
        ]
    from pyspark.sql.conversion import ArrowBatchTransformer

    columns: list[Any] = ArrowBatchTransformer.to_pandas(rows, timezone=time_zone, schema=struct)
    return columns


def arrow_column(values: pd.Series[Any], field: StructField, time_zone: str) -> pa.Array:
    """A pandas column as Spark takes it from user code: cast to the type of `field` without a check for overflow."""
    from pyspark.sql.types import StructType

    if _installed() < (4, 2):
        kind = arrow_schema(StructType([field])).field(0).type
        return _pandas_serializer(time_zone)._create_array(values, kind, field.dataType, arrow_cast=True)
    from pyspark.sql.conversion import PandasToArrowConversion

    rows = PandasToArrowConversion.convert(
        [values], StructType([field]), timezone=time_zone, safecheck=False, arrow_cast=True
    )
    return rows.column(0)


@lru_cache
def _pandas_serializer(time_zone: str) -> Any:
    """What Spark 4.1 has in place of `pyspark.sql.conversion`."""
    from pyspark.sql.pandas import serializers

    module: Any = serializers  # later releases do not have the class
    return module.ArrowStreamPandasSerializer(time_zone, safecheck=False, int_to_decimal_coercion_enabled=False)
