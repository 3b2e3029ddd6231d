"""The task manager: one process per executor that starts slots, fans calls out to them and uploads their snapshots.

It ends, and its slots with it, when the coordinator has not answered for the heartbeat timeout.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec

from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.protocol.address import own_host
from strandline.runtime.protocol.calls import NOTHING, Nothing
from strandline.runtime.protocol.coordinator_calls import (
    HEARTBEAT_EVERY,
    Acknowledgement,
    CoordinatorClient,
    Decline,
    Heartbeat,
    Registration,
)
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.folders import run_folder, slot_folder, socket_folder
from strandline.runtime.protocol.messages import ChangelogSettings, Rebuilt, RunInfo, Sealed, SlotSpec
from strandline.runtime.protocol.server import Server
from strandline.runtime.protocol.slot_calls import (
    BatchRound,
    Commit,
    Freeze,
    NextTimers,
    PrepareEmpty,
    Query,
    SlotClient,
    SlotFailed,
    SlotFigures,
    SlotReady,
    SlotStatus,
    SnapshotRef,
)
from strandline.runtime.protocol.taskmanager_calls import (
    CheckpointAborted,
    CheckpointCompleted,
    ForSlots,
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
from strandline.runtime.taskmanager.changelog.changelog import Barrier, Changelog
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.runtime.taskmanager.savepoint_uploads import upload_savepoint
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.storage import Storage, open_storage

log = logging.getLogger(__name__)

SLOT_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""One heap for all that a slot allocates. RocksDB's threads free each other's blocks, and what a batch needed is free
between batches; with a heap per thread, or one for Arrow alone, such memory stays resident and is of use to nobody."""
RUN_IS_DEAD_AFTER = 60.0
"""Seconds without a task manager on this host after which a run's local files may go."""

Asked = TypeVar("Asked")
Told = TypeVar("Told")
Upload = Callable[[list[SubtaskSnapshot]], list[SubtaskAck]]
"""Makes frozen states durable."""


@dataclass(slots=True)
class SlotProcess:
    """A running slot."""

    spec: SlotSpec
    process: subprocess.Popen[bytes]
    client: SlotClient
    rebuilt: list[Rebuilt]
    """How its operators' states came back."""

    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Kills the process. Its state is in its files, so nothing needs to be closed."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.client.close()


