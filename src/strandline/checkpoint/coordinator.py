"""Decides when to trigger a checkpoint, when it is complete, and which files may be deleted afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from strandline.checkpoint.decisions import AckDecision, CompletionDecision, CompletionPlan, FailDecision
from strandline.checkpoint.gc_pause import gc_paused
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    Kind,
    SinkFile,
    SourcePosition,
    SubtaskState,
    file_key,
    keyed_files,
    registered_files,
    source_files,
)
from strandline.checkpoint.pending import PendingCheckpoint, SavepointFormat, Subtask, SubtaskAck
from strandline.checkpoint.registry import Matched, SharedKey, SharedStateRegistry
from strandline.checkpoint.retention import retain
from strandline.checkpoint.schedule import TriggerSchedule
from strandline.checkpoint.stats import CheckpointHistory, CheckpointStats, checkpoint_stats
from strandline.checkpoint.steps import StepDescription
from strandline.checkpoint.surviving_copies import position_with_copies, states_with_copies
from strandline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class JobShape:
    """The part of a checkpoint's metadata that describes the job."""

    job: str
    generation: int
    parallelism: int
    max_parallelism: int
    operators: tuple[str, ...]
    steps: tuple[StepDescription, ...] = ()


class CheckpointCoordinator:
    """Decides about the checkpoints of one generation of a job.

    The caller completes a checkpoint in this order: `prepare_completion` (registers the files), write `_metadata`,
    `enter`, win the log entry, publish the sink rows, `confirm_completion`, delete what it returns. One checkpoint
    completes at a time. If `_metadata` cannot be written, the caller calls `fail`. After `enter` only the log entry
    decides: if it is ours, confirm; if it is another driver's, or its outcome stays unknown, stop without another call.
    All times are seconds of one clock, which the caller chooses, and which should never be set.
    """

    def __init__(
        self,
        *,
        interval: float,
        subtasks: Sequence[Subtask],
        min_pause: float = 0.0,
        timeout: float = 600.0,
        max_concurrent: int = 1,
        tolerable_failures: int = 0,
        num_retained: int = 1,
        first_checkpoint_id: int = 1,
        start_time: float = 0.0,
        covered_batch: int | None = None,
        history: CheckpointHistory | None = None,
    ) -> None:
        """The first checkpoint is due one interval after `start_time`. `covered_batch` is the batch of the checkpoint
        that the run started from. With an infinite interval, checkpoints are only taken by hand.
        """
        self._schedule = TriggerSchedule(interval, min_pause, max_concurrent, start_time, covered_batch)
        self._timeout = timeout
        self._tolerable_failures = tolerable_failures
        self._num_retained = num_retained
        self._subtasks = frozenset(subtasks)
        self._first_id = first_checkpoint_id
        self._next_id = first_checkpoint_id
        self._registry: SharedStateRegistry[SharedKey, FileHandle] = SharedStateRegistry(attrgetter("path"))
        self._pending: dict[int, PendingCheckpoint] = {}
        self._retained: tuple[int, ...] = ()
        self._gone: frozenset[str] = frozenset()
        """Paths that may be deleted since the newest checkpoint completed. A subtask that has not heard of it may still
        name them."""
        self._savepoints: set[int] = set()
        self._completing: int | None = None
        self._failures = 0
        self.history = history if history is not None else CheckpointHistory()

    # --- what is known ---------------------------------------------------------------------------

    @property
    def registry(self) -> SharedStateRegistry[SharedKey, FileHandle]:
        """The files of all retained checkpoints and of the one that is being completed."""
        return self._registry

    @property
    def retained(self) -> tuple[int, ...]:
        """The ids of the retained checkpoints, newest last."""
        return self._retained

    def pending(self) -> tuple[PendingCheckpoint, ...]:
        """The checkpoints in progress, oldest first."""
        return tuple(self._pending.values())

    def ready(self) -> tuple[int, ...]:
        """The checkpoints that can be completed now, oldest first; none while another one is being completed."""
        if self._completing is not None:
            return ()
        return tuple(pending.id for pending in self._pending.values() if pending.ready)

    def checkpoints(self) -> list[CheckpointStats]:
        """The history, oldest first, with the current figures of checkpoints in progress."""
        for pending in self._pending.values():
            self.history.record(checkpoint_stats(pending, "in_progress"))
        return self.history.checkpoints()

    def recover(
        self,
        retained: Iterable[CheckpointMetadata],
        dropped: Iterable[CheckpointMetadata] = (),
        held: Iterable[CheckpointMetadata] = (),
    ) -> tuple[FileHandle, ...]:
        """Rebuild the registry from the checkpoints that can be restored, before anything is triggered.

        `held` are the checkpoints that belong to somebody else: released ones, and the one that was restored without
        being claimed. This coordinator neither builds on their files nor deletes them. `dropped` are the checkpoints
        that the log names as dropped and whose metadata still exists. The files that their deletion left over are
        returned, to be deleted. All arguments are read one at a time and not kept, so a generator needs memory for only
        one checkpoint.
        """
        kept: set[int] = set()
        leftovers: list[FileHandle] = []
        with gc_paused():
            for metadata in retained:
                self._registry.record(metadata.checkpoint_id, self._registry.match(registered_files(metadata)))
                kept.add(metadata.checkpoint_id)
            for metadata in held:
                self._registry.hold(handle for _key, handle in registered_files(metadata))
            for metadata in dropped:
                leftovers += (handle for _key, handle in registered_files(metadata))
        self._retained = tuple(sorted(kept))
        return self._registry.unused(leftovers)

    # --- triggering ------------------------------------------------------------------------------

    def due_at(self) -> float:
        """The time when the next checkpoint is due: see `TriggerSchedule.due_at`."""
        return self._schedule.due_at()

    def committed(self, batch: int, since: float) -> None:
        """Record that `batch`, whose processing began at `since`, is committed.

        A checkpoint that became due in the meantime counts as waiting for its barrier from then on.
        """
        self._schedule.committed(batch, since)

    def should_trigger(self, now: float, committed_batch: int | None, forced: bool = False) -> bool:
        """Whether to take a checkpoint now, with its barrier after `committed_batch`.

        A `forced` checkpoint, taken by hand, only waits until fewer than `max_concurrent` are in progress. It does not
        wait for the interval, the pause or a new commit.
        """
        if committed_batch is not None:
            self._schedule.committed(committed_batch, now)
        if forced:
            return committed_batch is not None and self._schedule.has_place()
        return self._schedule.due_at() <= now

    def trigger(
        self,
        now: float,
        due_time: float,
        batch: int,
        *,
        kind: Kind = "checkpoint",
        epoch: float = 0.0,
        savepoint_format: SavepointFormat | None = None,
    ) -> PendingCheckpoint:
        """Begin a checkpoint with its barrier `now`, after `batch`. Its trigger time is `due_time`.

        `epoch` is what makes seconds since the epoch of a time: figures and metadata show those. Raises
        `CheckpointError` if `max_concurrent` are in progress. A savepoint may always begin, and no checkpoint waits for
        it.
        """
        if kind == "checkpoint" and not self._schedule.has_place():
            raise CheckpointError(
                f"Checkpoints {list(self._pending)} are in progress, and no more are allowed. Wait for one to end, "
                "or raise max_concurrent_checkpoints."
            )
        pending = PendingCheckpoint(
            id=self._next_id,
            kind=kind,
            batch=batch,
            trigger_time=min(due_time, now),
            barrier_time=now,
            subtasks=self._subtasks,
            epoch=epoch,
            savepoint_format=savepoint_format,
        )
        self._next_id += 1
        self._pending[pending.id] = pending
        self._schedule.committed(batch, now)
        if kind == "checkpoint":
            self._schedule.begin(pending.id, batch, pending.trigger_time, now)
        self.history.record(checkpoint_stats(pending, "in_progress"))
        return pending

    def expire(self, now: float) -> tuple[int, ...]:
        """The checkpoints that exceeded the timeout. The caller must `fail` them. One being completed never expires."""
        return tuple(
            pending.id
            for pending in self._pending.values()
            if not pending.completing and now - pending.barrier_time >= self._timeout
        )

    # --- acknowledgements and failures -----------------------------------------------------------

    def acknowledge(self, checkpoint_id: int, operator: str, subtask: int, ack: SubtaskAck) -> AckDecision:
        """Accept a subtask's acknowledgement, which may be repeated, late, or unknown. The first one counts."""
        pending = self._pending.get(checkpoint_id)
        if pending is None:
            if not self._first_id <= checkpoint_id < self._next_id or checkpoint_id in self._savepoints:
                # An earlier generation may have completed it, so this coordinator cannot judge what it refers to.
                return AckDecision("unknown" if checkpoint_id not in self._savepoints else "late")
            return AckDecision("late", self._registry.unused(list(ack.uploaded)))
        who = (operator, subtask)
        if who not in pending.subtasks or (ack.state.operator, ack.state.subtask) != who:
            return AckDecision("unknown", self._unclaimed(ack.uploaded))
        if who in pending.acks:
            return AckDecision("repeated", self._unclaimed(ack.uploaded))
        pending.add(ack)
        return AckDecision("ready" if pending.ready else "waiting")

    def fail(self, checkpoint_id: int, reason: str, now: float, *, counts: bool = True) -> FailDecision:
        """Give up a pending checkpoint. Returns its uploads for deletion, and whether the run must fail.

        `counts`: whether it is one of the failures that the job tolerates only so many of; a savepoint never is. An id
        that is not pending changes nothing, and neither does a checkpoint whose log entry may exist: it can only
        be finished.
        """
        pending = self._pending.get(checkpoint_id)
        if pending is None or pending.entered:
            return FailDecision()
        delete = self._abort([pending], reason, now)
        counts = counts and pending.kind == "checkpoint"
        self._failures += counts
        told = f"{pending.kind.capitalize()} {checkpoint_id} failed: {reason}"
        if counts:
            told += f" ({self._failures} in a row, {self._tolerable_failures} tolerated)"
        return FailDecision(
            failed=(checkpoint_id,),
            delete=delete,
            run_must_fail=counts and self._failures > self._tolerable_failures,
            reason=told,
        )

    def fail_all(self, reason: str, now: float) -> FailDecision:
        """Give up all pending checkpoints because the run ends or restarts. They do not count as failures.

        A checkpoint that is being completed stays pending, because only the log knows whether it is complete.
        """
        doomed = [pending for pending in self._pending.values() if not pending.completing]
        delete = self._abort(doomed, reason, now)
        return FailDecision(failed=tuple(pending.id for pending in doomed), delete=delete, reason=reason)

    # --- completion ------------------------------------------------------------------------------

    def prepare_completion(
        self,
        checkpoint_id: int,
        now: float,
        *,
        shape: JobShape,
        source: SourcePosition,
        uploaded: Iterable[FileHandle] = (),
        sink_files: Iterable[SinkFile] = (),
        properties: Mapping[str, str] | None = None,
    ) -> CompletionPlan:
        """Register the files of a checkpoint that all subtasks acknowledged, and return what to write.

        `uploaded` are the files that the caller uploaded for `source`. They are deleted if the checkpoint fails.
        Raises `CheckpointError` if it is not ready, if another one is being completed, or if it refers to a file that
        neither a retained checkpoint has nor was uploaded for it. The caller must `fail` it then.
        """
        pending = self._pending.get(checkpoint_id)
        if pending is None:
            raise CheckpointError(f"Checkpoint {checkpoint_id} is not in progress, so it cannot be completed.")
        pending.add_source(uploaded)
        if not pending.ready:
            raise CheckpointError(
                f"Checkpoint {checkpoint_id} cannot be completed: no acknowledgement from {pending.missing()}."
            )
        if self._completing not in (None, checkpoint_id):
            raise CheckpointError(
                f"Checkpoint {checkpoint_id} has to wait until checkpoint {self._completing} is completed."
            )
        order = {operator: index for index, operator in enumerate(shape.operators)}
        states = sorted(
            (ack.state for ack in pending.acks.values()),
            key=lambda state: (order.get(state.operator, len(order)), state.operator, state.subtask),
        )
        retained: tuple[int, ...] = self._retained
        dropped: tuple[int, ...] = ()
        with gc_paused():
            matched = self._matched(pending, states, source)
            if pending.kind == "checkpoint":
                self._registry.record(checkpoint_id, matched)
        if pending.kind == "checkpoint":
            retained, dropped = retain(self._retained, checkpoint_id, self._num_retained)
        self._completing = checkpoint_id
        pending.completing = True
        metadata = CheckpointMetadata(
            job=shape.job,
            checkpoint_id=checkpoint_id,
            generation=shape.generation,
            batch_id=pending.batch,
            kind=pending.kind,
            parallelism=shape.parallelism,
            max_parallelism=shape.max_parallelism,
            operators=shape.operators,
            subtasks=tuple(states_with_copies(states, matched.replaced)),
            source=position_with_copies(source, matched.replaced),
            sink_files=tuple(sink_files),
            trigger_time=pending.trigger_time + pending.epoch,
            completed_time=now + pending.epoch,
            properties=dict(properties or {}),
            steps=shape.steps,
        )
        duplicates = self._registry.unused(pending.uploads()) if pending.kind == "checkpoint" else ()
        return CompletionPlan(metadata, duplicates, retained, dropped)

    def enter(self, checkpoint_id: int) -> None:
        """Record that the caller is about to create the log entry: from now on the checkpoint cannot fail.

        Raises `CheckpointError` if the completion was not prepared.
        """
        pending = self._pending.get(checkpoint_id)
        if pending is None or not pending.completing:
            raise CheckpointError(f"Checkpoint {checkpoint_id} cannot be entered: its completion was not prepared.")
        pending.entered = True

    def confirm_completion(
        self, checkpoint_id: int, now: float, path: str | None = None, entry_time: float | None = None
    ) -> CompletionDecision:
        """Record that the log entry is won, so that the checkpoint is complete. Returns what to abort and to delete.

        The entry was won at `entry_time`, and the rows were published by `now`.

        A repeated call changes and returns nothing. Raises `CheckpointError` if the completion was not prepared.
        """
        if checkpoint_id in self._retained or checkpoint_id in self._savepoints:
            return CompletionDecision(checkpoint_id, self._retained)
        pending = self._pending.get(checkpoint_id)
        if pending is None or not pending.completing:
            raise CheckpointError(f"Checkpoint {checkpoint_id} cannot be confirmed: its completion was not prepared.")
        self._end(pending, now, completed=True)
        self.history.record(checkpoint_stats(pending, "completed", now, path, entry_time=entry_time))
        if pending.kind == "savepoint":
            self._savepoints.add(checkpoint_id)
            return CompletionDecision(checkpoint_id, self._retained)
        self._failures = 0
        self._retained, dropped = retain(self._retained, checkpoint_id, self._num_retained)
        delete: dict[str, FileHandle] = {}
        for handle in self._registry.unused(pending.uploads()):
            delete[handle.path] = handle
        older = [other for other in self._pending.values() if other.id < checkpoint_id and other.kind == "checkpoint"]
        for handle in self._abort(older, f"checkpoint {checkpoint_id} completed before it", now):
            delete[handle.path] = handle
        for gone in dropped:
            for handle in self._registry.drop(gone):
                delete[handle.path] = handle
        for handle in self._registry.unused(pending.obsolete()):
            delete[handle.path] = handle
        self._gone = frozenset(delete)
        self.history.record_discarded(dropped)
        return CompletionDecision(
            checkpoint_id=checkpoint_id,
            retained=self._retained,
            aborted=tuple(other.id for other in older),
            dropped=dropped,
            delete=tuple(delete.values()),
        )

    def drop_all(self) -> CompletionDecision:
        """Drop every retained checkpoint, because the job is cancelled and must leave no files behind."""
        dropped, self._retained = self._retained, ()
        if self._completing is not None:  # its log entry may exist
            dropped = (*dropped, self._completing)
        delete = [handle for gone in dropped for handle in self._registry.drop(gone)]
        self.history.record_discarded(dropped)
        return CompletionDecision(dropped[-1] if dropped else 0, dropped=dropped, delete=tuple(delete))

    # --- inside ----------------------------------------------------------------------------------

    def _matched(
        self, pending: PendingCheckpoint, states: Sequence[SubtaskState], source: SourcePosition
    ) -> Matched[SharedKey, FileHandle]:
        """Look up all uploaded files. Each must be uploaded for this checkpoint, or be part of a retained one."""
        for state in states:
            for file in state.files:
                if file.handle is None and file.inline is None:
                    raise _unusable(pending, state, f"file {file.name!r} has no content")
        # A savepoint refers only to its own uploads, so it is compared with an empty registry.
        registry = self._registry if pending.kind == "checkpoint" else SharedStateRegistry(attrgetter("path"))
        matched = registry.match(chain(keyed_files(states), source_files(source)))
        for key, handle in matched.unknown:
            # After a rescale, a known file may be used for other key groups.
            known = handle.path in pending.known_paths or registry.knows(handle)
            if not known or handle.path in self._gone:
                raise _stranger(pending, states, key, handle)
        return matched

    def _unclaimed(self, uploaded: Iterable[FileHandle]) -> tuple[FileHandle, ...]:
        """The uploads that neither the registry nor a pending checkpoint knows."""
        claims = [pending.uploaded_paths for pending in self._pending.values()]
        return self._registry.unused(
            [handle for handle in uploaded if not any(handle.path in paths for paths in claims)]
        )

    def _abort(self, doomed: Sequence[PendingCheckpoint], reason: str, now: float) -> tuple[FileHandle, ...]:
        uploads: list[FileHandle] = []
        for pending in doomed:
            self._end(pending, now, completed=False)
            self.history.record(checkpoint_stats(pending, "failed", now, failure=reason))
            uploads += self._registry.drop(pending.id)
            uploads += pending.uploads()
        return self._registry.unused(uploads)

    def _end(self, pending: PendingCheckpoint, now: float, completed: bool) -> None:
        if pending.kind == "checkpoint":
            self._schedule.end(pending.id, now, completed)
        del self._pending[pending.id]
        if self._completing == pending.id:
            self._completing = None


def _stranger(
    pending: PendingCheckpoint, states: Iterable[SubtaskState], key: SharedKey, handle: FileHandle
) -> CheckpointError:
    found = (
        (state, file)
        for state in states
        for file in state.files
        if file.handle == handle and file_key(state, file) == key
    )
    state, file = next(found, (None, None))
    if state is None or file is None:
        return CheckpointError(
            f"Checkpoint {pending.id} cannot be completed: {handle.path}, a piece of a source's log, is neither "
            "uploaded for it nor part of a retained checkpoint. The checkpoint fails; the next one uploads what it "
            "needs."
        )
    return _unusable(
        pending,
        state,
        f"file {file.name!r} ({handle.path}) is neither uploaded for it nor part of a retained checkpoint",
    )


def _unusable(pending: PendingCheckpoint, state: SubtaskState, what: str) -> CheckpointError:
    return CheckpointError(
        f"Checkpoint {pending.id} cannot be completed: operator {state.operator!r}, subtask {state.subtask}: {what}. "
        "The checkpoint fails; the next one uploads what it needs."
    )
