"""Operators: the stateful steps as they run inside a slot, on Arrow batches and on the state of one subtask.

Each implements `Operator`; per-key user code goes through `process`, running values per key through `aggregate`.
Job and runtime may import it; it imports only state and errors.
"""

from strandline.operators.aggregate import Aggregate, AggregateOperator, avg, count, max, min, sum
from strandline.operators.base import KEY_GROUP_COLUMN, SUBTASK_COLUMN, BatchInfo, Operator, SubtaskInfo
from strandline.operators.process import KeyedProcessor, ProcessContext, ProcessOperator

__all__ = [
    "KEY_GROUP_COLUMN",
    "SUBTASK_COLUMN",
    "Aggregate",
    "AggregateOperator",
    "BatchInfo",
    "KeyedProcessor",
    "Operator",
    "ProcessContext",
    "ProcessOperator",
    "SubtaskInfo",
    "avg",
    "count",
    "max",
    "min",
    "sum",
]
