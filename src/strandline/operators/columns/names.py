"""Names of columns in Spark's expressions."""

from __future__ import annotations


def quoted(column: str) -> str:
    """The name of a column in the form in which Spark takes any name; without the quotes it reads `a.b` as a field."""
    return "`" + column.replace("`", "``") + "`"
