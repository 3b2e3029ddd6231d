"""The slot processes of a task manager: starts them, calls them, ends them."""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from strandline.decoding import json_decoder
from strandline.errors import SlotLostError, StrandlineError
from strandline.runtime.liveness.processes import exit_text, mark_of_task_manager, started_at
from strandline.runtime.liveness.threads import OnFailure, map_with_caller
from strandline.runtime.protocol.calls import LONG, NOTHING
from strandline.runtime.protocol.failures import Failure
from strandline.runtime.protocol.folders import slot_folder
from strandline.runtime.protocol.logs import open_log, slot_log
from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.protocol.slot_calls import Freeze, SlotClient, SlotFailed, SlotReady, SnapshotRef
from strandline.runtime.protocol.taskmanager_calls import SlotAnswers
from strandline.runtime.taskmanager.slot_watch import SlotWatch
from strandline.runtime.taskmanager.snapshot_uploads import SubtaskSnapshot

log = logging.getLogger(__name__)

SLOT_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""A slot allocates everything from one heap. RocksDB's threads free each other's blocks, and the memory of a batch is
free between batches. With one heap per thread, or a heap for Arrow alone, such memory stays resident and unused."""

STOP_PATIENCE = 3.0
"""Seconds that a slot gets to close its state when it is asked to stop."""
KILL_PATIENCE = 5.0
"""Seconds that the system gets to end a killed process, which may wait for a disk."""

Asked = TypeVar("Asked")
Told = TypeVar("Told")


@dataclass(slots=True)
class SlotProcess:
    """A running slot."""

    spec: SlotSpec
    process: subprocess.Popen[bytes]
    client: SlotClient
    ready: SlotReady
    """What the slot said when it was ready."""
    watch: SlotWatch

    def alive(self) -> bool:
        return self.process.poll() is None

    def ended(self) -> str:
        """Why the process does not run any more; empty while it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        return self.watch.killed or f"its process {self.process.pid} {exit_text(code)}"

    def end(self) -> None:
        """Kill the process. Its state is in its files, so nothing needs to be closed."""
        self.watch.end()
        _kill(self.process)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.client.close()

    def snapshots(self, checkpoint_id: int, barrier_time: float) -> list[SubtaskSnapshot]:
        """The snapshots of the slot's operators, once all their files are on disk."""
        spec = self.spec
        return [
            SubtaskSnapshot(
                spec.index, spec.key_groups, spec.backend.kind, spec.backend.shares_files, report, barrier_time
            )
            for report in self.client.report(SnapshotRef(checkpoint_id))
        ]

    def release(self, checkpoint_id: int) -> None:
        """Let a frozen state go. A failure is only logged: a slot that is lost holds nothing."""
        try:
            self.client.release(SnapshotRef(checkpoint_id))
        except StrandlineError as error:
            log.warning("checkpoint %d, slot %d: %s", checkpoint_id, self.spec.index, error)


