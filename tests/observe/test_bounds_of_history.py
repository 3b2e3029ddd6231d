"""The history of a job stays small, and is written seldom."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from strandline.errors import StorageError
from strandline.observe import history_record
from strandline.observe.facts import CheckpointsFacts, Sample
from strandline.observe.history import MOST_AT_ONCE, REMOTE, RunHistory, too_many
from strandline.runtime.driver.figures import RunFigures
from strandline.storage import Storage, StoredFile
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


# --- pace ------------------------------------------------------------------------------------------


class Kept:
    """The history of a job second by second, with a clock that the test drives."""

    def __init__(self, storage: Storage) -> None:
        self.clock = 0.0
        self.facts = first_facts()
        self.writes: list[float] = []
        self.run = RunHistory(storage, self.facts, lambda: self.clock)

    def after(self, seconds: float, events: str = "", rows: int | None = None) -> bool:
        """Whether something is written so many seconds later, when facts are taken."""
        self.clock += seconds
        self.facts = many(events, self.facts)
        if rows is not None:
            self.facts = msgspec.structs.replace(self.facts, figures=RunFigures(self.facts.status, rows=rows))
        # Every second has a new sample.
        sample = Sample(self.facts.taken_ms + int(self.clock * 1000))
        self.run.offer(msgspec.structs.replace(self.facts, samples=(*self.facts.samples, sample)))
        if not self.run.is_due():
            return False
        self.run.write()
        self.writes.append(self.clock)
        return True


def local() -> Remembered:
    storage = Remembered()
    storage.root = Path("/local")
    return storage


@pytest.mark.parametrize("storage", [local(), Remembered()], ids=["disk", "objects"])
def test_an_idle_job_writes_nothing(storage: Remembered) -> None:
    kept = Kept(storage)
    kept.after(0, "c", rows=5)
    for _ in range(3600):
        kept.after(1)
    assert kept.writes == [0]
    assert storage.calls == ["write"]
    assert kept.after(1, "c")
    found = facts_in(storage)
    assert ended_of(found) == [(1, "completed"), (2, "completed")]
    assert len(found.samples) == 600


def test_on_a_local_disk_whatever_changes_is_written_when_it_is_seen() -> None:
    kept = Kept(local())
    assert all(kept.after(1, "c") for _ in range(300))
    assert all(kept.after(1, rows=row) for row in range(300))
    assert kept.after(0.2, "F")


def test_an_object_store_gets_every_checkpoint_at_once_if_they_are_two_seconds_apart() -> None:
    kept = Kept(Remembered())
    kept.after(0)
    assert [kept.after(1, "c" if second % 2 else "") for second in range(600)] == [False, True] * 300


def test_an_object_store_is_written_to_at_most_every_other_second_and_failures_still_come_at_once() -> None:
    storage = Remembered()
    kept = Kept(storage)
    for _ in range(600):
        kept.after(1, "c", rows=int(kept.clock))
    assert len(kept.writes) <= 600 / REMOTE.seconds + MOST_AT_ONCE
    assert all(late - early <= 3 for early, late in pairwise(kept.writes))
    assert len(storage.calls) <= 2 * len(kept.writes)
    failures = [kept.after(0.2, "F") for _ in range(20)]
    assert failures[:3] == [True] * 3
    assert sum(failures) <= 7  # failures that come again and again are not written more often


def test_an_object_store_gets_rows_alone_every_twelve_seconds() -> None:
    kept = Kept(Remembered())
    for second in range(601):
        kept.after(1, rows=second)
    assert len(kept.writes) == 50


def test_a_storage_that_fails_is_not_asked_more_often() -> None:
    storage = Remembered()
    storage.fails_at = set(range(5))
    kept = Kept(storage)
    tries = []
    for second in range(70):
        try:
            if kept.after(1, "F"):
                break
        except StorageError:
            tries.append(second)
    assert tries == [0, 12, 24, 36, 48]
    assert second == 60
    assert len(facts_in(storage).failures) == 61


def test_seconds_share_a_file() -> None:
    storage = Remembered()
    kept = Kept(storage)
    most = 0
    for _ in range(900):
        kept.after(1, "c")
        most = max(most, len(storage.files))
    assert most <= 25
    assert storage.calls.count("delete") <= 900 / 12 + 2
    found = [number for number, _status in ended_of(facts_in(storage))]
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= 898


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
