"""The job's graph, and the one streaming plan that Spark runs for it.

Shuffles, relays and Parquet writers are all part of the plan, which is built once for a query; the batch function only
starts actions on the finished rows. A stream that is used twice is evaluated twice, and gets the same rows both times.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN, Operator
from strandline.runtime.driver.batches import Outlets
from strandline.runtime.driver.clock import tick_rows
from strandline.runtime.protocol.side_outputs import recorded_struct, selected
from strandline.runtime.task.parquet_writer import MANIFEST, ParquetWriter
from strandline.runtime.task.relay import Relay
from strandline.sinks import ForeachBatchSink, ParquetSink, Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

Transformation = Callable[["DataFrame"], "DataFrame"]


@dataclass(frozen=True, slots=True, eq=False)
class SourceNode:
    """A streaming DataFrame that the user brought."""

    frame: DataFrame


@dataclass(frozen=True, slots=True, eq=False)
class TransformNode:
    """A stateless step: any function of a DataFrame."""

    parent: Node
    function: Transformation


@dataclass(frozen=True, slots=True, eq=False)
class UnionNode:
    """The rows of several streams with one schema."""

    parents: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StatefulNode:
    """A keyed step with state."""

    parent: Node
    operator: Operator
    columns: tuple[str, ...]
    """The input columns that the operator reads; no others are shuffled."""
    output: StructType
    initial: DataFrame | None = None
    """Rows that state is made of before the first batch of a job that begins."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputNode:
    """One kind of rows of a step that has side outputs; None is the main output."""

    parent: StatefulNode
    name: str | None


Node = SourceNode | TransformNode | UnionNode | StatefulNode | OutputNode


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the plan needs to know of the run it is built for."""

    job: str
    coordinator: tuple[Any, ...]
    secret: str
    parallelism: int
    max_parallelism: int
    storage_options: dict[str, str]
    ticks: Path | None = None
    """The file of the source that makes batches without rows; None where no step needs them."""


@dataclass(slots=True)
class Graph:
    """What the user built."""

    sinks: list[tuple[Node, Sink]] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    sources: list[SourceNode] = field(default_factory=list)

    def build(self, wiring: Wiring) -> tuple[DataFrame, Outlets]:
        """The finished rows of all sinks, and how to tell them apart again."""
        rows, outlets = self._rows(wiring)
        if wiring.ticks is not None:
            rows = rows.unionByName(tick_rows(rows.sparkSession, wiring.ticks, rows.schema))
        return rows, outlets

    def _rows(self, wiring: Wiring) -> tuple[DataFrame, Outlets]:
        from pyspark.sql import functions as F

        frames: dict[int, DataFrame] = {}
        manifests = [
            self._written(
                node, ParquetWriter(wiring.job, sink.path, wiring.storage_options, sink.compression), wiring, frames
            )
            for node, sink in self.sinks
            if isinstance(sink, ParquetSink)
        ]
        functions = [(node, sink.function) for node, sink in self.sinks if isinstance(sink, ForeachBatchSink)]
        streams: list[Node] = []
        for node, _function in functions:
            if not any(node is known for known in streams):
                streams.append(node)
        branches = [(_frame(node, wiring, frames)) for node in streams]
        manifest = reduce(lambda a, b: a.unionByName(b), manifests) if manifests else None
        if manifest is not None and not branches:
            return manifest, Outlets(lambda rows: rows, ())
        if manifest is None and len(branches) == 1:
            return branches[0], Outlets(None, tuple((lambda rows: rows, function) for _node, function in functions))

        # Several kinds of rows: each in a struct column of its own, null elsewhere, with the number of the branch.
        bodies = ([manifest] if manifest is not None else []) + branches
        tagged = [
            body.select(
                F.lit(number).alias("branch"),
                *(
                    (F.struct("*") if other == number else F.lit(None).cast(_struct(bodies[other]))).alias(
                        f"rows{other}"
                    )
                    for other in range(len(bodies))
                ),
            )
            for number, body in enumerate(bodies)
        ]
        first = 1 if manifest is not None else 0
        return (
            reduce(lambda a, b: a.union(b), tagged),
            Outlets(
                _branch(0) if manifest is not None else None,
                tuple(
                    (_branch(first + next(i for i, known in enumerate(streams) if known is node)), function)
                    for node, function in functions
                ),
            ),
        )

    def source_places(self, rows: DataFrame, ticks: bool) -> tuple[int, ...]:
        """Which source each line of Spark's offset log is about, by the order in which the job was given its sources.

        Spark has a line for every place of the plan at which the rows of a source come in, one that is read twice has
        two. Their order is that of the plan, and so changes with the steps and sinks of a job. `rows` is what `build`
        made, the last place is that of `ticks`.
        """
        found = _streams(rows)[: -1 if ticks else None]
        known = [leaf for source in self.sources for leaf in _streams(source.frame)]
        used: list[Any] = []
        for leaf in (*known, *found):
            if leaf in found and leaf not in used:
                used.append(leaf)
        return tuple(map(used.index, found))

    def initial_rows(self, wiring: Wiring, restored: Container[str]) -> list[DataFrame]:
        """Frames whose evaluation hands the initial state of a step to its slots, for steps that are not `restored`."""
        return [
            _partitioned(node.initial, node.operator, wiring, marked=False).mapInArrow(
                replace(_relay(node, wiring), marked=False, initial=True), recorded_struct(node.operator, node.output)
            )
            for node in self._nodes()
            if isinstance(node, StatefulNode) and node.initial is not None and node.operator.uid not in restored
        ]

    def _written(self, node: Node, writer: ParquetWriter, wiring: Wiring, frames: dict[int, DataFrame]) -> DataFrame:
        """A sink's manifest. What only this sink reads is written by the relay's own task, not by way of Spark."""
        readers = [known for known, _sink in self.sinks if known is node]
        readers += [parent for child in self._nodes() for parent in _parents(child) if parent is node]
        if isinstance(node, StatefulNode) and len(readers) == 1:
            rows = _partitioned(_frame(node.parent, wiring, frames).select(*node.columns), node.operator, wiring)
            return rows.mapInArrow(RelayToParquet(_relay(node, wiring), writer), MANIFEST)
        return _frame(node, wiring, frames).mapInArrow(writer, MANIFEST)

    def _nodes(self) -> list[Node]:
        """All nodes that lead to a sink."""
        found: list[Node] = []
        todo = [node for node, _sink in self.sinks]
        while todo:
            node = todo.pop()
            if not any(node is known for known in found):
                found.append(node)
                todo += _parents(node)
        return found


@dataclass(frozen=True, slots=True)
class RelayToParquet:
    """A relay and the writer of its only sink, in one task."""

    relay: Relay
    writer: ParquetWriter

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.writer(self.relay(batches))


def _parents(node: Node) -> tuple[Node, ...]:
    match node:
        case UnionNode(parents):
            return parents
        case TransformNode(parent) | StatefulNode(parent) | OutputNode(parent):
            return (parent,)
        case _:
            return ()


def _relay(node: StatefulNode, wiring: Wiring) -> Relay:
    return Relay(node.operator.uid, wiring.coordinator, wiring.secret, node.operator.time_mode != "none")


def _struct(frame: DataFrame) -> StructType:
    return frame.schema


def _branch(number: int) -> Transformation:
    return lambda rows: rows.filter(f"branch = {number}").select(f"rows{number}.*")


def prototype(node: Node) -> DataFrame:
    """A frame with the node's schema, for checking what is built on it; it is never run."""
    return _frame(node, None, {})


