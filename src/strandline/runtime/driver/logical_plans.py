"""What Spark's logical plan of a DataFrame tells: the streams that it reads, and what a job does not allow.

Private Spark API: `DataFrame._jdf`, and the classes of the plan. Logical plans have no public API in Python.
`DataFrame.explain` prints a plan as text, without the options of a source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strandline.runtime.driver.tick_source import TICK_SOURCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_KEEPING_STATE = {
    "Aggregate",
    "Deduplicate",
    "DeduplicateWithinWatermark",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPandas",
    "TransformWithStateInPySpark",
    "Distinct",
}
"""Names of Spark's logical nodes that keep state in a streaming query."""


def analyzed_plan(frame: DataFrame) -> Any:
    """The analyzed logical plan of a frame, as an object of the JVM."""
    return frame._jdf.queryExecution().analyzed()


def leaves_of(plan: Any) -> list[Any]:
    """The leaves of a plan, logical or physical, as objects of the JVM, in the order of the plan."""
    leaves = plan.collectLeaves()
    return [leaves.apply(number) for number in range(leaves.size())]


def streams_of(frame: DataFrame) -> list[Any]:
    """The streams that a plan reads, as objects of the JVM, in the order of the plan."""
    return [leaf for leaf in leaves_of(analyzed_plan(frame)) if leaf.isStreaming()]


def columns_of_unions(frame: DataFrame, below: DataFrame) -> list[list[str]]:
    """For each column of a union in the plan of `frame`: its metadata in every input of the union, as JSON.

    `frame` was made of `below`; the unions in the plan of `below` are left out.
    """
    found: list[list[str]] = []
    known, nodes = analyzed_plan(below), [analyzed_plan(frame)]
    while nodes:
        node = nodes.pop()
        if node.fastEquals(known):
            continue
        inputs = [node.children().apply(number) for number in range(node.children().size())]
        if node.nodeName() == "Union":
            outputs = [one.output() for one in inputs]
            found += [[str(one.apply(at).metadata().json()) for one in outputs] for at in range(outputs[0].size())]
        nodes += inputs
    return found


def all_support_available_now(frame: DataFrame) -> bool:
    """Whether Spark can read all streams of a plan up to what they hold now in several batches. Others may be able."""
    return all(
        (leaf.nodeName() == "StreamingRelation" and str(leaf.sourceName()).startswith("FileSource"))
        or (leaf.nodeName() == "StreamingRelationV2" and str(leaf.sourceName()) in ("kafka", TICK_SOURCE))
        for leaf in streams_of(frame)
    )


def kafka_topics(frame: DataFrame) -> list[str]:
    """The topics that a plan reads, as the options of its Kafka sources name them."""
    found = []
    for leaf in streams_of(frame):
        if leaf.nodeName() == "StreamingRelationV2" and str(leaf.sourceName()) == "kafka":
            named = (leaf.extraOptions().get(option) for option in ("subscribe", "subscribePattern", "assign"))
            found += [str(name) for name in named if name is not None]
    return found


def source_problems(frame: DataFrame) -> list[str]:
    """The reasons why a DataFrame cannot be the source of a job, found in its plan."""
    problems = []
    nodes = [analyzed_plan(frame)]
    while nodes:
        node = nodes.pop()
        name = node.nodeName()
        children = [node.children().apply(number) for number in range(node.children().size())]
        nodes.extend(children)
        streaming = [child for child in children if child.isStreaming()]
        if streaming and (name in _KEEPING_STATE or (name == "Join" and len(streaming) == 2)):
            problems.append(
                f"it contains Spark's own stateful operator {name}, whose state our checkpoints do not cover; "
                "use key_by(...) with aggregate(...), deduplicate(...) or process(...) instead"
            )
        if name == "StreamingRelation":
            option = node.dataSource().options().get("cleanSource")
            if option.isDefined() and str(option.get()).lower() != "off":
                problems.append("its option cleanSource removes files before a checkpoint covers them; leave it out")
    return problems
