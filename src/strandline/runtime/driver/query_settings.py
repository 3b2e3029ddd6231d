"""Spark's settings for the streaming query of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUERY_SETTINGS = {
    # Adaptive execution finds out at run time that an input is empty, and then skips the relay.
    "spark.sql.adaptive.enabled": "false",
    # Spark's checkpoint folder is scratch on the driver's disk, so the cheapest manager is enough.
    # Private Spark API: the value is the name of an internal class. No shorter public name selects it.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # Spark refuses every sort of a stream. Our sort is within a partition of one batch, where it is well defined.
    # Private Spark API: the setting is internal. No public one allows sortWithinPartitions alone.
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.streaming.stopTimeout": "60s",
}


AVAILABLE_NOW_WRAPPER = {"spark.sql.streaming.triggerAvailableNowWrapper.enabled": "true"}
"""With this, Spark reads also a source without support for `Trigger.AvailableNow` in several batches. Spark warns of
it, because it may read some sources wrongly, so it must not be set for such a source of the user."""


class QuickLogs:
    """Settings with which a query of micro-batches opens its logs: without checksums, and without a call of `chmod`.

    Hadoop's usual local files have a second file with checksums each. And without Hadoop's native library a process
    that runs `chmod` is started for each, which takes some seven milliseconds, twice a batch or more. The folder of the
    logs is private, and scratch.
    """

    settings: Final = MappingProxyType(
        {
            "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
            "fs.file.impl.disable.cache": "true",  # else the usual one is there already
        }
    )

    def __init__(self, spark: SparkSession) -> None:
        """`spark` is the session in which the query will be started."""
        self._before = {name: spark.conf.get(name, None) for name in self.settings}

    def end(self, session: SparkSession) -> None:
        """The logs are open: `session`, the query's own, gets the user's settings back for all other files."""
        _restore(session, self._before)


@contextlib.contextmanager
def query_settings(spark: SparkSession, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Sets what our query needs, and `more`, and then restores the session's own settings.

    A query copies the settings of its session when it starts, so it keeps them.
    """
    settings = {**QUERY_SETTINGS, **more}
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        _restore(spark, before)


def _restore(spark: SparkSession, before: Mapping[str, str | None]) -> None:
    for name, old in before.items():
        if old is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, old)
