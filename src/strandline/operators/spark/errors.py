"""Errors of the calls that a `StatefulProcessor` makes: each is ours and Spark's at the same time.

User code that was written for Spark catches `PySparkRuntimeError`, which is what PySpark raises for all of them.
"""

from __future__ import annotations

from pyspark.errors import PySparkRuntimeError

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError


class SparkCallError(StrandlineError, PySparkRuntimeError):
    """A call of the handle or of a state is not possible here."""


class SparkDefinitionError(JobDefinitionError, SparkCallError):
    """`init` declares a state that cannot be declared so."""


class SparkValueError(SchemaError, SparkCallError):
    """A value does not fit the schema of its state."""
