"""The changelog of one task manager: every slot's segments become durable before their batch commits.

A slot tells of a segment as soon as it is sealed; the segments of all slots go into one file while Spark is still busy
with the rows. `settle` waits for the rest, so a batch is decided when a lost host cannot take it back any more, and
uploads that fall behind slow processing down instead of piling up. A checkpoint has nothing left to upload.
If uploads fail altogether, batches go on with local segments alone up to a bound, and checkpoints fail until the
backlog is durable.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from strandline.checkpoint.metadata import SEGMENT_SUFFIX, StateFile, SubtaskState, last_batch, paths_of, segment_file
from strandline.checkpoint.pending import SubtaskAck
from strandline.errors import CheckpointError, StorageError, StrandlineError
from strandline.runtime.protocol.messages import ChangelogSettings, Sealed, SlotSpec
from strandline.runtime.taskmanager.changelog.book import LogBook, Subtask, SubtaskLog
from strandline.runtime.taskmanager.changelog.uploader import LogUploader
from strandline.runtime.taskmanager.local_copies import LocalCopies
from strandline.runtime.taskmanager.snapshot_uploads import SnapshotUploader, SubtaskSnapshot
from strandline.state.batch.merge import AT_ONCE_BYTES, merge
from strandline.state.batch.segment import SegmentHeader, read_table, write_table
from strandline.storage import JobPaths, Storage, open_storage
from strandline.storage.external import delete_files

log = logging.getLogger(__name__)

EARLY_BYTES = 32 << 20
"""A log below this is never a reason to materialize early, however small the state is."""
MERGE_FROM = 64
"""A log of so many segments is merged,"""
MERGE_AT_LEAST = 16
"""if so many of them can be put together."""
TICK = 0.25
REST = 5.0

Freeze = Callable[[int, int], Callable[[], list[SubtaskSnapshot]]]
"""Has a slot freeze its state under a number; what it returns tells the files, once they are all on disk."""


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

    def keep(self) -> None:
        """Give it a local file of its own: the slot deletes its one when it has a local snapshot."""
        own = f"{self.sealed.path}.behind"
        os.link(self.sealed.path, own)
        self.sealed = msgspec.structs.replace(self.sealed, path=own)


@dataclass(slots=True)
class _Slot:
    """What is known of a slot here, and when its state is materialized next."""

    spec: SlotSpec
    states: dict[str, tuple[dict[str, Any], ...]]
    due: float
    rest_until: float = 0.0
    """After a failure, not even a large log is a reason to try again before."""


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A slot's state that is being materialized."""

    index: int
    number: int
    book: LogBook
    logs: dict[str, SubtaskLog]
    files: Callable[[], list[SubtaskSnapshot]]


