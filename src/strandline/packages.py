"""The Maven coordinates of Spark's connectors, which are no part of PySpark.

It imports nothing but `errors`, and PySpark only when it is asked for the installed release.
"""

from __future__ import annotations

from typing import Final

from strandline.errors import ConfigError

_KAFKA: Final[dict[tuple[int, ...], str]] = {(4, 1): "4.1.2", (4, 2): "4.2.0", (4, 3): "4.2.0"}
"""The connector to Kafka for each release of Spark. For Spark 4.3 none is released yet; the one for 4.2 runs there."""


def packages(*connectors: str, spark_version: str | None = None) -> str:
    """The coordinates of Spark's connectors, separated by commas, as `spark.jars.packages` takes them.

    The one connector that is known is `"kafka"`. Without `spark_version`, the installed PySpark decides. Spark fetches
    the packages when the session starts, so the setting has no effect on a session that exists already.

    Raises `ConfigError` for another connector, and for a release of Spark whose connector is not known.
    """
    unknown = [name for name in connectors if name != "kafka"]
    if unknown or not connectors:
        asked = ", ".join(map(repr, unknown)) or "no connector"
        raise ConfigError(f"packages() got {asked}; the connector that it knows is 'kafka'")
    if spark_version is None:
        import pyspark

        spark_version = pyspark.__version__
    release = tuple(int(part) for part in spark_version.split(".")[:2] if part.isdigit())
    connector = _KAFKA.get(release)
    if connector is None:
        known = ", ".join(".".join(map(str, one)) for one in _KAFKA)
        raise ConfigError(
            f"packages() does not know the connector to Kafka for Spark {spark_version}, only for {known}. Look for "
            "spark-sql-kafka-0-10_2.13 in your Maven repository, and name its coordinates in spark.jars.packages."
        )
    return f"org.apache.spark:spark-sql-kafka-0-10_2.13:{connector}"
