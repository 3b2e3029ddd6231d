"""The drain: event time goes to its end, so that all windows close and all event-time timers fire.

A drain consists of batches without rows from the sources, after the last batch of Spark's. Spark's query has no part in
them: they run the plan of the job on empty tables in the place of the sources. So the position in the sources stays
where it is.

The steps come one after the other, in the order in which the user defined them. While a step fires, event time stands
still for the steps behind it. So a window has all rows of the steps before it when it closes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from strandline.errors import StrandlineError
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.nodes import (
    Node,
    OutputNode,
    ProjectionNode,
    SourceNode,
    StatefulNode,
    TransformNode,
    UnionNode,
)
from strandline.runtime.driver.plan import Graph, Wiring
from strandline.runtime.driver.query_settings import query_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from strandline.runtime.driver.batches import Batches

log = logging.getLogger(__name__)

MOST_BATCHES = 100
"""How many batches a step gets. A step needs more than one if its timers set timers."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Drains the steps of one generation."""

    job: str
    spark: SparkSession
    graph: Graph
    wiring: Wiring
    clock: Clock
    batches: Batches

    def run(self, last_spark_batch: int, check: Callable[[], None]) -> None:
        """Fire everything that waits for event time. No batch runs meanwhile, and no checkpoint is taken.

        `last_spark_batch` is the last batch of Spark's that is committed; a checkpoint has the position after it.
        `check` is called before each batch; its error ends the drain. Raises `StrandlineError` if a step sets a new
        timer whenever one fires.
        """
        graph = without_sources(self.graph)
        wiring = replace(self.wiring, ticks=None)
        ended: list[str] = []
        batches = 0
        for operator in self.graph.operators:
            if operator.time_mode != "event" or not operator.emits_on_time:
                continue
            ended.append(operator.uid)
            for _ in range(MOST_BATCHES):
                check()
                batches += 1
                with query_settings(self.spark):
                    # The plan is built for every batch: Spark would not compute the shuffles of a plan twice.
                    rows, _outlets = graph.build(wiring)
                    self.batches.run_without_sources(rows, last_spark_batch, batches, ended)
                if not self.clock.waits_for_end(ended):
                    break
            else:
                raise StrandlineError(
                    f"job {self.job!r}, step {operator.uid!r}: the drain was given up after {MOST_BATCHES} batches, "
                    "because timers of the step set new timers again and again. Nothing of the drain is visible. Start "
                    "the job again, and it goes on from its last checkpoint; stop it without a drain"
                )
        log.info("job %s: drained in %d batches", self.job, batches)


def without_sources(graph: Graph) -> Graph:
    """The same graph with empty tables in the place of the sources, so that Spark runs its plan as a batch."""
    made: dict[int, Node] = {}

    def rebuilt(node: Node) -> Node:
        if id(node) not in made:
            made[id(node)] = _rebuilt(node, rebuilt)
        return made[id(node)]

    return replace(graph, sinks=[(rebuilt(node), sink) for node, sink in graph.sinks], sources=[])


def _rebuilt(node: Node, rebuilt: Callable[[Node], Node]) -> Node:
    match node:
        case SourceNode(frame):
            return replace(node, frame=_empty(frame))
        case UnionNode(parents):
            return UnionNode(tuple(map(rebuilt, parents)))
        case OutputNode(parent):
            step = rebuilt(parent)
            assert isinstance(step, StatefulNode)
            return replace(node, parent=step)
        case TransformNode(parent) | ProjectionNode(parent) | StatefulNode(parent):
            return replace(node, parent=rebuilt(parent))


def _empty(frame: DataFrame) -> DataFrame:
    return frame.sparkSession.createDataFrame([], frame.schema)
