"""The history of a run: what is read is what was offered up to some moment, whatever happens between two calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.stats import CheckpointCounts
from strandline.errors import StorageError
from strandline.observe import history
from strandline.observe.facts import CheckpointsFacts
from strandline.observe.history import HistoryWriter, RunHistory
from strandline.observe.history_reader import HistoryReader, read_history
from strandline.observe.run_entries import own_entry
from strandline.runtime.driver.status import RunStatus
from strandline.storage import JobPaths, StoredFile
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.observe.generated import generated_facts
from tests.observe.happenings import (
    JOB,
    PATHS,
    START,
    Crashed,
    Remembered,
    after,
    checkpoint,
    ended_of,
    entry_of,
    facts_in,
    first_facts,
    many,
    stored,
)
from tests.observe.seen import Seen
from tests.waiting import wait_until

EVENTS = st.sampled_from(
    ["completed", "completed", "failed", "in_progress", "failure", "recovery", "rescale", "status"]
)
STEPS = st.lists(st.one_of(EVENTS, st.sampled_from(["write", "write", "write", "close"])), min_size=5, max_size=60)


@settings(max_examples=300)
@given(
    steps=STEPS,
    dies_at=st.one_of(st.none(), st.integers(0, 15)),
    fails_at=st.sets(st.integers(0, 8), max_size=4),
    done_first=st.booleans(),
    whole_after=st.integers(2, 5),
    part_seconds=st.sampled_from([0, 3, 1000]),
)
def test_what_is_read_is_the_history_up_to_some_moment_wherever_the_driver_dies(
    steps: list[str], dies_at: int | None, fails_at: set[int], done_first: bool, whole_after: int, part_seconds: int
) -> None:
    storage = Remembered()
    storage.dies_at, storage.fails_at, storage.done_first = dies_at, fails_at, done_first
    facts = first_facts()
    offered, saved, written = [facts], 0, -1
    """Every state that was offered; how many of them are certainly durable; the newest that may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "PARTS_PER_WHOLE", whole_after)
        patch.setattr(history, "PART_SECONDS", part_seconds)
        clock = 0
        run = RunHistory(storage, facts, lambda: clock)
        run.offer(facts)
        try:
            for step in steps:
                clock += 1
                if step not in ("write", "close"):
                    facts = after(facts, step)
                    offered.append(facts)
                    run.offer(facts)
                    continue
                written = len(offered) - 1
                try:
                    run.write(whole=step == "close")
                except StorageError:
                    continue
                saved = written + 1
        except Crashed:
            pass
    found = read_history(storage, JOB)
    if found is None:
        assert saved == 0
        return
    assert [note for note in found.notes if "the entry is missing" not in note] == []
    (place,) = [n for n, one in enumerate(offered) if one.taken_ms == found.facts.taken_ms]
    assert saved - 1 <= place <= written
    then = offered[place]
    assert ended_of(found.facts) == ended_of(then)
    assert found.facts.failures == then.failures
    assert found.facts.recoveries == then.recoveries
    assert found.facts.rescalings == then.rescalings
    assert found.facts.statuses == then.statuses
    assert found.facts.samples == then.samples
    assert len([path for path in storage.files if "/runs/" in path]) <= 2 * whole_after + len(fails_at) + 1


