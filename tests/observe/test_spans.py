"""Spans of checkpoints, restores and rescales, through OpenTelemetry's own SDK."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from strandline.observe.spans import Spans, tracer_of
from strandline.runtime.driver.figures import RestoreFigures
from tests.observe.generated import generated_facts


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Spans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(tracer_of(provider), "visits")


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_completed_checkpoint_is_a_span_with_its_own_times(spans: Spans, exporter: InMemorySpanExporter) -> None:
    stats = generated_facts(samples=0).checkpoints.last_completed
    assert stats is not None
    spans.checkpoint(stats)
    span = only(exporter)
    assert span.name == "Checkpoint"
    assert span.start_time == int(stats.trigger_time * 1e9)
    assert span.end_time is not None
    assert span.end_time - span.start_time == int(stats.end_to_end_ms * 1e6)
    assert dict(span.attributes or {}) == {
        "jobName": "visits",
        "checkpointId": stats.id,
        "checkpointedSize": stats.checkpointed_bytes,
        "fullSize": stats.full_bytes,
        "checkpointStatus": "COMPLETED",
        "checkpointType": "CHECKPOINT",
        "isUnaligned": False,
    }


def test_a_failed_checkpoint_is_an_error_with_its_cause(spans: Spans, exporter: InMemorySpanExporter) -> None:
    stats = generated_facts(samples=0).checkpoints.last_failed
    assert stats is not None
    spans.checkpoint(stats)
    span = only(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["failureMessage"] == stats.failure


def test_a_restore_a_recovery_and_a_rescale_say_what_they_read(spans: Spans, exporter: InMemorySpanExporter) -> None:
    facts = generated_facts(samples=0)
    spans.initialization(100.0, RestoreFigures(2000.0, 5, 7))
    spans.recovery(facts.recoveries[0])
    spans.rescale(facts.rescalings[0])
    start, restart, rescale = exporter.get_finished_spans()
    assert [one.name for one in (start, restart, rescale)] == ["JobInitialization", "JobInitialization", "Rescale"]
    assert (start.start_time, start.end_time) == (98 * 10**9, 100 * 10**9)
    assert start.attributes is not None
    assert start.attributes["RestoredStateSizeBytes.REMOTE"] == 7
    assert restart.attributes is not None
    assert (restart.attributes["initializationKind"], restart.attributes["failureMessage"]) == ("restart", "OSError")
    assert rescale.attributes is not None
    assert (rescale.attributes["previousParallelism"], rescale.attributes["newParallelism"]) == (1, 2)
