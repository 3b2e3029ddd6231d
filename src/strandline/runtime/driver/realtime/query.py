"""What Spark's query in real time needs, and what it cannot do.

Private Spark API: `realTimeMode.allowlistCheck`, without which Spark refuses Python in real time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from strandline.config import Config
from strandline.errors import JobDefinitionError
from strandline.pyspark_releases import has_realtime

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from strandline.runtime.driver.plan import Graph

SPARK_BATCH: Final = "1 minute"
"""How long a batch of Spark's lasts. Between two of them rows wait for some tenths of a second."""
_BUFFER_SIZE: Final = "spark.sql.execution.pandas.udf.buffer.size"
_TRANSFER_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ALLOWLIST: Final = "spark.sql.streaming.realTimeMode.allowlistCheck"
_INSTEAD: Final = "use latency_mode='batch'"


def realtime_settings(transfer_rows: int) -> Mapping[str, str]:
    """Spark's settings for a query in real time, which passes so many rows at a time to Python."""
    return {_BUFFER_SIZE: "64", _TRANSFER_ROWS: str(transfer_rows)}


def check_realtime(job: str, graph: Graph, config: Config, spark: SparkSession, *, available_now: bool) -> None:
    """Raises `JobDefinitionError` if real time does not support what the job, or its options, ask for."""
    why = _why_not(graph, config, spark, available_now)
    if why is not None:
        raise JobDefinitionError(f"job {job!r}: latency_mode='realtime' does not fit: {why}; {_INSTEAD}")


def _why_not(graph: Graph, config: Config, spark: SparkSession, available_now: bool) -> str | None:
    if not has_realtime():
        return "Spark has a real-time mode for Python since 4.3"
    if available_now:
        return "available_now=True ends a run when the sources are drained, and real time reads on"
    if config.batch_interval is not None:
        return "batch_interval is for micro-batches (epoch_interval is the least time between two epochs)"
    if config.shuffle == "spark":
        return "shuffle='spark' brings rows through Spark's shuffle, which has none in real time"
    if spark.sparkContext.getConf().get("spark.speculation", "false") == "true":
        return "spark.speculation repeats tasks that are slow, and tasks in real time take as long as the job runs"
    return graph.why_not_direct()


def allow_python(spark: SparkSession) -> None:
    """Have Spark accept Python in real time. Spark looks at the session of the user when a batch begins."""
    spark.conf.set(_ALLOWLIST, "false")
