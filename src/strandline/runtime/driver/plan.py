"""The job's graph, and the streaming plan that Spark runs for it.

The plan contains all shuffles, relays and Parquet writers. It is built once for a query; the batch function only starts
actions on its finished rows. A stream with two readers is evaluated twice, and yields the same rows both times.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from strandline.errors import JobDefinitionError
from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN, Operator
from strandline.operators.columns.names import quoted
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.columns.time_columns import as_united, in_all
from strandline.runtime.driver.batches import Outlets
from strandline.runtime.driver.logical_plans import columns_of_unions, streams_of
from strandline.runtime.driver.tick_source import tick_rows
from strandline.runtime.driver.watermarks import Lags, SourceTime, WatermarkPlan, behind, merged
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.side_outputs import output_struct, selected
from strandline.runtime.protocol.tls import Tls
from strandline.runtime.task.parquet_writer import MANIFEST, ParquetWriter, version_fields
from strandline.runtime.task.relay import Relay
from strandline.sinks import ForeachBatchSink, ParquetSink, Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

Transformation = Callable[["DataFrame"], "DataFrame"]
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True, eq=False)
class SourceNode:
    """A streaming DataFrame of the user."""

    frame: DataFrame
    time: SourceTime


@dataclass(frozen=True, slots=True, eq=False)
class TransformNode:
    """A stateless step: any function of a DataFrame."""

    parent: Node
    function: Transformation


@dataclass(frozen=True, slots=True, eq=False)
class UnionNode:
    """The rows of several streams that have the same schema."""

    parents: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StatefulNode:
    """A keyed step with state."""

    parent: Node
    operator: Operator
    columns: tuple[str, ...]
    """The input columns that the operator reads. Only these are shuffled."""
    output: StructType
    reads: tuple[tuple[Node, int], ...] = ()
    """The streams whose watermarks the step works with, each with the lag of the time column that it reads."""
    initial: DataFrame | None = None
    """Rows from which the step makes its state before the first batch, unless its state is restored."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputNode:
    """One output of a step that has side outputs. The name None stands for the main output."""

    parent: StatefulNode
    name: str | None


