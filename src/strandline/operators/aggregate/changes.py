"""Changed aggregates: which accumulators of a checkpoint a changed aggregation can go on with.

An aggregate may go, because the others do not depend on it. None may come, because it has not seen the earlier rows.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, DecimalType, FractionalType, IntegralType, StructField, StructType

from strandline.errors import JobDefinitionError, SchemaError
from strandline.operators.aggregate.plan import AggregatePlan
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.rewrite import ConvertedValues, Rewrite
from strandline.operators.step_change import StepChange
from strandline.pyspark_releases import spark_schema
from strandline.state.coding.codec import ColumnCodec
from strandline.state.coding.conversion import NotConvertibleError, conversion
from strandline.state.coding.ddl import parse_schema, type_text

AGGREGATES: Final = "aggregates"
"""The name of the list of accumulators in the description of a step."""


class CarriedColumns:
    """The stored accumulators of a checkpoint, and those of them that an aggregation goes on with."""

    def __init__(self, old: pa.Schema, new: pa.Schema) -> None:
        self.old = old
        self._new = new

    def convert(self, states: pa.RecordBatch) -> pa.RecordBatch:
        """The accumulators that are left, in the new order and in their new types."""
        columns = [states.column(field.name).cast(field.type) for field in self._new]
        return pa.RecordBatch.from_arrays(columns, schema=self._new)


def carried_columns(change: StepChange, plan: AggregatePlan, state: str, beside: int = 0) -> CarriedColumns | None:
    """The accumulators of a checkpoint, if they differ from those of `plan` but hold all that `plan` needs.

    In that case the difference is accepted. `state` holds the accumulators behind `beside` columns of the operator.
    """
    if not change.differs(AGGREGATES) or state not in change.stored:
        return None
    known = dict(change.before.columns[AGGREGATES])
    for name, inputs in plan.described:
        if name not in known:
            change.explain(f"and {name} has not seen the rows until now", AGGREGATES)
            return None
        if not _goes_on(name, known[name], inputs):
            change.explain(f"and {name} of {known[name]} does not become one of {inputs}", AGGREGATES)
            return None
    try:
        fields = parse_schema(change.stored[state].schema).fields[beside:]
        columns = CarriedColumns(_stored_schema(fields, plan.stored), plan.stored)
    except (NotConvertibleError, SchemaError, JobDefinitionError) as error:
        change.explain(str(error), AGGREGATES)
        return None
    change.accept(AGGREGATES)
    return columns


def converted_states(state: str, columns: CarriedColumns, codec: ColumnCodec) -> Rewrite:
    """Rewrites a state whose values are accumulators alone; `codec` encodes the new ones."""
    before = ColumnCodec(columns.old)
    return ConvertedValues(state, lambda values: codec.encode(columns.convert(before.decode(values))))


def _goes_on(name: str, before: str, now: str) -> bool:
    """Whether an accumulator can go on if the type of its input column has changed."""
    function = name.partition(":")[0]
    if before == now or function == "count":
        return True
    if function not in ("sum", "double", "min", "max", "first", "last"):
        return False
    try:
        old, new = (parse_schema(f"value {kind}").fields[0].dataType for kind in (before, now))
        if function in ("sum", "double"):
            return _summed_alike(old, new)
        # The extremes of floats are stored as integers in the order of the floats.
        if function in ("min", "max") and not isinstance(old, IntegralType | DecimalType):
            return False
        conversion(old, new)
    except (NotConvertibleError, SchemaError):
        return False
    return isinstance(old, IntegralType) == isinstance(new, IntegralType)


def _summed_alike(old: DataType, new: DataType) -> bool:
    """Whether sums of both types are stored in the same type, or in a wider decimal of the same scale."""
    if isinstance(old, DecimalType) or isinstance(new, DecimalType):
        both = isinstance(old, DecimalType) and isinstance(new, DecimalType)
        return both and old.scale == new.scale and old.precision <= new.precision  # type: ignore[attr-defined]  # both
    return any(isinstance(old, kind) and isinstance(new, kind) for kind in (IntegralType, FractionalType))


def _stored_schema(fields: list[StructField], new: pa.Schema) -> pa.Schema:
    """The Arrow columns that a checkpoint describes as `fields`. Raises `NotConvertibleError` if that is not certain.

    Spark's types do not tell all of Arrow's apart. Where a column stays as it is, its type is that of the new column.
    """
    kept = {
        field.name: (type_text(spark.dataType), field.type)
        for field, spark in zip(new, spark_schema(new).fields, strict=True)
    }
    missing = [name for name in kept if name not in {field.name for field in fields}]
    if missing:
        raise NotConvertibleError(f"and the checkpoint has no accumulator {missing[0]!r}")
    columns = []
    for field in fields:
        kind, stored = kept.get(field.name, ("", None))
        if stored is None or kind != type_text(field.dataType):
            users = field.name.startswith("user:")
            if users and stored is not None:
                raise NotConvertibleError(
                    f"and only the user's code knows what {field.name!r}, a {type_text(field.dataType)}, is as {kind}"
                )
            if users and isinstance(field.dataType, BinaryType):
                raise NotConvertibleError(f"and nothing tells how wide the binary accumulator {field.name!r} is")
            stored = arrow_schema(StructType([field])).field(0).type
        columns.append(pa.field(field.name, stored))
    return pa.schema(columns)