def _frame(node: Node, wiring: Wiring | None, known: dict[int, DataFrame]) -> DataFrame:
    frame = known.get(id(node))
    if frame is None:
        frame = known[id(node)] = _build(node, wiring, known)
    return frame


def _build(node: Node, wiring: Wiring | None, known: dict[int, DataFrame]) -> DataFrame:
    match node:
        case SourceNode(frame):
            return frame
        case TransformNode(parent, function):
            return function(_frame(parent, wiring, known))
        case UnionNode(parents):
            return reduce(lambda a, b: a.unionByName(b), [_frame(parent, wiring, known) for parent in parents])
        case StatefulNode(parent, operator, columns, output):
            rows = _frame(parent, wiring, known)
            if wiring is None:
                return rows.mapInArrow(_nothing, recorded_struct(operator, output))
            return _partitioned(rows.select(*columns), operator, wiring).mapInArrow(
                _relay(node, wiring), recorded_struct(operator, output)
            )
        case OutputNode(parent, name):
            return selected(_frame(parent, wiring, known), name)


def _nothing(batches: Any) -> Any:
    return iter(())


def _partitioned(rows: DataFrame, operator: Operator, wiring: Wiring, *, marked: bool = True) -> DataFrame:
    """Every row with its key group, in the partition of the subtask that owns the group."""
    from pyspark.sql import functions as F

    group = F.pmod(F.xxhash64(*operator.key_columns), F.lit(wiring.max_parallelism)).cast("int")
    subtask = F.expr(f"cast(`{KEY_GROUP_COLUMN}` * {wiring.parallelism} div {wiring.max_parallelism} as int)")
    keyed = rows.withColumn(KEY_GROUP_COLUMN, group).withColumn(SUBTASK_COLUMN, subtask)
    if marked and operator.time_mode != "none":
        keyed = keyed.unionByName(_marks(keyed, wiring.parallelism))
    keyed = keyed.repartitionById(wiring.parallelism, F.col(SUBTASK_COLUMN))
    return keyed.sortWithinPartitions(*operator.key_columns) if operator.sorted_input else keyed


def _marks(keyed: DataFrame, parallelism: int) -> DataFrame:
    """One row per subtask and batch, without a key group: the relay calls its slot even if there is nothing else."""
    from pyspark.sql import functions as F

    values = {SUBTASK_COLUMN: F.col("id").cast("int")}
    return keyed.sparkSession.range(0, parallelism, 1, 1).select(
        *(values.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in keyed.schema.fields)
    )


def _streams(frame: DataFrame) -> list[Any]:
    """The streams that a plan reads, as the JVM knows them, in the order of the plan."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()  # plans have no public API in Python
    return [leaf for number in range(leaves.size()) if (leaf := leaves.apply(number)).isStreaming()]


def source_problems(frame: DataFrame) -> list[str]:
    """What speaks against a DataFrame as the source of a job, found in its plan."""
    problems = []
    nodes = [frame._jdf.queryExecution().analyzed()]  # plans have no public API in Python
    while nodes:
        node = nodes.pop()
        name = node.nodeName()
        children = [node.children().apply(number) for number in range(node.children().size())]
        nodes.extend(children)
        streaming = [child for child in children if child.isStreaming()]
        if streaming and (name in _STATEFUL or (name == "Join" and len(streaming) == 2)):
            problems.append(
                f"it contains Spark's own stateful operator {name}, whose state our checkpoints do not cover; "
                "use key_by(...) with aggregate(...) or process(...) instead"
            )
        if name == "StreamingRelation":
            option = node.dataSource().options().get("cleanSource")
            if option.isDefined() and str(option.get()).lower() != "off":
                problems.append("its option cleanSource removes files before a checkpoint covers them; leave it out")
    return problems


_STATEFUL = {
    "Aggregate",
    "Deduplicate",
    "DeduplicateWithinWatermark",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPandas",
    "TransformWithStateInPySpark",
    "Distinct",
}
