"""Jobs that are seen through their history in storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strandline.errors import JobFailedError, StorageError
from strandline.observe.history import RunHistory
from strandline.observe.history_jobs import HistoryJobs
from strandline.observe.history_reader import HistoryReader
from strandline.storage import open_storage
from strandline.storage.local import LocalStorage
from tests.observe.happenings import (
    JOB,
    PATHS,
    START,
    entry_of,
    facts_in,
    first_facts,
    many,
    stored,
)
from tests.s3 import BUCKET, KEYS

# --- through HistoryJobs ---------------------------------------------------------------------------


def test_jobs_of_several_directories_are_shown_newest_first(tmp_path: Path) -> None:
    places = [LocalStorage(str(tmp_path / name)) for name in ("a", "b")]
    stored(places[0], many("c"))
    stored(places[1], many("cc", first_facts("run2", START + 1)))
    (tmp_path / "a" / "no-history" / "log").mkdir(parents=True)
    jobs = HistoryJobs([place.url for place in places])
    assert [job.facts().run for job in jobs.all()] == ["run2", "run1"]
    second = jobs.all()[1]
    assert jobs.get(second.id) is second
    assert second.control is None
    found = jobs.get(JOB)
    assert found is not None
    assert found.facts().run == "run2"
    assert jobs.get("nobody") is None


def test_a_directory_that_does_not_exist_has_no_jobs(tmp_path: Path) -> None:
    assert HistoryJobs([str(tmp_path / "nowhere")]).all() == []


def test_storage_is_looked_at_again_only_after_some_seconds(tmp_path: Path) -> None:
    clock = [0.0]
    storage = LocalStorage(str(tmp_path))
    stored(storage, many("c"))
    jobs = HistoryJobs([storage.url], clock=lambda: clock[0])
    (job,) = jobs.all()
    assert job.facts().run == "run1"
    stored(storage, many("c", first_facts("run2", START + 1)))
    assert job.facts().run == "run1"
    clock[0] += 5
    assert job.facts().run == "run2"
    assert jobs.all() == [job]


def test_logs_that_were_kept_can_be_read(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    stored(storage, many("c"))
    storage.write(PATHS.history_log("run1", "slot-0"), b"first line\nsecond line\nthird line\n")
    storage.write(PATHS.history_log("run0", "slot-1"), b"another run's\n")
    (job,) = HistoryJobs([storage.url]).all()
    assert list(job.processes()) == ["slot-0"]
    assert job.log("slot-0").text == "first line\nsecond line\nthird line\n"
    short = job.log("slot-0", 15)
    assert (short.text, short.cut) == ("third line\n", True)
    for process in ("slot-1", "../../log/x", "driver"):
        with pytest.raises(JobFailedError, match=r"no log of .* was kept; logs that were kept: slot-0"):
            job.log(process)


def test_a_heart_that_beats_between_two_looks_is_alive_and_one_that_stops_is_dead_whatever_the_clocks_say(
    tmp_path: Path,
) -> None:
    clock = [0.0]
    storage = LocalStorage(str(tmp_path))
    facts = many("c")
    reader = HistoryReader(storage, JOB, lambda: clock[0])

    def look(beat_ms: int, modified: float) -> bool:
        stored(storage, facts, entry_of(facts, host_id="elsewhere", beat_ms=beat_ms))
        path = tmp_path / PATHS.run_entry(START, "run1")
        os.utime(path, (modified, modified))
        clock[0] += 30
        found = reader.read()
        assert found is not None
        return found.facts.runs

    assert not look(1_000, 1)  # decades behind
    assert look(2_000, 2)
    assert look(3_000, 3)
    future = 4_000_000_000
    assert look(future * 1000, future)
    assert look(future * 1000, future)
    assert not look(future * 1000, future)


def test_a_history_in_an_object_store_is_read(s3_endpoint: str) -> None:
    options = {**KEYS, "endpoint": s3_endpoint}
    storage = open_storage(f"s3://{BUCKET}/history", options)
    facts = many("ccFp")
    stored(storage, facts, entry_of(facts, pid_started=1))
    (job,) = HistoryJobs([storage.url], options).all()
    found = job.facts()
    assert found.driver_lost
    assert [one.id for one in found.checkpoints.history] == [1, 2]
    assert found.failures == facts.failures
    later = RunHistory(storage, first_facts("run2", START + 1))
    later.offer(first_facts("run2", START + 1))
    later.write()
    assert facts_in(storage).run == "run2"


def test_a_storage_that_fails_for_a_while_leaves_what_was_known(tmp_path: Path) -> None:
    clock = [0.0]
    switch = tmp_path / "on"
    stored(LocalStorage(str(tmp_path / "a")), many("c"))
    options = {"fail_pattern": "^(list|read) ", "switch": str(switch)}
    jobs = HistoryJobs([f"faulty+file://{tmp_path}/a"], options, lambda: clock[0])
    switch.touch()
    with pytest.raises(StorageError, match="fails on purpose"):
        jobs.all()
    switch.unlink()
    (job,) = jobs.all()
    facts = job.facts()
    switch.touch()
    clock[0] += 10
    assert jobs.all() == [job]
    assert job.facts() == facts