class SlotProcesses:
    """The slots of one task manager, by index. Safe to use from several threads.

    The caller sees to it that a slot is not started while it is being ended.
    """

    def __init__(self, job: str, folder: Path, timeout: float, on_failure: OnFailure) -> None:
        """`folder` gets the logs of the processes. A slot that is silent for `timeout` seconds is killed.

        `on_failure` gets the error of a background thread that has died, here or in a slot.
        """
        self.generation = 0
        """The newest generation that started slots here."""
        self.pool = ThreadPoolExecutor(64, thread_name_prefix="slot-calls")
        self._job = job
        self._folder = folder
        self._timeout = timeout
        self._on_failure = on_failure
        self._lock = threading.Lock()
        """Protects `_slots`, `_spares` and `generation`."""
        self._slots: dict[int, SlotProcess] = {}
        self._mark = mark_of_task_manager(os.getpid(), started_at(os.getpid()))
        self._spares: list[subprocess.Popen[bytes]] = []
        """Processes that wait to become slots."""
        self._restored: dict[int, int] = {}
        """How many bytes of its state each slot that is being started has restored."""
        self._restored_generation = 0

    def all(self) -> list[SlotProcess]:
        with self._lock:
            return list(self._slots.values())

    def get(self, index: int) -> SlotProcess | None:
        with self._lock:
            return self._slots.get(index)

    # --- life ------------------------------------------------------------------------------------

    def reach(self, generation: int) -> None:
        """Note that a generation has begun, unless a later one has."""
        with self._lock:
            self.generation = max(self.generation, generation)

    def start(self, spec: SlotSpec) -> SlotProcess:
        """Start a slot; returns once it holds its state. Raises the slot's error, or `SlotLostError` if it dies."""
        slot_folder(spec).mkdir(parents=True, exist_ok=True)
        log_path = self._folder / f"{slot_log(spec.index)}.log"
        process = self._take_spare() or self._spawn(log_path)
        assert process.stdin is not None
        assert process.stdout is not None
        watch = SlotWatch(process, f"slot {spec.index} of job {self._job}", self._timeout, self._on_failure)
        try:
            message = msgspec.msgpack.encode(spec)
            process.stdin.write(struct.pack(">Q", len(message)) + message)
            process.stdin.flush()
            answer = _announced(process.stdout, watch, lambda size: self._note_restored(spec, size))
        except OSError:
            answer = b""
        process.stdout.close()
        if not answer:
            watch.end()
            code = _kill(process)
            tail = log_path.read_text(errors="replace")[-2000:] if log_path.exists() else ""
            raise SlotLostError(
                f"slot {spec.index} of job {self._job} ended while it started (exit code {code}); its log ends:\n{tail}"
            )
        told: SlotReady | SlotFailed = json_decoder(SlotReady | SlotFailed).decode(answer)  # type: ignore[arg-type]  # a union
        if isinstance(told, SlotFailed):
            watch.end()
            _kill(process)
            raise told.failure.error()
        # The watch decides whether the slot is lost: then it kills the process, and the calls fail.
        client = SlotClient(
            told.address, spec.run.secret, spec.run.run_id, lambda: spec.generation, patience=LONG, tls=spec.run.tls
        )
        watch.ask(client)
        self._note_restored(spec, sum(one.local_bytes + one.durable_bytes for one in told.rebuilt))
        slot = SlotProcess(spec, process, client, told, watch)
        with self._lock:
            self._slots[spec.index] = slot
        return slot

    def _note_restored(self, spec: SlotSpec, size: int) -> None:
        with self._lock:
            if spec.generation != self._restored_generation:
                self._restored_generation, self._restored = spec.generation, {}
            self._restored[spec.index] = size

    def restored_bytes(self) -> tuple[int, int]:
        """A generation, and how many bytes of their state its slots have restored that are being started."""
        with self._lock:
            return self._restored_generation, sum(self._restored.values())

    def all_started(self) -> None:
        """No slot is being started any more."""
        with self._lock:
            self._restored = {}

    def end(self, index: int) -> None:
        """End a slot at once; nothing happens if there is none."""
        with self._lock:
            slot = self._slots.pop(index, None)
        if slot is not None:
            slot.end()

    def end_all(self) -> None:
        """End all slots and spare processes at once."""
        for slot in self.all():
            self.end(slot.spec.index)
        self.end_spares()

    def stop_all(self) -> None:
        """Ask all slots to end; those that do not are killed."""

        def stop(slot: SlotProcess) -> None:
            with suppress(StrandlineError, subprocess.TimeoutExpired):
                slot.client.stop(NOTHING)
                slot.process.wait(timeout=STOP_PATIENCE)
            self.end(slot.spec.index)

        stopping = [threading.Thread(target=stop, args=(slot,), daemon=True) for slot in self.all()]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        self.end_spares()

    def start_spares(self, count: int) -> None:
        """Start processes in advance, until `count` wait to become slots."""
        with self._lock:
            while len(self._spares) < count:
                self._spares.append(self._spawn(self._folder / "spares.log"))

    def end_spares(self) -> None:
        while (spare := self._take_spare()) is not None:
            _kill(spare)

    def _spawn(self, log_path: Path) -> subprocess.Popen[bytes]:
        """Start a process. It writes to another log as soon as it knows which slot it is."""
        log_file = open_log(log_path)
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "strandline.runtime.slot.process", self._mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **SLOT_ENVIRONMENT},
            )
        finally:
            os.close(log_file)

    def _take_spare(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            while self._spares:
                spare = self._spares.pop()
                if spare.poll() is None:
                    return spare
        return None

    # --- calls -----------------------------------------------------------------------------------

    def call(
        self, indices: Iterable[int], method: Callable[[SlotClient, Asked], Told], request: Asked
    ) -> SlotAnswers[Told]:
        """Call some slots at the same time. Each slot answers for itself; indices without a slot are left out."""
        called = [slot for index in indices if (slot := self.get(index)) is not None]

        def one(slot: SlotProcess) -> tuple[Told | None, Failure | None]:
            try:
                return method(slot.client, request), None
            except StrandlineError as error:
                return None, Failure.of(error)

        answers: SlotAnswers[Told] = SlotAnswers({}, {})
        for slot, (value, failure) in zip(called, map_with_caller(self.pool, one, called), strict=True):
            if failure is not None:
                answers.failures[slot.spec.index] = failure
            else:
                answers.values[slot.spec.index] = cast("Told", value)
        return answers

    def freeze_all(self, request: Freeze) -> SlotAnswers[None]:
        """Freeze the state of every slot."""
        return self.call([slot.spec.index for slot in self.all()], SlotClient.freeze, request)

    # What `FrozenSlots` asks for.

    def freeze(self, index: int, number: int) -> Callable[[], list[SubtaskSnapshot]]:
        slot = self.get(index)
        if slot is None:
            raise SlotLostError(f"slot {index} of job {self._job} is not running")
        slot.client.freeze(Freeze(number))
        return lambda: slot.snapshots(number, time.time())

    def release(self, index: int, number: int) -> None:
        slot = self.get(index)
        if slot is not None:
            slot.release(number)

    def compact(self, index: int) -> None:
        slot = self.get(index)
        if slot is not None:
            slot.client.compact(NOTHING)


def _announced(output: IO[bytes], watch: SlotWatch, note_restored: Callable[[int], None]) -> bytes:
    """What a slot says when it has started. Empty: the process has ended.

    Numbers before it are signs of life: how many bytes of its state the slot has restored.
    """
    while True:
        line = output.readline()
        if not line.strip().isdigit():
            return line
        watch.heard()
        note_restored(int(line))


def _kill(process: subprocess.Popen[bytes]) -> int | None:
    """Kill a process; returns its exit code, or None if even the system cannot end it now."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=KILL_PATIENCE)
    return None
