"""Columns of an input as a checkpoint describes them: names and types, without nullability and comments."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql.types import StructType

from strandline.checkpoint.steps import Column
from strandline.state.coding.ddl import type_text


def described_columns(struct: StructType, names: Iterable[str] | None = None) -> tuple[Column, ...]:
    """The columns `names` of a struct in their order; all columns if `names` is None."""
    wanted = struct.names if names is None else names
    return tuple((name, type_text(struct[name].dataType)) for name in wanted)
