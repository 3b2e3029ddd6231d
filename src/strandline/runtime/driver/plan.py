"""The job's graph, and the streaming plan that Spark runs for it.

The plan contains all shuffles, relays and stagers of sinks; without Spark's shuffle, relays alone. It is built once for
a query; the batch function only starts actions on its finished rows. A stream with two readers is evaluated twice, and
yields the same rows both times.
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
from strandline.operators.columns.schemas import arrow_schema, fitted
from strandline.operators.columns.time_columns import as_united, in_all
from strandline.runtime.delivery.slot_connections import SlotConnections
from strandline.runtime.driver.batches import Outlets
from strandline.runtime.driver.logical_plans import columns_of_unions, streams_of
from strandline.runtime.driver.nodes import (
    Node,
    OutputNode,
    Projected,
    ProjectionNode,
    SourceNode,
    StatefulNode,
    Transformation,
    TransformNode,
    UnionNode,
    greatest_lag,
    is_stateful,
    lags_of,
    output_of,
    parents_of,
)
from strandline.runtime.driver.realtime.hidden_columns import with_hidden_columns
from strandline.runtime.driver.routes import feeds, inputs_of, levels, why_through_spark
from strandline.runtime.driver.tick_source import tick_rows
from strandline.runtime.driver.watermarks import WatermarkPlan
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.messages import FeedSpec
from strandline.runtime.protocol.side_outputs import output_struct, selected
from strandline.runtime.protocol.tls import Tls
from strandline.runtime.task.direct_relay import DELIVERED, DirectRelay
from strandline.runtime.task.relay import Relay
from strandline.runtime.task.stage_rows import MANIFEST, StageRows
from strandline.runtime.task.stream_relay import FOLLOWER_COLUMN, HIDDEN_COLUMNS, NO_ROWS, StreamRelay
from strandline.sinks.base import ExactlyOnceSink, Sink, SinkContext, SinkTarget, Stager
from strandline.sinks.callback import CallbackSink
from strandline.sinks.foreach_batch import ForeachBatchSink

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the plan needs to know about the generation for which it is built."""

    job: str
    run_id: str
    coordinator: Address
    secret: str = field(repr=False)
    parallelism: int
    max_parallelism: int
    checkpoint_dir: str
    storage_options: dict[str, str] = field(repr=False)
    heartbeat_timeout: float
    ticks: Path | None = None
    """The file of the tick source; None if no step has timers. See `clock`."""
    tls: Tls | None = field(default=None, repr=False)
    direct: bool = False
    """Whether relays deliver rows straight to the slots, without Spark's shuffle; see `Graph.why_not_direct`."""
    generation: int = 0
    addresses: str = ""
    """Names where the slots are; see `Cluster.addresses`."""

    @property
    def connections(self) -> SlotConnections:
        """How Spark's tasks reach the slots."""
        return SlotConnections(self.coordinator, self.secret, self.run_id, self.heartbeat_timeout, self.tls)


@dataclass(frozen=True, slots=True)
class StreamedPlan:
    """The plan of real-time mode."""

    rows: DataFrame
    places: tuple[int, ...]
    """As `Graph.source_places`."""
    source_of_stream: dict[int, int]
    """For each stream, the number of the `job.source(...)` that tells its event times; -1 if it has none."""


