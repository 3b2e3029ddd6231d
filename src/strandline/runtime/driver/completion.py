"""Completes checkpoints that every subtask has acknowledged, step by step.

The order makes every step repeatable after a crash: register the shared files, write `_metadata`, win the log entry,
publish the sink files, then delete what the checkpoint replaces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.decisions import CompletionDecision, CompletionPlan
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, all_files
from strandline.checkpoint.stats import CheckpointStats
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs
from strandline.runtime.driver.checkpoint_requests import SavepointRequests, Waiters
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.restore.epoch_log import EpochLog
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.protocol.taskmanager_calls import CheckpointCompleted
from strandline.sinks.positions import with_positions


@dataclass(slots=True)
class Completion:
    """The steps of a completion. The checkpoint thread calls them, one checkpoint after the other."""

    shape: JobShape
    properties: Mapping[str, str]
    """What the metadata of every checkpoint contains."""
    coordinator: CheckpointCoordinator
    cluster: Cluster
    inputs: CheckpointInputs
    durable: DurableCheckpoints
    commits: SinkCommits
    waiters: Waiters
    savepoints: SavepointRequests
    lock: threading.RLock
    """The lock of `Checkpoints`, which protects the coordinator, the inputs and the requests."""
    epoch_log: EpochLog | None = None
    stage: Callable[[int], None] = lambda _batch: None
    """Stages rows of epochs up to a batch that nobody has staged; see `StagedRows.stage`."""
    abandoned: bool = False
    """Whether the generation was closed while the thread waited for storage. Then the thread tells nobody anything."""
    _last: CheckpointCompleted | None = None
    """What the task managers were told of the last completed checkpoint."""

    def write_metadata(self, checkpoint_id: int) -> CompletionPlan | None:
        """Register the files of a checkpoint and write its metadata. An error fails the checkpoint.

        Returns what is to be done next; None if nothing is. A savepoint is complete then: it belongs to the user, so it
        is neither entered into the job's log nor registered.
        """
        target = self.savepoints.target(checkpoint_id)
        plan = self._plan(checkpoint_id, whole=target is not None)
        if plan is None:
            return None
        if target is not None:
            self._confirm_savepoint(checkpoint_id, target.complete(plan.metadata))
            return None
        self.durable.write_metadata(plan.metadata)
        return plan

    def finish(self, plan: CompletionPlan) -> None:
        """Enter a checkpoint into the job's log and carry out what follows from that.

        From the first try to write the entry on, the checkpoint can only be finished: by this generation, or by the
        takeover of the next one. So an error here ends the generation, and nobody is told that the checkpoint failed.
        """
        with self.lock:
            self.coordinator.enter(plan.metadata.checkpoint_id)
        self.durable.win_log_entry(plan)
        won = time.monotonic()
        self.commits.publish(plan.metadata)
        if self.abandoned:
            return
        decision = self._confirm(plan.metadata, won)
        self._announce(plan)
        self.durable.tidy_up((*decision.delete, *self._covered_epochs(plan.metadata.batch_id)), decision.dropped)

    def _covered_epochs(self, batch: int) -> tuple[FileHandle, ...]:
        """The files of epochs up to `batch` that no checkpoint names: nobody will name them any more.

        While another checkpoint is in progress, which may name them, they stay.
        """
        if self.epoch_log is None:
            return ()
        covered = [FileHandle(path, 0, "") for path in self.epoch_log.covered(batch)]
        with self.lock:
            if self.coordinator.pending():
                return ()
            unneeded = self.coordinator.registry.unused(covered)
        self.epoch_log.forget(handle.path for handle in unneeded)
        return unneeded

    def announce_again(self) -> None:
        """Repeat the last announcement. A task manager that missed it may have built a checkpoint on an older one."""
        if self._last is not None and not self.abandoned:
            self.cluster.checkpoint_completed(self._last)

    def _plan(self, checkpoint_id: int, *, whole: bool) -> CompletionPlan | None:
        """Register the files of a checkpoint and make its metadata; None if there is nothing to complete.

        It may have been aborted since it became ready. If its barrier came with a commit that has not ended, its
        position is not known yet. `whole` is set for a savepoint, which refers to no other file of the job.
        """
        inputs = self.inputs.of(checkpoint_id)
        if inputs is None:
            return None
        # Both may wait, for Spark and for storage, so this thread holds no lock.
        position, uploaded = self.inputs.store_logs(inputs.position, whole=whole)
        self.stage(inputs.batch)
        with self.lock:
            if self.inputs.of(checkpoint_id) is not None:
                return self.coordinator.prepare_completion(
                    checkpoint_id,
                    time.monotonic(),
                    shape=self.shape,
                    source=position,
                    uploaded=uploaded,
                    sink_files=self.inputs.sink_files(inputs.batch),
                    properties=with_positions(self.properties, self.commits.positions()),
                )
        self.durable.tidy_up(uploaded)
        return None

    def _confirm(self, metadata: CheckpointMetadata, won: float) -> CompletionDecision:
        """The log entry was won at `won`, and the rows are visible: tell the coordinator and everybody who waits."""
        number = metadata.checkpoint_id
        location = self.durable.location(number)
        with self.lock:
            decision = self.coordinator.confirm_completion(number, time.monotonic(), location, won)
            self.inputs.confirm(metadata)
            for ended in (number, *decision.aborted):
                self.inputs.end(ended)
            # A caller who waits for an older checkpoint gets this one, which covers more.
            futures = self.waiters.end((number, *decision.aborted))
            stats = self.coordinator.history.get(number)
        _resolve(futures, stats)
        return decision

    def _confirm_savepoint(self, checkpoint_id: int, path: str) -> None:
        with self.lock:
            self.coordinator.confirm_completion(checkpoint_id, time.monotonic(), path)
            self.inputs.end(checkpoint_id)
            self.savepoints.end(checkpoint_id)
            futures = self.waiters.end((checkpoint_id,))
            stats = self.coordinator.history.get(checkpoint_id)
        _resolve(futures, stats)

    def _announce(self, plan: CompletionPlan) -> None:
        """From now on slots are rebuilt from this checkpoint, and task managers build the next one on it."""
        metadata = plan.metadata
        generation, number = self.shape.generation, metadata.checkpoint_id
        self.cluster.set_restore_point(generation, metadata)
        self._last = CheckpointCompleted(number, _shared_handles(metadata) if plan.duplicates else {})
        self.cluster.checkpoint_completed(self._last)


def _resolve(futures: list[Future[CheckpointStats]], stats: CheckpointStats | None) -> None:
    for future in futures:
        assert stats is not None
        future.set_result(stats)


def _shared_handles(metadata: CheckpointMetadata) -> dict[str, FileHandle]:
    """The durable copy of every shared file, by the file's identity."""
    return {
        file.identity: file.handle for _state, file in all_files(metadata) if file.shared and file.handle is not None
    }
