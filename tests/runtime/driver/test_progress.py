"""The counts of a run, against a plain list of the batches that count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint.batch import batch_id
from strandline.runtime.driver.progress import BatchWork, RunProgress, Shape, offsets_behind
from strandline.runtime.driver.slot_samples import SlotSample
from strandline.runtime.protocol.messages import BatchTime, StepWatermarks
from strandline.runtime.protocol.slot_calls import OperatorFigures, RowCounts, SlotFigures

STEPS = ("first", "second")


def spark_report(number: int, rows: int, places: tuple[int, ...]) -> dict[str, Any]:
    """As Spark reports: a source counts as often as it is read, and the tick source comes last."""
    sources = [
        {"description": f"source {source}", "numInputRows": rows * places.count(source), "endOffset": {"at": number}}
        for source in dict.fromkeys(places)
    ]
    tick = {"description": "tick", "numInputRows": 0, "endOffset": {"tick": 1}}
    return {
        "batchId": number,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "numInputRows": sum(source["numInputRows"] for source in sources),
        "inputRowsPerSecond": 10.0,
        "processedRowsPerSecond": 20.0,
        "durationMs": {"triggerExecution": 5},
        "sources": [*sources, tick],
    }


def work(generation: int, number: int, rows: int, began: float = 0.0) -> BatchWork:
    counts = {uid: RowCounts(rows, 2 * rows, rows // 2) for uid in STEPS}
    when = BatchTime(1000 * number, dict.fromkeys(STEPS, StepWatermarks(900 * number or None)))
    return BatchWork(batch_id(generation, number), number, when, began, began + 1, counts, rows)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=6), st.booleans(), st.integers(0, 10)), max_size=5),
    st.sampled_from([(0,), (0, 0), (0, 1, 0), (1, 0, 1, 1)]),
)
def test_every_batch_counts_once_however_often_the_run_goes_back(
    generations: list[tuple[list[int], bool, int]], places: tuple[int, ...]
) -> None:
    """Each generation: the rows of its batches, whether Spark reported the last, and how many batches are kept."""
    progress = RunProgress("visits")
    counted: list[tuple[int, int, bool]] = []
    number = 0
    for generation, (batches, reported_last, kept) in enumerate(generations, 1):
        shape = Shape(generation, 2, counted[-1][0] if counted else -1, places, frozenset({"second"}))
        progress.begin(shape, STEPS)
        for index, rows in enumerate(batches):
            reported = reported_last or index < len(batches) - 1
            progress.committed(work(generation, number, rows))
            if reported:
                for of in (generation - 1, generation, generation):  # too late, in time, and once more
                    progress.reported(of, spark_report(number, rows, places))
            counted.append((batch_id(generation, number), rows, reported))
            number += 1
        assert progress.waits_for_report == (bool(batches) and not reported_last)
        del counted[kept:]
    progress.begin(Shape(9, 2, counted[-1][0] if counted else -1, places), STEPS)
    rows_in = sum(rows for _batch, rows, reported in counted if reported)
    worked = sum(rows for _batch, rows, _reported in counted)
    assert progress.rows == rows_in * len(set(places))
    assert progress.rows_out == 3 * worked
    late = sum(rows // 2 for _batch, rows, _reported in counted)
    for step in progress.steps().values():
        assert (step.rows_in, step.rows_out, step.late_rows) == (worked, 2 * worked, late)
    assert {source.rows for source in progress.sources()} <= {rows_in}


def test_a_report_has_the_names_of_spark_and_counts_each_row_once() -> None:
    reports: list[dict[str, Any]] = []
    progress = RunProgress("visits", reports.append)
    progress.begin(Shape(1, 2, -1, (0, 0)), STEPS)
    slot = SlotFigures(dict.fromkeys(STEPS, OperatorFigures(100, 40, 7)), 1000, 80)
    samples = [SlotSample(index, "task-manager-0", "127.0.0.1", slot) for index in range(2)]
    progress.sampled(1, samples, 4000, None)
    progress.committed(work(1, 3, 6))
    progress.reported(1, spark_report(3, 6, (0, 0)))
    (report,) = reports
    assert progress.recent() == reports
    assert (report["name"], report["batchId"], report["numInputRows"]) == ("visits", batch_id(1, 3), 6)
    assert (report["inputRowsPerSecond"], report["processedRowsPerSecond"]) == (5.0, 10.0)
    assert report["eventTime"] == {"watermark": "1970-01-01T00:00:02.700Z"}
    (source,) = report["sources"]
    assert (source["description"], source["numInputRows"], source["endOffset"]) == ("source 0", 6, {"at": 3})
    first = report["stateOperators"][0]
    assert (first["operatorName"], first["numRowsTotal"], first["numRowsDroppedByWatermark"]) == ("first", 14, 3)
    assert first["customMetrics"] == {
        "numRowsInput": 6,
        "numRowsOutput": 12,
        "stateBytes": 200,
        "watermarkMs": 2700,
    }
    assert report["sink"]["numOutputRows"] == 6
    figures = progress.steps()["second"]
    assert (figures.state_bytes, figures.state_memory_bytes, figures.estimated_keys) == (200, 80, 14)
    progress.sampled(1, samples[:1], 4000, None)
    assert progress.steps()["second"] == figures, "a slot that does not answer does not make the state smaller"
    assert progress.sizes.memory.used_bytes == 160


def test_a_source_that_is_read_less_often_than_the_plan_has_places_is_divided_by_the_reads() -> None:
    progress = RunProgress("visits")
    progress.begin(Shape(1, 2, -1, (0, 0, 0, 1, 1)), STEPS)
    progress.committed(replace(work(1, 0, 6), reads={0: 2}))
    progress.reported(1, spark_report(0, 6, (0, 0, 1, 1)))
    assert [source.rows for source in progress.sources()] == [6, 6]


def test_rates_are_those_of_the_last_minute_and_fall_to_zero() -> None:
    progress = RunProgress("visits")
    progress.begin(Shape(1, 1, -1, (0,)), STEPS)
    for number, began in enumerate((0.0, 100.0, 108.0)):
        progress.committed(work(1, number, 50, began))
        progress.reported(1, spark_report(number, 50, (0,)))
    assert progress.rates(110.0) == (10.0, 10.0)
    assert progress.rates(1000.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("end", "latest", "behind"),
    [
        ({"visits": {"0": 5, "1": 7}}, {"visits": {"0": 9, "1": 7, "2": 3}}, 7),
        (3, 10, 7),
        ({"logOffset": 3}, None, None),
        ("a", "b", None),
        ({"visits": {"0": 5}}, {"visits": {"0": "x"}}, None),
        ({}, {}, 0),
    ],
)
def test_how_far_a_source_is_behind(end: Any, latest: Any, behind: int | None) -> None:
    assert offsets_behind(end, latest) == behind