def test_the_facts_of_a_run_come_back_as_they_were(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = generated_facts(name=JOB, status=RunStatus.STOPPED, parallelism=4, checkpoints=30)
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write(whole=True)
    found = read_history(storage, JOB)
    assert found is not None
    back = found.facts
    for name in facts.__struct_fields__:
        if name not in ("id", "checkpoint_dir", "checkpoints", "health"):
            assert getattr(back, name) == getattr(facts, name), name
    assert back.checkpoint_dir == storage.url
    assert list(back.checkpoints.history) == [one for one in facts.checkpoints.history if one.status != "in_progress"]
    assert back.checkpoints.last_completed == facts.checkpoints.last_completed
    assert back.checkpoints.restored == facts.checkpoints.restored


def test_a_run_that_did_not_end_and_whose_process_is_gone_has_lost_its_driver(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = many("ccp")
    stored(storage, facts, entry_of(facts, pid_started=1))
    found = facts_in(storage)
    assert found.driver_lost
    assert not found.runs
    assert [finding.rule for finding in found.health][:1] == ["driver-lost"]
    assert found.status is RunStatus.RUNNING
    assert [one.id for one in found.checkpoints.history] == [1, 2]
    assert found.checkpoints.counts == CheckpointCounts(total=2, completed=2)


def test_a_run_that_is_alive_shows_its_checkpoint_in_progress_and_its_subtasks(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = generated_facts(name=JOB, checkpoints=3)
    stored(storage, facts, own_entry(facts))
    found = facts_in(storage)
    assert not found.driver_lost
    assert found.subtasks == facts.subtasks
    assert [one.status for one in found.checkpoints.history][-1] == "in_progress"


def test_the_entry_of_a_run_tells_its_end_if_the_last_part_was_lost(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = many("c")
    stored(storage, facts, entry_of(facts, status=RunStatus.FAILED, beat_ms=START + 99))
    found = facts_in(storage)
    assert (found.status, found.end_ms, found.driver_lost) == (RunStatus.FAILED, START + 99, False)


def test_a_checkpoint_that_was_dropped_later_is_dropped_in_the_history(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = many("cc")
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write()
    first, second = facts.checkpoints.history
    seen = msgspec.structs.replace(facts.checkpoints, history=(replace(first, discarded=True), second))
    run.offer(msgspec.structs.replace(facts, checkpoints=seen))
    run.write()
    found = facts_in(storage).checkpoints.history
    assert [(one.id, one.discarded, len(one.subtasks)) for one in found] == [(1, True, 2), (2, False, 2)]


def test_what_happened_to_earlier_runs_comes_first(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    first = many("ccFRS")
    second = first_facts("run2", START + 100_000)
    second = msgspec.structs.replace(
        many("fcF", msgspec.structs.replace(second, checkpoints=CheckpointsFacts(history=(checkpoint(2),)))),
    )
    stored(storage, first)
    stored(storage, second)
    found = facts_in(storage)
    assert found.run == "run2"
    assert [(one.id, one.status) for one in found.checkpoints.history] == [
        (1, "completed"),
        (2, "completed"),
        (3, "failed"),
        (4, "completed"),
    ]
    assert found.failures == first.failures + second.failures
    assert found.recoveries == first.recoveries
    assert found.rescalings == first.rescalings
    assert found.checkpoints.counts.completed == 1  # of this run, as while it ran
    assert found.samples == second.samples


def test_a_run_that_is_alive_is_shown_even_if_the_clock_was_set_back_since(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    before = msgspec.structs.replace(first_facts("run1"), status=RunStatus.FAILED)
    stored(storage, many("cc", before), entry_of(before))
    now = first_facts("run2", START - 3_600_000)
    stored(storage, many("ccc", now), entry_of(now))
    found = read_history(storage, JOB)
    assert found is not None
    assert (found.facts.run, found.facts.status, found.facts.driver_lost) == ("run2", RunStatus.RUNNING, False)
    assert [(run.entry.run, run.liveness) for run in found.runs] == [("run2", "alive"), ("run1", "ended")]


def test_two_drivers_at_once_do_not_touch_each_others_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PARTS_PER_WHOLE", 3)
    storage = LocalStorage(str(tmp_path))
    seen = {"old": many("c", first_facts("old")), "new": many("c", first_facts("new", START + 1))}
    runs = {name: RunHistory(storage, facts) for name, facts in seen.items()}
    for _ in range(10):
        for name, run in runs.items():
            seen[name] = many("c", seen[name])
            run.offer(seen[name])
            run.write()
    old = [part for file in storage.list(PATHS.history_runs_dir) if (part := PATHS.parse_history(file.path))]
    assert {part.run for part in old} == {"old", "new"}
    found = facts_in(storage)
    assert found.run == "new"
    assert ended_of(found) == ended_of(seen["new"])


class WholeSeconds(LocalStorage):
    """Says times as an object store does."""

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        return (replace(file, modified=1_700_000_000.0) for file in super().list(prefix, after))


def test_a_part_that_is_written_again_within_a_second_is_read_again(tmp_path: Path) -> None:
    storage = WholeSeconds(str(tmp_path))
    facts = first_facts()
    run = RunHistory(storage, facts, lambda: 0.0)
    reader = HistoryReader(storage, JOB)
    sizes: set[int] = set()
    for number in range(20):
        run.offer(msgspec.structs.replace(facts, taken_ms=facts.taken_ms + 1000 + number))
        run.write()
        found = reader.read()
        assert found is not None
        assert found.facts.taken_ms == facts.taken_ms + 1000 + number
        sizes.update(file.size for file in storage.list(JobPaths(JOB).history_runs_dir))
    assert len(sizes) < 20  # else a size had told it


def test_a_driver_that_was_lost_was_seen_last_when_its_entry_was_renewed(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = many("c")
    hour = 3_600_000
    stored(storage, facts, entry_of(facts, pid_started=1, beat_ms=facts.taken_ms + hour))
    found = facts_in(storage)
    assert found.driver_lost
    assert found.taken_ms == facts.taken_ms + hour


# --- in the background -----------------------------------------------------------------------------


def test_what_a_run_did_more_than_a_second_ago_is_in_its_history(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    job = Seen(many("c"))
    writer = HistoryWriter(job, storage)
    wait_until(lambda: read_history(storage, JOB))
    took = []
    for _ in range(3):
        job.current = many("c", job.current)
        began = time.monotonic()
        writer.look()  # as a job that runs does, when it has taken facts
        wait_until(lambda: len(facts_in(storage).checkpoints.history) == len(job.current.checkpoints.history))
        took.append(time.monotonic() - began)
    writer.close()
    assert min(took) < 0.5


def test_the_writer_saves_the_end_of_a_run(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    job = Seen(many("c"))
    writer = HistoryWriter(job, storage)
    wait_until(lambda: read_history(storage, JOB))
    job.current = msgspec.structs.replace(many("cc", job.current), status=RunStatus.FINISHED, end_ms=START + 5)
    writer.close()
    found = facts_in(storage)
    assert (found.status, found.end_ms, found.driver_lost) == (RunStatus.FINISHED, START + 5, False)
    assert len(found.checkpoints.history) == 3


def test_a_storage_that_fails_is_logged_once_and_nothing_is_lost_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history, "LOCAL", replace(history.LOCAL, failed_seconds=0.0))
    switch = tmp_path / "on"
    switch.touch()
    storage = FaultyStorage(f"faulty+file://{tmp_path}/c", {"fail_pattern": "^write ", "switch": str(switch)})
    job = Seen(many("c"))
    writer = HistoryWriter(job, storage)
    wait_until(lambda: "writing its history failed" in caplog.text)
    job.current = many("ccF", job.current)
    switch.unlink()
    writer.close()
    found = facts_in(storage)
    assert [one.id for one in found.checkpoints.history] == [1, 2, 3]
    assert caplog.text.count("writing its history failed") == 1
