"""Columns that rows of Kafka carry through the user's transforms: where they come from, and their event time.

The relay must know the offset of every row, and a user's `select` drops it. So the finished plan is built once more,
from its sources up, with three more columns in every node. A node in which the order of a partition, or the way from
a row to its offset, gets lost is refused by its name.

Private Spark API: the classes of the logical plan, as in `logical_plans`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from strandline.errors import JobDefinitionError
from strandline.operators.columns.names import quoted
from strandline.runtime.driver.event_times import watermark_of
from strandline.runtime.driver.logical_plans import analyzed_plan
from strandline.runtime.task.stream_relay import FROM_COLUMN, HIDDEN_COLUMNS, OFFSET_COLUMN, TIME_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PASSING: Final = {"Filter", "SubqueryAlias"}
"""Nodes whose output is that of their input."""
_WITHOUT_EFFECT: Final = {"CollectMetrics", "EventTimeWatermark"}
"""Nodes that only Spark's own watermark or metrics need. Relays see the event times in `TIME_COLUMN` instead."""
_ADVICE: Final = "use latency_mode='batch', or do this before the rows come to Kafka or behind the step"


@dataclass(frozen=True, slots=True)
class StreamedFrame:
    """The rows of a job's step with the hidden columns, and from where they come."""

    frame: DataFrame
    sources: tuple[int, ...]
    """For every stream that was read, in the order of the plan, the number of the `job.source(...)` that tells its
    event times; -1 if it has none."""


def with_hidden_columns(
    frame: DataFrame, streams: Iterator[int], time_columns: Sequence[tuple[str, ...]], job: str
) -> StreamedFrame:
    """The rows of a streaming frame with `HIDDEN_COLUMNS`.

    `streams` numbers the streams in the order of the plan. `time_columns` are the event time columns of each
    `job.source(...)`. Raises `JobDefinitionError` if real time cannot follow the plan.
    """
    rewriting = _Rewriting(frame.sparkSession, streams, time_columns, job)
    plan = rewriting.rebuilt(analyzed_plan(frame))
    return StreamedFrame(rewriting.dataset(plan), tuple(rewriting.sources))


class _Rewriting:
    def __init__(
        self, spark: SparkSession, streams: Iterator[int], time_columns: Sequence[tuple[str, ...]], job: str
    ) -> None:
        context: Any = spark.sparkContext
        self.sources: list[int] = []
        self._spark: Any = spark
        self._jvm = context._jvm
        self._streams = streams
        self._time_columns = time_columns
        self._job = job

    def dataset(self, plan: Any) -> DataFrame:
        from pyspark.sql import DataFrame as Frame

        return Frame(
            self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._spark._jsparkSession, plan), self._spark
        )

    def rebuilt(self, node: Any) -> Any:
        """The node with the hidden columns at the end of its output."""
        name = str(node.nodeName())
        if self._contains(node, "IN_SUBQUERY", "EXISTS_SUBQUERY"):  # Spark makes joins of these
            raise self._refused("a subquery")
        if self._contains(node, "PYTHON_UDF"):
            raise JobDefinitionError(
                f"job {self._job!r}: a function in Python in front of a step keeps rows back until more of them come, "
                "which latency_mode='realtime' cannot wait for; call the function in the step, write it with functions "
                "of Spark's, or use latency_mode='batch'"
            )
        if not node.isStreaming():
            raise self._refused(f"{name} without a stream")
        if node.children().isEmpty():
            return self._source(node, name)
        if name in _WITHOUT_EFFECT:
            first = len(self.sources)
            return self._timed(node, self.rebuilt(node.children().apply(0)), first)
        if name == "Project":
            child = self.rebuilt(node.child())
            columns = [*_elements(node.projectList()), *self._hidden(child)]
            return self._project(columns, child)
        if name in _PASSING:
            return node.withNewChildren(self._seq([self.rebuilt(node.child())]))
        if name == "Union":
            children = []
            for before in _elements(node.children()):
                child = self.rebuilt(before)
                children.append(self._project([*_elements(before.output()), *self._hidden(child)], child))
            return node.withNewChildren(self._seq(children))
        raise self._refused(name)

    def _contains(self, node: Any, *names: str) -> bool:
        """Whether an expression of the node contains something that Spark names so."""
        known = self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        patterns = [getattr(known, name)() for name in names]
        expressions = _elements(node.expressions())
        return any(expression.containsPattern(pattern) for expression in expressions for pattern in patterns)

    def _source(self, node: Any, name: str) -> Any:
        if name != "StreamingRelationV2" or str(node.sourceName()) != "kafka":
            source = node.sourceName() if name in ("StreamingRelation", "StreamingRelationV2") else name
            raise JobDefinitionError(
                f"job {self._job!r}: latency_mode='realtime' reads Kafka, and this job has another source, {source}; "
                "use latency_mode='batch'"
            )
        stream = next(self._streams)
        self.sources.append(-1)
        rows = self.dataset(node).selectExpr(
            "*",
            f"concat('{stream} ', cast(partition as string), ' ', topic) as {FROM_COLUMN}",
            f"offset as {OFFSET_COLUMN}",
            f"cast(null as bigint) as {TIME_COLUMN}",
        )
        return analyzed_plan(rows)

    def _timed(self, node: Any, child: Any, first: int) -> Any:
        """The child of an observed node, with the event times that the node observes. `first`: its first stream."""
        found = watermark_of(node)
        if found is None:
            return child
        source, number = found
        columns = self._time_columns[source]
        if len(columns) > 1:
            raise JobDefinitionError(
                f"job {self._job!r}: a source has {len(columns)} watermarks ({', '.join(columns)}), and "
                f"latency_mode='realtime' takes one for each source; {_ADVICE}"
            )
        for stream in range(first, len(self.sources)):
            self.sources[stream] = source
        rows = self.dataset(child)
        time = f"unix_micros(cast({quoted(columns[number])} as timestamp)) as {TIME_COLUMN}"
        (made,) = _elements(analyzed_plan(rows.selectExpr(time)).projectList())
        hidden = self._hidden(child)
        plain = _elements(child.output())[: -len(HIDDEN_COLUMNS)]
        return self._project([*plain, *hidden[:-1], made], child)

    def _hidden(self, plan: Any) -> list[Any]:
        return _elements(plan.output())[-len(HIDDEN_COLUMNS) :]

    def _project(self, columns: list[Any], child: Any) -> Any:
        return self._jvm.org.apache.spark.sql.catalyst.plans.logical.Project(self._seq(columns), child)

    def _seq(self, values: list[Any]) -> Any:
        return self._jvm.PythonUtils.toSeq(values)

    def _refused(self, name: str) -> JobDefinitionError:
        return JobDefinitionError(
            f"job {self._job!r}: latency_mode='realtime' follows the offset of every row through select, filter, "
            f"withColumn and union, and cannot follow it through {name} in front of a step; {_ADVICE}"
        )


def _elements(sequence: Any) -> list[Any]:
    return [sequence.apply(number) for number in range(sequence.size())]
