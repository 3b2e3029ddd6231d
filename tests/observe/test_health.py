"""Health in words: every rule speaks up when its figures are bad, and a healthy job is left in peace."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import Finding, JobFacts, Sample, StatusChange
from strandline.observe.health import RULES, findings
from strandline.observe.rules.measures import raised
from strandline.observe.words import duration, size
from strandline.runtime.driver.recoveries import Recovery
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.protocol.figures import ChangelogFigures
from tests.observe.generated import NOW, generated_facts
from tests.observe.rules.courses import (
    all_completed,
    checkpointed,
    quiet,
    sampled,
    with_,
    with_history,
    without_checkpoints_since,
)

GUIDE = Path(__file__).parents[2] / "docs" / "operations.md"


def rules_of(facts: JobFacts) -> list[str]:
    return [one.rule for one in findings(facts)]


def only(facts: JobFacts) -> Finding:
    found = findings(facts)
    assert len(found) == 1, [one.rule for one in found]
    return found[0]


# --- quiet -----------------------------------------------------------------------------------------


def test_a_healthy_job_has_no_findings() -> None:
    assert findings(quiet()) == ()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    parallelism=st.integers(1, 40),
    checkpoints=st.integers(4, 60),
    samples=st.integers(0, 600),
    interval=st.sampled_from([1.0, "10s", "10 min", None]),
    changelog=st.booleans(),
    pressure=st.floats(0, 0.45),
    spike=st.integers(0, 540),
    delay=st.floats(0, 400),
)
def test_healthy_jobs_of_all_kinds_have_no_findings(
    seed: int,
    parallelism: int,
    checkpoints: int,
    samples: int,
    interval: object,
    changelog: bool,
    pressure: float,
    spike: int,
    delay: float,
) -> None:
    facts = generated_facts(seed=seed, parallelism=parallelism, checkpoints=checkpoints, samples=samples)
    config = {**facts.config, "changelog": changelog}
    config = {**config, "checkpoint_interval": interval} if interval is not None else {}
    chance = random.Random(seed)

    def changed(back: int, one: Sample) -> Sample:
        # A spike of a minute is no back pressure, wherever it falls, and jumps below the threshold are none either.
        pressed = 1.0 if spike <= back < spike + 60 else pressure * (0.5 + chance.random())
        return with_(one, back_pressured=min(1.0, pressed), cache_hit_ratio=0.9 + 0.1 * chance.random())

    log = ChangelogFigures(1.0, 100, 103, 0, 10**9, 0, 40, 20_000_000, 10**9, 7, 1) if changelog else None
    assert facts.figures is not None
    facts = with_(facts, config=config, figures=with_(facts.figures, changelog=log))
    facts = checkpointed(
        sampled(facts, changed), lambda _back, one: replace(one, start_delay_ms=min(delay, 0.4 * one.end_to_end_ms))
    )
    assert findings(facts) == ()


@pytest.mark.parametrize("status", [RunStatus.STARTING, RunStatus.RESTARTING, RunStatus.RESCALING, RunStatus.RUNNING])
def test_the_first_minute_is_not_judged_by_its_load(status: RunStatus) -> None:
    bad = sampled(quiet(), lambda _back, one: with_(one, back_pressured=1.0))
    assert rules_of(bad) == ["back-pressure"]
    just = (StatusChange(bad.taken_ms - 59_000, RunStatus.RUNNING),)
    assert findings(with_(bad, statuses=just, status=status)) == ()


def test_a_job_that_ended_well_has_no_findings() -> None:
    for status in (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.CANCELLED):
        assert findings(generated_facts(status=status)) == ()


def test_a_job_without_any_figures_has_no_findings() -> None:
    facts = JobFacts("id", "job", "run", RunStatus.RUNNING, int(NOW * 1000), int((NOW - 4000) * 1000))
    assert findings(facts) == ()


# --- load ------------------------------------------------------------------------------------------


def test_back_pressure_of_minutes_is_reported_with_the_subtask_that_waits() -> None:
    facts = sampled(quiet(), lambda back, one: with_(one, back_pressured=0.8 if back < 200 else 0.0))
    worst = with_(facts.subtasks[3], back_pressured=0.83)
    found = only(with_(facts, subtasks=(*facts.subtasks[:3], worst, *facts.subtasks[4:])))
    assert (found.rule, found.severity, found.subject) == ("back-pressure", "warning", "enrich, subtask 3")
    assert "80 %" in found.text
    assert "rescale" in found.remedy


def test_back_pressure_does_not_flap_between_its_two_thresholds() -> None:
    def pressed(before: float, now: float) -> JobFacts:
        return sampled(quiet(), lambda back, one: with_(one, back_pressured=before if back > 180 else now))

    assert rules_of(pressed(0.7, 0.4)) == ["back-pressure"], "it was on, and 0.4 is not yet calm"
    assert rules_of(pressed(0.1, 0.4)) == [], "it was off, and 0.4 is not yet high"
    assert rules_of(pressed(0.7, 0.1)) == []


def test_a_long_start_delay_is_back_pressure() -> None:
    facts = checkpointed(quiet(), lambda _back, one: replace(one, start_delay_ms=6000.0, end_to_end_ms=6300.0))
    found = only(facts)
    assert found.rule == "back-pressure"
    assert "6.0 s" in found.text


def test_one_slow_subtask_in_the_same_place_is_a_straggler() -> None:
    def slowed(_back: int, one: CheckpointStats) -> CheckpointStats:
        subtasks = [
            replace(sub, async_ms=4000.0) if (sub.operator, sub.subtask) == ("counts", 2) else sub
            for sub in one.subtasks
        ]
        return replace(one, subtasks=tuple(subtasks))

    found = only(checkpointed(quiet(), slowed))
    assert (found.rule, found.subject) == ("straggler", "counts, subtask 2")
    assert "4.0 s" in found.text
    assert "127.0.0.1" in found.text
    assert "logs JOB --subtask 2" in found.remedy


def test_slow_subtasks_that_change_are_no_straggler() -> None:
    def slowed(back: int, one: CheckpointStats) -> CheckpointStats:
        subtasks = [replace(sub, async_ms=4000.0) if sub.subtask == back % 5 else sub for sub in one.subtasks]
        return replace(one, subtasks=tuple(subtasks))

    assert findings(checkpointed(quiet(), slowed)) == ()


def test_one_busy_subtask_beside_idle_ones_is_a_straggler() -> None:
    facts = sampled(quiet(), lambda _back, one: with_(one, busy=0.95))
    step = facts.steps[1].id
    subtasks = tuple(
        with_(one, busy=0.97 if one.index == 4 else 0.2) if one.vertex == step else one for one in facts.subtasks
    )
    found = only(with_(facts, subtasks=subtasks))
    assert (found.rule, found.subject) == ("straggler", "counts, subtask 4")


def test_a_hot_key_group_is_reported_and_a_warning_if_slots_are_busy() -> None:
    facts = quiet()
    step = facts.steps[0]
    hot = with_(facts, key_group_rows={step.id: (*(10_000,) * 127, 2_000_000)})
    found = only(hot)
    assert (found.rule, found.subject, found.severity) == ("skewed-key-groups", "enrich", "info")
    assert "Key group 127" in found.text
    assert "Subtask 4" in found.text
    busy = sampled(hot, lambda _back, one: with_(one, busy=0.85))
    assert only(busy).severity == "warning"


def standing(facts: JobFacts, rows: tuple[int, int] = (0, 0), per_second: float = 9_000.0) -> JobFacts:
    """The watermark stands still since five minutes before now, and the second source is silent."""
    return sampled(
        facts,
        lambda back, one: with_(
            one,
            watermark_lag_ms=20_000 + max(0, 300 - back) * 1000,
            rows_per_second=per_second,
            source_rows=(rows[0] * (600 - back), rows[1] * (600 - back)),
        ),
    )


def test_a_watermark_that_stands_still_names_the_silent_source() -> None:
    found = only(standing(quiet(), (100, 0)))
    assert (found.rule, found.subject) == ("idle-source", "FileStreamSource[file:/in/users]")
    assert "idle_after" in found.remedy
    assert only(standing(quiet(), (100, 100))).subject == ""


def test_a_watermark_that_moves_with_rare_batches_is_not_reported() -> None:
    facts = standing(quiet(), (100, 100))
    rare = sampled(facts, lambda back, one: with_(one, source_rows=(1000 if back > 100 else 2000, 0)))
    assert findings(rare) == ()


def test_a_watermark_that_stands_still_while_no_rows_come_is_not_reported() -> None:
    assert findings(standing(quiet(), (0, 0), 0.0)) == ()


def test_a_source_that_does_not_answer_is_reported_while_the_run_waits_for_it() -> None:
    def silent(seconds: float) -> JobFacts:
        facts = quiet()
        assert facts.figures is not None
        return with_(facts, figures=with_(facts.figures, silent_source="KafkaV2[Subscribe[clicks]]", silent_s=seconds))

    found = only(silent(12.0))
    assert (found.rule, found.severity, found.subject) == ("silent-source", "warning", "KafkaV2[Subscribe[clicks]]")
    assert "has not answered for 12 s" in found.text
    assert only(silent(90.0)).severity == "critical"
    restarting = with_(silent(90.0), status=RunStatus.FAILED)
    assert "silent-source" not in rules_of(restarting)


# --- checkpoints -----------------------------------------------------------------------------------


def test_checkpoints_longer_than_their_interval_are_reported() -> None:
    slow = checkpointed(quiet(), lambda _back, one: replace(one, end_to_end_ms=12_000.0, sync_ms=9_000.0))
    found = only(slow)
    assert found.rule == "slow-checkpoints"
    assert "12 s" in found.text
    assert "synchronous part, 9.0 s" in found.text
    assert "checkpoint_interval" in found.remedy
    every_batch = with_(slow, config={**slow.config, "checkpoint_every_batch": True})
    assert findings(every_batch) == ()


def test_one_slow_checkpoint_is_not_reported() -> None:
    assert findings(checkpointed(quiet(), lambda back, one: replace(one, end_to_end_ms=30_000.0 * (back == 3)))) == ()


def test_uploads_that_grow_at_a_flat_rate_are_at_the_limit_of_the_storage() -> None:
    def uploads(back: int, one: CheckpointStats) -> CheckpointStats:
        taken = 9000.0 - 500.0 * min(back, 12)
        return replace(one, async_ms=taken, end_to_end_ms=taken + 200, checkpointed_bytes=int(taken * 50_000))

    found = only(checkpointed(all_completed(quiet()), uploads))
    assert found.rule == "upload-limit"
    assert "50.0 MB/s" in found.text


def test_uploads_that_get_faster_with_their_size_are_not_at_the_limit() -> None:
    def uploads(back: int, one: CheckpointStats) -> CheckpointStats:
        taken = 7000.0 - 300.0 * min(back, 12)
        return replace(one, async_ms=taken, end_to_end_ms=taken + 200, checkpointed_bytes=int(taken * taken * 10))

    assert findings(checkpointed(all_completed(quiet()), uploads)) == ()


def test_a_changelog_that_is_not_durable_is_reported() -> None:
    facts = quiet()
    assert facts.figures is not None

    def behind(count: int) -> JobFacts:
        assert facts.figures is not None
        return with_(facts, figures=with_(facts.figures, changelog=ChangelogFigures(behind_bytes=count)))

    assert findings(behind(10_000_000)) == ()
    assert only(behind(70_000_000)).severity == "warning"
    assert only(behind(200_000_000)).severity == "critical"


def test_failed_checkpoints_in_a_row_are_reported_with_the_last_cause() -> None:
    def failing(newest: int) -> JobFacts:
        return checkpointed(
            all_completed(quiet()),
            lambda back, one: replace(one, status="failed", failure=f"no {one.id}") if back < newest else one,
        )

    assert findings(failing(1)) == ()
    assert only(failing(2)).severity == "warning"
    found = only(failing(4))
    assert (found.rule, found.severity) == ("failed-checkpoints", "critical")
    assert "no 100" in found.text


def test_no_completed_checkpoint_while_rows_come_is_critical() -> None:
    facts = quiet()
    found = only(without_checkpoints_since(facts, 300))
    assert (found.rule, found.severity) == ("no-checkpoint", "critical")
    assert "4 min" in found.text or "5 min" in found.text
    assert only(with_history(facts, [])).rule == "no-checkpoint"


def test_no_checkpoint_is_due_while_no_rows_come() -> None:
    idle = sampled(without_checkpoints_since(quiet(), 300), lambda _back, one: with_(one, rows_per_second=0.0))
    assert findings(idle) == ()


def test_rows_that_the_rate_remembers_do_not_ask_for_a_checkpoint() -> None:
    # A checkpoint covers the last rows, and the rate shows them for a minute more.
    facts = without_checkpoints_since(quiet(), 100)
    assert findings(sampled(facts, lambda back, one: with_(one, rows_per_second=9.0 * (back > 40)))) == ()


def test_a_checkpoint_that_never_ends_is_found_without_any_figure_of_rows() -> None:
    facts = quiet(samples=0)
    stuck = [one for one in facts.checkpoints.history if one.trigger_time < NOW - 400]
    stuck.append(replace(stuck[-1], id=500, status="in_progress", trigger_time=NOW - 390))
    assert only(with_history(facts, stuck)).rule == "no-checkpoint"


# --- state -----------------------------------------------------------------------------------------


def test_a_changelog_much_larger_than_allowed_is_reported() -> None:
    facts = quiet()
    assert facts.figures is not None
    log = ChangelogFigures(segment_bytes=900_000_000, base_bytes=500_000_000, failed_materializations=3)
    found = only(with_(facts, figures=with_(facts.figures, changelog=log)))
    assert (found.rule, found.severity) == ("changelog-amplification", "warning")
    assert "2.8 times" in found.text
    early = ChangelogFigures(
        segment_bytes=200_000_000, base_bytes=900_000_000, materializations=10, early_materializations=8
    )
    assert only(with_(facts, figures=with_(facts.figures, changelog=early))).severity == "info"


def test_cache_misses_are_reported_when_the_cache_is_full() -> None:
    facts = sampled(quiet(), lambda _back, one: with_(one, cache_hit_ratio=0.6))
    assert findings(facts) == (), "the cache has room: more memory would not help"
    assert facts.figures is not None
    full = with_(facts.figures.state_memory, most_used_bytes=165_000_000)
    found = only(with_(facts, figures=with_(facts.figures, state_memory=full)))
    assert found.rule == "cache-misses"
    assert "40 %" in found.text
    assert "state_memory" in found.remedy


@pytest.mark.parametrize(("backend", "share", "known"), [("heap", 0.95, True), ("heap", 0.7, False)])
def test_memory_of_the_heap_backend_that_is_used_up_is_reported(backend: str, share: float, known: bool) -> None:
    facts = quiet()
    assert facts.figures is not None
    memory = with_(facts.figures.state_memory, most_used_bytes=int(256_000_000 * share))
    facts = with_(
        facts,
        config={**facts.config, "state_backend": backend},
        figures=with_(facts.figures, state_memory=memory),
    )
    assert rules_of(facts) == (["memory-short"] if known else [])


def growing(per_checkpoint: float, expires: bool | None) -> JobFacts:
    facts = all_completed(quiet(checkpoints=400))
    facts = with_(facts, graph=tuple(with_(one, state_expires=expires) for one in facts.graph))
    return checkpointed(
        facts, lambda back, one: replace(one, full_bytes=int(1e9 * per_checkpoint ** (400 - back)), subtasks=())
    )


def test_state_that_only_grows_is_reported_unless_it_expires() -> None:
    found = only(growing(1.003, False))
    assert found.rule == "state-only-grows"
    assert "time to live" in found.text
    assert only(growing(1.003, None)).rule == "state-only-grows"
    assert findings(growing(1.003, True)) == ()
    assert findings(growing(1.00001, False)) == ()


# --- failures --------------------------------------------------------------------------------------


def test_a_failed_run_is_critical_and_says_where_it_goes_on() -> None:
    facts = generated_facts(status=RunStatus.FAILED)
    found = only(facts)
    last = facts.checkpoints.last_completed
    assert last is not None
    assert (found.rule, found.severity) == ("run-failed", "critical")
    assert "ZeroDivisionError" in found.text
    assert f"checkpoint {last.id}" in found.remedy


def test_a_lost_driver_is_critical() -> None:
    found = only(with_(generated_facts(), driver_lost=True))
    assert (found.rule, found.severity) == ("driver-lost", "critical")
    assert "4711" in found.text


def recovered(*recoveries: Recovery, **config: object) -> JobFacts:
    facts = quiet()
    return with_(facts, recoveries=recoveries, config={**facts.config, **config})


def test_restarts_that_come_again_are_reported_with_their_cause() -> None:
    restart = Recovery(NOW - 1000, "restart", (0, 1), 5, 3000.0, 0, 0, "OSError: disk full\n  at …")
    assert findings(recovered(restart, restart)) == ()
    found = only(recovered(*[restart] * 3))
    assert (found.rule, found.severity) == ("repeated-restarts", "warning")
    assert "disk full" in found.text
    assert only(recovered(*[restart] * 5)).severity == "critical"
    assert findings(recovered(*[replace(restart, time=NOW - 3000)] * 5)) == ()


def test_a_slot_that_is_lost_again_and_again_is_named() -> None:
    loss = Recovery(NOW - 100, "slots", (3,), 5, 300.0, 0, 0, "slot 3: its process 1 was killed by SIGKILL")
    found = only(recovered(loss, loss, replace(loss, slots=(1, 3))))
    assert (found.rule, found.subject) == ("repeated-restarts", "slot 3")


def test_local_recovery_that_missed_is_reported() -> None:
    missed = Recovery(NOW - 100, "restart", (0,), 5, 30_000.0, 1_000_000, 99_000_000, "")
    assert findings(recovered(missed)) == (), "local recovery is off"
    found = only(recovered(missed, local_recovery=True))
    assert (found.rule, found.severity) == ("local-recovery-missed", "warning")
    assert "99 %" in found.text
    assert findings(recovered(replace(missed, durable_bytes=0), local_recovery=True)) == ()


# --- all -------------------------------------------------------------------------------------------


def test_findings_come_worst_first() -> None:
    facts = sampled(without_checkpoints_since(quiet(), 300), lambda _back, one: with_(one, back_pressured=0.9))
    step = facts.steps[0].id
    facts = with_(facts, key_group_rows={step: (*(10_000,) * 127, 2_000_000)})
    assert [one.severity for one in findings(facts)] == ["critical", "warning", "info"]


def test_health_of_a_thousand_subtasks_needs_few_calls() -> None:
    facts = quiet(parallelism=500, checkpoints=1000)
    assert len(facts.subtasks) == 1000
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = findings(facts)
    finally:
        sys.setprofile(None)
    assert found == ()
    assert calls < 100_000, "it is asked once a second"


@given(st.lists(st.floats(0, 1), max_size=30))
def test_an_alarm_is_on_only_after_a_value_above_and_none_below_since(values: list[float]) -> None:
    alarm = raised(values, 0.7, 0.3)
    last = next((value for value in reversed(values) if value >= 0.7 or value < 0.3), 0.0)
    assert alarm is (last >= 0.7)


def test_figures_in_words() -> None:
    assert [duration(n) for n in (0.85, 2, 12, 200, 18_000, 10**6)] == [
        "850 ms",
        "2.0 s",
        "12 s",
        "3 min 20 s",
        "5 h",
        "11 d 13 h",
    ]
    assert [size(n) for n in (12, 1500, 2_500_000)] == ["12 B", "1.5 kB", "2.5 MB"]


def test_every_rule_is_in_the_operations_guide_and_every_rule_of_the_guide_exists() -> None:
    section = GUIDE.read_text().split("\n## Health in words\n")[1].split("\n## ")[0]
    rules = [rule.name for rule in RULES]
    # The reader of a job's history adds one of its own.
    assert re.findall(r"^### `([a-z-]+)`", section, re.MULTILINE) == [*rules, "history-unreadable"]
