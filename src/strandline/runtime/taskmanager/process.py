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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from strandline.checkpoint.metadata import FileHandle
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.protocol.folders import run_folder, slot_folder, socket_folder
from strandline.runtime.protocol.messages import (
    ChangelogSettings,
    RunInfo,
    Sealed,
    SlotSpec,
    SnapshotReport,
    StorageSettings,
)
from strandline.runtime.protocol.wire import Address, Client, Server, decode_error, encode_error, own_host
from strandline.runtime.taskmanager.changelog.changelog import Barrier, Changelog
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.runtime.taskmanager.savepoint_uploads import upload_savepoint
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.storage import Storage, open_storage

log = logging.getLogger(__name__)

HEARTBEAT_EVERY = 1.0
SLOT_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""One heap for all that a slot allocates. RocksDB's threads free each other's blocks, and what a batch needed is free
between batches; with a heap per thread, or one for Arrow alone, such memory stays resident and is of use to nobody."""
RUN_IS_DEAD_AFTER = 60.0
"""Seconds without a task manager on this host after which a run's local files may go."""

Upload = Callable[[list[SubtaskSnapshot]], list[SubtaskAck]]
"""Makes frozen states durable."""


@dataclass(slots=True)
class SlotProcess:
    """A running slot."""

    spec: SlotSpec
    process: subprocess.Popen[bytes]
    client: Client
    rebuilt: list[Any]
    """How its operators' states came back; see `Rebuilt`."""

    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Kill it; its state is in its files, there is nothing to say goodbye to."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.client.close()


