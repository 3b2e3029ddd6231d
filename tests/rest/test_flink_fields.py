"""Field names are Flink's: those of its `rest_v1_dispatcher.yml`, and newer ones of its message classes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strandline.observe.facts import JobFacts, vertex_id
from strandline.rest.flink_states import job_state
from strandline.runtime.driver.status import RunStatus
from tests.observe.generated import generated_facts
from tests.rest.served import Client

COUNTS = vertex_id("step", "counts")
SPREAD = {"min", "max", "avg", "p50", "p90", "p95", "p99", "p999"}
TASKS = {
    *("created", "scheduled", "deploying", "initializing", "running", "finished"),
    *("canceling", "canceled", "failed", "reconciling"),
}
IO = {
    *("read-bytes", "read-bytes-complete", "write-bytes", "write-bytes-complete"),
    *("read-records", "read-records-complete", "write-records", "write-records-complete"),
    *("accumulated-backpressured-time", "accumulated-idle-time", "accumulated-busy-time"),
}
CHECKPOINT = {
    *("className", "id", "status", "is_savepoint", "savepointFormat", "trigger_timestamp", "latest_ack_timestamp"),
    *("checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data"),
    *("persisted_data", "num_subtasks", "num_acknowledged_subtasks", "checkpoint_type", "tasks"),
    *("external_path", "discarded", "failure_timestamp", "failure_message"),
}
TASK_CHECKPOINT = {
    *("id", "status", "latest_ack_timestamp", "checkpointed_size", "state_size", "end_to_end_duration"),
    *("alignment_buffered", "processed_data", "persisted_data", "num_subtasks", "num_acknowledged_subtasks"),
}
RESCALE = {
    *("rescaleUuid", "resourceRequirementsUuid", "rescaleAttemptId", "vertices", "slots", "schedulerStates"),
    *("startTimestampInMillis", "endTimestampInMillis", "terminalState", "triggerCause", "terminatedReason"),
}


@pytest.mark.parametrize(
    ("path", "inside", "fields"),
    [
        ("/jobs", ("jobs", 0), {"id", "status"}),
        (
            "/jobs/overview",
            ("jobs", 0),
            {
                *("jid", "name", "start-time", "end-time", "duration", "state", "last-modification", "tasks"),
                "pending-operators",
            },
        ),
        ("/jobs/overview", ("jobs", 0, "tasks"), {"total", *TASKS}),
        (
            "/jobs/visits",
            (),
            {
                *("jid", "name", "isStoppable", "state", "start-time", "end-time", "duration", "maxParallelism", "now"),
                *("timestamps", "vertices", "status-counts", "plan", "job-type", "pending-operators"),
            },
        ),
        (
            "/jobs/visits",
            ("vertices", 0),
            {
                *("id", "slotSharingGroupId", "name", "maxParallelism", "parallelism", "status", "start-time"),
                *("end-time", "duration", "tasks", "metrics"),
            },
        ),
        ("/jobs/visits", ("vertices", 2, "tasks"), {name.upper() for name in TASKS}),
        ("/jobs/visits", ("vertices", 2, "metrics"), IO),
        ("/jobs/visits", ("vertices", 0, "metrics"), IO - {"read-bytes", "write-bytes"}),
        ("/jobs/visits", ("vertices", 4, "metrics"), IO - {"read-bytes", "write-bytes"}),
        ("/jobs/visits/plan", ("plan",), {"jid", "name", "type", "nodes"}),
        ("/jobs/visits/config", (), {"jid", "name", "execution-config"}),
        (
            "/jobs/visits/config",
            ("execution-config",),
            {"restart-strategy", "job-parallelism", "object-reuse-mode", "user-config"},
        ),
        ("/jobs/visits/exceptions", ("exceptionHistory",), {"entries", "truncated"}),
        (
            "/jobs/visits/exceptions",
            ("exceptionHistory", "entries", 0),
            {
                *("exceptionName", "stacktrace", "timestamp", "failureLabels", "taskName", "endpoint"),
                *("taskManagerId", "concurrentExceptions"),
            },
        ),
        (f"/jobs/visits/vertices/{COUNTS}", (), {"id", "name", "parallelism", "maxParallelism", "now", "subtasks"}),
        (
            f"/jobs/visits/vertices/{COUNTS}/subtasks/1",
            (),
            {
                *("subtask", "status", "attempt", "endpoint", "start-time", "end-time", "duration", "metrics"),
                *("taskmanager-id", "start_time", "status-duration", "other-concurrent-attempts"),
            },
        ),
        (f"/jobs/visits/vertices/{COUNTS}/subtasktimes", (), {"id", "name", "now", "subtasks"}),
        (
            f"/jobs/visits/vertices/{COUNTS}/backpressure",
            (),
            {"status", "backpressureLevel", "end-timestamp", "subtasks"},
        ),
        (
            f"/jobs/visits/vertices/{COUNTS}/backpressure",
            ("subtasks", 0),
            {"subtask", "attempt-number", "backpressureLevel", "ratio", "idleRatio", "busyRatio"},
        ),
        ("/jobs/visits/checkpoints", (), {"counts", "summary", "latest", "history"}),
        ("/jobs/visits/checkpoints", ("counts",), {"restored", "total", "in_progress", "completed", "failed"}),
        (
            "/jobs/visits/checkpoints",
            ("summary",),
            {
                *("checkpointed_size", "state_size", "end_to_end_duration", "processed_data", "persisted_data"),
                "alignment_buffered",
            },
        ),
        ("/jobs/visits/checkpoints", ("summary", "state_size"), SPREAD),
        ("/jobs/visits/checkpoints", ("latest",), {"completed", "savepoint", "failed", "restored"}),
        (
            "/jobs/visits/checkpoints",
            ("latest", "restored"),
            {"id", "restore_timestamp", "is_savepoint", "external_path"},
        ),
        ("/jobs/visits/checkpoints", ("history", 0), CHECKPOINT),
        (
            "/jobs/visits/checkpoints/config",
            (),
            {
                *("mode", "interval", "timeout", "min_pause", "max_concurrent", "externalization", "state_backend"),
                *("checkpoint_storage", "unaligned_checkpoints", "aligned_checkpoint_timeout"),
                *("tolerable_failed_checkpoints", "checkpoints_after_tasks_finish", "state_changelog_enabled"),
                *("changelog_storage", "changelog_periodic_materialization_interval"),
            },
        ),
        ("/jobs/visits/checkpoints/config", ("externalization",), {"enabled", "delete_on_cancellation"}),
        ("/jobs/visits/checkpoints/details/19", (), CHECKPOINT),
        ("/jobs/visits/checkpoints/details/19", ("tasks", COUNTS), TASK_CHECKPOINT),
        (
            f"/jobs/visits/checkpoints/details/19/subtasks/{COUNTS}",
            (),
            {*TASK_CHECKPOINT, "summary", "subtasks"},
        ),
        (
            f"/jobs/visits/checkpoints/details/19/subtasks/{COUNTS}",
            ("summary",),
            {
                *("checkpointed_size", "state_size", "end_to_end_duration", "checkpoint_duration", "alignment"),
                "start_delay",
            },
        ),
        (
            f"/jobs/visits/checkpoints/details/19/subtasks/{COUNTS}",
            ("summary", "checkpoint_duration"),
            {"sync", "async"},
        ),
        (
            f"/jobs/visits/checkpoints/details/19/subtasks/{COUNTS}",
            ("summary", "alignment"),
            {"buffered", "processed", "persisted", "duration"},
        ),
        (
            f"/jobs/visits/checkpoints/details/19/subtasks/{COUNTS}",
            ("subtasks", 0),
            {
                *("className", "index", "status", "ack_timestamp", "end_to_end_duration", "checkpointed_size"),
                *("state_size", "checkpoint", "alignment", "start_delay", "unaligned_checkpoint", "aborted"),
            },
        ),
        (
            f"/jobs/visits/checkpoints/details/20/subtasks/{COUNTS}",
            ("subtasks", 1),
            {"className", "index", "status"},
        ),
        ("/jobs/visits/rescales/overview", (), {"rescalesCounts", "latest"}),
        (
            "/jobs/visits/rescales/overview",
            ("rescalesCounts",),
            {"ignored", "inProgress", "completed", "failed"},
        ),
        ("/jobs/visits/rescales/history", (0,), RESCALE),
        (
            "/jobs/visits/rescales/history",
            (0, "vertices", COUNTS),
            {
                *("jobVertexId", "jobVertexName", "slotSharingGroupId", "slotSharingGroupName", "desiredParallelism"),
                *("sufficientParallelism", "preRescaleParallelism", "postRescaleParallelism"),
            },
        ),
        (
            "/jobs/visits/rescales/summary",
            (),
            {
                *("rescalesCounts", "rescalesDurationStatsInMillis", "completedRescalesDurationStatsInMillis"),
                *("ignoredRescalesDurationStatsInMillis", "failedRescalesDurationStatsInMillis"),
            },
        ),
        (
            "/jobs/visits/rescales/config",
            (),
            {
                *("rescaleHistoryMax", "schedulerExecutionMode", "submissionResourceWaitTimeoutInMillis"),
                *("submissionResourceStabilizationTimeoutInMillis", "slotIdleTimeoutInMillis"),
                *("executingCooldownTimeoutInMillis", "executingResourceStabilizationTimeoutInMillis"),
                *("maximumDelayForTriggeringRescaleInMillis", "rescaleOnFailedCheckpointCount"),
            },
        ),
        (
            "/overview",
            (),
            {
                *("taskmanagers", "slots-total", "slots-available", "jobs-running", "jobs-finished"),
                *("jobs-cancelled", "jobs-failed", "flink-version", "flink-commit"),
            },
        ),
        (
            "/config",
            (),
            {
                *("refresh-interval", "timezone-name", "timezone-offset", "flink-version", "flink-revision"),
                "features",
            },
        ),
        ("/v1/jobs", ("jobs", 0), {"id", "status"}),
    ],
)
def test_the_fields_have_flinks_names(
    client: Client, path: str, inside: tuple[str | int, ...], fields: set[str]
) -> None:
    found: Any = client.get(path)
    for step in inside:
        found = found[step]
    assert set(found) == fields


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (RunStatus.STARTING, "INITIALIZING"),
        (RunStatus.RUNNING, "RUNNING"),
        (RunStatus.RESTARTING, "RESTARTING"),
        (RunStatus.RESCALING, "RESTARTING"),
        (RunStatus.FINISHED, "FINISHED"),
        (RunStatus.STOPPED, "FINISHED"),
        (RunStatus.CANCELLED, "CANCELED"),
        (RunStatus.FAILED, "FAILED"),
    ],
)
def test_every_status_has_a_state_of_flinks(status: RunStatus, expected: str) -> None:
    assert job_state(generated_facts(status=status, samples=0)) == expected


def test_a_job_whose_driver_is_lost_is_suspended() -> None:
    lost = JobFacts("1", "visits", "2", RunStatus.RUNNING, 0, 0, driver_lost=True)
    assert job_state(lost) == "SUSPENDED"


def test_figures_of_checkpoints_are_those_of_the_facts(client: Client) -> None:
    known = generated_facts().checkpoints
    told = client.get("/jobs/visits/checkpoints")
    assert told["counts"] == {"restored": 2, "total": 20, "in_progress": 1, "completed": 18, "failed": 1}
    assert [one["id"] for one in told["history"]] == list(range(20, 0, -1))
    completed = [one for one in known.history if one.status == "completed"]
    assert told["summary"]["end_to_end_duration"]["max"] == round(max(one.end_to_end_ms for one in completed))
    assert told["latest"]["savepoint"]["checkpoint_type"] == "SAVEPOINT"
    assert told["latest"]["savepoint"]["savepointFormat"] == "NATIVE"
    assert {one["discarded"] for one in told["history"] if one["status"] == "COMPLETED"} == {True, False}
    assert told["latest"]["failed"]["failure_message"] == "subtask 1 of counts: storage says 503 Slow Down"
    pending = client.get(f"/jobs/visits/checkpoints/details/20/subtasks/{COUNTS}")
    assert [one["status"] for one in pending["subtasks"]] == ["completed", "pending_or_failed"]


def test_a_rescale_is_found_by_its_uuid_with_the_states_it_went_through(client: Client) -> None:
    (only,) = client.get("/jobs/visits/rescales/history")
    assert only["schedulerStates"] is None
    details = client.get(f"/jobs/visits/rescales/details/{only['rescaleUuid']}")
    assert [one["state"] for one in details["schedulerStates"]] == ["Executing", "StopWithSavepoint", "Restarting"]
    assert sum(one["durationInMillis"] for one in details["schedulerStates"]) == 3100
    assert client("GET", f"/jobs/visits/rescales/details/{'0' * 36}").status == 404


def test_failures_come_newest_first_and_without_those_of_checkpoints(client: Client) -> None:
    told = client.get("/jobs/visits/exceptions")["exceptionHistory"]
    assert [one["exceptionName"] for one in told["entries"]] == ["slot 0", "OSError"]
    assert client.get("/jobs/visits/exceptions?maxExceptions=1")["exceptionHistory"]["truncated"] is True


def test_metrics_are_listed_and_chosen_as_in_flink(client: Client) -> None:
    names = [one["id"] for one in client.get("/jobs/visits/metrics")]
    assert "lastCheckpointDuration" in names
    assert client.get("/jobs/visits/metrics?get=numRestarts,nothing") == [{"id": "numRestarts", "value": "1"}]
    vertex = client.get(f"/jobs/visits/vertices/{COUNTS}/metrics?get=0.numRecordsIn,numLateRecordsDropped")
    assert [one["id"] for one in vertex] == ["0.numRecordsIn", "numLateRecordsDropped"]


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/visits/vertices/" + "0" * 32,
        f"/jobs/visits/vertices/{COUNTS}/subtasks/99",
        "/jobs/visits/checkpoints/details/999",
        f"/jobs/visits/checkpoints/details/19/subtasks/{'0' * 32}",
    ],
)
def test_what_a_job_does_not_have_is_told(client: Client, path: str) -> None:
    answer = client("GET", path)
    assert answer.status == 404
    assert len(answer.json["errors"]) == 1


def test_no_answer_about_a_job_holds_its_secrets(client: Client) -> None:
    """The facts hold none; this holds it for the answers that turn them into others."""
    assert client.served.token not in json.dumps(client.get("/jobs/visits/config"))