class TaskManager(TaskManagerCalls):
    """Serves one run on one executor."""

    def __init__(self, run: RunInfo, identity: str) -> None:
        self.run = run
        self.identity = identity
        self._slots: dict[int, SlotProcess] = {}
        self._spares: list[tuple[subprocess.Popen[bytes], Path]] = []
        """Processes that wait to become slots, and their logs."""
        self._changing = threading.Lock()
        self._generation = 0
        """The newest generation that started slots here."""
        self._fan_pool = ThreadPoolExecutor(64, thread_name_prefix="fan")
        self._ended = threading.Event()
        self._folder = run_folder(run.local_dir, run.job, run.run_id)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._alive = _hold(self._folder)
        _clear_dead_runs(self._folder)
        storage = open_storage(run.storage.url, run.storage.options)
        self._copies = LocalCopies(self._folder / "copies", str(os.getpid()))
        self._uploader = SnapshotUploader(storage, run.job, run.uploads, copies=self._copies)
        self._log = self._open_log(storage, run.changelog) if run.changelog else None
        self._coordinator = CoordinatorClient(run.coordinator, run.secret, run.run_id, lambda: self._generation)
        self.server = Server(
            run.secret,
            TaskManagerCalls,
            self,
            run_id=run.run_id,
            generation=lambda: self._generation,
            bind_host=run.bind_host,
            advertise_host=own_host(run.bind_host, run.coordinator.host),
            unix_path=str(socket_folder(run.run_id) / f"tm-{os.getpid()}.sock"),
        )
        if self._log is not None:
            self._log.start()

    def _open_log(self, storage: Storage, settings: ChangelogSettings) -> Changelog:
        scratch = self._folder / f"log-{os.getpid()}"
        return Changelog(storage, self.run.job, settings, self._uploader, self, scratch, copies=self._copies)

    # --- slots -----------------------------------------------------------------------------------

    def start_slots(self, request: StartSlots) -> dict[int, StartedSlot]:
        copies = str(self._folder / "copies") if request.use_copies else None
        specs = [msgspec.structs.replace(spec, manager=self.server.address, copies=copies) for spec in request.specs]
        self._generation = max([self._generation, *(spec.generation for spec in specs)])
        with self._changing:
            for spec in specs:
                old = self._slots.pop(spec.index, None)
                if old is not None:
                    old.end()
                if self._log is not None:
                    self._log.slot_starting(spec)
                else:
                    for operator in spec.operators:
                        states = [state for state in spec.restore if state.operator == operator.uid]
                        self._uploader.start_from((operator.uid, spec.index), states, spec.restore_owned)
            self._clear_old_generations(specs)
            outcomes = list(self._fan_pool.map(self._start, specs))
            self._end_spares()
        failed = [outcome for outcome in outcomes if isinstance(outcome, StrandlineError)]
        if failed:
            raise failed[0]
        return {
            slot.spec.index: StartedSlot(slot.client.address, slot.rebuilt)
            for slot in outcomes
            if isinstance(slot, SlotProcess)
        }

    def start_spares(self, request: SpareSlots) -> None:
        while len(self._spares) < request.count:
            self._spares.append(self._spawn(self._folder / f"slot-spare-{time.time_ns()}.log"))

    def _spawn(self, log_path: Path) -> tuple[subprocess.Popen[bytes], Path]:
        with log_path.open("ab") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "strandline.runtime.slot.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **SLOT_ENVIRONMENT},
            )
        return process, log_path

    def _take_spare(self) -> tuple[subprocess.Popen[bytes], Path] | None:
        with suppress(IndexError):
            while True:
                spare = self._spares.pop()
                if spare[0].poll() is None:
                    return spare
        return None

    def _start(self, spec: SlotSpec) -> SlotProcess | StrandlineError:
        folder = slot_folder(spec)
        folder.mkdir(parents=True, exist_ok=True)
        process, log_path = self._take_spare() or self._spawn(self._folder / f"slot-{spec.index}.log")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            message = msgspec.msgpack.encode(spec)
            process.stdin.write(struct.pack(">Q", len(message)) + message)
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = b""
        process.stdout.close()
        if not answer:
            process.kill()
            code = process.wait()
            tail = log_path.read_text(errors="replace")[-2000:]
            return SlotLostError(
                f"slot {spec.index} of job {spec.run.job} ended while it started (exit code {code}); its log ends:\n"
                f"{tail}"
            )
        told: SlotReady | SlotFailed = msgspec.json.decode(answer, type=SlotReady | SlotFailed)
        if isinstance(told, SlotFailed):
            process.wait()
            return told.failure.error()
        client = SlotClient(told.address, spec.run.secret, spec.run.run_id, lambda: spec.generation)
        slot = SlotProcess(spec, process, client, told.rebuilt)
        self._slots[spec.index] = slot
        if self._log is not None:
            changed = {one.operator for one in told.rebuilt if one.changed}
            self._log.slot_opened(spec, told.states, changed)
        return slot

    def _clear_old_generations(self, specs: list[SlotSpec]) -> None:
        newest = max((spec.generation for spec in specs), default=0)
        for index, slot in list(self._slots.items()):
            if slot.spec.generation < newest:
                slot.end()
                del self._slots[index]
        for path in self._folder.glob("gen-*"):
            if int(path.name.removeprefix("gen-")) < newest:
                shutil.rmtree(path, ignore_errors=True)

    def _end_spares(self) -> None:
        while (spare := self._take_spare()) is not None:
            spare[0].kill()
            spare[0].wait()

    def stop_slots(self, request: Nothing) -> None:
        with self._changing:
            for slot in self._slots.values():
                try:
                    slot.client.stop(NOTHING)
                    slot.process.wait(timeout=5)
                except (StrandlineError, subprocess.TimeoutExpired):
                    pass
                slot.end()
            self._slots.clear()
            if self._log is not None:
                self._log.end()

    def describe(self, request: Nothing) -> TaskManagerInfo:
        slots = {index: SlotProcessInfo(slot.process.pid, slot.alive()) for index, slot in self._slots.items()}
        return TaskManagerInfo(self.identity, os.getpid(), slots)

    def _on_slots(
        self, slots: Iterable[int], method: Callable[[SlotClient, Asked], Told], request: Asked
    ) -> SlotAnswers[Told]:
        """Calls slots at once; each answers for itself."""
        called = [slot for index in slots if (slot := self._slots.get(index)) is not None]

        def one(slot: SlotProcess) -> tuple[Told | None, Failure | None]:
            try:
                return method(slot.client, request), None
            except StrandlineError as error:
                return None, Failure.of(error)

        answers: SlotAnswers[Told] = SlotAnswers({}, {})
        for slot, (value, failure) in zip(called, self._fan_pool.map(one, called), strict=True):
            if failure is not None:
                answers.failures[slot.spec.index] = failure
            else:
                answers.values[slot.spec.index] = cast("Told", value)
        return answers

    # --- batches ---------------------------------------------------------------------------------

    def sealed(self, request: Sealed) -> None:
        if self._log is not None:
            self._log.queue.offer(request)

    def collect_prepared(self, request: ForSlots[BatchRound]) -> SlotAnswers[PreparedSlot]:
        statuses = self._on_slots(request.slots, SlotClient.status, NOTHING)
        prepared = {index: PreparedSlot(status, {}) for index, status in statuses.values.items()}
        if self._log is not None:
            wanted = (request.request.batch, request.request.round)
            sealed = [
                one for status in statuses.values.values() for one in status.sealed if (one.batch, one.round) == wanted
            ]
            for (operator, index), upload in self._log.queue.wait_until_durable(sealed).items():
                prepared[index].segments[operator] = upload
        return SlotAnswers(prepared, statuses.failures)

    def commit(self, request: ForSlots[Commit]) -> SlotAnswers[NextTimers]:
        if self._log is not None:
            self._log.queue.commit(request.request.batch)
        return self._on_slots(request.slots, SlotClient.commit, request.request)

    def discard(self, request: ForSlots[BatchRound]) -> SlotAnswers[None]:
        return self._on_slots(request.slots, SlotClient.discard, request.request)

    def prepare_empty(self, request: ForSlots[PrepareEmpty]) -> SlotAnswers[None]:
        return self._on_slots(request.slots, SlotClient.prepare_empty, request.request)

    def slot_status(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotStatus]:
        return self._on_slots(request.slots, SlotClient.status, request.request)

    def slot_figures(self, request: ForSlots[Nothing]) -> SlotAnswers[SlotFigures]:
        return self._on_slots(request.slots, SlotClient.figures, request.request)

    def query(self, request: ForSlots[Query]) -> SlotAnswers[bytes]:
        return self._on_slots(request.slots, SlotClient.query, request.request)

    def changelog_figures(self, request: Nothing) -> dict[str, float]:
        return self._log.figures() if self._log is not None else {}

    # --- checkpoints -----------------------------------------------------------------------------

    def take_checkpoint(self, request: TakeCheckpoint) -> SlotAnswers[list[SubtaskAck]]:
        if self._log is not None:
            return self._barrier_of_log(self._log, request.checkpoint)
        frozen = self._on_slots(list(self._slots), SlotClient.freeze, Freeze(request.checkpoint))
        self._upload_frozen(frozen, request.checkpoint, partial(self._uploader.upload, request.checkpoint))
        return SlotAnswers({index: [] for index in frozen.values}, frozen.failures)

    def take_savepoint(self, request: TakeSavepoint) -> SlotAnswers[None]:
        freeze = Freeze(request.checkpoint, request.canonical)
        frozen = self._on_slots(list(self._slots), SlotClient.freeze, freeze)
        storage = open_storage(request.target.url, request.target.options)
        self._upload_frozen(frozen, request.checkpoint, partial(upload_savepoint, storage))
        return frozen

    def _upload_frozen(self, frozen: SlotAnswers[None], checkpoint_id: int, upload: Upload) -> None:
        slots = [self._slots[index] for index in frozen.values if index in self._slots]
        arguments = (slots, checkpoint_id, time.time(), upload)
        threading.Thread(target=self._upload, args=arguments, daemon=True).start()

    def _upload(self, slots: list[SlotProcess], checkpoint_id: int, barrier_time: float, upload: Upload) -> None:
        """Upload what all slots froze, and acknowledge it subtask by subtask; or decline once for all of them."""
        if not slots:
            return
        try:
            try:
                snapshots = [
                    snapshot
                    for some in self._fan_pool.map(lambda slot: _snapshots(slot, checkpoint_id, barrier_time), slots)
                    for snapshot in some
                ]
                for ack in upload(snapshots):
                    self._coordinator.acknowledge(Acknowledgement(slots[0].spec.generation, checkpoint_id, ack))
            except (StrandlineError, OSError) as error:
                self._decline(slots[0].spec.generation, checkpoint_id, error)
        except StrandlineError as error:
            log.warning("checkpoint %d: %s", checkpoint_id, error)
        finally:
            for slot in slots:
                _release(slot, checkpoint_id)

    def _decline(self, generation: int, checkpoint_id: int, error: Exception) -> None:
        log.warning("checkpoint %d: %s", checkpoint_id, error)
        reason = f"task manager {self.identity}: {error}"
        self._coordinator.decline(Decline(generation, checkpoint_id, reason, isinstance(error, SlotLostError)))

    def _barrier_of_log(self, log_: Changelog, checkpoint_id: int) -> SlotAnswers[list[SubtaskAck]]:
        acks: dict[int, list[SubtaskAck]] = {index: [] for index in self._slots}
        barrier = log_.barrier(checkpoint_id)
        if barrier.durable:
            for ack in log_.acknowledge(barrier):
                acks.setdefault(ack.state.subtask, []).append(ack)
        else:
            threading.Thread(target=self._acknowledge_late, args=(log_, barrier, self._generation), daemon=True).start()
        return SlotAnswers(acks, {})

    def _acknowledge_late(self, log_: Changelog, barrier: Barrier, generation: int) -> None:
        """Acknowledge once what is missing is durable; or decline."""
        try:
            try:
                for ack in log_.acknowledge(barrier):
                    self._coordinator.acknowledge(Acknowledgement(generation, barrier.checkpoint_id, ack))
            except (StrandlineError, OSError) as error:
                self._decline(generation, barrier.checkpoint_id, error)
        except StrandlineError as error:
            log.warning("checkpoint %d: %s", barrier.checkpoint_id, error)

    def freeze(self, index: int, number: int) -> Callable[[], list[SubtaskSnapshot]]:
        """Have a slot freeze its state; what it returns tells the files, once they are all on disk."""
        slot = self._slots.get(index)
        if slot is None:
            raise SlotLostError(f"slot {index} of job {self.run.job} is not running")
        slot.client.freeze(Freeze(number))
        return lambda: _snapshots(slot, number, time.time())

    def compact(self, index: int) -> None:
        slot = self._slots.get(index)
        if slot is not None:
            slot.client.compact(NOTHING)

    def release(self, index: int, number: int) -> None:
        """The slot's files of that state are not needed for an upload any more."""
        slot = self._slots.get(index)
        if slot is not None:
            _release(slot, number)

    def checkpoint_completed(self, request: CheckpointCompleted) -> None:
        if self._log is not None:
            self._log.completed(request.checkpoint)
            return
        self._uploader.completed(request.checkpoint, request.replaced)
        self._copies.prune(self._uploader.identities)

    def checkpoint_aborted(self, request: CheckpointAborted) -> None:
        if self._log is not None:
            self._log.aborted(request.checkpoint)
            return
        self._uploader.aborted(request.checkpoint)

    # --- life ------------------------------------------------------------------------------------

    def shutdown(self, request: Nothing) -> None:
        self._ended.set()

    def register(self) -> None:
        """Tells the coordinator that this task manager is there."""
        self._coordinator.register(Registration(self.identity, self.server.address, os.getpid()))

    def serve(self) -> None:
        """Ping the coordinator until it is gone, or says that this task manager is not needed any more."""
        last_answer = time.monotonic()
        while not self._ended.wait(HEARTBEAT_EVERY):
            os.utime(self._folder / "alive.lock")
            lost = [index for index, slot in self._slots.items() if not slot.alive()]
            try:
                answer = self._coordinator.heartbeat(Heartbeat(self.identity, lost))
                last_answer = time.monotonic()
                if not answer.wanted:
                    log.info("not wanted any more")
                    break
            except StrandlineError:
                if time.monotonic() - last_answer > self.run.heartbeat_timeout - HEARTBEAT_EVERY:
                    log.warning("the coordinator has been silent for %.0f s: ending", self.run.heartbeat_timeout)
                    break
        for slot in list(self._slots.values()):
            slot.end()
        self._end_spares()
        if self._log is not None:
            self._log.close()  # without `end`: the slots may go on elsewhere, from just what it uploaded
        self._uploader.close()
        self._alive.close()
        if _nobody_holds(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.rmtree(socket_folder(self.run.run_id), ignore_errors=True)
        os._exit(0)


def _snapshots(slot: SlotProcess, checkpoint_id: int, barrier_time: float) -> list[SubtaskSnapshot]:
    """What a slot froze at the barrier, once it is all on disk."""
    spec = slot.spec
    return [
        SubtaskSnapshot(
            spec.index,
            spec.key_groups,
            spec.backend.kind,
            spec.backend.shares_files,
            report,
            barrier_time,
        )
        for report in slot.client.report(SnapshotRef(checkpoint_id))
    ]


def _release(slot: SlotProcess, checkpoint_id: int) -> None:
    try:
        slot.client.release(SnapshotRef(checkpoint_id))
    except StrandlineError as error:
        log.warning("checkpoint %d, slot %d: %s", checkpoint_id, slot.spec.index, error)


def _hold(folder: Path) -> BinaryIO:
    """A shared lock that says: some task manager of this run still lives on this host."""
    handle = (folder / "alive.lock").open("ab")
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def _nobody_holds(folder: Path) -> bool:
    try:
        with (folder / "alive.lock").open("ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def _clear_dead_runs(mine: Path) -> None:
    """Delete local files of runs of this job that died with their host or were killed whole.

    A run whose only task manager here has just been lost is about to start another: it still needs its files.
    """
    for folder in mine.parent.iterdir():
        lock = folder / "alive.lock"
        if folder == mine or not lock.exists() or time.time() - lock.stat().st_mtime < RUN_IS_DEAD_AFTER:
            continue
        if _nobody_holds(folder):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Entry of the task manager process: run info and where to leave the address come by environment."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s task manager %(name)s: %(message)s")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = msgspec.json.decode(os.environ.pop("STRANDLINE_RUN"), type=RunInfo)
    address_file = Path(os.environ.pop("STRANDLINE_ADDRESS_FILE"))
    identity = os.environ.pop("STRANDLINE_IDENTITY")
    manager = TaskManager(run, identity)
    manager.register()
    temporary = address_file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(manager.server.address))
    temporary.replace(address_file)
    manager.serve()


if __name__ == "__main__":
    main()