class TaskManager:
    """Serves one run on one executor."""

    def __init__(self, run: RunInfo, identity: str) -> None:
        self.run = run
        self.identity = identity
        self._slots: dict[int, SlotProcess] = {}
        self._spares: list[tuple[subprocess.Popen[bytes], Path]] = []
        """Processes that wait to become slots, and their logs."""
        self._changing = threading.Lock()
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
        self._coordinator = Client(Address.unpack(run.coordinator), run.secret)
        names = (
            "start_slots",
            "warm",
            "stop_slots",
            "fan",
            "sealed",
            "settle",
            "commit",
            "barrier",
            "savepoint",
            "checkpoint_completed",
            "checkpoint_aborted",
            "shutdown",
            "describe",
            "figures",
        )
        self.server = Server(
            run.secret,
            {name: getattr(self, name) for name in names},
            bind_host=run.bind_host,
            advertise_host=own_host(run.bind_host, Address.unpack(run.coordinator).host),
            unix_path=str(socket_folder(run.run_id) / f"tm-{os.getpid()}.sock"),
        )
        if self._log is not None:
            self._log.start()

    def _open_log(self, storage: Storage, settings: ChangelogSettings) -> Changelog:
        scratch = self._folder / f"log-{os.getpid()}"
        return Changelog(storage, self.run.job, settings, self._uploader, self, scratch, copies=self._copies)

    # --- slots -----------------------------------------------------------------------------------

    def start_slots(self, body: dict[str, Any]) -> dict[int, Any]:
        """Start a slot for every spec, in parallel; answers once they hold their state: where they are, and how."""
        here = self.server.address.pack()
        copies = str(self._folder / "copies") if body.get("local") else None
        specs = [
            msgspec.structs.replace(msgspec.convert(spec, SlotSpec), manager=here, copies=copies)
            for spec in body["specs"]
        ]
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
            slot.spec.index: {"address": slot.client.address.pack(), "rebuilt": slot.rebuilt}
            for slot in outcomes
            if isinstance(slot, SlotProcess)
        }

    def warm(self, body: dict[str, Any]) -> None:
        """Have processes ready that only wait to be told which slot they are."""
        while len(self._spares) < body["slots"]:
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
        told = msgspec.json.decode(answer)
        if "error" in told:
            process.wait()
            return decode_error(bytes.fromhex(told["error"]))
        client = Client(Address.unpack(told["address"]), spec.run.secret)
        slot = SlotProcess(spec, process, client, told["rebuilt"])
        self._slots[spec.index] = slot
        if self._log is not None:
            changed = {one["operator"] for one in told["rebuilt"] if one["changed"]}
            self._log.slot_opened(spec, told["states"], changed)
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

    def stop_slots(self, _body: Any) -> None:
        with self._changing:
            for slot in self._slots.values():
                try:
                    slot.client.call("stop", timeout=2)
                    slot.process.wait(timeout=5)
                except (StrandlineError, subprocess.TimeoutExpired):
                    pass
                slot.end()
            self._slots.clear()
            if self._log is not None:
                self._log.end()

    def describe(self, _body: Any) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "pid": os.getpid(),
            "slots": {index: {"pid": slot.process.pid, "alive": slot.alive()} for index, slot in self._slots.items()},
        }

    def fan(self, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Call `action` on every slot, or on those of `indices`, at once; each answers for itself."""
        indices = body.get("indices")
        slots = [slot for index, slot in self._slots.items() if indices is None or index in indices]

        def one(slot: SlotProcess) -> dict[str, Any]:
            try:
                return {"value": slot.client.call(body["action"], body.get("body"), body.get("timeout"))}
            except StrandlineError as error:
                return {"error": encode_error(error)}

        answers = self._fan_pool.map(one, slots)
        return {slot.spec.index: answer for slot, answer in zip(slots, answers, strict=True)}

    # --- batches ---------------------------------------------------------------------------------

    def sealed(self, body: dict[str, Any]) -> None:
        """A slot has sealed a segment."""
        if self._log is not None:
            self._log.queue.offer(msgspec.convert(body, Sealed))

    def settle(self, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The slots' status; with the changelog, once what they prepared in this round is durable.

        A slot's answer then has `log`: of every segment, whether it is durable, and its file.
        """
        answers = self.fan({"action": "status", "indices": body["indices"]})
        if self._log is None:
            return answers
        sealed = [
            one
            for answer in answers.values()
            if "value" in answer
            for one in msgspec.convert(answer["value"]["sealed"], list[Sealed])
            if (one.batch, one.round) == (body["batch"], body["round"])
        ]
        for (operator, index), outcome in self._log.queue.wait_until_durable(sealed).items():
            answers[index]["value"].setdefault("log", {})[operator] = outcome
        return answers

    def commit(self, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The batch is decided: it is part of the log, and every slot makes it its state."""
        if self._log is not None:
            self._log.queue.commit(body["batch"])
        return self.fan({"action": "commit", "body": body, "indices": body["indices"]})

    def figures(self, _body: Any) -> dict[str, float]:
        """What the changelog takes up and what it cost; nothing without one."""
        return self._log.figures() if self._log is not None else {}

    # --- checkpoints -----------------------------------------------------------------------------

    def barrier(self, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Freeze all slots (the synchronous part), then upload in the background.

        With the changelog everything is durable already, as a rule: then the acknowledgements are part of the answer.
        """
        if self._log is not None:
            return self._barrier_of_log(self._log, body)
        answers = self.fan({"action": "barrier", "body": body, "timeout": body.get("timeout")})
        self._upload_frozen(answers, body["checkpoint"], partial(self._uploader.upload, body["checkpoint"]))
        return answers

    def savepoint(self, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Freeze all slots for a savepoint, then upload in the background, to the savepoint's own folder."""
        answers = self.fan({"action": "savepoint", "body": body, "timeout": body.get("timeout")})
        target = msgspec.convert(body["target"], StorageSettings)
        storage = open_storage(target.url, target.options)
        self._upload_frozen(answers, body["checkpoint"], partial(upload_savepoint, storage))
        return answers

    def _upload_frozen(self, answers: dict[int, dict[str, Any]], checkpoint_id: int, upload: Upload) -> None:
        slots = [self._slots[index] for index, answer in answers.items() if index in self._slots and "value" in answer]
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
                    self._coordinator.call(
                        "acknowledge",
                        {"checkpoint": checkpoint_id, "generation": slots[0].spec.generation, "ack": ack},
                    )
            except (StrandlineError, OSError) as error:
                log.warning("checkpoint %d: %s", checkpoint_id, error)
                self._coordinator.call(
                    "decline",
                    {
                        "checkpoint": checkpoint_id,
                        "generation": slots[0].spec.generation,
                        "reason": f"task manager {self.identity}: {error}",
                        "lost": isinstance(error, SlotLostError),
                    },
                )
        except StrandlineError as error:
            log.warning("checkpoint %d: %s", checkpoint_id, error)
        finally:
            for slot in slots:
                _release(slot, checkpoint_id)

    def _barrier_of_log(self, log_: Changelog, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {index: {"value": []} for index in self._slots}
        barrier = log_.barrier(body["checkpoint"])
        if barrier.durable:
            for ack in log_.acknowledge(barrier):
                answers.setdefault(ack.state.subtask, {"value": []})["value"].append(ack)
        else:
            generation = next((slot.spec.generation for slot in self._slots.values()), 0)
            threading.Thread(target=self._acknowledge_late, args=(log_, barrier, generation), daemon=True).start()
        return answers

    def _acknowledge_late(self, log_: Changelog, barrier: Barrier, generation: int) -> None:
        """Acknowledge once what is missing is durable; or decline."""
        about = {"checkpoint": barrier.checkpoint_id, "generation": generation}
        try:
            try:
                for ack in log_.acknowledge(barrier):
                    self._coordinator.call("acknowledge", {**about, "ack": ack})
            except (StrandlineError, OSError) as error:
                log.warning("checkpoint %d: %s", barrier.checkpoint_id, error)
                reason = f"task manager {self.identity}: {error}"
                lost = isinstance(error, SlotLostError)
                self._coordinator.call("decline", {**about, "reason": reason, "lost": lost})
        except StrandlineError as error:
            log.warning("checkpoint %d: %s", barrier.checkpoint_id, error)

    def freeze(self, index: int, number: int) -> Callable[[], list[SubtaskSnapshot]]:
        """Have a slot freeze its state; what it returns tells the files, once they are all on disk."""
        slot = self._slots.get(index)
        if slot is None:
            raise SlotLostError(f"slot {index} of job {self.run.job} is not running")
        slot.client.call("barrier", {"checkpoint": number})
        return lambda: _snapshots(slot, number, time.time())

    def compact(self, index: int) -> None:
        slot = self._slots.get(index)
        if slot is not None:
            slot.client.call("tidy")

    def release(self, index: int, number: int) -> None:
        """The slot's files of that state are not needed for an upload any more."""
        slot = self._slots.get(index)
        if slot is not None:
            _release(slot, number)

    def checkpoint_completed(self, body: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.completed(body["checkpoint"])
            return
        replaced = msgspec.convert(body["replaced"], dict[str, FileHandle])
        self._uploader.completed(body["checkpoint"], replaced)
        self._copies.prune(self._uploader.identities)

    def checkpoint_aborted(self, body: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.aborted(body["checkpoint"])
            return
        self._uploader.aborted(body["checkpoint"])

    # --- life ------------------------------------------------------------------------------------

    def shutdown(self, _body: Any) -> None:
        self._ended.set()

    def serve(self) -> None:
        """Ping the coordinator until it is gone, or says that this task manager is not needed any more."""
        last_answer = time.monotonic()
        while not self._ended.wait(HEARTBEAT_EVERY):
            os.utime(self._folder / "alive.lock")
            lost = [index for index, slot in self._slots.items() if not slot.alive()]
            try:
                answer = self._coordinator.call(
                    "heartbeat", {"identity": self.identity, "lost": lost}, timeout=HEARTBEAT_EVERY
                )
                last_answer = time.monotonic()
                if not answer["wanted"]:
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
    reports = slot.client.call("report", {"checkpoint": checkpoint_id})
    return [
        SubtaskSnapshot(
            spec.index,
            spec.key_groups,
            spec.backend.kind,
            spec.backend.shares_files,
            report,
            barrier_time,
        )
        for report in msgspec.convert(reports, list[SnapshotReport])
    ]


def _release(slot: SlotProcess, checkpoint_id: int) -> None:
    try:
        slot.client.call("release", {"checkpoint": checkpoint_id})
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
    manager._coordinator.call(
        "register", {"identity": identity, "address": manager.server.address.pack(), "pid": os.getpid()}, timeout=10
    )
    temporary = address_file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(manager.server.address.pack()))
    temporary.replace(address_file)
    manager.serve()


if __name__ == "__main__":
    main()
