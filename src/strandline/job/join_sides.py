"""Brings the two sides of a join into one stream with the columns that the join's operator takes."""

from __future__ import annotations

from pyspark.sql.types import ByteType

from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.plan import LEFT, RIGHT, SIDE_COLUMN
from strandline.runtime.driver.nodes import Node, Projected, ProjectionNode, UnionNode


def union_of_sides(operator: JoinOperator, left: Node, right: Node) -> UnionNode:
    """The rows of both sides with the input columns of `operator`; `SIDE_COLUMN` says from which side a row comes."""
    return UnionNode((_side(operator, left, LEFT), _side(operator, right, RIGHT)))


def _side(operator: JoinOperator, node: Node, side: int) -> ProjectionNode:
    columns = [Projected(SIDE_COLUMN, side, ByteType())]
    for column in operator.input_columns:
        columns.append(Projected(column.name, column.left if side == LEFT else column.right, column.data_type))
    return ProjectionNode(node, tuple(columns))
