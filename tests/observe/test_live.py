"""The facts of a job that runs: a slot is killed, the job is rescaled, checkpointed, saved, and ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.errors import StrandlineError
from strandline.job import observation
from strandline.observe.facts import JobFacts, job_id
from strandline.observe.live import LiveJob
from strandline.observe.registration import local_runs
from tests.jobs.place import Place, batches, running_sums
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

ROWS = batches(6)


def live(run: sl.JobRun) -> LiveJob:
    job = run._observation.job
    assert job is not None
    return job


def facts_when(run: sl.JobRun, what: str, holds: Callable[[JobFacts], object]) -> JobFacts:
    """The first facts of the run that fulfil a condition."""
    wait_until(lambda: holds(live(run).facts()), what=what)
    return live(run).facts()


def check_sums(facts: JobFacts) -> None:
    """What must hold of all facts of a running job."""
    (step,) = facts.steps
    assert facts.figures is not None
    assert len(facts.subtasks) == step.parallelism == facts.figures.parallelism
    for one in facts.subtasks:
        assert one.vertex == step.id
        assert 0 <= one.busy <= 1
        assert 0 <= one.back_pressured <= 1
        assert one.busy + one.back_pressured + one.idle == pytest.approx(1)
        assert one.rows_in_per_second >= 0
    assert len(facts.key_group_rows[step.id]) == 128
    assert sum(facts.key_group_rows[step.id]) == sum(one.rows_in for one in facts.subtasks)
    assert facts.start_ms <= facts.taken_ms
    assert [change.time_ms for change in facts.statuses] == sorted(change.time_ms for change in facts.statuses)


def test_the_facts_of_a_job_follow_it_through_its_life(tmp_path: Path, spark: SparkSession) -> None:
    place = Place(tmp_path, spark)
    options: dict[str, Any] = {"checkpoint_interval": "1h", "savepoint_dir": str(tmp_path / "saved")}
    secrets: dict[str, Any] = {
        "storage_options": {"secret_access_key": "hunter2-hunter2"},
        "rest_token": "hunter2-hunter2",
    }
    with place.sums(**options, **secrets, rest_port=0).start() as run:
        place.write(ROWS[0])
        place.write(ROWS[1])
        run.process_all_available()
        facts = facts_when(run, "all rows", lambda facts: sum(one.rows_in for one in facts.subtasks) == 600)
        check_sums(facts)
        assert (facts.id, facts.name) == (job_id(str(place.checkpoints), "visits"), "visits")
        assert (facts.status, facts.runs, facts.end_ms, facts.error) == ("running", True, None, "")
        assert [(vertex.kind, vertex.name) for vertex in facts.graph] == [
            ("source", "source-0"),
            ("step", "sums"),
            ("sink", "sink-0"),
        ]
        source, step, sink = facts.graph
        assert (step.inputs, sink.inputs) == ((source.id,), (step.id,))
        assert (step.description, sink.description) == ("process by user", f"ParquetSink({place.output})")
        assert source.description.startswith("FileStreamSource[")
        assert {one.pid for one in facts.subtasks} == {slot.pid for slot in run.processes().slots}
        assert {one.task_manager for one in facts.subtasks} == {one.id for one in run.processes().task_managers}
        assert facts.checkpoints.last_completed == run.checkpoints()[-1]
        assert "hunter2" not in msgspec.json.encode(facts).decode()
        assert json.loads(json.dumps(facts.as_dict()["config"]))["num_retained"] == 1

        os.kill(facts.subtasks[0].pid, signal.SIGKILL)
        place.write(ROWS[2])
        run.process_all_available()
        facts = facts_when(run, "the new slot", lambda now: now.subtasks[0].pid != facts.subtasks[0].pid)
        facts = facts_when(run, "the recovery", lambda now: now.recoveries)
        check_sums(facts)
        # The loss may interrupt a checkpoint, which is told, too.
        (failure,) = (one for one in facts.failures if one.kind != "checkpoint")
        assert (failure.kind, failure.subtasks) == ("slots", (0,))
        assert "SIGKILL" in failure.cause
        assert failure.cause == facts.recoveries[0].reason

        rescaling = live(run).rescale(3)
        facts = facts_when(run, "three subtasks", lambda now: len(now.subtasks) == 3)
        check_sums(facts)
        assert facts.rescalings == (rescaling,)
        assert facts.config["parallelism"] == 3

        place.write(ROWS[3])
        run.process_all_available()
        taken = live(run).trigger_checkpoint()
        assert taken.completed_time is not None
        assert taken.trigger_time < max(one.ack_time for one in taken.subtasks) <= taken.completed_time
        full = live(run).trigger_checkpoint(full=True)
        assert taken.checkpointed_bytes < taken.full_bytes == full.full_bytes == full.checkpointed_bytes
        path = live(run).savepoint(None, "native")
        assert Path(path).parent == tmp_path / "saved"
        facts = facts_when(run, "the savepoint", lambda now: now.checkpoints.last_savepoint)
        assert facts.checkpoints.last_savepoint is not None
        assert facts.checkpoints.last_savepoint.path == path
        assert facts.checkpoints.last_savepoint.savepoint_format == "native"
        assert [one.discarded for one in facts.checkpoints.history if one.id in (taken.id, full.id)] == [True, False]
        # The loss of the slot may have interrupted a checkpoint, and more than once: it is tried again at once.
        interrupted = [one.cause for one in facts.failures if one.kind == "checkpoint"]
        assert facts.checkpoints.counts.total == len(facts.checkpoints.history)
        assert facts.checkpoints.counts.failed == len(interrupted)
        assert all("a slot was lost" in cause for cause in interrupted), interrupted
        assert facts.samples[-1].rows_per_second > 0
        assert msgspec.json.decode(msgspec.json.encode(facts), type=JobFacts) == facts
        assert live(run).control is not None
        assert run.ui_url == facts.driver.ui_url
        assert f'<a href="{run.ui_url}">' in run._repr_html_()
        with urlopen(f"{run.ui_url}/jobs/overview", timeout=5) as answer:
            assert [job["jid"] for job in json.load(answer)["jobs"]] == [facts.id]
    facts = live(run).facts()
    assert (facts.status, facts.runs, facts.subtasks) == ("stopped", False, ())
    assert facts.end_ms == facts.statuses[-1].time_ms
    assert [change.status for change in facts.statuses] == ["starting", "running", "rescaling", "running", "stopped"]
    assert facts.figures is not None
    assert facts.figures.rows == 1200
    assert live(run).control is None
    with pytest.raises(StrandlineError, match="was ended by somebody else meanwhile, and no savepoint was made"):
        live(run).stop(str(tmp_path / "saved"), "native")


def test_the_end_of_a_history_that_hangs_is_waited_for_once_and_holds_up_nothing_else(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRANDLINE_RUNS_DIR", str(tmp_path / "host"))
    monkeypatch.setattr(observation, "END_PATIENCE", 1.5)
    switch = tmp_path / "switch"
    switch.touch()
    place = Place(tmp_path, spark)
    faults = {"fail_pattern": "history/", "fail_mode": "hang", "switch": str(switch)}
    place.write(ROWS[0])
    config = sl.Config(
        checkpoint_dir=f"faulty+file://{tmp_path}/ckpt",
        storage_options=faults,
        parallelism=1,
        local_dir=str(tmp_path / "local"),
        rest_port="off",
    )
    try:
        with place.sums(config=config).start() as run:
            run.process_all_available()
        (entry,) = local_runs()
        assert entry.entry.status == "stopped"
        began = time.monotonic()
        run.stop()
        run.cancel()
        assert time.monotonic() - began < 1.0
        assert place.rows() == running_sums(ROWS[:1])
    finally:
        switch.unlink()
