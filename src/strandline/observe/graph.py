"""The graph of a job as people see it: sources, stateful steps and sinks, and which reads which."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from strandline.checkpoint.steps import StepDescription
from strandline.observe.facts import Vertex, VertexKind, vertex_id
from strandline.redaction import shown
from strandline.runtime.driver.figures import SourceFigures
from strandline.runtime.driver.logical_plans import streams_of
from strandline.runtime.driver.nodes import Node, SourceNode, StatefulNode, parents_of
from strandline.runtime.driver.plan import Graph
from strandline.sinks.base import ExactlyOnceSink, Sink
from strandline.sinks.callback import CallbackSink
from strandline.sinks.foreach_batch import ForeachBatchSink
from strandline.state.descriptors import StateDescriptor

MAX_DESCRIPTION = 200


def vertices_of(graph: Graph) -> tuple[Vertex, ...]:
    """The vertices of a job, each after those that it reads. All have parallelism 1; see `with_parallelism`.

    Steps without state belong to the edge on which they lie.
    """
    return _Vertices(graph).made


def with_parallelism(
    vertices: Sequence[Vertex], parallelism: int, sources: Sequence[SourceFigures] = ()
) -> tuple[Vertex, ...]:
    """The vertices as they are while the job runs: steps with so many subtasks, sources as Spark describes them.

    Spark's descriptions are taken only if there is one for each source: a DataFrame may read several streams.
    """
    known = sum(vertex.kind == "source" for vertex in vertices) == len(sources)
    told = iter([_short(source.description) for source in sources] if known else [])
    found = []
    for vertex in vertices:
        if vertex.kind == "step":
            vertex = msgspec.structs.replace(vertex, parallelism=parallelism)
        elif vertex.kind == "source":
            vertex = msgspec.structs.replace(vertex, description=next(told, vertex.description))
        found.append(vertex)
    return tuple(found)


class _Vertices:
    """Walks from the sinks to the sources. Sources that no sink needs are left out."""

    def __init__(self, graph: Graph) -> None:
        self._numbers = {id(source): number for number, source in enumerate(graph.sources)}
        self._ids: dict[int, str] = {}
        found: list[Vertex] = []
        for number, (node, sink) in enumerate(graph.sinks):
            inputs = self._inputs(node, found)
            name = f"sink-{number}"
            found.append(Vertex(vertex_id("sink", name), name, "sink", _sink_text(sink), 1, inputs))
        sources = [vertex for vertex in found if vertex.kind == "source"]
        numbers = {vertex.id: int(vertex.name.removeprefix("source-")) for vertex in sources}
        sources.sort(key=lambda vertex: numbers[vertex.id])
        self.made = (*sources, *(vertex for vertex in found if vertex.kind != "source"))

    def _inputs(self, node: Node, found: list[Vertex]) -> tuple[str, ...]:
        """The ids of the nearest sources and steps whose rows `node` holds. New ones are added to `found`."""
        if not isinstance(node, SourceNode | StatefulNode):
            ids = [id_ for parent in parents_of(node) for id_ in self._inputs(parent, found)]
            return tuple(dict.fromkeys(ids))
        if id(node) not in self._ids:
            vertex = self._source(node) if isinstance(node, SourceNode) else self._step(node, found)
            self._ids[id(node)] = vertex.id
            found.append(vertex)
        return (self._ids[id(node)],)

    def _source(self, node: SourceNode) -> Vertex:
        return _vertex("source", f"source-{self._numbers[id(node)]}", _source_text(node))

    def _step(self, node: StatefulNode, found: list[Vertex]) -> Vertex:
        inputs = self._inputs(node.parent, found)
        described = node.operator.describe()
        text = f"{described.kind} by {', '.join(name for name, _type in described.keys)}"
        vertex = _vertex("step", node.operator.uid, text, inputs)
        return msgspec.structs.replace(vertex, state_expires=_expires(described, node.operator.declared_states))


def _vertex(kind: VertexKind, name: str, text: str, inputs: tuple[str, ...] = ()) -> Vertex:
    return Vertex(vertex_id(kind, name), name, kind, _short(text), 1, inputs)


def _expires(step: StepDescription, declared: Sequence[StateDescriptor]) -> bool | None:
    """Whether the state of a step goes away by itself; None if user code may delete it with timers."""
    match step.kind:
        case "window" | "session":
            return True
        case "deduplicate":
            return step.parameters.get("ttl_ms") is not None
        case "join":
            return step.parameters.get("lower_ms") is not None
        case "aggregate":
            return False
        case _:
            own = [state for state in declared if state.kind != "timers"]
            if own and all(state.ttl_ms is not None for state in own):
                return True
            return False if own and len(own) == len(declared) else None


def _source_text(node: SourceNode) -> str:
    """What the plan says of a source, until Spark describes it in its first report."""
    return ", ".join(str(leaf.sourceName()) for leaf in streams_of(node.frame))


def _sink_text(sink: Sink) -> str:
    match sink:
        case ExactlyOnceSink():
            return _short(f"{type(sink).__name__}({sink.place})")
        case ForeachBatchSink(function) | CallbackSink(function):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return _short(f"{type(sink).__name__}({name})")
        case _:
            return type(sink).__name__


def _short(text: str) -> str:
    return shown(text)[:MAX_DESCRIPTION]
