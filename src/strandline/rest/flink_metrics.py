"""The metrics of a job under Flink's names, as pure functions of the facts. docs/metrics.md explains each."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from strandline.checkpoint.stats import SubtaskStats
from strandline.observe.facts import JobFacts, SubtaskFacts, Vertex
from strandline.observe.samples import offsets_behind
from strandline.rest.flink_states import JobState, job_state, state_of
from strandline.runtime.driver.figures import StepFigures

Value = float | int | str

_TIMED_STATES: tuple[JobState, ...] = ("INITIALIZING", "RUNNING", "RESTARTING")
NANOS = 1_000_000
"""Nanoseconds in a millisecond."""


class Metric(Struct, frozen=True, omit_defaults=True):
    """A metric. A list of names has no values."""

    id: str
    value: str | None = None


def job_metrics(facts: JobFacts) -> dict[str, Value]:
    """The metrics of a whole job."""
    return {
        **_checkpoints(facts),
        **_states(facts),
        **_rows(facts),
        **_state(facts),
        **_changelog(facts),
        **_restore(facts),
    }


def step_metrics(facts: JobFacts, vertex: Vertex) -> dict[str, Value]:
    """The metrics of a step, summed over its subtasks."""
    figures = facts.figures.steps.get(vertex.name) if facts.figures is not None else None
    if figures is None:
        return {}
    known: dict[str, Value] = {
        "numRecordsIn": figures.rows_in,
        "numRecordsOut": figures.rows_out,
        "numLateRecordsDropped": figures.late_rows,
        "stateSize": figures.state_bytes,
        "stateMemorySize": figures.state_memory_bytes,
        "stateEstimatedKeys": figures.estimated_keys,
        **_bytes(figures),
    }
    if figures.watermark_ms is not None:
        known["currentInputWatermark"] = figures.watermark_ms
    subtasks = [one for one in facts.subtasks if one.vertex == vertex.id]
    if subtasks:
        known["maxBusyTimeMsPerSecond"] = round(1000 * max(one.busy for one in subtasks), 1)
        known["maxBackPressuredTimeMsPerSecond"] = round(1000 * max(one.back_pressured for one in subtasks), 1)
    return known


def subtask_metrics(facts: JobFacts, subtask: SubtaskFacts, checkpoint: SubtaskStats | None) -> dict[str, Value]:
    """The metrics of a subtask. `checkpoint` has its figures in the last completed checkpoint."""
    known: dict[str, Value] = {
        "numRecordsIn": subtask.rows_in,
        "numRecordsOut": subtask.rows_out,
        "numRecordsInPerSecond": round(subtask.rows_in_per_second, 1),
        "numRecordsOutPerSecond": round(subtask.rows_out_per_second, 1),
        "busyTimeMsPerSecond": round(1000 * subtask.busy, 1),
        "backPressuredTimeMsPerSecond": round(1000 * subtask.back_pressured, 1),
        "idleTimeMsPerSecond": round(1000 * subtask.idle, 1),
        "isBackPressured": int(subtask.back_pressured > 0.5),
        "stateSize": subtask.state_bytes,
        "stateMemorySize": subtask.memory_bytes,
        **_bytes(subtask),
    }
    if facts.config.get("state_backend", "rocksdb") == "rocksdb":
        known["rocksdb_estimate_num_keys"] = subtask.estimated_keys
        known["rocksdb_estimate_live_data_size"] = subtask.state_bytes
        if subtask.cache_hit_ratio is not None:
            known["rocksdb_block_cache_hit_ratio"] = round(subtask.cache_hit_ratio, 4)
    if subtask.watermark_ms is not None:
        known["currentInputWatermark"] = subtask.watermark_ms
    if checkpoint is not None:
        known["checkpointAlignmentTime"] = round(checkpoint.alignment_ms * NANOS)
        known["checkpointStartDelayNanos"] = round(checkpoint.start_delay_ms * NANOS)
    return known


def _bytes(counts: StepFigures | SubtaskFacts) -> dict[str, Value]:
    named = {"numBytesIn": counts.bytes_in, "numBytesOut": counts.bytes_out}
    return {name: value for name, value in named.items() if value is not None}


def vertex_metrics(facts: JobFacts, vertex: Vertex) -> dict[str, Value]:
    """The metrics of a vertex as Flink names them there: `0.numRecordsIn` is that of subtask 0."""
    known = dict(step_metrics(facts, vertex))
    last = last_checkpoint(facts, vertex)
    for one in facts.subtasks:
        if one.vertex == vertex.id:
            metrics = subtask_metrics(facts, one, last.get(one.index))
            known.update({f"{one.index}.{name}": value for name, value in metrics.items()})
    return known


def last_checkpoint(facts: JobFacts, vertex: Vertex) -> dict[int, SubtaskStats]:
    """The figures of a step's subtasks in the last completed checkpoint, by their numbers."""
    last = facts.checkpoints.last_completed
    return {} if last is None else {one.subtask: one for one in last.subtasks if one.operator == vertex.name}


def chosen(metrics: Mapping[str, Value], names: str | None) -> list[Metric]:
    """As Flink answers: all names without values, or the values of those that are asked for."""
    if names is None:
        return [Metric(name) for name in metrics]
    return [Metric(name, str(metrics[name])) for name in names.split(",") if name in metrics]


