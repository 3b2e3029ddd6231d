"""Which rows of a step come from Spark, and which straight from the slots of other steps."""

from __future__ import annotations

from typing import Any, cast

from pyspark.sql.types import ByteType, StringType

import strandline as sl
from strandline.operators.process.process_operator import ProcessOperator
from strandline.runtime.driver.nodes import (
    Node,
    OutputNode,
    Projected,
    ProjectionNode,
    SourceNode,
    StatefulNode,
    TransformNode,
    UnionNode,
)
from strandline.runtime.driver.routes import feeds, inputs_of, levels, why_through_spark
from strandline.runtime.driver.watermarks import SourceTime
from strandline.state.coding.ddl import parse_schema

ROWS = "user string, x long"


def source() -> SourceNode:
    return SourceNode(cast("Any", None), SourceTime(()))  # no row is ever read


def step(uid: str, parent: Node, reads: str = ROWS, gives: str = ROWS, key: str = "user") -> StatefulNode:
    input_struct, output = parse_schema(reads), parse_schema(gives)
    operator = ProcessOperator(uid, sl.KeyedProcessor(), [key], input_struct, output, side_outputs={"rare": ROWS})
    return StatefulNode(parent, operator, tuple(input_struct.names), output)


def test_a_step_may_read_sources_and_steps_at_once() -> None:
    one = step("one", plain := source())
    two = step("two", UnionNode((one, OutputNode(one, "rare"), plain)))
    inputs = inputs_of(two)
    assert inputs.spark is plain
    assert [(route.source, route.output) for route in inputs.routes] == [(one, None), (one, "rare")]
    assert inputs_of(one).routes == ()
    three = step("three", UnionNode((two, one)))
    assert inputs_of(three).spark is None
    unread = "unread"
    assert levels([three, two, one], ["one", unread, "two", "three"]) == (("one", unread), ("two",), ("three",))
    found = feeds([three, two, one])
    assert {uid: sorted((feed.operator, feed.output or "") for feed in some) for uid, some in found.items()} == {
        "one": [("three", ""), ("two", ""), ("two", "rare")],
        "two": [("three", "")],
    }
    numbers = [feed.number for some in found.values() for feed in some]
    assert len(set(numbers)) == len(numbers)


def test_columns_are_named_anew_on_the_way() -> None:
    one = step("one", plain := source())
    renamed = (
        Projected("side", 1, ByteType()),
        Projected("who", "user", StringType()),
        Projected("nobody", None, StringType()),
    )
    again = (Projected("user", "who", StringType()), Projected("other", "side", ByteType()))
    node = ProjectionNode(ProjectionNode(UnionNode((one, plain)), renamed), again)
    two = step("two", node, reads="user string, other tinyint")
    inputs = inputs_of(two)
    assert dict(inputs.routes[0].columns) == {"user": "user", "other": 1}
    assert isinstance(inputs.spark, ProjectionNode)
    assert inputs.spark.columns == again
    assert isinstance(inputs.spark.parent, ProjectionNode)
    assert inputs.spark.parent.parent is plain
    assert why_through_spark(two) is None


def test_what_only_spark_can_do_between_two_steps_is_named() -> None:
    def why(parent: Node, **kinds: str) -> str:
        found = why_through_spark(step("two", parent, **kinds))
        assert found is not None
        return found

    one = step("one", source())
    transformed = UnionNode((source(), TransformNode(one, lambda df: df)))
    assert why(transformed).startswith("a transform stands between the step 'two' and the step before it; ")
    assert why(one, reads="user string, x int") == (
        "the step 'two' reads the column 'x' of the step 'one' as int, and it is bigint"
    )
    maps = step("one", source(), gives="user map<string, int>, x long")
    assert why(maps, reads="user map<string, int>, x long") == (
        "a slot cannot compute the key group of the column 'user' of the step 'two'"
    )
    # a transform in front of the first step is Spark's work in any case
    assert why_through_spark(step("one", TransformNode(source(), lambda df: df))) is None
