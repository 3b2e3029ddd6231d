"""How often a batch reads each stream: Spark's count of input rows is so many times too large.

A plan has a place for every reader of a stream. Spark computes places that are alike only once: it reuses their
exchange. Which ones those are can be seen in the plan that was executed.

Private Spark API: the physical plan of the running batch, through `event_times.running_execution`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strandline.runtime.driver.event_times import running_execution
from strandline.runtime.driver.logical_plans import leaves_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REUSED = "ReusedExchange"
_WITHOUT_ROWS = {"LocalRelation", "LocalTableScan"}
"""Names of the logical and of the physical node of a stream that has no rows in a batch. Spark may leave either out."""


class SourceReads:
    """Finds out how often the plan of a generation reads each stream."""

    def __init__(self, spark: SparkSession, places: tuple[int, ...]) -> None:
        """`places` has the stream of each place at which the plan reads one; see `Graph.source_places`."""
        self._spark = spark
        self._places = places
        self._known = {stream: 1 for stream, count in Counter(places).items() if count == 1}

    def look(self) -> Mapping[int, int]:
        """The reads of each stream that has had rows, as far as Spark's plans tell. The caller is the batch function.

        They do not change from batch to batch, so the plan of a batch is looked at only while some are unknown.
        """
        if len(self._known) < len(set(self._places)):
            execution = running_execution(self._spark)
            logical = [(leaf.nodeName(), leaf.isStreaming()) for leaf in leaves_of(execution.logical())]
            physical = [found for found in _scans(execution.executedPlan()) if found[0] not in _WITHOUT_ROWS]
            self._known |= _reads(self._places, logical, [reused for _name, reused in physical])
        return dict(self._known)


def _reads(places: tuple[int, ...], logical: list[tuple[str, bool]], reused: list[bool]) -> dict[int, int]:
    """The reads of streams with rows.

    `logical` has the name of every leaf, and whether it is a stream; `reused` whether each leaf that may have rows is
    read by another place. Empty if the two plans do not fit each other.
    """
    with_rows = [name not in _WITHOUT_ROWS for name, _streaming in logical]
    if sum(with_rows) != len(reused):
        return {}
    answers = iter(reused)
    found: Counter[int] = Counter()
    left = iter(places)
    for (_name, streaming), has_rows in zip(logical, with_rows, strict=True):
        is_reused = next(answers) if has_rows else True
        stream = next(left, None) if streaming else None
        if stream is not None and not is_reused:
            found[stream] += 1
    return dict(found)


def _scans(plan: Any, reused: bool = False) -> list[tuple[str, bool]]:
    """The leaves of a physical plan with their names; a reused exchange stands for the leaves below it."""
    found: list[tuple[str, bool]] = []
    for leaf in leaves_of(plan):
        name = leaf.nodeName()
        found += _scans(leaf.child(), reused=True) if name == _REUSED else [(name, reused)]
    return found
