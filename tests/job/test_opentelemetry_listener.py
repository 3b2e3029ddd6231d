"""The listener that gives spans to OpenTelemetry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import strandline as sl
from strandline.job.listener import Listeners
from strandline.runtime.driver.events import CheckpointEnded, Progressed, Recovered, Rescaled, Terminated
from tests.observe.generated import generated_facts

FACTS = generated_facts(samples=0)
RUN: Any = SimpleNamespace(name="visits", figures=lambda: FACTS.figures)
"""The listener asks a run for its name and its figures. A run needs Spark."""


def test_all_events_of_a_run_become_spans() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    listeners = Listeners(RUN)
    listeners.add(sl.OpenTelemetryListener(provider))
    listeners.start()
    for event in (
        Progressed({"batchId": 0, "timestamp": "2026-01-01T00:00:10.000Z"}),
        Progressed({"batchId": 1, "timestamp": "2026-01-01T00:00:11.000Z"}),
        CheckpointEnded(FACTS.checkpoints.history[0]),
        Recovered(FACTS.recoveries[1]),
        Rescaled(FACTS.rescalings[0]),
        Terminated(),
    ):
        listeners.post(event)
    listeners.join(20)
    spans = exporter.get_finished_spans()
    assert [one.name for one in spans] == ["JobInitialization", "Checkpoint", "JobInitialization", "Rescale"]
    assert spans[0].end_time == 1767225610 * 10**9
