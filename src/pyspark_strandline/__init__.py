"""Registers the data source `strandline` in every Spark session: PySpark looks for `DefaultSource` in `pyspark_*`."""

from strandline.state_reader.spark_source import StateSource as DefaultSource

__all__ = ["DefaultSource"]
