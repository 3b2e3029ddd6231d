"""From where the rows of a step come: from Spark, or straight from the slots of the steps before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strandline.operators.columns.schemas import arrow_schema
from strandline.runtime.driver.nodes import (
    Node,
    OutputNode,
    ProjectionNode,
    StatefulNode,
    UnionNode,
    is_stateful,
    output_of,
    parents_of,
)
from strandline.runtime.protocol.messages import FeedSpec
from strandline.state.coding.spark_hash import hashes_as_spark

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Columns = Mapping[str, str | int | None]
"""For each column that a step reads: the column that it is, or a number, or null."""


@dataclass(frozen=True, slots=True)
class Route:
    """Rows of a step that go straight to the slots of another step."""

    source: StatefulNode
    output: str | None
    """The side output; None for the main output."""
    columns: Columns


@dataclass(frozen=True, slots=True)
class StepInputs:
    """From where the rows of a step come."""

    spark: Node | None
    """The rows that Spark brings; None if there are none."""
    routes: tuple[Route, ...]


def inputs_of(step: StatefulNode) -> StepInputs:
    """From where the rows of a step come, unless `why_through_spark` says that all of them pass through Spark."""
    found = list(_branches(step.parent, {name: name for name in step.columns}))
    nodes = [one for one in found if not isinstance(one, Route)]
    spark = None if not nodes else nodes[0] if len(nodes) == 1 else UnionNode(tuple(nodes))
    return StepInputs(spark, tuple(one for one in found if isinstance(one, Route)))


def _branches(node: Node, columns: Columns) -> Iterator[Node | Route]:
    """The parts of a step's input, if it is read as `columns`."""
    if not is_stateful(node):
        yield node
        return
    match node:
        case StatefulNode() | OutputNode():
            step, output = output_of(node)
            assert isinstance(step, StatefulNode)
            yield Route(step, output, columns)
        case UnionNode(parents):
            for parent in parents:
                yield from _branches(parent, columns)
        case ProjectionNode(parent, projected):
            values = {one.name: one.value for one in projected}
            below = {name: values[value] if isinstance(value, str) else value for name, value in columns.items()}
            for branch in _branches(parent, below):
                yield branch if isinstance(branch, Route) else ProjectionNode(branch, projected)


def why_through_spark(step: StatefulNode) -> str | None:
    """Why rows of other steps must pass through Spark on their way to the step; None if they need not."""
    uid = step.operator.uid
    if _has_transform(step.parent):
        return (
            f"a transform stands between the step {uid!r} and the step before it; do its work in one of the two steps"
        )
    wanted = step.operator.input_struct
    for route in inputs_of(step).routes:
        given = _output_struct(route)
        for name, value in route.columns.items():
            if isinstance(value, str) and given[value].dataType != wanted[name].dataType:
                return (
                    f"the step {uid!r} reads the column {value!r} of the step {route.source.operator.uid!r} as "
                    f"{wanted[name].dataType.simpleString()}, and it is {given[value].dataType.simpleString()}"
                )
        for name in step.operator.key_columns:
            if not hashes_as_spark(arrow_schema(wanted).field(name).type):
                return f"a slot cannot compute the key group of the column {name!r} of the step {uid!r}"
    return None


def _has_transform(node: Node) -> bool:
    """Whether the user's transforms change rows of a step before the next step gets them."""
    if not is_stateful(node) or isinstance(node, StatefulNode | OutputNode):
        return False
    return not isinstance(node, UnionNode | ProjectionNode) or any(map(_has_transform, parents_of(node)))


def _output_struct(route: Route) -> StructType:
    return route.source.output if route.output is None else route.source.operator.side_outputs[route.output]


def levels(steps: Iterable[StatefulNode], uids: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The uids of the steps: first those that read no step, then those that read only these, and so on.

    `uids` has the steps in the order in which they were declared, also those that no sink reads.
    """
    nodes = {step.operator.uid: step for step in steps}
    level: dict[str, int] = {}
    for uid in uids:  # a step is declared after those that it reads
        before = [route.source.operator.uid for route in inputs_of(nodes[uid]).routes] if uid in nodes else []
        level[uid] = max((level[one] + 1 for one in before), default=0)
    return tuple(
        tuple(uid for uid in uids if level[uid] == number) for number in range(max(level.values(), default=0) + 1)
    )


def feeds(steps: Iterable[StatefulNode]) -> dict[str, list[FeedSpec]]:
    """For every step, the steps that read its output without Spark in between."""
    found: dict[str, list[FeedSpec]] = {}
    number = 0
    for step in sorted(steps, key=lambda one: one.operator.uid):
        for route in inputs_of(step).routes:
            feed = FeedSpec(step.operator.uid, route.output, list(route.columns.items()), number)
            found.setdefault(route.source.operator.uid, []).append(feed)
            number += 1
    return found
