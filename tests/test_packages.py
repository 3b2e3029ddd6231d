"""The coordinates of connectors follow the release of Spark; what is not known is an error."""

from __future__ import annotations

import pyspark
import pytest

import strandline as sl

ARTIFACT = "org.apache.spark:spark-sql-kafka-0-10_2.13"


@pytest.mark.parametrize(("version", "connector"), [("4.1.1", "4.1.2"), ("4.2.0", "4.2.0"), ("4.3.0", "4.2.0")])
def test_each_release_of_spark_has_its_connector(version: str, connector: str) -> None:
    assert sl.packages("kafka", spark_version=version) == f"{ARTIFACT}:{connector}"


def test_the_installed_spark_decides_by_default() -> None:
    assert sl.packages("kafka") == sl.packages("kafka", spark_version=pyspark.__version__)


@pytest.mark.parametrize("version", ["4.0.1", "5.0.0", "nonsense"])
def test_an_unknown_release_is_an_error_that_says_what_to_look_for(version: str) -> None:
    with pytest.raises(sl.ConfigError, match=rf"{version}.*4\.1, 4\.2, 4\.3.*spark-sql-kafka"):
        sl.packages("kafka", spark_version=version)


def test_an_unknown_connector_is_an_error() -> None:
    with pytest.raises(sl.ConfigError, match="'pulsar'; the connector that it knows is 'kafka'"):
        sl.packages("kafka", "pulsar")
    with pytest.raises(sl.ConfigError, match="no connector"):
        sl.packages()
