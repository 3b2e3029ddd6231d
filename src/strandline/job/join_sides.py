"""Brings the two sides of a join into one stream with the columns that the join's operator takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strandline.operators.columns.names import quoted
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.join.plan import LEFT, RIGHT, SIDE_COLUMN
from strandline.runtime.driver.plan import Node, Transformation, TransformNode, UnionNode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def union_of_sides(operator: JoinOperator, left: Node, right: Node) -> UnionNode:
    """The rows of both sides with the input columns of `operator`; `SIDE_COLUMN` says from which side a row comes."""
    return UnionNode((TransformNode(left, _side(operator, LEFT)), TransformNode(right, _side(operator, RIGHT))))


def _side(operator: JoinOperator, side: int) -> Transformation:
    def project(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        columns = [F.lit(side).cast("byte").alias(SIDE_COLUMN)]
        for column in operator.input_columns:
            source = column.left if side == LEFT else column.right
            value = F.lit(None) if source is None else F.col(quoted(source))
            columns.append(value.cast(column.data_type).alias(column.name))
        return frame.select(*columns)

    return project