Node = SourceNode | TransformNode | UnionNode | StatefulNode | OutputNode


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the plan needs to know about the generation for which it is built."""

    job: str
    run_id: str
    coordinator: Address
    secret: str = field(repr=False)
    parallelism: int
    max_parallelism: int
    storage_options: dict[str, str] = field(repr=False)
    heartbeat_timeout: float
    ticks: Path | None = None
    """The file of the tick source; None if no step has timers. See `clock`."""
    tls: Tls | None = field(default=None, repr=False)


@dataclass(slots=True)
class Graph:
    """The steps and sinks that the user declared."""

    sinks: list[tuple[Node, Sink]] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    sources: list[SourceNode] = field(default_factory=list)

    def build(self, wiring: Wiring) -> tuple[DataFrame, Outlets]:
        """The finished rows of all sinks in one frame, and which of them belong to which sink."""
        rows, outlets = self._rows(wiring)
        if wiring.ticks is not None:
            rows = rows.unionByName(tick_rows(rows.sparkSession, wiring.ticks, rows.schema))
        return rows, outlets

    def _rows(self, wiring: Wiring) -> tuple[DataFrame, Outlets]:
        frames: dict[int, DataFrame] = {}
        manifests = [
            self._written(
                node,
                ParquetWriter(wiring.job, sink.path, wiring.storage_options, sink.compression, sink.added_columns),
                wiring,
                frames,
            )
            for node, sink in self.sinks
            if isinstance(sink, ParquetSink)
        ]
        functions = [(node, sink.function) for node, sink in self.sinks if isinstance(sink, ForeachBatchSink)]
        streams: list[Node] = []
        for node, _function in functions:
            if not any(node is known for known in streams):
                streams.append(node)
        # A user's function may read only some of its rows. Rows that go through a step are read completely. A source
        # that is read at several places shows the times of the last of them; see `event_times`.
        streams.sort(key=_is_stateful)
        branches = [_frame(node, wiring, frames) for node in streams]
        manifest = reduce(lambda a, b: a.unionByName(b), manifests) if manifests else None
        if manifest is not None and not branches:
            return manifest, Outlets(lambda rows: rows, ())
        if manifest is None and len(branches) == 1:
            return branches[0], Outlets(None, tuple((lambda rows: rows, function) for _node, function in functions))
        outlets = Outlets(
            _branch(len(branches)) if manifest is not None else None,
            tuple(
                (_branch(next(i for i, known in enumerate(streams) if known is node)), function)
                for node, function in functions
            ),
        )
        return _tagged_union([*branches, manifest] if manifest is not None else branches), outlets

    def written_columns(self) -> dict[str, pa.Schema]:
        """The columns of the files of every `ParquetSink`, by the sink's path."""
        return {
            sink.path: pa.schema([*arrow_schema(prototype(node).schema), *version_fields(sink.added_columns)])
            for node, sink in self.sinks
            if isinstance(sink, ParquetSink)
        }

    def watermark_plan(self) -> WatermarkPlan:
        """How the watermarks of the steps follow from those of the sources. All calls of `job.source` are numbered."""
        numbers = {id(source): number for number, source in enumerate(self.sources)}
        steps = [node for node in self._nodes() if isinstance(node, StatefulNode)]
        return WatermarkPlan(
            tuple(source.time for source in self.sources),
            {step.operator.uid: _lags(step, numbers) for step in steps},
        )

    def source_places(self, rows: DataFrame, ticks: bool) -> tuple[int, ...]:
        """For each line of an entry in Spark's offset log, the number of the stream of Spark that it belongs to.

        The streams that the plan reads are numbered in the order of `job.source(...)`. A source that unites two streams
        counts twice, and one that no sink needs does not count; `watermark_plan` numbers sources in another way. Spark
        writes one line for every place at which the plan reads a stream, in the order of the plan. So a source with two
        readers has two lines, and the order changes with the steps and sinks of the job. `rows` is the frame that
        `build` made. With `ticks` its last line belongs to the tick source, which is left out.
        """
        found = streams_of(rows)[: -1 if ticks else None]
        known = [leaf for source in self.sources for leaf in streams_of(source.frame)]
        used: list[Any] = []
        for leaf in (*known, *found):
            if leaf in found and leaf not in used:
                used.append(leaf)
        return tuple(map(used.index, found))

    def steps_of_functions(self) -> frozenset[str]:
        """The steps whose output reaches a `ForeachBatchSink` without passing another step."""
        found: set[str] = set()
        todo = [node for node, sink in self.sinks if isinstance(sink, ForeachBatchSink)]
        while todo:
            node = todo.pop()
            if isinstance(node, StatefulNode):
                found.add(node.operator.uid)
            else:
                todo += parents_of(node)
        return frozenset(found)

    def initial_rows(self, wiring: Wiring, restored: Container[str]) -> list[DataFrame]:
        """Frames that send initial state to the slots when they are evaluated, for steps that are not `restored`."""
        return [
            _mapped(
                _partitioned(node.initial, node.operator, wiring, marked=False),
                replace(_relay(node, wiring), marked=False, initial=True),
                output_struct(node.operator, node.output),
            )
            for node in self._nodes()
            if isinstance(node, StatefulNode) and node.initial is not None and node.operator.uid not in restored
        ]

    def _written(self, node: Node, writer: ParquetWriter, wiring: Wiring, frames: dict[int, DataFrame]) -> DataFrame:
        """The manifest rows of a sink.

        If the sink is the only reader of a stateful step, the relay's task writes the Parquet files itself, so that the
        rows do not pass through Spark.
        """
        readers = [known for known, _sink in self.sinks if known is node]
        readers += [parent for child in self._nodes() for parent in parents_of(child) if parent is node]
        if isinstance(node, StatefulNode) and len(readers) == 1:
            rows = _frame(node.parent, wiring, frames).select(*map(quoted, node.columns))
            rows = _partitioned(rows, node.operator, wiring)
            return _mapped(rows, RelayToParquet(_relay(node, wiring), writer), MANIFEST)
        return _mapped(_frame(node, wiring, frames), writer, MANIFEST)

    def _nodes(self) -> list[Node]:
        """All nodes from which rows reach a sink."""
        found: list[Node] = []
        todo = [node for node, _sink in self.sinks]
        while todo:
            node = todo.pop()
            if not any(node is known for known in found):
                found.append(node)
                todo += parents_of(node)
        return found


@dataclass(frozen=True, slots=True)
class RelayToParquet:
    """A relay, and the Parquet writer of its only reader, in one task."""

    relay: Relay
    writer: ParquetWriter

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.writer(self.relay(batches))


@dataclass(frozen=True, slots=True)
class Renamed:
    """A function of record batches that gets their columns under other names."""

    function: ArrowFunction
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.function(batch.rename_columns(list(self.names)) for batch in batches)


def parents_of(node: Node) -> tuple[Node, ...]:
    """The nodes whose rows a node reads."""
    match node:
        case UnionNode(parents):
            return parents
        case TransformNode(parent) | StatefulNode(parent) | OutputNode(parent):
            return (parent,)
        case _:
            return ()


def _lags(node: Node, numbers: Mapping[int, int]) -> Lags:
    """How far the watermark of a stream is behind those of the sources from which its rows come."""
    match node:
        case SourceNode(_, time):
            return {numbers[id(node)]: 0} if time.delays_ms else {}
        case StatefulNode(reads=reads) if reads:
            return merged(behind(_lags(stream, numbers), lag) for stream, lag in reads)
        case _:
            return merged(_lags(parent, numbers) for parent in parents_of(node))


def _is_stateful(node: Node) -> bool:
    """Whether the rows of the node come out of a step."""
    return isinstance(node, StatefulNode) or any(map(_is_stateful, parents_of(node)))