@dataclass(slots=True)
class Graph:
    """The steps and sinks that the user declared."""

    sinks: list[tuple[Node, Sink]] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    sources: list[SourceNode] = field(default_factory=list)

    def build(self, wiring: Wiring) -> tuple[DataFrame, Outlets]:
        """The finished rows of all sinks in one frame, and which of them belong to which sink."""
        rows, outlets = self._delivered(wiring) if wiring.direct else self._rows(wiring)
        if wiring.ticks is not None:
            rows = rows.unionByName(tick_rows(rows.sparkSession, wiring.ticks, rows.schema))
        return rows, outlets

    def build_streamed(self, wiring: Wiring, *, released_at_once: bool) -> StreamedPlan:
        """The plan of real-time mode: relays that run as long as a batch of Spark's.

        `released_at_once` says whether Spark passes every row to Python alone, and no row may wait for the next one.
        Raises `JobDefinitionError` if real time cannot follow the rows of the job.
        """
        steps, inputs = self._relayed(wiring)
        known = [leaf for source in self.sources for leaf in streams_of(source.frame)]
        found = [leaf for rows in inputs for leaf in streams_of(rows)]
        used = list(dict.fromkeys(leaf for leaf in (*known, *found) if leaf in found))
        places = tuple(map(used.index, found))
        if len(set(places)) < len(places):
            raise JobDefinitionError(
                f"job {wiring.job!r}: a source is read at several places, which latency_mode='realtime' cannot do; "
                "make a source for each of them, or use latency_mode='batch'"
            )
        numbers = iter(places)
        columns = [source.time.columns for source in self.sources]
        sources: dict[int, int] = {}
        relays = []
        for step, rows in zip(steps, inputs, strict=True):
            hidden = with_hidden_columns(rows, numbers, columns, wiring.job)
            sources |= dict(zip(places[len(sources) :], hidden.sources, strict=False))
            selected_rows = hidden.frame.select(*map(quoted, [*step.columns, *HIDDEN_COLUMNS]))
            grouped = _grouped(selected_rows, step.operator, wiring)
            relay = StreamRelay(step.operator.uid, wiring.connections, wiring.generation, wiring.addresses)
            relays.append(_mapped(_followed(grouped) if released_at_once else grouped, relay, NO_ROWS))
        return StreamedPlan(reduce(lambda a, b: a.unionByName(b), relays), places, sources)

    def why_not_direct(self) -> str | None:
        """Why rows must go through Spark's shuffle; None if relays may deliver them straight to the slots.

        Then slots stage their output for the sinks themselves, so no row of a step comes back to Spark.
        """
        for node, sink in self.sinks:
            if isinstance(sink, ForeachBatchSink):
                return "a ForeachBatchSink takes rows from Spark"
            step, _name = output_of(node)
            if not isinstance(step, StatefulNode):
                place = sink.place if isinstance(sink, ExactlyOnceSink) else "CallbackSink"
                return (
                    f"the sink {place} does not stand directly behind a keyed step, so that its rows pass through "
                    "Spark; do in the step what comes after it"
                )
        return next((why for step in self._steps() if (why := why_through_spark(step)) is not None), None)

    def levels(self) -> tuple[tuple[str, ...], ...]:
        """In which order slots prepare the steps, if rows are delivered directly; see `Deployment.levels`."""
        return levels(self._steps(), [operator.uid for operator in self.operators])

    def feeds(self) -> dict[str, list[FeedSpec]]:
        """For every step, the steps that its slots deliver rows to, if rows are delivered directly."""
        return feeds(self._steps())

    def stagers(
        self, job: str, checkpoint_dir: str, storage_options: Mapping[str, str]
    ) -> dict[str, list[tuple[str | None, Stager]]]:
        """For every step, the sinks that stand directly behind one of its outputs. None names the main output."""
        found: dict[str, list[tuple[str | None, Stager]]] = {}
        for node, sink in self.sinks:
            step, name = output_of(node)
            if not isinstance(sink, ExactlyOnceSink) or not isinstance(step, StatefulNode):
                continue
            stager = sink.stager(sink_context(node, job, checkpoint_dir, storage_options))
            found.setdefault(step.operator.uid, []).append((name, stager))
        return found

    def callbacks(self) -> dict[tuple[str, str | None], list[Callable[[pa.Table, int], None]]]:
        """The functions of `CallbackSink` for every output, by step and name, if rows are delivered directly."""
        found: dict[tuple[str, str | None], list[Callable[[pa.Table, int], None]]] = {}
        for node, sink in self.sinks:
            if isinstance(sink, CallbackSink):
                step, name = output_of(node)
                assert isinstance(step, StatefulNode)
                found.setdefault((step.operator.uid, name), []).append(sink.function)
        return found

    def _delivered(self, wiring: Wiring) -> tuple[DataFrame, Outlets]:
        """One row for every delivery of rows to a slot."""
        delivered = [
            _mapped(
                _grouped(rows.select(*map(quoted, step.columns)), step.operator, wiring),
                DirectRelay(step.operator.uid, wiring.connections, step.operator.combiner()),
                DELIVERED,
            )
            for step, rows in zip(*self._relayed(wiring), strict=True)
        ]
        outlets = Outlets(None, (), direct=True, callbacks=self.callbacks())
        return reduce(lambda a, b: a.unionByName(b), delivered), outlets

    def _relayed(self, wiring: Wiring) -> tuple[list[StatefulNode], list[DataFrame]]:
        """The steps that get rows from Spark, and these rows."""
        frames: dict[int, DataFrame] = {}
        found = [(step, node) for step in self._steps() if (node := inputs_of(step).spark) is not None]
        return [step for step, _node in found], [_frame(node, wiring, frames) for _step, node in found]

    def _rows(self, wiring: Wiring) -> tuple[DataFrame, Outlets]:
        frames: dict[int, DataFrame] = {}
        manifests = [
            self._staged(
                node,
                sink.stager(sink_context(node, wiring.job, wiring.checkpoint_dir, wiring.storage_options)),
                wiring,
                frames,
            )
            for node, sink in self.sinks
            if isinstance(sink, ExactlyOnceSink)
        ]
        functions = [(node, _on_frames(sink)) for node, sink in self.sinks if isinstance(sink, _WithFunction)]
        streams: list[Node] = []
        for node, _function in functions:
            if not any(node is known for known in streams):
                streams.append(node)
        # A user's function may read only some of its rows. Rows that go through a step are read completely. A source
        # that is read at several places shows the times of the last of them; see `event_times`.
        streams.sort(key=is_stateful)
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

    def targets(self, job: str, checkpoint_dir: str, storage_options: Mapping[str, str]) -> dict[str, SinkTarget]:
        """The targets of the exactly-once sinks, by place."""
        return {
            sink.place: sink.target(sink_context(node, job, checkpoint_dir, storage_options))
            for node, sink in self.sinks
            if isinstance(sink, ExactlyOnceSink)
        }

    def watermark_plan(self) -> WatermarkPlan:
        """How the watermarks of the steps follow from those of the sources. All calls of `job.source` are numbered."""
        numbers = {id(source): number for number, source in enumerate(self.sources)}
        return WatermarkPlan(
            tuple(source.time for source in self.sources),
            {step.operator.uid: lags_of(step, numbers) for step in self._steps()},
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
        """The steps whose output reaches the function of a sink without passing another step."""
        found: set[str] = set()
        todo = [node for node, sink in self.sinks if isinstance(sink, _WithFunction)]
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

    def _staged(self, node: Node, stager: Stager, wiring: Wiring, frames: dict[int, DataFrame]) -> DataFrame:
        """The manifest rows of a sink.

        If the sink is the only reader of a stateful step, the relay's task stages the rows itself, so that they do not
        pass through Spark.
        """
        readers = [known for known, _sink in self.sinks if known is node]
        readers += [parent for child in self._nodes() for parent in parents_of(child) if parent is node]
        if isinstance(node, StatefulNode) and len(readers) == 1:
            rows = _frame(node.parent, wiring, frames).select(*map(quoted, node.columns))
            rows = _partitioned(rows, node.operator, wiring)
            return _mapped(rows, RelayToSink(_relay(node, wiring), StageRows(stager)), MANIFEST)
        return _mapped(_frame(node, wiring, frames), StageRows(stager), MANIFEST)

    def _steps(self) -> list[StatefulNode]:
        """The steps from which rows reach a sink."""
        return [node for node in self._nodes() if isinstance(node, StatefulNode)]

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
class RelayToSink:
    """A relay, and the sink that is its only reader, in one task."""

    relay: Relay
    stage: StageRows

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.stage(self.relay(batches))


@dataclass(frozen=True, slots=True)
class Renamed:
    """A function of record batches that gets their columns under other names."""

    function: ArrowFunction
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.function(batch.rename_columns(list(self.names)) for batch in batches)


def sink_context(node: Node, job: str, checkpoint_dir: str, storage_options: Mapping[str, str]) -> SinkContext:
    """What a sink of the node's rows is told."""
    keys: tuple[str, ...] = ()
    if isinstance(node, StatefulNode) and set(node.operator.key_columns) <= set(node.output.names):
        keys = tuple(node.operator.key_columns)
    return SinkContext(job, arrow_schema(prototype(node).schema), checkpoint_dir, keys, dict(storage_options))


def _relay(node: StatefulNode, wiring: Wiring) -> Relay:
    return Relay(node.operator.uid, wiring.connections, node.operator.time_mode != "none")


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
        case ProjectionNode(parent, columns):
            return _frame(parent, wiring, known).select(*map(_projected, columns))
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


def _projected(column: Projected) -> Column:
    from pyspark.sql import functions as F

    value = F.col(quoted(column.value)) if isinstance(column.value, str) else F.lit(column.value)
    return value.cast(column.data_type).alias(column.name)


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


def _grouped(rows: DataFrame, operator: Operator, wiring: Wiring) -> DataFrame:
    """Adds to every row its key group, and the subtask that owns the group."""
    from pyspark.sql import functions as F

    keys = [quoted(name) for name in operator.key_columns]
    group = F.pmod(F.xxhash64(*keys), F.lit(wiring.max_parallelism)).cast("int")
    subtask = F.expr(f"cast(`{KEY_GROUP_COLUMN}` * {wiring.parallelism} div {wiring.max_parallelism} as int)")
    return rows.withColumn(KEY_GROUP_COLUMN, group).withColumn(SUBTASK_COLUMN, subtask)


_WithFunction = ForeachBatchSink | CallbackSink


def _on_frames(sink: ForeachBatchSink | CallbackSink) -> Callable[[DataFrame, int], None]:
    """The function of a sink, for rows that come from Spark."""
    if isinstance(sink, ForeachBatchSink):
        return sink.function
    function = sink.function

    def on_frame(rows: DataFrame, batch: int) -> None:
        schema = arrow_schema(rows.schema)
        parts = [fitted(part, schema, "CallbackSink") for part in rows.toArrow().to_batches() if part.num_rows]
        if parts:
            function(pa.Table.from_batches(parts), batch)

    return on_frame


def _followed(rows: DataFrame) -> DataFrame:
    """Every row, and behind it a row that says nothing: Spark passes a row to Python when it has seen the next one."""
    from pyspark.sql import functions as F

    return rows.withColumn(FOLLOWER_COLUMN, F.explode(F.array(F.lit(False), F.lit(True))))


def _partitioned(rows: DataFrame, operator: Operator, wiring: Wiring, *, marked: bool = True) -> DataFrame:
    """Adds its key group to every row, and shuffles the rows to the partition of the subtask that owns the group."""
    from pyspark.sql import functions as F

    keys = [quoted(name) for name in operator.key_columns]
    keyed = _grouped(rows, operator, wiring)
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
