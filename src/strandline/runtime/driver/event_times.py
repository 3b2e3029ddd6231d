"""Which event times the rows of a source have shown in a batch.

`observed` puts a node into the plan of a source that notes the latest event time of the rows that pass. Spark does not
move filters of later steps below such a node, so a row that a filter drops still moves the watermark.

Private Spark API: `DataFrame.observe` is public, but it reports after the batch, in the query's progress. The batch
function reads the values from the execution of the running batch, through `StreamingQuery._jsq`. To observe a
`withWatermark` inside a user's DataFrame, the node is put into the logical plan; see `logical_plans`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strandline.operators.columns.names import quoted
from strandline.operators.columns.time_columns import SPARK_WATERMARK
from strandline.runtime.driver.logical_plans import analyzed_plan
from strandline.runtime.driver.watermarks import Seen, WatermarkPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUERY_ID = "sql.streaming.queryId"
"""The local property with which Spark names the query of the running batch."""
_WATERMARK_NODE = "EventTimeWatermark"
_PREFIX = "strandline.source."


def observed(frame: DataFrame, column: str, source: int, number: int = 0) -> DataFrame:
    """The rows of watermark `number` of a source. Their latest time in `column` can be read after a batch."""
    from pyspark.sql import functions as F

    latest = F.max(F.unix_micros(F.col(quoted(column)))).alias("latest")
    return frame.observe(_name(source, number), latest, F.count(F.lit(1)).alias("rows"))


def observed_watermarks(frame: DataFrame, source: int) -> tuple[DataFrame, tuple[tuple[str, int], ...]]:
    """A user's DataFrame in which every `withWatermark` is observed, with their columns and delays in milliseconds."""
    from pyspark.sql import DataFrame as Frame

    spark = frame.sparkSession
    context: Any = spark.sparkContext
    found: list[tuple[str, int]] = []

    def dataset(plan: Any) -> DataFrame:
        return Frame(context._jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan), spark)

    def rebuilt(node: Any) -> Any:
        before = [node.children().apply(number) for number in range(node.children().size())]
        children = list(map(rebuilt, before))
        if node.nodeName() == _WATERMARK_NODE:
            marked = next(field for field in dataset(node).schema.fields if SPARK_WATERMARK in field.metadata)
            children = [analyzed_plan(observed(dataset(children[0]), marked.name, source, len(found)))]
            found.append((marked.name, int(marked.metadata[SPARK_WATERMARK])))
        if all(new is old for new, old in zip(children, before, strict=True)):
            return node
        return node.withNewChildren(context._jvm.PythonUtils.toSeq(children))

    plan = rebuilt(analyzed_plan(frame))
    return (dataset(plan), tuple(found)) if found else (frame, ())


def running_execution(spark: SparkSession) -> Any:
    """Spark's execution of the running batch, as an object of the JVM. The caller is the batch function."""
    query: Any = spark.streams.get(str(spark.sparkContext.getLocalProperty(QUERY_ID)))
    return query._jsq.streamingQuery().lastExecution()


def read_observed(spark: SparkSession, plan: WatermarkPlan) -> dict[int, Seen]:
    """What the rows of every source have shown in the running batch. The caller is the batch function.

    Spark has no values for a source that has no rows in the batch. After a repeated action the values cover the rows of
    both, which are the same.
    """
    if not any(source.delays_ms for source in plan.sources):
        return {}
    metrics = running_execution(spark).observedMetrics()
    return {
        number: _seen([metrics.get(_name(number, one)) for one in range(len(source.delays_ms))])
        for number, source in enumerate(plan.sources)
    }


def _seen(metrics: list[Any]) -> Seen:
    rows = [metric.get() if metric.isDefined() else None for metric in metrics]
    return Seen(
        tuple(None if row is None or row.isNullAt(0) else row.getLong(0) // 1000 for row in rows),
        sum(row.getLong(1) for row in rows if row is not None),
    )


def _name(source: int, number: int) -> str:
    return f"{_PREFIX}{source}.{number}"


def watermark_of(node: Any) -> tuple[int, int] | None:
    """The source and the number of the watermark that a node of a logical plan observes; None for another node."""
    if node.nodeName() != "CollectMetrics" or not str(node.name()).startswith(_PREFIX):
        return None
    source, _, number = str(node.name()).removeprefix(_PREFIX).partition(".")
    return int(source), int(number)
