"""A stream of rows inside a job: stateless steps, keys and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from strandline.errors import JobDefinitionError
from strandline.job.spark_words import no_such_attribute
from strandline.operators.columns.declared import check_key_type, check_not_reserved, check_time_column
from strandline.operators.columns.time_columns import default_time_column, lag_of, time_columns
from strandline.runtime.driver.cluster_setup import absolute_location
from strandline.runtime.driver.logical_plans import source_problems
from strandline.runtime.driver.nodes import (
    Node,
    OutputNode,
    Transformation,
    TransformNode,
    UnionNode,
    greatest_lag,
    has_watermark,
)
from strandline.runtime.driver.plan import prototype, sink_context
from strandline.sinks.base import ExactlyOnceSink, Sink
from strandline.sinks.callback import CallbackSink
from strandline.sinks.delta.sink import DeltaSink
from strandline.sinks.foreach_batch import ForeachBatchSink
from strandline.sinks.parquet.sink import ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

    from strandline.job.job import Job
    from strandline.job.keyed_stream import KeyedStream

NO_WATERMARK = "no source of its rows has event time: give job.source(df, event_time='...', watermark_delay='...')"


class Stream:
    """A stream of rows inside a job; `Job.source` and every step return one.

    The methods describe the job. Nothing runs before `Job.start`. A method raises `JobDefinitionError` if the step that
    it describes cannot run.
    """

    def __init__(self, job: Job, node: Node) -> None:
        self._job = job
        self._node = node
        self._prototype = prototype(node)

    def __repr__(self) -> str:
        """The columns of the stream with their types."""
        return f"<Stream: {', '.join(f'{field.name} {field.dataType.simpleString()}' for field in self.schema)}>"

    if not TYPE_CHECKING:  # a type checker should find such names itself

        def __getattr__(self, name: str) -> NoReturn:
            raise no_such_attribute("Stream", name, keyed=False)

    @property
    def schema(self) -> StructType:
        """The columns of the stream."""
        return self._prototype.schema

    def _time_column(self, given: str | None, where: str, keyword: str = "time") -> str:
        """The event time column that a step reads: the column that the user named with `keyword`, or the stream's own.

        Raises `JobDefinitionError` if there is no such column, or if it cannot be event time.
        """
        schema = self.schema
        column = given if given is not None else default_time_column(schema)
        if column is not None:
            check_time_column(schema, column, f"{where}: {keyword}={given!r}" if given is not None else where)
            return column
        several = ", ".join(time_columns(schema))
        if not has_watermark(self._node):
            problem = NO_WATERMARK
        elif several:
            problem = f"its stream has several event time columns: {several}. Name one with {keyword}="
        else:
            problem = (
                f"its stream has no event time column. Name the column with {keyword}=: a transform that computes a "
                "column, and a step of your own code without output_time=, do not say which column is event time"
            )
        raise JobDefinitionError(f"{where} works in event time, but {problem}")

    def _reads(self, column: str | None) -> tuple[Node, int]:
        """This stream as the input of a step with the event time column `column`: its node, and the column's lag."""
        return self._node, 0 if column is None else self._lag_ms(column)

    def _lag_ms(self, column: str) -> int:
        """How far rows that come later may be behind the watermark of the stream, in the event time column `column`.

        A column that the user computed may be as far behind as the time columns from which it can be computed.
        """
        lag = lag_of(self.schema[column])
        return greatest_lag(self._node) if lag is None else lag

    def side(self, name: str) -> Stream:
        """Returns the side output `name` of the step that made this stream.

        Raises `JobDefinitionError` if the step has no such side output.
        """
        node = self._node
        if not isinstance(node, OutputNode) or name not in node.parent.operator.side_outputs:
            known = list(node.parent.operator.side_outputs) if isinstance(node, OutputNode) else []
            raise JobDefinitionError(
                f"job {self._job.name!r}: no side output {name!r} here; there are: {', '.join(known) or 'none'}"
            )
        return Stream(self._job, OutputNode(node.parent, name))

    def transform(self, function: Transformation) -> Stream:
        """Returns the stream that `function` makes of this one, a stateless step.

        `function` takes the stream as a DataFrame and returns another DataFrame. The job calls it once when it is built
        and again when it starts, so the function should only describe columns. Raises `JobDefinitionError` if the
        result is no DataFrame, if it is not made from the argument, or if it contains a stateful operation of Spark's.
        """
        node = TransformNode(self._node, function)
        result = Stream(self._job, node)
        if not result._prototype.isStreaming:
            raise JobDefinitionError(
                f"job {self._job.name!r}: a transform must return a DataFrame made from its argument"
            )
        problems = source_problems(result._prototype)
        if problems:
            raise JobDefinitionError(f"job {self._job.name!r}: this transform cannot run: {'; '.join(problems)}.")
        return result

    def union(self, *others: Stream) -> Stream:
        """Returns the rows of this stream and of `others`.

        Raises `JobDefinitionError` if a stream belongs to another job, or has other columns or columns of other types.
        """
        for other in others:
            if other._job is not self._job:
                raise JobDefinitionError("streams of different jobs cannot be united")
            if set(other.schema.names) != set(self.schema.names):
                raise JobDefinitionError(
                    f"job {self._job.name!r}: union of streams with different columns: "
                    f"{self.schema.names} and {other.schema.names}"
                )
            for field in self.schema.fields:
                types = field.dataType.simpleString(), other.schema[field.name].dataType.simpleString()
                if types[0] != types[1]:
                    raise JobDefinitionError(
                        f"job {self._job.name!r}: union of streams with different types: the column {field.name!r} is "
                        f"{types[0]} in one and {types[1]} in the other; cast it in a transform before the union"
                    )
        return Stream(self._job, UnionNode((self._node, *(other._node for other in others))))

    def key_by(self, *columns: str | Column | Sequence[str | Column]) -> KeyedStream:
        """Returns the stream grouped by the values of `columns`; the steps of a keyed stream keep state per key.

        A column is a name, a `Column` such as `F.col("user")`, or an expression with a name, such as
        `F.lower("user").alias("u")`: the stream then has the column `u`, too. A list of columns is the same as the
        columns one by one.

        Raises `JobDefinitionError` if a column does not exist, if an expression has no name of its own, if a key
        column has a map or a collated string in it, or if the name of a column begins with `__sl_`.
        """
        from strandline.job.key_columns import read_key_columns
        from strandline.job.keyed_stream import KeyedStream

        names, added = read_key_columns(f"job {self._job.name!r}: key_by", self._prototype, columns)
        keyed = self.transform(lambda frame: frame.withColumns(added)) if added else self
        for name in names:
            check_key_type(keyed.schema[name].dataType, "the column", f"job {self._job.name!r}: key_by({name!r})")
        check_not_reserved(keyed.schema, f"job {self._job.name!r}: key_by")
        return KeyedStream(keyed, names)

    def sink(self, sink: Sink) -> Stream:
        """Sends the rows of this stream to `sink`, and returns this stream. A stream may have several sinks.

        Raises `JobDefinitionError` if another sink of the job writes to the same place, or if the sink cannot take
        these rows, and `ConfigError` if an option of the sink is wrong.
        """
        if not isinstance(sink, ExactlyOnceSink | ForeachBatchSink | CallbackSink):
            raise JobDefinitionError(
                f"{sink!r} is not a sink; use one such as ParquetSink(path) or ForeachBatchSink(function)"
            )
        if isinstance(sink, ExactlyOnceSink):
            config = self._job.config
            location = absolute_location(config.checkpoint_dir)
            context = sink_context(self._node, self._job.name, location, config.storage_options)
            if not context.schema.names:
                raise JobDefinitionError(
                    f"job {self._job.name!r}: rows without columns cannot be written by {type(sink).__name__}; select "
                    "at least one column"
                )
            sink = sink.bound(context)
            for _node, known in self._job._graph.sinks:
                if isinstance(known, ExactlyOnceSink):
                    _check_apart(self._job.name, known, sink)
        self._job._graph.sinks.append((self._node, sink))
        return self


def _check_apart(job: str, known: ExactlyOnceSink, new: ExactlyOnceSink) -> None:
    """Raise `JobDefinitionError` if one of two sinks would write into the target of the other."""
    if new.place == known.place:
        raise JobDefinitionError(f"job {job!r}: two sinks write to {new.place!r}; give each its own folder or table")
    for outer, inner in ((known, new), (new, known)):
        if not isinstance(outer, ParquetSink | DeltaSink) or not isinstance(inner, ParquetSink | DeltaSink):
            continue
        folder, other = outer.path.rstrip("/"), inner.path.rstrip("/")
        if other == folder or (isinstance(outer, DeltaSink) and other.startswith(f"{folder}/")):
            raise JobDefinitionError(
                f"job {job!r}: the sinks {known.place!r} and {new.place!r} share the folder {folder!r}: readers would "
                "find the rows of both, and a VACUUM of a Delta table deletes what is not its own; give each sink its "
                "own folder"
            )
