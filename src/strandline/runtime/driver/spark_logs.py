"""Keeps Spark's log quiet where a message would only alarm.

Private Spark API: `SparkContext._jvm`. Spark logs by log4j; without it the messages appear.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark import SparkContext

_QUIETER: Final = {
    # A stack trace if the thread of a query is interrupted while it makes a file.
    "org.apache.hadoop.util.Shell": "ERROR",
    # A stack trace for every task that is stopped while it writes, and tasks in real time always are.
    "org.apache.spark.util.Utils": "OFF",
    "org.apache.spark.sql.execution.datasources.v2.DataWritingSparkTask": "OFF",
    "org.apache.spark.sql.execution.datasources.v2.WriteToDataSourceV2Exec": "OFF",
}
"""Loggers, each with the level that it gets."""


@contextmanager
def interrupts_silenced(context: SparkContext) -> Iterator[None]:
    """While a query is stopped: it notes the end of its batch with the interrupt pending, and its tasks end."""
    from py4j.protocol import Py4JError

    jvm: Any = context._jvm
    before: dict[str, Any] = {}
    try:
        log4j = jvm.org.apache.logging.log4j
        levels = log4j.core.config.Configurator
        for name, level in _QUIETER.items():
            before[name] = log4j.LogManager.getLogger(name).getLevel()
            levels.setLevel(name, log4j.Level.toLevel(level))
    except (Py4JError, TypeError):
        yield
        return
    try:
        yield
    finally:
        for name, level in before.items():
            levels.setLevel(name, level)
