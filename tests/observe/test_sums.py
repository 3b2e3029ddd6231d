"""Rates, shares and sums of a live job, from samples that slots gave: without a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import StrandlineError
from strandline.observe.facts import Vertex, vertex_id
from strandline.observe.samples import Samples
from strandline.observe.subtasks import WINDOW_NS, SlotWindow
from strandline.runtime.driver.events import CheckpointEnded, Recovered
from strandline.runtime.driver.figures import RunFigures, SourceFigures
from strandline.runtime.driver.recoveries import Began, Recovery
from strandline.runtime.driver.run_records import KEPT_RECORDS, MAX_TEXT, RunRecords
from strandline.runtime.driver.slot_samples import SlotSample
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.protocol.slot_calls import OperatorFigures, SlotFigures

SECOND = 1_000_000_000
STEP = Vertex(vertex_id("step", "sums"), "sums", "step", "process by user", 2)


def sample(
    at: float,
    *,
    rows: int = 0,
    busy: float = 0.0,
    waiting: float = 0.0,
    durability: float = 0.0,
    index: int = 0,
    pid: int = 1,
    groups: tuple[int, ...] = (),
    reads: tuple[int, int] = (0, 0),
) -> SlotSample:
    """What a slot said after `at` seconds, in which it was busy and waited for so many seconds."""
    figures = OperatorFigures(
        state_bytes=100,
        memory_bytes=10,
        estimated_keys=5,
        taken_ns=round(at * SECOND),
        rows_in=rows,
        rows_out=rows // 2,
        busy_ns=round(busy * SECOND),
        back_pressured_ns=round(waiting * SECOND),
        first_key_group=index * len(groups),
        key_group_rows=list(groups),
        cache_hits=reads[0],
        cache_misses=reads[1],
    )
    slot = SlotFigures({"sums": figures}, 1000, 10, pid)
    return SlotSample(index, "task-manager-0", "127.0.0.1", slot, round(durability * SECOND))


def test_rates_and_shares_are_those_of_the_last_seconds() -> None:
    window = SlotWindow()
    for at in range(31):
        # The first ten seconds were busy; after them the subtask waits a fifth of the time, half of that for storage.
        busy, waits = min(at, 10) + 0.5 * max(0, at - 10), 0.1 * max(0, at - 10)
        window.add([sample(at + 100, rows=50 * at, busy=busy, waiting=waits, durability=waits)])
    (facts,) = window.subtasks([STEP], {"sums": 77})
    assert (facts.vertex, facts.index, facts.pid, facts.rows_in, facts.watermark_ms) == (STEP.id, 0, 1, 1500, 77)
    assert facts.rows_in_per_second == pytest.approx(50)
    assert facts.rows_out_per_second == pytest.approx(25)
    assert facts.busy == pytest.approx(0.5)
    assert facts.back_pressured == pytest.approx(0.2)
    assert facts.idle == pytest.approx(0.3)


def test_the_cache_is_judged_by_the_reads_of_the_last_seconds() -> None:
    window = SlotWindow()
    window.add([sample(100, reads=(1000, 0))])
    window.add([sample(101, reads=(1000, 0))])
    assert [facts.cache_hit_ratio for facts in window.subtasks([STEP], {})] == [None]
    window.add([sample(102, reads=(1030, 10))])
    assert [facts.cache_hit_ratio for facts in window.subtasks([STEP], {})] == [0.75]


def test_a_new_process_begins_anew_and_a_repeated_sample_changes_nothing() -> None:
    window = SlotWindow()
    window.add([sample(100, rows=900), sample(100, index=1)])
    window.add([sample(105, rows=1000), sample(105, index=1)])
    window.add([sample(105, rows=1000), sample(105, index=1)])
    first, second = window.subtasks([STEP], {})
    assert (first.rows_in_per_second, second.index) == (20.0, 1)
    window.add([sample(3, rows=10, busy=3, pid=2), sample(106, index=1)])
    first, _second = window.subtasks([STEP], {})
    assert (first.pid, first.rows_in, first.rows_in_per_second, first.busy) == (2, 10, 0.0, 0.0)
    window.add([sample(4, rows=30, busy=4, pid=2)])
    (first,) = window.subtasks([STEP], {})
    assert (first.rows_in_per_second, first.busy, first.idle) == (20.0, 1.0, 0.0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * WINDOW_NS // SECOND),
            st.floats(0, 40),
            st.floats(0, 40),
            st.floats(0, 40),
            st.integers(0, 10**9),
            st.integers(1, 2),
        ),
        max_size=20,
    )
)
def test_shares_are_shares_whatever_slots_say(said: list[tuple[int, float, float, float, int, int]]) -> None:
    window, at = SlotWindow(), 0
    for passed, busy, waiting, durability, rows, pid in said:
        at += passed
        window.add([sample(at, rows=rows, busy=busy, waiting=waiting, durability=durability, pid=pid)])
        for one in window.subtasks([STEP], {}):
            assert 0 <= one.busy <= 1
            assert 0 <= one.back_pressured <= 1
            assert one.busy + one.back_pressured + one.idle == pytest.approx(1)
            assert min(one.rows_in_per_second, one.rows_out_per_second) >= 0


def test_the_rows_of_all_key_groups_are_put_together() -> None:
    window = SlotWindow()
    window.add([sample(1, index=1, groups=(4, 5)), sample(1, index=0, groups=(1, 2))])
    assert window.key_group_rows([STEP], 6) == {STEP.id: (1, 2, 4, 5, 0, 0)}
    window.add([])
    assert window.key_group_rows([STEP], 2) == {STEP.id: (0, 0)}
    assert window.subtasks([STEP], {}) == ()


def figures(rows: int, batch_ms: float = 100.0) -> RunFigures:
    return RunFigures(
        RunStatus.RUNNING,
        rows=rows,
        rows_out=rows // 10,
        batch_duration_ms=batch_ms,
        sources=(SourceFigures("a", rows, None, 7), SourceFigures("b", 0), SourceFigures("c", 0, None, 3)),
    )


def test_a_sample_counts_rows_over_the_last_seconds_and_is_kept_for_some_minutes() -> None:
    samples = Samples()
    for second in range(1000):
        samples.take(Began(5000.0 + second, second), figures(100 * second if second < 900 else 90_000), ())
    kept = samples.all()
    assert (len(kept), kept[-1].time_ms) == (600, 5_999_000)
    assert (kept[-101].rows_per_second, kept[-101].rows_out_per_second) == (100.0, 10.0)
    assert kept[-1].rows_per_second == 0.0
    assert (kept[-1].offsets_behind, kept[-1].source_rows) == (10, (90_000, 0, 0))


def test_a_batch_that_takes_long_does_not_look_like_no_rows() -> None:
    samples = Samples()
    for second in range(120):
        samples.take(Began(0.0, second), figures(30_000 * (second // 30), batch_ms=30_000), ())
    assert all(one.rows_per_second > 0 for one in samples.all()[60:])


def test_a_run_that_goes_back_to_a_checkpoint_has_no_negative_rate() -> None:
    samples = Samples()
    for second, rows in enumerate((0, 500, 1000, 200)):
        samples.take(Began(0.0, second), figures(rows), ())
    samples.take(Began(0.0, 20.0), figures(100), ())
    assert min(one.rows_per_second for one in samples.all()) >= 0


def failed_checkpoint(number: int) -> CheckpointEnded:
    stats = CheckpointStats(number, "failed", "checkpoint", 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, failure="full")
    return CheckpointEnded(stats)


def test_records_of_a_run_are_bounded_and_in_order() -> None:
    records = RunRecords()
    for status in (RunStatus.STARTING, RunStatus.RUNNING, RunStatus.RUNNING, RunStatus.STOPPED):
        records.status(status)
    assert [status for _time, status in records.statuses] == ["starting", "running", "stopped"]
    records.event(Recovered(Recovery(5.0, "slots", (1,), 0, 1.0, 0, 0, "slot 1: killed")))
    records.event(Recovered(Recovery(6.0, "restart", (0, 1), 0, 1.0, 0, 0, "told by the restart itself")))
    records.failed("restart", StrandlineError("x" * 2 * MAX_TEXT))
    records.event(failed_checkpoint(7))
    kinds = [(failure.kind, failure.slots, failure.checkpoint) for failure in records.failures]
    assert kinds == [("slots", (1,), None), ("restart", (), None), ("checkpoint", (), 7)]
    assert len(records.failures[1].text) == MAX_TEXT
    for number in range(2 * KEPT_RECORDS):
        records.event(failed_checkpoint(number))
    assert len(records.failures) == KEPT_RECORDS
