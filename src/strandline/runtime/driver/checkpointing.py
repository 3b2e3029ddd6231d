"""Triggers the checkpoints of a generation, takes acknowledgements, and completes or fails what was triggered."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Literal, NamedTuple

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.decisions import FailDecision
from strandline.checkpoint.metadata import SinkFile
from strandline.checkpoint.pending import SubtaskAck
from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import CheckpointError, FencedError, SlotLostError, StorageError, StrandlineError
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs, CommittedBatch, Inputs
from strandline.runtime.driver.checkpoint_requests import (
    CheckpointFailedError,
    CheckpointInterruptedError,
    SavepointRequests,
    Waiters,
    take_with_retries,
)
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.completion import Completion
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints, MetadataTakenError
from strandline.runtime.driver.restore.epoch_log import EpochLog
from strandline.runtime.driver.restore.savepoints import SavepointTarget
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.liveness.threads import ends_within
from strandline.runtime.protocol.coordinator_calls import Acknowledgement, Decline
from strandline.runtime.protocol.taskmanager_calls import Barrier, CommittedSlot

log = logging.getLogger(__name__)

FENCE_CHECK_EVERY = 5.0
SLOTS_MISSING_PAUSE = 0.1
CLOSE_PATIENCE = 30.0
"""How many seconds the end of a generation waits for storage that does not answer."""
RETRY_PAUSE = 0.2
"""How many seconds pass before a checkpoint that failed is taken again on request."""


class _Begun(NamedTuple):
    """A checkpoint that was triggered."""

    id: int
    full: bool


class Checkpoints:
    """The checkpoints of one generation. One thread triggers and completes them; acknowledgements come from outside.

    With the changelog, whoever commits a batch triggers a checkpoint that is due then: see `begin_with_commit`.

    Who may wait for whom:

    - `commit_lock` keeps commits and barriers apart. It is taken before `_lock`, never while `_lock` is held. The
      checkpoint thread holds it until every slot has answered the barrier; the batch function holds it until every slot
      has answered the commit.
    - `_lock` protects the coordinator and the requests. Nobody waits for storage, a task manager or a slot while
      holding it, because the server threads that deliver acknowledgements need it.
    - Callers of `take`, `savepoint` and `cover` wait for the checkpoint thread, so they hold neither of the two. The
      batch function may wait there while it is busy: the checkpoint thread does not wait for a batch to end.
    """

    def __init__(
        self,
        coordinator: CheckpointCoordinator,
        cluster: Cluster,
        shape: JobShape,
        properties: dict[str, str],
        inputs: CheckpointInputs,
        durable: DurableCheckpoints,
        commits: SinkCommits,
        timeout: float,
        epoch_log: EpochLog | None = None,
    ) -> None:
        """In real time the files of an `epoch_log` are deleted when a checkpoint covers them, and none names them."""
        self.failure: StrandlineError | None = None
        self.commit_lock = threading.RLock()
        """Held by whoever commits a batch or takes a barrier."""
        self.before_barrier: Callable[[], None] = lambda: None
        """Called before a barrier, with the commit lock held: in real time, slots may be told of a commit later."""
        self._coordinator = coordinator
        self._cluster = cluster
        self._shape = shape
        self._inputs = inputs
        self._durable = durable
        self._commits = commits
        self._timeout = timeout
        self._waiters = Waiters()
        self._savepoints = SavepointRequests()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._completion = Completion(
            shape,
            properties,
            coordinator,
            cluster,
            inputs,
            durable,
            commits,
            self._waiters,
            self._savepoints,
            self._lock,
            epoch_log,
        )
        self._closed = False
        self._suspended = False
        """Whether no checkpoint may begin."""
        self._sleeps_until = -math.inf
        """Until when the checkpoint thread sleeps if nobody wakes it."""
        self._thread = threading.Thread(target=self._loop, daemon=True, name="checkpoints")

    def start(self) -> None:
        """Accept acknowledgements, and trigger checkpoints from now on."""
        self._cluster.listener = self
        self._thread.start()

    @property
    def last_spark_batch(self) -> int | None:
        """Spark's number of the last committed batch; None if nothing was ever committed."""
        with self._lock:
            committed = self._inputs.committed
        return None if committed is None else committed.spark_batch

    def suspend(self) -> None:
        """Let no checkpoint and no savepoint begin until `resume`. Whoever requests one waits."""
        with self.commit_lock, self._wake:
            self._suspended = True

    def resume(self) -> None:
        """Let checkpoints begin again."""
        with self._wake:
            self._suspended = False
            self._wake.notify_all()

    def close(self, patience: float | None = None) -> None:
        """Take no more checkpoints. A checkpoint that is being completed is finished first, the others are aborted.

        If that takes longer than `patience` seconds, by default `CLOSE_PATIENCE`, the thread is left behind, and
        nothing is deleted here: the next takeover finishes the checkpoint if it exists, or fences it.
        """
        patience = CLOSE_PATIENCE if patience is None else patience
        answers = self._end_thread(patience)
        with self._wake:
            ended = CheckpointError("the run ended")
            decision = self._coordinator.fail_all("the run ended", time.monotonic())
            self._abort(decision, ended)
            for future in self._waiters.end(self._waiters.begun):
                future.set_exception(ended)
            self._refuse(ended)
        self._cluster.listener = None
        if answers:
            self._commits.close()
        if answers and not ends_within(patience, "tidy-up", lambda: self._durable.tidy_up(decision.delete)):
            log.warning("job %s: files of aborted checkpoints are deleted in the background", self._shape.job)

    def _end_thread(self, patience: float) -> bool:
        """Have the checkpoint thread end; False if storage keeps it waiting."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._durable.hurry()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(patience)
        with self._wake:
            waits = self._thread.is_alive() and threading.current_thread() is not self._thread
            self._completion.abandoned = waits
        if waits:
            log.warning("job %s: storage does not answer, so a checkpoint is left unfinished", self._shape.job)
        return not waits

    def delete_all(self, patience: float = CLOSE_PATIENCE) -> bool:
        """Take no more checkpoints, and delete every checkpoint of the job.

        Returns False, and deletes nothing, if storage keeps the checkpoint thread waiting for `patience` seconds: that
        thread may still write the job's log. A deletion that takes longer goes on in the background; the next start
        completes it.
        """
        if not self._end_thread(patience):
            return False
        with self._lock:
            decision = self._coordinator.drop_all()
        if not ends_within(
            patience, "delete-checkpoints", lambda: self._durable.delete_all(decision.dropped, decision.delete)
        ):
            log.warning("job %s: its checkpoints are deleted in the background", self._shape.job)
        return True

    # --- facts from outside --------------------------------------------------------------------------

    def committed(self, batch: int, spark_batch: int, files: list[SinkFile], began: float) -> None:
        """A batch was committed, and `files` hold its staged rows. The caller holds the commit lock.

        `began` is the time of `time.monotonic` at which the batch began.
        """
        with self._wake:
            self._coordinator.committed(batch, began)
            self._inputs.add(CommittedBatch(batch, spark_batch), files)
            if self._coordinator.due_at() < self._sleeps_until:
                self._wake.notify_all()

    def have_staged(self, stage: Callable[[int], None]) -> None:
        """Have a checkpoint call `stage` for the rows that it publishes; see `Completion.stage`."""
        self._completion.stage = stage

    def note_staged(self, batch: int, files: list[SinkFile]) -> None:
        """Rows of committed epochs, up to `batch`, were staged."""
        with self._lock:
            self._inputs.add_staged(batch, files)

    def begin_with_commit(self, batch: int, began: float, *, wanted: bool = False) -> Barrier | None:
        """Begin a checkpoint whose barrier comes with the commit of `batch`; None if none is due, or can be.

        With the changelog a barrier only names files, as a rule, so it can come with the commit, and saves a call. The
        batch is decided, began at `began`, and the commit has not gone out. A `wanted` checkpoint does not wait until
        it is due. The caller holds the commit lock, and calls `end_barrier` after the commit. If the commit fails for
        good it calls `give_up`.
        """
        if self._cluster.run.changelog is None:
            return None
        with self._wake:
            if self._closed or self._suspended or self.failure is not None or self._savepoints:
                return None
            self._coordinator.committed(batch, began)
            begun = self._begin_if_due(batch, wanted=wanted)
            return Barrier(checkpoint=begun.id, full=begun.full) if begun is not None else None

    def end_barrier(self, checkpoint_id: int, committed: Collection[CommittedSlot]) -> None:
        """Go on with a checkpoint after the commit that its barrier came with, and that `committed` has told.

        The batch and its position are known by now. The caller holds the commit lock since `begin_with_commit`.
        """
        with self._lock:
            if all(one.id != checkpoint_id for one in self._coordinator.pending()):
                return  # aborted meanwhile
            covered = self._inputs.committed
            assert covered is not None
        self._barrier(checkpoint_id, covered, partial(self._take_answers, committed))

    def _take_answers(self, committed: Collection[CommittedSlot], checkpoint_id: int) -> None:
        refused = next((one.refused for one in committed if one.refused is not None), None)
        if refused is not None:
            raise refused.error()
        if not committed:
            raise SlotLostError("a slot was lost while the batch before the barrier was committed")
        for one in committed:
            for ack in one.acks:
                self._acknowledge(checkpoint_id, ack)

    def wait_for_sinks(self, given_up: Callable[[], bool]) -> None:
        """Return when another batch may stage rows, or when `given_up` returns True."""
        self._commits.wait_for_room(
            lambda: sum(self.staged_bytes().values()), lambda: given_up() or self.failure is not None
        )

    def staged_bytes(self) -> dict[str, int]:
        """How many bytes are staged for each sink and covered by no completed checkpoint."""
        with self._lock:
            return self._inputs.staged_bytes()

    def slots_replaced(self) -> None:
        """Abort what is pending: lost slots will never acknowledge it. This does not count as a failed checkpoint."""
        with self._wake:
            decision = self._coordinator.fail_all("a slot was lost and replaced", time.monotonic())
            self._abort(decision, CheckpointInterruptedError("a slot was lost while the checkpoint was taken"))
            self._wake.notify_all()
        self._durable.tidy_up(decision.delete)

    def acknowledge(self, news: Acknowledgement) -> None:
        if news.generation == self._shape.generation:
            self._acknowledge(news.checkpoint, news.ack)

    def _acknowledge(self, checkpoint_id: int, ack: SubtaskAck) -> None:
        with self._wake:
            decision = self._coordinator.acknowledge(checkpoint_id, ack.state.operator, ack.state.subtask, ack)
            self._wake.notify_all()
        self._durable.tidy_up(decision.delete)

    def decline(self, news: Decline) -> None:
        if news.generation != self._shape.generation:
            return
        if news.slot_lost:
            self.slots_replaced()
        else:
            self._fail(news.checkpoint, news.reason, declined=True)

    # --- on request ----------------------------------------------------------------------------------

    def take_soon(self) -> Future[CheckpointStats]:
        """Take a checkpoint of what is committed, without waiting for it."""
        with self._wake:
            future = self._waiters.request()
            self._wake.notify_all()
            return future

    def take(self, heal: Callable[[], None] | None = None, *, full: bool = False) -> CheckpointStats | None:
        """Take a checkpoint of everything committed so far, and wait until it is complete.

        A `full` one uploads the whole state, also the files that the last checkpoint holds.

        Returns None if nothing was ever committed. If a lost slot interrupts the checkpoint, it is taken again once
        the slot is back; `heal` replaces lost slots where nobody else does.
        """
        return self._take(lambda: self._waiters.request(full), heal)

    def savepoint(
        self, make_target: Callable[[], SavepointTarget], heal: Callable[[], None] | None = None
    ) -> CheckpointStats | None:
        """Like `take`, but writes a savepoint. Checkpoints go on beside it."""
        return self._take(lambda: self._savepoints.request(make_target()), heal)

    def _take(
        self, request: Callable[[], Future[CheckpointStats]], heal: Callable[[], None] | None
    ) -> CheckpointStats | None:
        return take_with_retries(lambda: self._request(request), heal)

    def _request(self, request: Callable[[], Future[CheckpointStats]]) -> Future[CheckpointStats] | None:
        with self._wake:
            if self._inputs.committed is None:
                return None
            if self._closed or self.failure is not None:
                raise self.failure or CheckpointError("the run has ended")
            future = request()
            self._wake.notify_all()
            return future

    def cover(self, heal: Callable[[], None] | None = None) -> None:
        """Return once a completed checkpoint covers everything that is committed now."""
        with self._lock:
            all_covered = self._inputs.all_covered
        if not all_covered:
            self._tolerantly(lambda: self._take(self._wait_for_covering, heal))

    def _wait_for_covering(self) -> Future[CheckpointStats]:
        """A future for a checkpoint that covers all that is committed: one that has begun, or else the next one."""
        batch = self._inputs.batch
        assert batch is not None
        for pending in self._coordinator.pending():
            if pending.kind == "checkpoint" and pending.batch >= batch:
                return self._waiters.join(pending.id)
        return self._waiters.request()

    def take_tolerantly(self, heal: Callable[[], None] | None = None) -> CheckpointStats | None:
        """Like `take`, but a checkpoint that fails is taken again, as long as the job tolerates its failures.

        Raises the failure of the generation once it does not.
        """
        return self._tolerantly(lambda: self.take(heal))

    def _tolerantly(self, take: Callable[[], CheckpointStats | None]) -> CheckpointStats | None:
        while True:
            try:
                return take()
            except CheckpointFailedError:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self.failure is not None, RETRY_PAUSE)
                    if self.failure is not None:
                        raise self.failure from None

    # --- the thread ----------------------------------------------------------------------------------

    def _loop(self) -> None:
        fence_checked = time.monotonic()
        try:
            while True:
                with self._wake:
                    if self._closed:
                        return
                    pause = self._pause()
                    self._sleeps_until = time.monotonic() + pause
                    self._wake.wait(pause)
                    self._sleeps_until = -math.inf
                with self._lock:
                    expired = self._coordinator.expire(time.monotonic())
                for checkpoint_id in expired:
                    self._fail(checkpoint_id, f"not complete after {self._timeout:.0f} s (checkpoint_timeout)")
                with self._lock:
                    ready = self._coordinator.ready()
                for checkpoint_id in ready:
                    self._complete(checkpoint_id)
                    fence_checked = time.monotonic()
                if self._cluster.suspects():
                    self._interrupt_pending()
                self._trigger_if_due()
                if time.monotonic() - fence_checked > FENCE_CHECK_EVERY:
                    self._check_fence()
                    fence_checked = time.monotonic()
        except StrandlineError as error:
            self.give_up(error)
        except Exception as error:
            log.exception("job %s: checkpointing failed", self._shape.job)
            self.give_up(StrandlineError(f"job {self._shape.job}: {type(error).__name__}: {error}"))

    def _interrupt_pending(self) -> None:
        """A slot or a task manager is lost: whoever waits for a checkpoint replaces it, and takes the checkpoint again.

        While a batch runs, or the supervisor watches, they notice the loss, too. At the end of a run nobody else does.
        """
        with self._lock:
            waits = any(not one.ready for one in self._coordinator.pending())
        if waits:
            self.slots_replaced()

    def check_not_fenced(self) -> None:
        """Raise the failure of the checkpoints, or `FencedError` if another driver has taken the job over.

        Any thread may call this. Raises nothing if storage does not say who has the job.
        """
        if self.failure is not None:
            raise self.failure
        self._check_fence()

    def _check_fence(self) -> None:
        """Raise `FencedError` if another driver has taken the job over. If storage does not say, look again later."""
        try:
            self._durable.check_not_fenced()
        except StorageError as error:
            log.warning("job %s: cannot look whether another driver has taken over: %s", self._shape.job, error)

    def give_up(self, error: StrandlineError) -> None:
        """No checkpoint will complete, and the generation ends with `error`.

        Nobody but the callers who wait is told. `close` aborts the checkpoints that have no entry in the job's log.
        """
        with self._wake:
            self.failure = self.failure or error
            for future in self._waiters.end(self._waiters.begun):
                future.set_exception(error)
            self._refuse(error)

    def _refuse(self, error: StrandlineError) -> None:
        """Tell everybody who waits for a checkpoint or savepoint to begin that none will."""
        self._waiters.refuse(error)
        self._savepoints.refuse(error)

    def _pause(self) -> float:
        """How many seconds the thread may sleep unless it is woken."""
        now, batch = time.monotonic(), self._inputs.batch
        if self._coordinator.ready():
            return 0.0
        if self._suspended or self.failure is not None:
            return 1.0
        if self._savepoints:
            return 0.0
        if self._waiters.requested and self._coordinator.should_trigger(now, batch, forced=True):
            return 0.0
        self._coordinator.should_trigger(now, batch)  # tells the coordinator what is committed
        if self._cluster.suspects():
            return SLOTS_MISSING_PAUSE  # a barrier would only fail
        due = self._coordinator.due_at() - now
        return max(0.0, min(due if math.isfinite(due) else 1.0, 1.0))

    def _trigger_if_due(self) -> None:
        if not self._wants_barrier():
            return  # whoever works on a batch may hold the lock for long
        with self.commit_lock:
            if self._closed or self._suspended or self.failure is not None or not self._wants_barrier():
                return
            try:
                self.before_barrier()
            except SlotLostError as error:
                log.warning("job %s: no checkpoint now: %s", self._shape.job, error)
                with self._wake:
                    self._refuse(CheckpointInterruptedError("a slot was lost before the checkpoint was taken"))
                    self._wake.wait(SLOTS_MISSING_PAUSE)
                return
            while self._savepoints:
                self._trigger_savepoint()
            with self._lock:
                begun = self._begin_if_due(self._inputs.batch)
                if begun is None:
                    return
                committed = self._inputs.committed
                assert committed is not None
            self._barrier(begun.id, committed, partial(self._freeze_for_checkpoint, full=begun.full))

    def _wants_barrier(self) -> bool:
        """Whether a savepoint or a checkpoint should begin now."""
        with self._lock:
            batch = self._inputs.batch
            return bool(self._savepoints) or (batch is not None and self._why_now(batch, wanted=False) is not None)

    def _why_now(self, batch: int, *, wanted: bool) -> Literal["forced", "due"] | None:
        """Why a checkpoint may begin after `batch` now; None if it may not. The caller holds the lock."""
        now = time.monotonic()
        wanted = wanted or self._waiters.requested
        if wanted and self._coordinator.should_trigger(now, batch, forced=True):
            return "forced"
        return "due" if self._coordinator.should_trigger(now, batch) and not self._cluster.suspects() else None

    def _begin_if_due(self, batch: int | None, *, wanted: bool = False) -> _Begun | None:
        """Begin a checkpoint with its barrier after `batch`, the last one that is decided, if it is wanted or due.

        The caller holds both locks.
        """
        why = None if batch is None else self._why_now(batch, wanted=wanted)
        if batch is None or why is None:
            return None
        now = time.monotonic()
        due = now if why == "forced" else self._coordinator.due_at()
        pending = self._coordinator.trigger(now, due, batch, epoch=time.time() - now)
        return _Begun(pending.id, self._waiters.begin_checkpoint(pending.id))

    def _trigger_savepoint(self) -> None:
        with self._lock:
            requested = self._savepoints.next()
            if requested is None:
                return
            target, future = requested
            committed = self._inputs.committed
            assert committed is not None
            now = time.monotonic()
            pending = self._coordinator.trigger(
                now,
                now,
                committed.batch,
                kind="savepoint",
                epoch=time.time() - now,
                savepoint_format=target.format,
            )
            self._waiters.begin_savepoint(pending.id, future)
            self._savepoints.begin(pending.id, target)
        freeze = partial(self._cluster.savepoint, target=target, timeout=self._timeout)
        self._barrier(pending.id, committed, freeze)

    def _barrier(self, checkpoint_id: int, committed: CommittedBatch, freeze: Callable[[int], None]) -> None:
        """The synchronous part of a checkpoint. The caller holds the commit lock, so no commit comes in between."""
        try:
            position = self._inputs.position(committed)
            with self._lock:
                self._inputs.note(checkpoint_id, Inputs(position, committed.batch))
            freeze(checkpoint_id)
        except SlotLostError as error:
            log.warning("job %s, checkpoint %d: %s", self._shape.job, checkpoint_id, error)
            self.slots_replaced()
        except StrandlineError as error:
            self._fail(checkpoint_id, str(error))

    def _freeze_for_checkpoint(self, checkpoint_id: int, *, full: bool) -> None:
        for ack in self._cluster.barrier(checkpoint_id, self._timeout, full):
            self._acknowledge(checkpoint_id, ack)

    # --- how a checkpoint ends -----------------------------------------------------------------------

    def _complete(self, checkpoint_id: int) -> None:
        """Complete a checkpoint that every subtask has acknowledged. Until its metadata is written, it may fail."""
        try:
            plan = self._completion.write_metadata(checkpoint_id)
        except FencedError:
            raise
        except MetadataTakenError as error:
            self._fail(checkpoint_id, str(error), counts=False)
            return
        except StrandlineError as error:
            self._fail(checkpoint_id, str(error))
            self._completion.announce_again()
            return
        if plan is not None:
            self._completion.finish(plan)

    def _fail(self, checkpoint_id: int, reason: str, *, declined: bool = False, counts: bool = True) -> None:
        with self._wake:
            if declined and any(one.id == checkpoint_id and one.ready for one in self._coordinator.pending()):
                return  # every acknowledgement has arrived; the sender of one did not learn that, and declined
            decision = self._coordinator.fail(checkpoint_id, reason, time.monotonic(), counts=counts)
            if not decision.failed or self._completion.abandoned:
                return
            log.warning("job %s: %s", self._shape.job, decision.reason)
            error = CheckpointFailedError if counts else CheckpointInterruptedError
            self._abort(decision, error(decision.reason))
            if decision.run_must_fail:
                self.failure = self.failure or StrandlineError(f"job {self._shape.job}: {decision.reason}")
            self._wake.notify_all()
        self._durable.tidy_up(decision.delete)

    def _abort(self, decision: FailDecision, error: StrandlineError) -> None:
        """Forget failed checkpoints, and tell everybody who waits for them. The caller holds the lock."""
        for checkpoint_id in decision.failed:
            self._inputs.end(checkpoint_id)
            self._savepoints.end(checkpoint_id)
            for future in self._waiters.end((checkpoint_id,)):
                future.set_exception(error)
            # In a thread of its own: nobody may wait for a task manager with the lock held.
            threading.Thread(
                target=self._cluster.checkpoint_aborted,
                args=(checkpoint_id,),
                daemon=True,
            ).start()
