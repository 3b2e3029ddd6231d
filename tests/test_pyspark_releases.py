"""Which releases of Spark a job may run on, and that the package's metadata names the same ones."""

from __future__ import annotations

import tomllib
from datetime import datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.types import StructField, TimestampNTZType, TimestampType

from strandline.errors import ConfigError
from strandline.pyspark_releases import (
    SUPPORTED,
    PandasSettings,
    arrow_column,
    arrow_schema,
    check_supported,
    pandas_columns,
    spark_schema,
)
from strandline.state.coding.ddl import parse_schema


@pytest.mark.parametrize("version", ["4.1.0", "4.2.1", "4.3.0-SNAPSHOT", pyspark.__version__])
def test_a_supported_release_is_accepted(version: str) -> None:
    check_supported(version)


@pytest.mark.parametrize("version", ["3.5.9", "4.0.5", "4.4.0", "5.0.0", "unknown"])
def test_any_other_release_is_refused_with_the_releases_that_work(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"Spark {version} is not supported.* 4\.1, 4\.2, 4\.3\.$"):
        check_supported(version)


def test_the_requirement_of_the_package_allows_exactly_the_supported_releases() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (first, *_), (*_, last) = SUPPORTED, SUPPORTED
    assert f"pyspark>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}" in project["dependencies"]


def test_timestamps_with_and_without_a_zone_keep_their_kind_through_arrow() -> None:
    struct = parse_schema("at timestamp, local timestamp_ntz, n long")
    schema = arrow_schema(struct)
    assert schema.field("at").type == pa.timestamp("us", "UTC")
    assert schema.field("local").type == pa.timestamp("us")
    assert [field.dataType for field in spark_schema(schema)] == [field.dataType for field in struct]


BERLIN = PandasSettings("Europe/Berlin")


def test_an_instant_is_a_local_time_in_pandas_and_the_same_instant_again_in_arrow() -> None:
    struct = parse_schema("at timestamp, local timestamp_ntz")
    noon = datetime(2026, 7, 1, 12)
    rows = pa.record_batch(
        {
            "at": pa.array([noon, None], pa.timestamp("us", "UTC")).cast(pa.timestamp("us", "Europe/Berlin")),
            "local": pa.array([noon, None], pa.timestamp("us")),
        }
    )
    at, local = pandas_columns(rows, struct, BERLIN)
    assert (at.name, local.name) == ("at", "local")
    assert at.iloc[0] == pd.Timestamp(2026, 7, 1, 14)
    assert local.iloc[0] == pd.Timestamp(noon)
    assert at.isna().tolist() == local.isna().tolist() == [False, True]
    again = arrow_column(at, StructField("at", TimestampType()), BERLIN)
    assert again.cast(pa.timestamp("us", "Europe/Berlin")).equals(rows.column("at"))
    assert arrow_column(local, StructField("local", TimestampNTZType()), BERLIN).equals(rows.column("local"))