@dataclass(frozen=True, slots=True)
class Barrier:
    """The barrier of a checkpoint, and what it needs that was not durable then."""

    checkpoint_id: int
    time: float
    behind: tuple[_Offer, ...]
    frozen: tuple[_Frozen, ...]

    @property
    def durable(self) -> bool:
        """Whether `TaskLog.acknowledge` has nothing to wait for."""
        return not self.behind and not self.frozen


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
        self,
        storage: Storage,
        job: str,
        settings: ChangelogSettings,
        uploader: SnapshotUploader,
        scratch: Path,
        copies: LocalCopies | None = None,
    ) -> None:
        """`copies` keeps every segment of the log on local disk, too."""
        self.figures = Figures()
        self._storage = storage
        self._settings = settings
        self._snapshots = uploader
        self._copies = copies
        place = open_storage(settings.storage.url, settings.storage.options) if settings.storage else None
        self._segments = LogUploader(storage, JobPaths(job), settings.upload_timeout, settings.upload_attempts, place)
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
        self._flush = 0
        self._closed = False
        self._wake = threading.Condition()
        self._materializing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, freeze: Freeze, thaw: Callable[[int, int], None], tidy: Callable[[int], None]) -> None:
        """Begin to work. `freeze` and `thaw` reach a slot: take a local snapshot, and let it go again.

        `tidy` has a slot make its state smaller, in its own time, before it is materialized.
        """
        self._freeze = freeze
        self._tidy = tidy
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

    def slot_starts(self, spec: SlotSpec) -> None:
        """A slot is about to come up: of what an earlier one prepared, nothing will commit any more."""
        with self._wake:
            if spec.generation != self._generation:
                self._forget_generation(spec.generation)
            self.committed(spec.decided_batch)  # a slot may die between the decision and our hearing of it
            for operator in spec.operators:
                self._replace_offer((operator.uid, spec.index), None)

    def slot_opened(self, spec: SlotSpec, states: dict[str, list[dict[str, Any]]], changed: Container[str]) -> None:
        """The slot is up; `states` describes what its operators keep.

        Operators that are `changed` declare their states otherwise than the checkpoint they were restored from.
        """
        with self._wake:
            interval = self._settings.materialization_interval
            # Spread over the subtasks, so that they do not all upload at once.
            due = time.monotonic() + interval * (spec.index + 1) / spec.parallelism
            known = self._slots.get(spec.index)
            described = {uid: tuple(some) for uid, some in states.items()}
            self._slots[spec.index] = _Slot(spec, described, known.due if known else due)
            for operator in spec.operators:
                subtask = (operator.uid, spec.index)
                if subtask not in self._book:
                    self._open(subtask, spec, operator.uid in changed)

    def _open(self, subtask: Subtask, spec: SlotSpec, changed: bool) -> None:
        restored = [state for state in spec.restore if state.operator == subtask[0]]
        files = [file for state in restored for file in state.files] if spec.restore_owned else []
        base: list[StateFile] | None = None
        segments: list[StateFile] = []
        whole = spec.restore_owned and not changed and not spec.rescaled
        if whole and (spec.log_complete or spec.decided_batch == spec.restore_batch):
            base = [file for file in files if not file.is_segment]
            segments = [file for file in files if file.is_segment] + [
                file for uid, file in spec.log if uid == subtask[0]
            ]
        self._book.open(subtask, base, segments, restored=files)
        self._snapshots.forget([subtask])
        self._snapshots.start_from(subtask, restored, spec.restore_owned)

    def _forget_generation(self, generation: int) -> None:
        """What belonged to an older generation is nobody's: no checkpoint will ever name it."""
        for subtask in self._book.subtasks():
            self._replace_offer(subtask, None)
            self._book.close(subtask)
        for offer in self._behind:
            offer.void = True
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

    def _delete(self, paths: Sequence[str]) -> None:
        try:
            delete_files(self._storage, paths)
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
            while True:
                self._persist([*self._behind, *offers])
                behind = sum(offer.sealed.size for offer in (*self._behind, *offers) if offer.error)
                if behind <= self._settings.max_behind_bytes or self._closed:
                    break
                log.warning("%d bytes of the changelog are not durable: processing waits for storage", behind)
            self.figures.wait_ms += (time.monotonic() - started) * 1000
            return {offer.subtask: (offer.durable, offer.file) for offer in offers}

    def _persist(self, offers: Sequence[_Offer]) -> None:
        """Try to make segments durable; holds the lock except while it waits."""
        for offer in offers:
            offer.error = None
        self._flush += 1
        self._wake.notify_all()
        self._wake.wait_for(lambda: self._closed or all(map(_over, offers)))
        self._flush -= 1

    def committed(self, batch: int) -> None:
        """The batch is decided: its segments are part of the log."""
        with self._wake:
            for subtask, offer in list(self._offers.items()):
                if offer.sealed.batch != batch or offer.void:
                    continue
                del self._offers[subtask]
                if not offer.durable:
                    self._fall_behind(offer)
                elif offer.file is not None:
                    self._append(offer, offer.file)
            self._decided = max(self._decided, batch)

    def _fall_behind(self, offer: _Offer) -> None:
        try:
            offer.keep()
            self._behind.append(offer)
        except OSError as error:
            offer.void = True
            self._book.open(offer.subtask, None, ())
            log.warning("batch %d of %s is lost to the log: %s", offer.sealed.batch, offer.subtask, error)

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
                files = [segment_file(offer.sealed.batch, handle) for offer, handle in zip(taken, handles, strict=True)]
            except (StorageError, OSError) as problem:
                error = problem if isinstance(problem, StorageError) else StorageError(str(problem))
                log.warning("%s", error)
            with self._wake:
                unwanted = self._uploaded(taken, files, error)
                self._wake.notify_all()
            if unwanted:
                self._delete(unwanted)

    def _ready(self) -> bool:
        waiting = [offer.sealed for offer in self._offers.values() if offer.waiting]
        if self._flush:
            return bool(waiting) or any(offer.waiting for offer in self._behind)
        here = Counter(_step(offer.sealed) for offer in self._offers.values())
        return any(here[_step(sealed)] == len(self._slots) for sealed in waiting)

    def _uploaded(self, taken: list[_Offer], files: list[StateFile], error: StorageError | None) -> list[str]:
        """Note how an upload ended; returns paths that nobody needs, nor has heard of."""
        for offer in taken:
            offer.uploading = False
            offer.error = error
        needed: set[str] = set()
        for offer, file in zip(taken, files, strict=False):
            if offer.void:
                continue
            needed.update(paths_of([file]))
            self._book.hold(file)
            offer.file = file
            offer.durable = True
            if offer in self._behind:
                self._behind.remove(offer)
                self._append(offer, file)
                self._local.pop(file.identity)
                Path(offer.sealed.path).unlink(missing_ok=True)
        return sorted(set(paths_of(files)) - needed)

    def _append(self, offer: _Offer, file: StateFile) -> None:
        self._book.append(offer.subtask, file)
        self._local[file.identity] = path = Path(offer.sealed.path)
        if self._copies is not None:
            self._copies.keep(file.identity, path)

    # --- checkpoints -----------------------------------------------------------------------------

    def barrier(self, checkpoint_id: int) -> Barrier:
        """Take the barrier of a checkpoint: it names what the log holds now, whatever is committed later.

        Called while nothing can be committed. States without a materialization are frozen, so that they get one.
        """
        with self._wake:
            self._book.barrier(checkpoint_id)
            behind = tuple(
                offer for offer in self._behind if offer.sealed.batch > self._book.log(offer.subtask).base_batch
            )
            missing = sorted({index for _operator, index in self._book.without_base()})
        frozen: list[_Frozen] = []
        try:
            for index in missing:
                frozen.append(self._frozen(index))
        except BaseException:
            self._thaw_all(frozen)
            raise
        return Barrier(checkpoint_id, time.time(), behind, tuple(frozen))

    def acknowledge(self, barrier: Barrier) -> list[SubtaskAck]:
        """The acknowledgements of all subtasks, once everything that was committed at the barrier is durable.

        Raises whatever prevents that: `StorageError`, or `CheckpointError` if the checkpoint was given up meanwhile.
        """
        late = {} if barrier.durable else self._catch_up(barrier)
        with self._wake:
            named = self._book.acknowledge(barrier.checkpoint_id, late)
            now = time.time()
            acks = []
            for at, entry in enumerate(named.entries):
                operator, index = entry.subtask
                slot = self._slots[index]
                spec = slot.spec
                state = SubtaskState(
                    operator=operator,
                    subtask=index,
                    key_group_start=spec.key_groups.start,
                    key_group_end=spec.key_groups.stop,
                    backend=spec.backend.kind,
                    incremental=spec.backend.shares_files,
                    files=entry.files,
                    states=slot.states.get(operator, ()),
                )
                acks.append(
                    SubtaskAck(
                        state=state,
                        uploaded=(),
                        barrier_time=barrier.time,
                        ack_time=now,
                        sync_ms=0.0,
                        async_ms=(now - barrier.time) * 1000,
                        checkpointed_bytes=entry.new_bytes,
                        full_bytes=entry.full_bytes,
                        beforehand=named.beforehand if at == 0 else (),
                        obsolete=named.obsolete if at == 0 else (),
                    )
                )
            return acks

    def _catch_up(self, barrier: Barrier) -> dict[Subtask, list[StateFile]]:
        """Make durable what was not at the barrier."""
        late: dict[Subtask, list[StateFile]] = {}
        try:
            with self._wake:
                self._persist(barrier.behind)
                failed = next((offer.error for offer in barrier.behind if offer.error), None)
            if failed is not None:
                raise failed
            for frozen in barrier.frozen:
                for ack in self._make_durable(frozen):
                    late[ack.state.operator, frozen.index] = list(ack.state.files)
        finally:
            self._thaw_all(barrier.frozen)
        materialized = set(late)
        for offer in barrier.behind:
            if offer.subtask not in materialized and offer.file is not None:
                late.setdefault(offer.subtask, []).append(offer.file)
        return late

    def completed(self, checkpoint_id: int) -> None:
        with self._wake:
            lost = self._book.completed(checkpoint_id)
            # Nothing of what these subtasks had uploaded can be relied on any more.
            self._snapshots.forget(lost)
        if self._copies is not None:
            self._copies.prune(self._identities)
        if lost:
            log.warning("checkpoint %d names other files of %s: they are materialized anew", checkpoint_id, lost)

    def _identities(self) -> set[str]:
        with self._wake:
            return self._book.identities()

    def aborted(self, checkpoint_id: int) -> None:
        with self._wake:
            self._book.aborted(checkpoint_id)

    # --- materialization -----------------------------------------------------------------------------

    def _materialize_loop(self) -> None:
        merge_from = 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed, TICK)
                if self._closed:
                    return
                index = self._next_due()
            if index is None:
                if time.monotonic() >= merge_from:
                    merge_from = time.monotonic() + (0.0 if self._merge_if_many() else REST)
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
        with self._wake:
            slot = self._slots.get(index)
            if slot is None:
                return
            slot.due = time.monotonic() + self._settings.materialization_interval
            logs = [self._book.log((op.uid, index)) for op in slot.spec.operators]
            if all(known.base is not None and not known.segments for known in logs):
                return
        self._tidy(index)
        frozen = self._frozen(index)
        try:
            self._make_durable(frozen)
        finally:
            self._thaw_all([frozen])

    def _frozen(self, index: int) -> _Frozen:
        """A slot's state, as it is now."""
        with self._wake:
            book = self._book
            slot = self._slots.get(index)
            if slot is None:
                raise CheckpointError(f"slot {index} is not here any more")
            logs = {op.uid: book.log((op.uid, index)) for op in slot.spec.operators}
        number = time.time_ns() // 1000
        return _Frozen(index, number, book, logs, self._freeze(index, number))

    def _make_durable(self, frozen: _Frozen) -> list[SubtaskAck]:
        """Upload a frozen state: its log is shorter from then on."""
        started = time.monotonic()
        with self._materializing:
            try:
                snapshots = frozen.files()
                acks = self._snapshots.upload(frozen.number, snapshots, lasting=True)
                states = [
                    (frozen.logs[ack.state.operator], ack.state, snapshot.report.batch)
                    for snapshot, ack in zip(snapshots, acks, strict=True)
                ]
                with self._wake:
                    used = self._book is frozen.book and self._book.materialized(states)
                    if used:
                        self._snapshots.completed(frozen.number, {})
                        self._forget_local()
            finally:
                self._snapshots.aborted(frozen.number)
        if not used:
            self._delete(sorted({handle.path for ack in acks for handle in ack.uploaded}))
            raise CheckpointError(f"slot {frozen.index} was started anew while its state was materialized")
        self.figures.materializations += 1
        self.figures.materialized_bytes += sum(ack.checkpointed_bytes for ack in acks)
        self.figures.last_materialization_ms = (time.monotonic() - started) * 1000
        return acks

    def _thaw_all(self, frozen: Iterable[_Frozen]) -> None:
        for one in frozen:
            self._thaw(one.index, one.number)

    # --- merging ---------------------------------------------------------------------------------

    def _merge_if_many(self) -> bool:
        """Put segments of a long log together, so that checkpoints name few, and overwritten changes go.

        False if it could not be done.
        """
        with self._wake:
            incomplete = {offer.subtask for offer in self._behind}  # what comes late belongs between the others
            found = next(
                (
                    (subtask, known, run)
                    for subtask in self._book.subtasks()
                    if subtask not in incomplete
                    and (run := mergeable(known := self._book.log(subtask), self._local.__contains__))
                ),
                None,
            )
        if found is None:
            return True
        subtask, known, run = found
        target = self._scratch / f"{uuid.uuid4().hex}{SEGMENT_SUFFIX}"
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
            return False
        file = segment_file(batch, handle)
        with self._wake:
            self._local[file.identity] = target
            if self._copies is not None:
                self._copies.keep(file.identity, target)
            if self._book.merged(subtask, known, run, file):
                self.figures.merges += 1
            self._forget_local()
        return True

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
        if not has_local_file(file.identity) or (len(run) >= MERGE_AT_LEAST and file.size > size):
            break
        if size + file.size > AT_ONCE_BYTES:
            break
        run.insert(0, file)
        size += file.size
    return run if len(run) >= MERGE_AT_LEAST else []


def _over(offer: _Offer) -> bool:
    """Whether nobody need wait for it any more."""
    return offer.durable or offer.void or offer.error is not None


def _step(sealed: Sealed) -> tuple[str, int, int]:
    """The work that all slots do at the same time."""
    return sealed.operator, sealed.batch, sealed.round
