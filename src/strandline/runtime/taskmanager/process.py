"""The task manager: one process per executor that starts slots, calls them and makes their state durable.

It ends, and its slots with it, when the driver has not answered for the heartbeat timeout.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # what is loaded below stays: `set_up_process` switches the collector on again

import logging
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import msgspec

from strandline.checkpoint.pending import SubtaskAck
from strandline.decoding import json_decoder
from strandline.errors import SlotLostError, StaleAttemptError, StrandlineError
from strandline.logs import formatter, log_context
from strandline.runtime.liveness.processes import started_at
from strandline.runtime.protocol.address import listen_on
from strandline.runtime.protocol.calls import NOTHING, Nothing
from strandline.runtime.protocol.coordinator_calls import HEARTBEAT_EVERY, CoordinatorClient, Heartbeat, Registration
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.figures import ChangelogFigures
from strandline.runtime.protocol.folders import clear_socket_folder, run_folder, socket_folder
from strandline.runtime.protocol.logs import LogText, ReadLog
from strandline.runtime.protocol.messages import RunInfo, Sealed, SlotSpec
from strandline.runtime.protocol.process_limits import set_up_process
from strandline.runtime.protocol.profiles import Folded, Profile
from strandline.runtime.protocol.server import Server
from strandline.runtime.protocol.slot_calls import (
    BatchRound,
    Commit,
    Freeze,
    Prepare,
    PrepareEmpty,
    Query,
    SlotClient,
    SlotFigures,
    SlotStatus,
)
from strandline.runtime.protocol.taskmanager_calls import (
    Barrier,
    CheckpointAborted,
    CheckpointCompleted,
    CommitBatch,
    CommittedSlot,
    ForSlots,
    OlderSlots,
    PreparedSlot,
    SlotAnswers,
    SlotProcessInfo,
    SpareSlots,
    StartedSlot,
    StartSlots,
    TakeCheckpoint,
    TakeSavepoint,
    TaskManagerCalls,
    TaskManagerInfo,
)
from strandline.runtime.protocol.user_folder import make_private
from strandline.runtime.taskmanager.background_uploads import BackgroundUploads
from strandline.runtime.taskmanager.changelog.changelog import Changelog
from strandline.runtime.taskmanager.durability import ChangelogDurability, Durability, SnapshotDurability
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.runtime.taskmanager.logs import HostLogs
from strandline.runtime.taskmanager.run_folder_lock import RunFolderLock
from strandline.runtime.taskmanager.savepoint_uploads import upload_savepoint
from strandline.runtime.taskmanager.slot_processes import SlotProcess, SlotProcesses
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader
from strandline.runtime.taskmanager.worker_watch import WorkerWatch
from strandline.storage import open_storage

log = logging.getLogger(__name__)

REGISTER_PATIENCE = 3
"""For how many times the heartbeat timeout a new task manager tries to reach its driver."""


class TaskManager(TaskManagerCalls):
    """Serves one run on one executor."""

    def __init__(self, run: RunInfo, identity: str, executor: int | None = None) -> None:
        """`executor` is the process id of Spark's executor, whose Python workers are watched."""
        self.run = run
        self.identity = identity
        self._name = uuid.uuid4().hex[:12]
        """Names its local files. Containers that share a folder may have processes with the same id."""
        self._ended = threading.Event()
        self._dead_thread: Failure | None = None
        self._workers = WorkerWatch(executor, run.heartbeat_timeout) if executor is not None else None
        self._changing = threading.Lock()
        """Held while slots are started or stopped."""
        self._folder = make_private(run_folder(run.local_dir, run.job, run.run_id))
        self._folder_lock = RunFolderLock(self._folder)
        self._folder_lock.delete_dead_runs()
        self._logs = HostLogs(run)
        self._logs.delete_old()
        self._driver_silent = False
        self._slots = SlotProcesses(run.job, self._logs.folder, run.heartbeat_timeout, self._thread_died)
        self._coordinator = CoordinatorClient(
            run.coordinator,
            run.secret,
            run.run_id,
            lambda: self._slots.generation,
            patience=run.heartbeat_timeout,
            tls=run.tls,
        )
        self._background = BackgroundUploads(self._slots, self._coordinator, identity, self._thread_died)
        self._durability = self._open_durability()
        bind_host, advertise_host = listen_on(run.bind_host, run.coordinator.host)
        self.server = Server(
            run.secret,
            TaskManagerCalls,
            self,
            run_id=run.run_id,
            generation=lambda: self._slots.generation,
            bind_host=bind_host,
            advertise_host=advertise_host,
            tls=run.tls,
            unix_path=str(make_private(socket_folder(run.run_id)) / f"tm-{self._name}.sock"),
        )

    def _open_durability(self) -> Durability:
        run = self.run
        storage = open_storage(run.storage.url, run.storage.options)
        copies = LocalCopies(self._folder / "copies", self._name)
        uploader = SnapshotUploader(storage, run.job, run.uploads, copies=copies)
        if run.changelog is None:
            return SnapshotDurability(self._slots, uploader, self._background, copies)
        scratch = self._folder / f"changelog-{self._name}"
        changelog = Changelog(
            storage, run.job, run.changelog, uploader, self._slots, scratch, copies=copies, on_failure=self._thread_died
        )
        return ChangelogDurability(self._slots, changelog, uploader, self._background)

    # --- slots -----------------------------------------------------------------------------------

    def start_slots(self, request: StartSlots) -> dict[int, StartedSlot]:
        copies = str(self._folder / "copies") if request.use_copies else None
        specs = [msgspec.structs.replace(spec, manager=self.server.address, copies=copies) for spec in request.specs]
        generation = max((spec.generation for spec in specs), default=self._slots.generation)
        self._slots.reach(generation)
        with self._changing:
            self._refuse_older_generation(generation)
            for spec in specs:
                self._refuse_older(spec)
            for spec in specs:
                self._slots.end(spec.index)
                self._durability.slot_starting(spec)
            self._clear_old_generations(generation)
            outcomes = list(self._slots.pool.map(self._start, specs))
            self._slots.all_started()
            self._slots.end_spares()
        for outcome in outcomes:
            if isinstance(outcome, StrandlineError):
                raise outcome
        return {
            slot.spec.index: StartedSlot(slot.client.address, slot.ready.rebuilt)
            for slot in outcomes
            if isinstance(slot, SlotProcess)
        }

    def _refuse_older_generation(self, generation: int) -> None:
        """Raises `StaleAttemptError` if a later generation has begun while a call waited for `_changing`."""
        if generation < self._slots.generation:
            raise StaleAttemptError(
                f"job {self.run.job}: the caller is of generation {generation}, but generation "
                f"{self._slots.generation} has begun"
            )

    def _refuse_older(self, spec: SlotSpec) -> None:
        """Raises `StaleAttemptError` if a later incarnation of the slot runs already: the call was delayed."""
        running = self._slots.get(spec.index)
        if running is None:
            return
        given, known = ((one.generation, one.incarnation) for one in (spec, running.spec))
        if given <= known:
            raise StaleAttemptError(
                f"slot {spec.index} of job {self.run.job}: incarnation {given[1]} of generation {given[0]} is not "
                f"later than the running one, {known[1]} of generation {known[0]}"
            )

    def _start(self, spec: SlotSpec) -> SlotProcess | StrandlineError:
        """Start a slot. An error is returned, so that the other slots come up all the same."""
        try:
            slot = self._slots.start(spec)
        except StrandlineError as error:
            return error
        self._durability.slot_opened(spec, slot.ready)
        return slot

    def end_older_slots(self, request: OlderSlots) -> None:
        self._slots.reach(request.generation)
        with self._changing:
            self._refuse_older_generation(request.generation)
            self._clear_old_generations(request.generation)
            self._slots.end_spares()
            if not self._slots.all():
                self._durability.end()

    def _clear_old_generations(self, newest: int) -> None:
        for slot in self._slots.all():
            if slot.spec.generation < newest:
                self._slots.end(slot.spec.index)
        for path in self._folder.glob("gen-*"):
            if int(path.name.removeprefix("gen-")) < newest:
                shutil.rmtree(path, ignore_errors=True)

    def start_spares(self, request: SpareSlots) -> None:
        self._slots.start_spares(request.count)

    def stop_slots(self, request: Nothing) -> None:
        with self._changing:
            self._slots.stop_all()
            self._durability.end()

    def describe(self, request: Nothing) -> TaskManagerInfo:
        slots = {
            slot.spec.index: SlotProcessInfo(slot.process.pid, slot.alive(), slot.ended()) for slot in self._slots.all()
        }
        return TaskManagerInfo(self.identity, os.getpid(), slots)

    def log_names(self, request: Nothing) -> list[str]:
        return self._logs.names()

    def read_log(self, request: ReadLog) -> LogText:
        return self._logs.read(request)

    def log_ends(self, request: Nothing) -> dict[str, LogText]:
        return self._logs.ends()

    # --- batches ---------------------------------------------------------------------------------

    def sealed(self, request: Sealed) -> None:
        self._durability.sealed(request)

    def collect_prepared(self, request: ForSlots[BatchRound]) -> SlotAnswers[PreparedSlot]:
        return self._once_durable(
            self._slots.call(request.slots, SlotClient.status_when_free, NOTHING), request.request
        )

    def prepare(self, request: ForSlots[Prepare]) -> SlotAnswers[PreparedSlot]:
        statuses = self._slots.call(request.slots, SlotClient.prepare, request.request)
        if not request.request.last:  # more steps follow, and their segments travel together
            return SlotAnswers({i: PreparedSlot(one, {}) for i, one in statuses.values.items()}, statuses.failures)
        return self._once_durable(statuses, request.request)

    def _once_durable(self, statuses: SlotAnswers[SlotStatus], of: BatchRound | Prepare) -> SlotAnswers[PreparedSlot]:
        """What slots said of themselves, once the segments of the round are durable as far as they must be."""
        prepared = {index: PreparedSlot(status, {}) for index, status in statuses.values.items()}
        wanted = (of.batch, of.round)
        sealed = [
            one for status in statuses.values.values() for one in status.sealed if (one.batch, one.round) == wanted
        ]
        for (operator, index), upload in self._durability.wait_until_durable(sealed).items():
            prepared[index].segments[operator] = upload
        return SlotAnswers(prepared, statuses.failures)

    def commit(self, request: ForSlots[CommitBatch]) -> SlotAnswers[CommittedSlot]:
        batch, barrier = request.request.batch, request.request.barrier
        self._durability.committed(batch)
        applied = self._slots.call(
            request.slots, SlotClient.commit, Commit(batch, applied=bool(request.request.durable))
        )
        self._durability.durable(request.request.durable)
        acks: dict[int, list[SubtaskAck]] = {}
        refused: Failure | None = None
        if barrier is not None and not applied.failures:
            try:
                acks = self._barrier(barrier).values
            except Exception as error:
                # The batch is committed all the same: whatever it is, it must not look like an error of the commit.
                log.exception("checkpoint %d: no barrier", barrier.checkpoint)
                refused = Failure.of(error)
        slots = {index: CommittedSlot(timers, acks.get(index, []), refused) for index, timers in applied.values.items()}
        return SlotAnswers(slots, applied.failures)

    def discard(self, request: ForSlots[BatchRound]) -> SlotAnswers[None]:
        return self._slots.call(request.slots, SlotClient.discard, request.request)

    def prepare_empty(self, request: ForSlots[PrepareEmpty]) -> SlotAnswers[None]:
        return self._slots.call(request.slots, SlotClient.prepare_empty, request.request)

    def slot_status(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotStatus]:
        return self._slots.call(request.slots, SlotClient.status, request.request)

    def slot_figures(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotFigures]:
        return self._slots.call(request.slots, SlotClient.figures, request.request)

    def query(self, request: ForSlots[Query]) -> SlotAnswers[bytes]:
        return self._slots.call(request.slots, SlotClient.query, request.request)

    def profile(self, request: ForSlots[Profile]) -> SlotAnswers[Folded]:
        return self._slots.call(request.slots, SlotClient.profile, request.request)

    def changelog_figures(self, request: Nothing) -> ChangelogFigures | None:
        return self._durability.figures()

    # --- checkpoints -----------------------------------------------------------------------------

    def take_checkpoint(self, request: TakeCheckpoint) -> SlotAnswers[list[SubtaskAck]]:
        return self._barrier(request)

    def _barrier(self, request: Barrier) -> SlotAnswers[list[SubtaskAck]]:
        with log_context(checkpoint=request.checkpoint):
            return self._durability.barrier(request.checkpoint, request.full)

    def take_savepoint(self, request: TakeSavepoint) -> SlotAnswers[None]:
        frozen = self._slots.freeze_all(Freeze(request.checkpoint, request.canonical))
        storage = open_storage(request.target.url, request.target.options)
        self._background.start_upload(frozen, request.checkpoint, partial(upload_savepoint, storage))
        return frozen

    def checkpoint_completed(self, request: CheckpointCompleted) -> None:
        self._durability.completed(request.checkpoint, request.replaced)

    def checkpoint_aborted(self, request: CheckpointAborted) -> None:
        self._durability.aborted(request.checkpoint)

    # --- life ------------------------------------------------------------------------------------

    @property
    def registration(self) -> Registration:
        """What the driver, and the launcher of this executor, need to know of this task manager."""
        return Registration(self.identity, self.server.address, os.getpid(), started_at(os.getpid()))

    def _thread_died(self, error: StrandlineError) -> None:
        """A background thread has died: the next heartbeat says so, and the driver ends this task manager."""
        self._dead_thread = self._dead_thread or Failure.of(error)

    def _register(self) -> None:
        """Tell the driver that this task manager is there. A driver that stands still gets some time to answer."""
        deadline = time.monotonic() + REGISTER_PATIENCE * self.run.heartbeat_timeout
        while True:
            try:
                return self._coordinator.register(self.registration)
            except SlotLostError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def shutdown(self, request: Nothing) -> None:
        self._ended.set()

    def serve(self, address_file: Path) -> None:
        """Register, write the address, and work until the driver is gone or needs this task manager no longer.

        Then the process ends. The slots end with it, and the local files are deleted, whatever fails.
        """
        code = 0
        work = partial(self._work, address_file)
        for act in (work, self._slots.end_all, self._durability.close, self._keep_logs, self._clear_up):
            try:
                act()
            except Exception:
                log.exception("the task manager has failed")
                code = 1
        os._exit(code)

    def _work(self, address_file: Path) -> None:
        self._register()
        temporary = address_file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self.registration))
        temporary.replace(address_file)
        self._send_heartbeats()

    def _send_heartbeats(self) -> None:
        last_answer = time.monotonic()
        while not self._ended.wait(HEARTBEAT_EVERY):
            self._folder_lock.refresh()
            self._logs.look()
            if self._workers is not None:
                self._workers.look()
            lost = [slot.spec.index for slot in self._slots.all() if not slot.alive()]
            try:
                generation, restored = self._slots.restored_bytes()
                news = Heartbeat(self.identity, lost, self._dead_thread, restored, generation)
                answer = self._coordinator.heartbeat(news)
                last_answer = time.monotonic()
                if not answer.wanted:
                    log.info("not wanted any more")
                    break
            except StrandlineError:
                if time.monotonic() - last_answer > self.run.heartbeat_timeout - HEARTBEAT_EVERY:
                    log.warning("the driver has been silent for %.0f s: ending", self.run.heartbeat_timeout)
                    self._driver_silent = True
                    break

    def _keep_logs(self) -> None:
        if self._driver_silent:
            self._logs.keep_durably()

    def _clear_up(self) -> None:
        if self._folder_lock.release():
            shutil.rmtree(self._folder, ignore_errors=True)
            clear_socket_folder(self.run.run_id)


def main() -> None:
    """Run a task manager. Standard input has the run's description; the environment says where to write the address."""
    set_up_process()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = json_decoder(RunInfo).decode(sys.stdin.buffer.read())
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(run.log_format, "task manager", {"job": run.job, "run": run.run_id}, run.secrets))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    address_file = Path(os.environ.pop("STRANDLINE_ADDRESS_FILE"))
    identity = os.environ.pop("STRANDLINE_IDENTITY")
    manager = TaskManager(run, identity, int(os.environ.pop("STRANDLINE_EXECUTOR")))
    manager.serve(address_file)


if __name__ == "__main__":
    main()