def _checkpoints(facts: JobFacts) -> dict[str, Value]:
    counts, last, restored = facts.checkpoints.counts, facts.checkpoints.last_completed, facts.checkpoints.restored
    known: dict[str, Value] = {
        "numberOfInProgressCheckpoints": counts.in_progress,
        "numberOfCompletedCheckpoints": counts.completed,
        "numberOfFailedCheckpoints": counts.failed,
        "totalNumberOfCheckpoints": counts.total,
        "lastCheckpointRestoreTimestamp": -1 if restored is None else round(restored.restore_time * 1000),
    }
    if last is not None:
        known |= {
            "lastCheckpointDuration": round(last.end_to_end_ms),
            "lastCheckpointSize": last.checkpointed_bytes,
            "lastCheckpointFullSize": last.full_bytes,
            "lastCompletedCheckpointId": last.id,
            "lastCheckpointCompletedTimestamp": round(last.end_time * 1000),
            "lastCheckpointExternalPath": last.path or "n/a",
            "lastCheckpointStartDelay": round(last.start_delay_ms),
        }
        if last.subtasks:
            known["fileMerging_logicalFileCount"] = sum(one.files for one in last.subtasks)
            known["fileMerging_logicalFileSize"] = last.full_bytes
    return known


def _states(facts: JobFacts) -> dict[str, Value]:
    """Flink's `<state>State`, `<state>Time` and `<state>TimeTotal`."""
    now = job_state(facts)
    totals: dict[JobState, int] = dict.fromkeys(_TIMED_STATES, 0)
    current = 0
    end = facts.taken_ms if facts.end_ms is None else facts.end_ms
    changes = [*facts.statuses]
    for number, change in enumerate(changes):
        until = changes[number + 1].time_ms if number + 1 < len(changes) else end
        state = state_of(change.status)
        if state in totals:
            totals[state] += max(0, until - change.time_ms)
        current = max(0, until - change.time_ms)
    known: dict[str, Value] = {
        "numRestarts": facts.figures.restarts if facts.figures is not None else 0,
        "numRescales": len(facts.rescalings),
        "uptime": max(0, end - facts.start_ms),
    }
    for state, total in totals.items():
        known[f"{state.lower()}State"] = int(state == now)
        known[f"{state.lower()}Time"] = current if state == now else 0
        known[f"{state.lower()}TimeTotal"] = total
    return known


def _rows(facts: JobFacts) -> dict[str, Value]:
    figures = facts.figures
    if figures is None:
        return {}
    known: dict[str, Value] = {
        "numRecordsIn": figures.rows,
        "numRecordsOut": figures.rows_out,
        "numRecordsInPerSecond": round(figures.rows_per_second, 1),
        "numRecordsOutPerSecond": round(figures.rows_out_per_second, 1),
        "numLateRecordsDropped": figures.late_rows,
        "numBatches": figures.batches,
        "lastBatchDuration": round(figures.batch_duration_ms, 1),
        "parallelism": figures.parallelism,
        "numReplacedSlots": figures.replaced_slots,
    }
    if figures.watermark_ms is not None:
        known["currentInputWatermark"] = figures.watermark_ms
    if figures.watermark_lag_ms is not None:
        known["watermarkLag"] = figures.watermark_lag_ms
    behind = offsets_behind(figures.sources)
    if behind is not None:
        known["pendingRecords"] = behind
    return known


def _state(facts: JobFacts) -> dict[str, Value]:
    figures = facts.figures
    if figures is None:
        return {}
    return {
        "stateSize": figures.state_bytes,
        "stateMemorySize": figures.state_memory_bytes,
        "stateMemoryUsed": figures.state_memory.used_bytes,
        "stateMemorySlotBudget": figures.state_memory.slot_budget_bytes,
        "stateMemoryMostUsed": figures.state_memory.most_used_bytes,
    }


def _changelog(facts: JobFacts) -> dict[str, Value]:
    changelog = facts.figures.changelog if facts.figures is not None else None
    if changelog is None:
        return {}
    requests = max(1, changelog.upload_requests)
    return {
        "numberOfUploadRequests": changelog.upload_requests,
        "numberOfUploadFailures": changelog.upload_failures,
        "attemptsPerUpload": round(changelog.upload_attempts / requests, 3),
        "uploadSizes": round(changelog.upload_bytes / requests),
        "uploadBacklogSize": changelog.behind_bytes,
        "changelogWaitTime": round(changelog.wait_ms),
        "startedMaterialization": changelog.materializations + changelog.failed_materializations,
        "completedMaterialization": changelog.materializations,
        "failedMaterialization": changelog.failed_materializations,
        "earlyMaterialization": changelog.early_materializations,
        "lastDurationOfMaterialization": round(changelog.last_materialization_ms),
        "lastFullSizeOfMaterialization": changelog.base_bytes,
        "lastFullSizeOfNonMaterialization": changelog.segment_bytes,
    }


def _restore(facts: JobFacts) -> dict[str, Value]:
    figures = facts.figures
    if figures is None:
        return {}
    return {
        "initializationTime": round(figures.restore.duration_ms),
        "restoredLocalBytes": figures.restore.local_bytes,
        "restoredRemoteBytes": figures.restore.durable_bytes,
    }