def has_watermark(node: Node) -> bool:
    """Whether a source of the node's rows has event time."""
    if isinstance(node, SourceNode):
        return bool(node.time.delays_ms)
    return any(map(has_watermark, parents_of(node)))


def _relay(node: StatefulNode, wiring: Wiring) -> Relay:
    return Relay(
        node.operator.uid,
        wiring.coordinator,
        wiring.secret,
        wiring.run_id,
        node.operator.time_mode != "none",
        wiring.heartbeat_timeout,
        tls=wiring.tls,
    )


def _tagged_union(bodies: list[DataFrame]) -> DataFrame:
    """The rows of several frames in one frame: each in a struct column of its own, with the number of its frame."""
    from pyspark.sql import functions as F

    tagged = [
        body.select(
            F.lit(number).alias("branch"),
            *(
                (F.struct("*") if other == number else F.lit(None).cast(bodies[other].schema)).alias(f"rows{other}")
                for other in range(len(bodies))
            ),
        )
        for number, body in enumerate(bodies)
    ]
    return reduce(lambda a, b: a.union(b), tagged)


def _branch(number: int) -> Transformation:
    """Selects the rows of one frame from what `_tagged_union` made."""
    return lambda rows: rows.filter(f"branch = {number}").select(f"rows{number}.*")


def prototype(node: Node) -> DataFrame:
    """A frame that has the node's schema and is never evaluated. It serves to check the steps that follow the node."""
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
            rows = _frame(parent, wiring, known)
            made = _transformed(function, rows)
            return as_united(made, columns_of_unions(made, rows), greatest_lag(parent))
        case UnionNode(parents):
            frames = [_frame(parent, wiring, known) for parent in parents]
            return in_all(reduce(lambda a, b: a.unionByName(b), frames), [frame.schema for frame in frames])
        case StatefulNode(parent, operator, columns, output):
            rows = _frame(parent, wiring, known)
            if wiring is None:
                return _mapped(rows, _nothing, output_struct(operator, output))
            rows = _partitioned(rows.select(*map(quoted, columns)), operator, wiring)
            return _mapped(rows, _relay(node, wiring), output_struct(operator, output))
        case OutputNode(parent, name):
            return selected(_frame(parent, wiring, known), name)


def greatest_lag(node: Node) -> int:
    """How far any time column of the node's rows may be behind the watermark of the node, in milliseconds.

    A step that declares no time columns may pass those of its input on.
    """
    match node:
        case SourceNode():
            return 0
        case StatefulNode(_, operator) if operator.time_columns:
            return max(operator.time_columns.values())
        case _:
            return max(map(greatest_lag, parents_of(node)))


def _transformed(function: Transformation, rows: DataFrame) -> DataFrame:
    from pyspark.sql import DataFrame

    made: object = function(rows)
    if not isinstance(made, DataFrame):
        name = getattr(function, "__qualname__", repr(function))
        hint = "is its `return` missing?" if made is None else "return the DataFrame itself"
        raise JobDefinitionError(f"transform({name}): the function returned {_kind(made)}, not a DataFrame; {hint}")
    return made


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _mapped(rows: DataFrame, function: ArrowFunction, schema: StructType | str) -> DataFrame:
    """`mapInArrow` for columns of any name: PySpark itself looks its columns up by their names without quotes."""
    names = rows.columns
    if not any("." in name or "`" in name for name in names):
        return rows.mapInArrow(function, schema)
    return rows.toDF(*(f"c{at}" for at in range(len(names)))).mapInArrow(Renamed(function, tuple(names)), schema)


def _nothing(batches: Any) -> Any:
    return iter(())


def _partitioned(rows: DataFrame, operator: Operator, wiring: Wiring, *, marked: bool = True) -> DataFrame:
    """Adds its key group to every row, and shuffles the rows to the partition of the subtask that owns the group."""
    from pyspark.sql import functions as F

    keys = [quoted(name) for name in operator.key_columns]
    group = F.pmod(F.xxhash64(*keys), F.lit(wiring.max_parallelism)).cast("int")
    subtask = F.expr(f"cast(`{KEY_GROUP_COLUMN}` * {wiring.parallelism} div {wiring.max_parallelism} as int)")
    keyed = rows.withColumn(KEY_GROUP_COLUMN, group).withColumn(SUBTASK_COLUMN, subtask)
    if marked and operator.time_mode != "none":
        keyed = keyed.unionByName(_marks(keyed, wiring.parallelism))
    keyed = keyed.repartitionById(wiring.parallelism, F.col(SUBTASK_COLUMN))
    return keyed.sortWithinPartitions(*keys) if operator.sorted_input else keyed


def _marks(keyed: DataFrame, parallelism: int) -> DataFrame:
    """One row per subtask and batch, without a key group, so that the relay calls its slot even if it gets no rows."""
    from pyspark.sql import functions as F

    values = {SUBTASK_COLUMN: F.col("id").cast("int")}
    return keyed.sparkSession.range(0, parallelism, 1, 1).select(
        *(values.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in keyed.schema.fields)
    )
