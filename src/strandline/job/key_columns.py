"""Reads the columns of `key_by`: names, columns, and expressions with a name of their own."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame

from strandline.errors import JobDefinitionError
from strandline.operators.columns.declared import column_type


def read_key_columns(
    where: str, frame: DataFrame, given: Sequence[str | Column | Sequence[str | Column]]
) -> tuple[tuple[str, ...], dict[str, Column]]:
    """The names of the key columns, and the expressions of those that `frame` does not have yet.

    Raises `JobDefinitionError`, with `where` in front, for what is not a column of `frame` and cannot become one.
    """
    columns = [column for one in given for column in (one if isinstance(one, list | tuple) else [one])]
    if not columns:
        raise JobDefinitionError(f"{where} needs at least one column")
    names: list[str] = []
    added: dict[str, Column] = {}
    for column in columns:
        if isinstance(column, Column):
            name = _plain_name(column, frame)
            if name is None:
                name = _new_name(f"{where}({_text(column)})", column, frame)
                added[name] = column
        elif isinstance(column, str):
            name = column
            column_type(frame.schema, name, f"{where}({name!r})")
        else:
            raise JobDefinitionError(
                f"{where}({column!r}): a {type(column).__name__} is no column; give the name of a column, or a Column "
                "such as F.col('user')"
            )
        names.append(name)
    return tuple(names), added


def _plain_name(column: Column, frame: DataFrame) -> str | None:
    """The name of a column that the frame has; None for an expression."""
    text = _text(column).strip("`")
    return text if text in frame.columns else None


def _new_name(where: str, column: Column, frame: DataFrame) -> str:
    """The name that the user gave to an expression. Raises `JobDefinitionError` if there is none, or if it is taken."""
    from pyspark.sql import functions as F

    try:
        name = frame.select(column).columns[0]
        # A struct names its fields by their names, and those that have none by their place.
        named = frame.select(F.struct(column).alias("0"), F.struct(F.lit(0), column).alias("1")).select("0.*", "1.*")
    except AnalysisException as error:
        column_type(frame.schema, _text(column), where)
        raise JobDefinitionError(f"{where}: {str(error).splitlines()[0]}") from None
    if named.columns == ["col1", "col1", "col2"]:
        raise JobDefinitionError(
            f"{where}: the expression has no name, so no column would hold the key; write .alias('...') behind it"
        )
    if name in frame.columns:
        raise JobDefinitionError(f"{where}: the stream has a column {name!r} already; choose another alias")
    return name


def _text(column: Column) -> str:
    """What the user wrote, as PySpark shows it: `Column<'lower(user) AS u'>` without the frame around it."""
    return str(column).removeprefix("Column<'").removesuffix("'>")
