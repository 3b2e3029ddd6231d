"""The changelog of one task manager: every slot's segments become durable before their batch commits.

A slot tells of a segment as soon as it is sealed; the segments of all slots go into one file while Spark is still busy
with the rows. `settle` waits for the rest, so a batch is decided when a lost host cannot take it back any more, and
uploads that fall behind slow processing down instead of piling up. A checkpoint has nothing left to upload.
If uploads fail altogether, batches go on with local segments alone up to a bound, and checkpoints fail until the
backlog is durable.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strandline.changelog.book import LogBook, Subtask, SubtaskLog, last_batch, segment_name
from strandline.changelog.merge import AT_ONCE_BYTES, merge
from strandline.changelog.uploader import LogUploader
from strandline.checkpoint.metadata import LOG_SUFFIX, StateFile, SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import CheckpointError, StorageError, StrandlineError
from strandline.runtime.messages import ChangelogSettings, Sealed, SlotSpec
from strandline.runtime.uploads import SnapshotUploader, SubtaskSnapshot
from strandline.state.keys import key_group_range
from strandline.state.segment import SegmentHeader, read_table, write_table
from strandline.storage import JobPaths, Storage

log = logging.getLogger(__name__)

EARLY_BYTES = 32 << 20
"""A log below this is never a reason to materialize early, however small the state is."""
MERGE_FROM = 64
"""A log of so many segments is merged,"""
MERGE_AT_LEAST = 16
"""if so many of them can be put together."""
TICK = 0.25
REST = 5.0

Freeze = Callable[[int, int], list[SubtaskSnapshot]]
"""Has a slot freeze its state under a number, and tells its files; see `TaskManager._frozen`."""


@dataclass(slots=True, eq=False)
class _Offer:
    """A sealed segment on its way to storage."""

    sealed: Sealed
    file: StateFile | None = None
    error: StorageError | None = None
    uploading: bool = False
    void: bool = False
    """Replaced by another attempt: it will never commit."""
    durable: bool = False

    @property
    def subtask(self) -> Subtask:
        return self.sealed.operator, self.sealed.subtask

    @property
    def waiting(self) -> bool:
        return not (self.durable or self.uploading or self.void or self.error)


@dataclass(slots=True)
class _Slot:
    """What is known of a slot here, and when its state is materialized next."""

    spec: SlotSpec
    states: dict[str, tuple[dict[str, Any], ...]]
    due: float
    rest_until: float = 0.0
    """After a failure, not even a large log is a reason to try again before."""


@dataclass(slots=True)
class Figures:
    """What the log cost so far, and what it takes up."""

    wait_ms: float = 0.0
    """How long batches waited for their segments to become durable."""
    materializations: int = 0
    failed_materializations: int = 0
    early_materializations: int = 0
    last_materialization_ms: float = 0.0
    materialized_bytes: int = 0
    merges: int = 0


class TaskLog:
    """Keeps the changelog of a task manager's slots. Its threads end with `close`."""

    def __init__(
        self, storage: Storage, job: str, settings: ChangelogSettings, uploader: SnapshotUploader, scratch: Path
    ) -> None:
        self.figures = Figures()
        self._storage = storage
        self._settings = settings
        self._snapshots = uploader
        self._segments = LogUploader(storage, JobPaths(job), settings.upload_timeout, settings.upload_attempts)
        self._book = LogBook()
        self._slots: dict[int, _Slot] = {}
        self._offers: dict[Subtask, _Offer] = {}
        """The newest segment of each subtask: of the batch that is worked on, or of the last one."""
        self._behind: list[_Offer] = []
        """Segments of committed batches that could not be uploaded so far."""
        self._local: dict[str, Path] = {}
        """Where the segments of the log are on local disk, as far as they are."""
        self._scratch = scratch
        self._generation = 0
        self._decided = -1
        self._flush = False
        self._closed = False
        self._wake = threading.Condition()
        self._materializing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, freeze: Freeze, thaw: Callable[[int, int], None]) -> None:
        """Begin to work. `freeze` and `thaw` reach a slot: take a local snapshot, and let it go again."""
        self._freeze = freeze
        self._thaw = thaw
        for target in (self._upload_loop, self._materialize_loop):
            thread = threading.Thread(target=target, daemon=True, name=target.__name__.strip("_"))
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._segments.close()

    # --- slots -----------------------------------------------------------------------------------

    def slot_starts(self, spec: SlotSpec, was_here: bool) -> None:
        """A slot comes up; `was_here` in this generation: then what is durable of its state is known already."""
        with self._wake:
            if spec.generation != self._generation:
                self._forget_generation(spec.generation)
            self.committed(spec.decided_batch)  # a slot may die between the decision and our hearing of it
            interval = self._settings.materialization_interval
            # Spread over the subtasks, so that they do not all upload at once.
            due = time.monotonic() + interval * (spec.index + 1) / spec.parallelism
            known = self._slots.get(spec.index)
            self._slots[spec.index] = _Slot(spec, known.states if known else {}, known.due if known else due)
            for operator in spec.operators:
                subtask = (operator.uid, spec.index)
                self._replace_offer(subtask, None)
                if not (was_here and subtask in self._book):
                    self._open(subtask, spec)

    def _open(self, subtask: Subtask, spec: SlotSpec) -> None:
        restored = next((state for state in spec.restore if state.operator == subtask[0]), None)
        files = restored.files if restored else ()
        usable = spec.restore_owned and (spec.log_complete or spec.decided_batch == spec.restore_batch)
        segments = [file for file in files if file.is_log] + [file for uid, file in spec.log if uid == subtask[0]]
        base = [file for file in files if not file.is_log] if usable else None
        self._book.open(subtask, base, segments if usable else (), confirmed=usable)

    def slot_opened(self, index: int, states: dict[str, list[dict[str, Any]]]) -> None:
        """The slot is up; `states` describes what its operators keep."""
        with self._wake:
            self._slots[index].states = {uid: tuple(described) for uid, described in states.items()}

    def _forget_generation(self, generation: int) -> None:
        """What belonged to an older generation is nobody's: no checkpoint will ever name it."""
        for subtask in self._book.subtasks():
            self._replace_offer(subtask, None)
            self._book.close(subtask)
        self._delete(self._book.leftovers())
        self._book = LogBook()
        self._slots.clear()
        self._offers.clear()
        self._behind.clear()
        self._forget_local()
        self._decided = -1
        self._generation = generation

    def end(self) -> None:
        """The run ends: what no checkpoint can refer to is deleted."""
        with self._wake:
            self._forget_generation(-1)

    def _delete(self, paths: list[str]) -> None:
        try:
            self._storage.delete(paths)
        except StorageError as error:
            log.warning("cannot delete %d files of the changelog: %s", len(paths), error)

    # --- segments --------------------------------------------------------------------------------

    def offer(self, sealed: Sealed) -> None:
        """A slot has sealed a segment. Its upload begins once all slots have one of this operator, or with `settle`."""
        with self._wake:
            subtask = (sealed.operator, sealed.subtask)
            known = self._offers.get(subtask)
            if sealed.batch <= self._decided:
                return  # word of it comes late
            if known is not None and (known.sealed.batch, known.sealed.round) >= (sealed.batch, sealed.round):
                return
            self._replace_offer(subtask, _Offer(sealed, durable=sealed.entries == 0))
            self._wake.notify_all()

    def _replace_offer(self, subtask: Subtask, offer: _Offer | None) -> None:
        old = self._offers.pop(subtask, None)
        if old is not None and not old.void:
            old.void = True
            if old.file is not None:
                self._book.void(old.file)
        if offer is not None:
            self._offers[subtask] = offer

    def settle(self, sealed: Iterable[Sealed]) -> dict[Subtask, tuple[bool, StateFile | None]]:
        """Wait until the segments of a batch are durable; says of each whether it is, and its file (None if empty)."""
        wanted = list(sealed)
        for one in wanted:
            self.offer(one)
        started = time.monotonic()
        with self._wake:
            offers = [self._offers[one.operator, one.subtask] for one in wanted]
            self._persist([*self._behind, *offers])
            behind = sum(offer.sealed.size for offer in (*self._behind, *offers) if offer.error)
            while behind > self._settings.max_behind_bytes and not self._closed:
                log.warning("%d bytes of the changelog are not durable: processing waits for storage", behind)
                self._persist([*self._behind, *offers])
                behind = sum(offer.sealed.size for offer in (*self._behind, *offers) if offer.error)
            self.figures.wait_ms += (time.monotonic() - started) * 1000
            return {offer.subtask: (offer.durable, offer.file) for offer in offers}

    def _persist(self, offers: list[_Offer]) -> None:
        """Try to make segments durable; holds the lock except while it waits."""
        for offer in offers:
            offer.error = None
        self._flush = True
        self._wake.notify_all()
        self._wake.wait_for(lambda: self._closed or all(map(_over, offers)))
        self._flush = False

    def committed(self, batch: int) -> None:
        """The batch is decided: its segments are part of the log."""
        with self._wake:
            for subtask, offer in list(self._offers.items()):
                if offer.sealed.batch != batch or offer.void:
                    continue
                del self._offers[subtask]
                if not offer.durable:
                    self._behind.append(offer)
                elif offer.file is not None:
                    self._append(offer, offer.file)
            self._decided = max(self._decided, batch)

    def _upload_loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._ready())
                if self._closed:
                    return
                taken = [offer for offer in (*self._behind, *self._offers.values()) if offer.waiting]
                for offer in taken:
                    offer.uploading = True
            error: StorageError | None = None
            files: list[StateFile] = []
            try:
                handles = self._segments.upload([Path(offer.sealed.path) for offer in taken])
                files = [
                    StateFile(segment_name(offer.sealed.batch), f"{handle.path}#{handle.offset}", True, handle)
                    for offer, handle in zip(taken, handles, strict=True)
                ]
            except (StorageError, OSError) as problem:
                error = problem if isinstance(problem, StorageError) else StorageError(str(problem))
                log.warning("%s", error)
            with self._wake:
                self._uploaded(taken, files, error)
                self._wake.notify_all()

    def _ready(self) -> bool:
        waiting = [offer for offer in self._offers.values() if offer.waiting]
        if self._flush:
            return bool(waiting) or any(offer.waiting for offer in self._behind)
        counts: dict[str, int] = {}
        for offer in waiting:
            counts[offer.sealed.operator] = counts.get(offer.sealed.operator, 0) + 1
        return any(count == len(self._slots) for count in counts.values())

    def _uploaded(self, taken: list[_Offer], files: list[StateFile], error: StorageError | None) -> None:
        for file in files:
            self._book.hold(file)
        for at, offer in enumerate(taken):
            offer.uploading = False
            offer.error = error
            if error is not None:
                continue
            offer.file = files[at]
            offer.durable = True
            if offer.void:
                self._book.void(files[at])
            elif offer in self._behind:
                self._behind.remove(offer)
                self._append(offer, files[at])

    def _append(self, offer: _Offer, file: StateFile) -> None:
        self._book.append(offer.subtask, file)
        self._local[file.identity] = Path(offer.sealed.path)

    # --- checkpoints -----------------------------------------------------------------------------

    def acknowledge(self, checkpoint_id: int, barrier_time: float) -> list[SubtaskAck] | None:
        """The acknowledgements of all subtasks; None if something has to become durable first: `catch_up`."""
        with self._wake:
            if self._behind or self._book.without_base():
                return None
            named = self._book.acknowledge(checkpoint_id)
            now = time.time()
            acks = []
            for at, entry in enumerate(named.entries):
                operator, index = entry.subtask
                slot = self._slots[index]
                spec = slot.spec
                groups = key_group_range(index, spec.parallelism, spec.max_parallelism)
                state = SubtaskState(
                    operator=operator,
                    subtask=index,
                    key_group_start=groups.start,
                    key_group_end=groups.stop,
                    backend=spec.backend.kind,
                    incremental=spec.backend.incremental and spec.backend.kind == "rocksdb",
                    files=entry.files,
                    states=slot.states.get(operator, ()),
                )
                acks.append(
                    SubtaskAck(
                        state=state,
                        uploaded=(),
                        barrier_time=barrier_time,
                        ack_time=now,
                        sync_ms=0.0,
                        async_ms=(now - barrier_time) * 1000,
                        checkpointed_bytes=entry.new_bytes,
                        full_bytes=entry.full_bytes,
                        beforehand=named.beforehand if at == 0 else (),
                        obsolete=named.obsolete if at == 0 else (),
                    )
                )
            return acks

    def catch_up(self) -> None:
        """Make durable what a checkpoint needs: segments that are behind, states without a materialization."""
        with self._wake:
            behind = list(self._behind)
            self._persist(behind)
            failed = next((offer.error for offer in behind if offer.error), None)
            missing = sorted({index for _operator, index in self._book.without_base()})
        if failed is not None:
            raise failed
        for index in missing:
            self._materialize(index)

    def completed(self, checkpoint_id: int) -> None:
        with self._wake:
            lost = self._book.completed(checkpoint_id)
        if lost:
            # Nothing of what these subtasks had uploaded can be relied on any more.
            self._snapshots.forget(lost)
            log.warning("checkpoint %d names other files of %s: they are materialized anew", checkpoint_id, lost)

    def aborted(self, checkpoint_id: int) -> None:
        with self._wake:
            self._book.aborted(checkpoint_id)

    # --- materialization -----------------------------------------------------------------------------

    def _materialize_loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed, TICK)
                if self._closed:
                    return
                index = self._next_due()
            if index is None:
                self._merge_if_many()
                continue
            try:
                self._materialize(index)
            except (StrandlineError, OSError) as error:
                # The log is the truth: checkpoints go on without it.
                self.figures.failed_materializations += 1
                with self._wake:
                    if index in self._slots:
                        self._slots[index].rest_until = time.monotonic() + REST
                log.warning("slot %d could not be materialized: %s", index, error)

    def _next_due(self) -> int | None:
        """The slot whose turn it is: by the clock, or because its log has grown too large for its state."""
        now = time.monotonic()
        for index, slot in sorted(self._slots.items(), key=lambda item: item[1].due):
            if slot.due <= now:
                return index
            if slot.rest_until <= now and any(
                self._too_large(self._book.log((op.uid, index))) for op in slot.spec.operators
            ):
                self.figures.early_materializations += 1
                return index
        return None

    def _too_large(self, log_: SubtaskLog) -> bool:
        allowed = max(EARLY_BYTES, (self._settings.max_amplification - 1) * log_.base_bytes)
        return log_.log_bytes > allowed

    def _materialize(self, index: int) -> None:
        """Upload a slot's state itself, and truncate its log."""
        with self._materializing:
            with self._wake:
                slot = self._slots.get(index)
                if slot is None:
                    return
                slot.due = time.monotonic() + self._settings.materialization_interval
                logs = {uid: self._book.log((uid, index)) for uid in (op.uid for op in slot.spec.operators)}
                if all(known.base is not None and not known.segments for known in logs.values()):
                    return
            started = time.monotonic()
            number = time.time_ns() // 1000
            try:
                snapshots = self._freeze(index, number)
                acks = self._snapshots.upload(number, snapshots, lasting=True)
                with self._wake:
                    used = [
                        self._book.materialized(
                            (ack.state.operator, index),
                            logs[ack.state.operator],
                            ack.state.files,
                            snapshot.report.batch,
                        )
                        for snapshot, ack in zip(snapshots, acks, strict=True)
                    ]
                    self._forget_local()
                if not all(used):
                    raise CheckpointError(f"slot {index} was started anew while its state was materialized")
                self._snapshots.completed(number, {})
            finally:
                self._snapshots.aborted(number)
                self._thaw(index, number)
            self.figures.materializations += 1
            self.figures.materialized_bytes += sum(ack.checkpointed_bytes for ack in acks)
            self.figures.last_materialization_ms = (time.monotonic() - started) * 1000

    # --- merging ---------------------------------------------------------------------------------

    def _merge_if_many(self) -> None:
        """Put segments of a long log together, so that checkpoints name few, and overwritten changes go."""
        with self._wake:
            found = next(
                (
                    (subtask, known, run)
                    for subtask in self._book.subtasks()
                    if (run := mergeable(known := self._book.log(subtask), self._local.__contains__))
                ),
                None,
            )
        if found is None:
            return
        subtask, known, run = found
        target = self._scratch / f"{uuid.uuid4().hex}{LOG_SUFFIX}"
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
            whole = merge([read_table(self._local[file.identity]) for file in run])
            batch = last_batch(run[-1])
            write_table(target, SegmentHeader(self._generation, batch, 0, subtask[0], subtask[1], -1), whole)
            (handle,) = self._segments.upload([target])
        except (StrandlineError, OSError, KeyError) as error:
            # The slot has let go of the files because its state is being materialized; or storage is in trouble.
            log.info("%d segments of %s were not merged: %s", len(run), subtask, error)
            target.unlink(missing_ok=True)
            return
        file = StateFile(segment_name(batch), f"{handle.path}#0", True, handle)
        with self._wake:
            self._local[file.identity] = target
            if self._book.merged(subtask, known, run, file):
                self.figures.merges += 1
            self._forget_local()

    def _forget_local(self) -> None:
        """Local files are needed for merging as long as their segments are part of a log."""
        needed = {file.identity for subtask in self._book.subtasks() for file in self._book.log(subtask).segments}
        for identity in [identity for identity in self._local if identity not in needed]:
            path = self._local.pop(identity)
            if path.parent == self._scratch:
                path.unlink(missing_ok=True)

    # --- figures ---------------------------------------------------------------------------------

    def describe(self) -> dict[str, float]:
        """What the log takes up and what it cost."""
        with self._wake:
            logs = [self._book.log(subtask) for subtask in self._book.subtasks()]
            return {
                **asdict(self.figures),
                **{f"upload_{name}": value for name, value in asdict(self._segments.figures).items()},
                "segments": sum(len(one.segments) for one in logs),
                "log_bytes": sum(one.log_bytes for one in logs),
                "base_bytes": sum(one.base_bytes for one in logs),
                "behind_bytes": sum(offer.sealed.size for offer in self._behind),
            }


def mergeable(log_: SubtaskLog, has_local_file: Callable[[str], bool]) -> list[StateFile]:
    """The newest segments of a log that has become long, back to one that is larger than all of them together.

    So every change is merged again only a few times, however long the log becomes.
    """
    if len(log_.segments) < MERGE_FROM:
        return []
    run: list[StateFile] = []
    size = 0
    for file in reversed(log_.segments):
        length = file.handle.size if file.handle is not None else 0
        if not has_local_file(file.identity) or (len(run) >= MERGE_AT_LEAST and length > size):
            break
        if size + length > AT_ONCE_BYTES:
            break
        run.insert(0, file)
        size += length
    return run if len(run) >= MERGE_AT_LEAST else []


def _over(offer: _Offer) -> bool:
    """Whether nobody need wait for it any more."""
    return offer.durable or offer.void or offer.error is not None
