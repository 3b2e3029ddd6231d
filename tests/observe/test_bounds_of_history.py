"""The history of a job stays small, and is written seldom."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from strandline.observe import history_record
from strandline.observe.facts import CheckpointsFacts
from strandline.observe.history import RunHistory, too_many
from strandline.storage import StoredFile
from tests.observe.generated import generated_facts
from tests.observe.happenings import (
    JOB,
    PATHS,
    START,
    Remembered,
    checkpoint,
    ended_of,
    facts_in,
    first_facts,
    many,
    stored,
)

# --- bounds ----------------------------------------------------------------------------------------


def test_the_history_of_a_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("KEPT_CHECKPOINTS", 20), ("KEPT_DETAILED", 5), ("KEPT_FAILURES", 7)):
        monkeypatch.setattr(history_record, name, value)
    monkeypatch.setattr("strandline.observe.history_merge.KEPT_CHECKPOINTS", 20)
    storage = Remembered()
    facts = first_facts()
    run = RunHistory(storage, facts)
    for number in range(200):
        facts = many("cF", facts)
        run.offer(facts)
        if number % 3 == 0:
            run.write()
    run.write(whole=True)
    found = facts_in(storage)
    assert [one.id for one in found.checkpoints.history] == list(range(181, 201))
    assert [bool(one.subtasks) for one in found.checkpoints.history] == [False] * 15 + [True] * 5
    assert found.failures == facts.failures[-7:]
    assert found.checkpoints.counts.completed == 200
    assert len(storage.files) == 1


def test_ten_thousand_checkpoints_and_a_thousand_subtasks_stay_small() -> None:
    storage = Remembered()
    facts = generated_facts(name=JOB, parallelism=1000, checkpoints=10_000, samples=600)
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write(whole=True)
    (size,) = [len(data) for data in storage.files.values()]
    found = facts_in(storage)
    assert len(found.checkpoints.history) == 9_999
    assert sum(len(one.subtasks) for one in found.checkpoints.history) <= history_record.KEPT_SUBTASKS
    print(f"{size:,} bytes")
    assert size < 10 << 20


def test_a_checkpoint_that_is_offered_again_after_it_left_the_history_is_not_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history_record, "KEPT_CHECKPOINTS", 3)
    record = history_record.HistoryRecord()
    facts = many("ccccc")
    record.offer(facts)
    record.saved()
    record.offer(many("c", facts))
    assert [one.id for one in record.fresh().checkpoints] == [6]


def test_an_id_that_is_used_again_replaces_the_checkpoint_that_failed() -> None:
    storage = Remembered()
    facts = many("cf")
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write()
    again = replace(checkpoint(2), trigger_time=START / 1000 + 500)
    seen = msgspec.structs.replace(facts.checkpoints, history=(checkpoint(1), again))
    run.offer(msgspec.structs.replace(facts, checkpoints=seen))
    run.write()
    assert ended_of(facts_in(storage)) == [(1, "completed"), (2, "completed")]


def stored_file(run: int, size: int, modified: float) -> StoredFile:
    return StoredFile(PATHS.history_part(run, f"r{run}", 0, whole=True), size, modified)


def test_the_oldest_runs_go_when_there_are_too_many_but_not_one_that_may_be_alive() -> None:
    day = 86_400.0
    files = [stored_file(run, 10, run * day) for run in range(1, 31)]
    log = StoredFile(PATHS.history_log("r3", "driver"), 5, 3 * day)
    kept_log = StoredFile(PATHS.history_log("r30", "driver"), 5, 3 * day)
    doomed = too_many([*files, log, kept_log], PATHS, (30, "r30"))
    assert doomed == [*files[:10][::-1], log]
    files[4] = stored_file(5, 10, 30 * day - 60)
    assert files[4] not in too_many(files, PATHS, (30, "r30"))


def test_the_oldest_runs_go_when_they_are_too_large() -> None:
    files = [stored_file(run, 30 << 20, run * 86_400.0) for run in range(1, 5)]
    assert too_many(files, PATHS, (4, "r4")) == [files[0]]


def test_a_job_with_a_checkpoint_every_second_writes_less_than_once_in_ten_seconds() -> None:
    storage = Remembered()
    clock = [0.0]
    facts = first_facts()
    run = RunHistory(storage, facts, lambda: clock[0])
    for second in range(600):
        clock[0] += 1.0
        facts = many("cF" if second % 20 == 0 else "c", facts)
        run.offer(facts)
        if run.is_due():
            run.write()
    writes = storage.calls.count("write")
    assert writes <= 600 / 12 + 3
    assert len(storage.calls) <= 2 * writes
    clock[0] += 0.5
    run.offer(many("F", facts))
    assert not run.is_due()  # failures that come again and again are not written more often


def test_a_failure_is_written_at_once() -> None:
    clock = [0.0]
    facts = first_facts()
    run = RunHistory(Remembered(), facts, lambda: clock[0])
    run.offer(facts)
    run.write()
    clock[0] += 1.0
    run.offer(many("c", facts))
    assert not run.is_due()
    run.offer(many("cF", facts))
    assert run.is_due()


def test_earlier_runs_lose_the_figures_of_subtasks_if_the_newest_has_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.observe.history_reader.KEPT_SUBTASKS", 6)
    storage = Remembered()
    stored(storage, many("ccc"))
    newer = first_facts("run2", START + 1)
    known = CheckpointsFacts(history=(checkpoint(3),))
    stored(storage, many("ccc", msgspec.structs.replace(newer, checkpoints=known)))
    found = facts_in(storage)
    assert [(one.id, len(one.subtasks)) for one in found.checkpoints.history] == [
        (1, 0),
        (2, 0),
        (3, 2),
        (4, 2),
        (5, 2),
        (6, 2),
    ]
