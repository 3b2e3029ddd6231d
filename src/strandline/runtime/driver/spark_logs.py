"""Keeps Spark's log quiet where a message would only alarm.

Private Spark API: `SparkContext._jvm`. Spark logs by log4j; without it the messages appear.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext

_SHELL = "org.apache.hadoop.util.Shell"
"""Logs a stack trace if the thread of a query is interrupted while it makes a file."""


@contextmanager
def interrupts_silenced(context: SparkContext) -> Iterator[None]:
    """While a query is stopped: it notes the end of its batch with the interrupt pending."""
    from py4j.protocol import Py4JError

    jvm: Any = context._jvm
    try:
        levels = jvm.org.apache.logging.log4j.core.config.Configurator
        before = jvm.org.apache.logging.log4j.LogManager.getLogger(_SHELL).getLevel()
        levels.setLevel(_SHELL, jvm.org.apache.logging.log4j.Level.ERROR)
    except (Py4JError, TypeError):
        yield
        return
    try:
        yield
    finally:
        levels.setLevel(_SHELL, before)
