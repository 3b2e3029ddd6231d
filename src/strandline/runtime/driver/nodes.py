"""The nodes of a job's graph: what the user declared, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strandline.operators.base import Operator
from strandline.runtime.driver.watermarks import Lags, SourceTime, behind, merged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

Transformation = Callable[["DataFrame"], "DataFrame"]


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


@dataclass(frozen=True, slots=True)
class Projected:
    """One column of a `ProjectionNode`."""

    name: str
    value: str | int | None
    """The column that it is taken from, or the same number in every row, or null."""
    data_type: DataType


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionNode:
    """A stateless step that only names columns anew and adds constants. Unlike a transform, slots can work it out."""

    parent: Node
    columns: tuple[Projected, ...]


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
    """The input columns that the operator reads. Only these are sent."""
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


Node = SourceNode | TransformNode | ProjectionNode | UnionNode | StatefulNode | OutputNode


def parents_of(node: Node) -> tuple[Node, ...]:
    """The nodes whose rows a node reads."""
    match node:
        case UnionNode(parents):
            return parents
        case TransformNode(parent) | ProjectionNode(parent) | StatefulNode(parent) | OutputNode(parent):
            return (parent,)
        case _:
            return ()


def lags_of(node: Node, numbers: Mapping[int, int]) -> Lags:
    """How far the watermark of a stream is behind those of the sources from which its rows come."""
    match node:
        case SourceNode(_, time):
            return {numbers[id(node)]: 0} if time.delays_ms else {}
        case StatefulNode(reads=reads) if reads:
            return merged(behind(lags_of(stream, numbers), lag) for stream, lag in reads)
        case _:
            return merged(lags_of(parent, numbers) for parent in parents_of(node))


def is_stateful(node: Node) -> bool:
    """Whether the rows of the node come out of a step."""
    return isinstance(node, StatefulNode) or any(map(is_stateful, parents_of(node)))


def has_watermark(node: Node) -> bool:
    """Whether a source of the node's rows has event time."""
    if isinstance(node, SourceNode):
        return bool(node.time.delays_ms)
    return any(map(has_watermark, parents_of(node)))


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


def output_of(node: Node) -> tuple[Node, str | None]:
    """The step that emits the rows of a node, with the name of its side output; None for the main output."""
    return (node.parent, node.name) if isinstance(node, OutputNode) else (node, None)
