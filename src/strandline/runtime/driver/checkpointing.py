"""Carries out what the checkpoint coordinator decides: barriers, completion, publication, deletion."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.decisions import FailDecision
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, SinkFile, SourcePosition, all_files, encode
from strandline.checkpoint.pending import SubtaskAck
from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import (
    AlreadyExistsError,
    CheckpointError,
    FencedError,
    SlotLostError,
    StorageError,
    StrandlineError,
)
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.restore.savepoints import SavepointTarget
from strandline.runtime.driver.restore.sink_files import publish
from strandline.runtime.driver.restore.takeover import Claim
from strandline.storage.external import delete_files

log = logging.getLogger(__name__)

FENCE_CHECK_EVERY = 5.0
TRIES = 6
SLOTS_MISSING_PAUSE = 0.1


class Interrupted(CheckpointError):
    """A checkpoint ended because a slot was lost: nobody's fault, try again."""


class Checkpoints:
    """The checkpoints of one generation. One thread triggers and completes; acknowledgements come from outside."""

    def __init__(
        self,
        coordinator: CheckpointCoordinator,
        cluster: Cluster,
        claim: Claim,
        shape: JobShape,
        position: Callable[[int], SourcePosition],
        with_watermark: Callable[[SourcePosition], SourcePosition],
        guard: threading.RLock,
        timeout: float,
    ) -> None:
        self.failure: StrandlineError | None = None
        self._coordinator = coordinator
        self._cluster = cluster
        self._store = claim.store
        self._storage = claim.storage
        self._paths = claim.paths
        self._sinks = claim.sinks
        self._properties = claim.properties
        self._restored = restored = claim.restored
        self._shape = shape
        self._position = position
        self._with_watermark = with_watermark
        self._guard = guard
        self._timeout = timeout
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._committed: tuple[int, int] | None = (restored.batch_id, restored.source.batch) if restored else None
        self._covered = restored.batch_id if restored else -1
        self._uncovered: list[tuple[int, SinkFile]] = []
        self._inputs: dict[int, tuple[SourcePosition, list[SinkFile]]] = {}
        self._wanted: list[Future[CheckpointStats]] = []
        self._wanted_savepoints: list[tuple[SavepointTarget, Future[CheckpointStats]]] = []
        self._targets: dict[int, SavepointTarget] = {}
        """The savepoints that are under way."""
        self._waiting: dict[int, list[Future[CheckpointStats]]] = {}
        self._news: dict[str, Any] | None = None
        """What the task managers were told of the last completion."""
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True, name="checkpoints")

    def start(self) -> None:
        self._cluster.handlers.acknowledge = self._acknowledge
        self._cluster.handlers.decline = self._decline
        self._thread.start()

    # --- facts from outside --------------------------------------------------------------------------

    def committed(self, batch: int, spark_batch: int, files: list[SinkFile], began: float) -> None:
        """A batch was committed; `files` hold its rows, staged. Called while commits and barriers are kept apart."""
        with self._wake:
            self._coordinator.committed(batch, began)
            self._committed = (batch, spark_batch)
            self._uncovered += [(batch, file) for file in files]
            self._wake.notify_all()

    def slots_replaced(self) -> None:
        """Snapshots of the lost slots will never be acknowledged: give up what is pending, without blame."""
        with self._wake:
            decision = self._coordinator.fail_all("a slot was lost and replaced", time.time())
            self._abort(decision, Interrupted("a slot was lost while the checkpoint was taken"))
            self._wake.notify_all()
        self._delete(decision.delete)

    def _acknowledge(self, body: dict[str, Any]) -> None:
        if body["generation"] != self._shape.generation:
            return
        ack = msgspec.convert(body["ack"], SubtaskAck)
        with self._wake:
            decision = self._coordinator.acknowledge(body["checkpoint"], ack.state.operator, ack.state.subtask, ack)
            self._wake.notify_all()
        self._delete(decision.delete)

    def _decline(self, body: dict[str, Any]) -> None:
        if body["generation"] != self._shape.generation:
            return
        if body["lost"]:
            self.slots_replaced()
        else:
            self._fail(body["checkpoint"], body["reason"], declined=True)

    # --- by hand -------------------------------------------------------------------------------------

    def take(self, heal: Callable[[], None] | None = None) -> CheckpointStats | None:
        """A checkpoint of everything committed so far, complete; None if nothing was ever committed.

        A checkpoint that a lost slot interrupts is taken again once the slot is back; `heal` brings it back, where
        nobody else does.
        """
        return self._take_with_retries(self._wanted.append, heal)

    def savepoint(
        self, make_target: Callable[[], SavepointTarget], heal: Callable[[], None] | None = None
    ) -> CheckpointStats | None:
        """A savepoint of everything committed so far, complete; see `take`. Checkpoints go on beside it."""
        return self._take_with_retries(lambda wanted: self._wanted_savepoints.append((make_target(), wanted)), heal)

    def _take_with_retries(
        self, want: Callable[[Future[CheckpointStats]], None], heal: Callable[[], None] | None
    ) -> CheckpointStats | None:
        for attempt in range(TRIES):
            wanted: Future[CheckpointStats] = Future()
            with self._wake:
                if self._committed is None:
                    return None
                if self._closed or self.failure is not None:
                    raise self.failure or CheckpointError("the run has ended")
                want(wanted)
                self._wake.notify_all()
            try:
                return wanted.result()
            except Interrupted:
                if attempt == TRIES - 1:
                    raise
                time.sleep(0.2 * 2**attempt)
                if heal is not None:
                    heal()
        raise AssertionError("unreachable")

    def cover(self, heal: Callable[[], None] | None = None) -> None:
        """Return once a completed checkpoint covers everything that is committed now."""
        with self._lock:
            committed = self._committed
            covered = self._covered
        if committed is not None and covered < committed[0]:
            self.take(heal)

    def delete_all(self) -> None:
        """Give up every checkpoint of the job: none is needed after this run."""
        with self._lock:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()
        decision = self._coordinator.drop_all()
        self._store.forget_all()
        self._delete(decision.delete)
        self._storage.delete([self._paths.metadata(gone) for gone in decision.dropped])

    # --- the thread ----------------------------------------------------------------------------------

    def _loop(self) -> None:
        fence_checked = time.time()
        try:
            while True:
                with self._wake:
                    if self._closed:
                        return
                    self._wake.wait(self._pause())
                for expired in self._coordinator.expire(time.time()):
                    self._fail(expired, f"not complete after {self._timeout:.0f} s (checkpoint_timeout)")
                for ready in self._coordinator.ready():
                    self._complete(ready)
                    fence_checked = time.time()
                self._trigger_if_due()
                if time.time() - fence_checked > FENCE_CHECK_EVERY:
                    self._store.check_not_fenced()
                    fence_checked = time.time()
        except StrandlineError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("job %s: checkpointing failed", self._shape.job)
            self._give_up(CheckpointError(f"job {self._shape.job}: {type(error).__name__}: {error}"))

    def _give_up(self, error: StrandlineError) -> None:
        with self._wake:
            self.failure = error
            self._abort(FailDecision(failed=tuple(self._waiting)), error)
            self._refuse(error)

    def _refuse(self, error: StrandlineError) -> None:
        """Tell everybody who waits for a checkpoint to begin that none will."""
        for wanted in (*self._wanted, *(future for _target, future in self._wanted_savepoints)):
            wanted.set_exception(error)
        self._wanted.clear()
        self._wanted_savepoints.clear()

    def _pause(self) -> float:
        """How long nothing needs doing, unless somebody wakes the thread."""
        now = time.time()
        if self._coordinator.ready() or self._wanted_savepoints:
            return 0.0
        if self._wanted and self._coordinator.should_trigger(now, self._batch(), forced=True):
            return 0.0
        self._coordinator.should_trigger(now, self._batch())  # tells the coordinator what is committed
        if self._cluster.suspects():
            return SLOTS_MISSING_PAUSE  # a barrier would only fail
        due = self._coordinator.due_at() - now
        return max(0.0, min(due if math.isfinite(due) else 1.0, 1.0))

    def _batch(self) -> int | None:
        return self._committed[0] if self._committed else None

    def _trigger_if_due(self) -> None:
        with self._guard:
            while self._wanted_savepoints:
                self._trigger_savepoint()
            with self._lock:
                now = time.time()
                forced = bool(self._wanted) and self._coordinator.should_trigger(now, self._batch(), forced=True)
                due_now = self._coordinator.should_trigger(now, self._batch()) and not self._cluster.suspects()
                if not forced and not due_now:
                    return
                assert self._committed is not None
                batch, spark_batch = self._committed
                due = now if forced else self._coordinator.due_at()
                pending = self._coordinator.trigger(now, due, batch, forced)
                self._waiting[pending.id], self._wanted = self._wanted, []
                files = [file for covered, file in self._uncovered if covered <= batch]
            self._barrier(pending.id, batch, spark_batch, files, self._ask_for_barrier)

    def _trigger_savepoint(self) -> None:
        with self._lock:
            if not self._wanted_savepoints:
                return
            target, wanted = self._wanted_savepoints.pop(0)
            assert self._committed is not None
            batch, spark_batch = self._committed
            now = time.time()
            pending = self._coordinator.trigger(now, now, batch, forced=True, kind="savepoint")
            self._waiting[pending.id] = [wanted]
            self._targets[pending.id] = target
            files = [file for covered, file in self._uncovered if covered <= batch]
        freeze = partial(self._cluster.savepoint, target=target, timeout=self._timeout)
        self._barrier(pending.id, batch, spark_batch, files, freeze)

    def _barrier(
        self,
        checkpoint_id: int,
        batch: int,
        spark_batch: int,
        files: list[SinkFile],
        freeze: Callable[[int], None],
    ) -> None:
        """The synchronous part, while no commit can come in between."""
        try:
            self._note_inputs(checkpoint_id, batch, spark_batch, files)
            freeze(checkpoint_id)
        except SlotLostError as error:
            log.warning("job %s, checkpoint %d: %s", self._shape.job, checkpoint_id, error)
            self.slots_replaced()
        except StrandlineError as error:
            self._fail(checkpoint_id, str(error))

    def _note_inputs(self, checkpoint_id: int, batch: int, spark_batch: int, files: list[SinkFile]) -> None:
        if self._restored is not None and batch == self._restored.batch_id:
            position = self._restored.source
        else:
            position = self._position(spark_batch)
        with self._lock:
            self._inputs[checkpoint_id] = (position, files)

    def _ask_for_barrier(self, checkpoint_id: int) -> None:
        for ack in self._cluster.barrier(checkpoint_id, self._timeout):
            self._acknowledge({"checkpoint": checkpoint_id, "generation": self._shape.generation, "ack": ack})

    # --- how a checkpoint ends -----------------------------------------------------------------------

    def _complete(self, checkpoint_id: int) -> None:
        """Files registered, `_metadata` written, log entry won, rows published, older checkpoints and files deleted."""
        path = self._paths.metadata(checkpoint_id)
        target = self._targets.get(checkpoint_id)
        try:
            inputs = self._inputs.get(checkpoint_id)
            if inputs is None:
                return  # given up since it was ready, because a slot was lost
            position, sink_files = self._with_watermark(inputs[0]), inputs[1]
            with self._lock:
                if checkpoint_id not in self._inputs:
                    return
                plan = self._coordinator.prepare_completion(
                    checkpoint_id,
                    time.time(),
                    shape=self._shape,
                    source=position,
                    sink_files=sink_files,
                    properties=self._properties,
                )
            if target is not None:
                self._complete_savepoint(checkpoint_id, target.complete(plan.metadata))
                return
            self._write_metadata(path, encode(plan.metadata))
        except FencedError:
            raise
        except StrandlineError as error:
            self._fail(checkpoint_id, str(error))
            if self._news is not None:
                # A task manager that never heard of the last completion may have built on an older checkpoint.
                self._cluster.tell_managers("checkpoint_completed", self._news)
            return
        self._store.complete(checkpoint_id, path, plan.metadata.batch_id, plan.retained, plan.dropped)
        self._publish(sink_files)
        with self._lock:
            decision = self._coordinator.confirm_completion(checkpoint_id, time.time(), f"{self._storage.url}/{path}")
            self._covered = plan.metadata.batch_id
            self._uncovered = [(batch, file) for batch, file in self._uncovered if batch > plan.metadata.batch_id]
            self._inputs.pop(checkpoint_id, None)
            stats = self._coordinator.history.get(checkpoint_id)
            waiting = self._waiting.pop(checkpoint_id, [])
            aborted = [future for gone in decision.aborted for future in self._waiting.pop(gone, [])]
        for future in (*waiting, *aborted):
            assert stats is not None
            future.set_result(stats)
        self._cluster.confirm_base(plan.metadata.batch_id, plan.metadata.subtasks)
        replaced = _handles(plan.metadata) if plan.duplicates else {}
        self._news = {"checkpoint": checkpoint_id, "replaced": replaced}
        self._cluster.tell_managers("checkpoint_completed", self._news)
        self._delete(decision.delete)
        self._tidy_up([self._paths.metadata(gone) for gone in decision.dropped])

    def _complete_savepoint(self, checkpoint_id: int, path: str) -> None:
        """It is the user's from now on: neither the job's log nor its registry knows of it."""
        with self._lock:
            self._coordinator.confirm_completion(checkpoint_id, time.time(), path)
            self._inputs.pop(checkpoint_id, None)
            self._targets.pop(checkpoint_id, None)
            stats = self._coordinator.history.get(checkpoint_id)
            waiting = self._waiting.pop(checkpoint_id, [])
        for future in waiting:
            assert stats is not None
            future.set_result(stats)

    def _write_metadata(self, path: str, data: bytes) -> None:
        try:
            self._storage.create(path, data)
        except AlreadyExistsError:
            if self._storage.read(path) != data:
                self._store.check_not_fenced()
                raise CheckpointError(f"{self._storage.url}/{path} was written by another driver") from None

    def _publish(self, files: list[SinkFile]) -> None:
        """From the won log entry on, this must happen; if it cannot now, a restart does it."""
        for attempt in range(4):
            try:
                for sink, storage in self._sinks.items():
                    publish(storage, [file for file in files if file.sink == sink])
                return
            except StorageError as error:
                if attempt == 3:
                    raise
                log.warning("job %s: publishing failed, trying again: %s", self._shape.job, error)
                time.sleep(0.2 * 2**attempt)

    def _fail(self, checkpoint_id: int, reason: str, declined: bool = False) -> None:
        with self._wake:
            if declined and any(one.id == checkpoint_id and one.ready for one in self._coordinator.pending()):
                return  # all have acknowledged; the one that declines only never heard that its word arrived
            decision = self._coordinator.fail(checkpoint_id, reason, time.time())
            if not decision.failed:
                return
            log.warning("job %s: %s", self._shape.job, decision.reason)
            self._abort(decision, CheckpointError(decision.reason))
            if decision.run_must_fail:
                self.failure = self.failure or StrandlineError(f"job {self._shape.job}: {decision.reason}")
            self._wake.notify_all()
        self._delete(decision.delete)

    def _abort(self, decision: FailDecision, error: StrandlineError) -> None:
        for checkpoint_id in decision.failed:
            self._inputs.pop(checkpoint_id, None)
            self._targets.pop(checkpoint_id, None)
            for future in self._waiting.pop(checkpoint_id, []):
                future.set_exception(error)
            threading.Thread(
                target=self._cluster.tell_managers,
                args=("checkpoint_aborted", {"checkpoint": checkpoint_id}),
                daemon=True,
            ).start()

    def _delete(self, handles: tuple[FileHandle, ...]) -> None:
        self._tidy_up([handle.path for handle in handles])

    def _tidy_up(self, paths: list[str]) -> None:
        """Delete files that nobody needs: a failure leaves an orphan, never a broken checkpoint or a failed run."""
        if not paths:
            return
        try:
            delete_files(self._storage, paths)
        except StorageError as error:
            log.warning("job %s: could not delete %d files: %s", self._shape.job, len(paths), error)

    def close(self) -> None:
        """No more checkpoints. One that is being completed is finished first."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        with self._wake:
            decision = self._coordinator.fail_all("the run ended", time.time())
            self._abort(decision, CheckpointError("the run ended"))
            self._refuse(CheckpointError("the run ended"))
        self._cluster.handlers.acknowledge = lambda _body: None
        self._cluster.handlers.decline = lambda _body: None
        if not isinstance(self.failure, FencedError):
            self._delete(decision.delete)


def _handles(metadata: CheckpointMetadata) -> dict[str, FileHandle]:
    return {
        file.identity: file.handle for _state, file in all_files(metadata) if file.shared and file.handle is not None
    }
