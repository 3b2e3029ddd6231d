"""Spark's settings for the streaming query of a job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

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


QUICK_LOGS: Final = MappingProxyType(
    {
        "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "fs.file.impl.disable.cache": "true",  # else the usual one is there already
    }
)
"""With these, a query of micro-batches opens its logs without checksums, and so with fewer calls of `chmod`.

Hadoop's usual local files have a second file with checksums each. And without Hadoop's native library a process that
runs `chmod` is started for each file, which takes some five milliseconds: twice a batch, and without these settings
four times. The folder of the logs is private, and scratch. Once the logs are open, `restore` gives the session of the
query the user's settings back.
"""

UserSettings = Mapping[str, str | None]
"""Settings as the user's session has them; None if it does not have one."""


@dataclass(slots=True)
class _Held:
    """A setting that is ours for a while."""

    users: str | None
    holders: int = 0


_changing = threading.Lock()
_starting = threading.RLock()
_held: WeakKeyDictionary[SparkSession, dict[str, _Held]] = WeakKeyDictionary()
"""What is ours now, in every session. Several jobs may start in one session at the same time."""


@contextlib.contextmanager
def query_settings(spark: SparkSession, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[UserSettings]:
    """Sets what our query needs, and `more`, gives what the user had, and restores that in the end.

    A query copies the settings of its session when it starts, so it keeps them. Whoever sets `more` does it within
    `one_start_at_a_time`.
    """
    settings = {**QUERY_SETTINGS, **more}
    with _changing:
        ours = _held.setdefault(spark, {})
        for name, value in settings.items():
            if name not in ours:
                ours[name] = _Held(spark.conf.get(name, None))
            ours[name].holders += 1
            spark.conf.set(name, value)
        users = {name: ours[name].users for name in settings}
    try:
        yield users
    finally:
        with _changing:
            for name in settings:
                ours[name].holders -= 1
            over = {name: ours.pop(name).users for name in settings if not ours[name].holders}
            restore(spark, over)


@contextlib.contextmanager
def one_start_at_a_time() -> Iterator[None]:
    """Held while a query starts: queries of several jobs start with different settings of one session."""
    with _starting:
        yield


def restore(session: SparkSession, users: UserSettings) -> None:
    """Gives a session the user's settings back."""
    for name, value in users.items():
        if value is None:
            session.conf.unset(name)
        else:
            session.conf.set(name, value)
