"""The job's log as data: a gapless sequence of takeovers and completions, and the state that follows from it."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from strandline.checkpoint.batch import generation_of, is_of
from strandline.checkpoint.metadata import BatchId, CheckpointId, Generation, Natural, Seconds
from strandline.errors import CheckpointError, FencedError

MetadataPath = Annotated[
    str, msgspec.Meta(pattern=r"\A(?:(?:(?!\.)[A-Za-z0-9._-]{1,200}/)?chk-(?:0|[1-9][0-9]{0,17})/)?_metadata\Z")
]
"""The `_metadata` of a checkpoint in the folder of a job, or of a savepoint. It cannot lead elsewhere."""


class CheckpointRef(msgspec.Struct, frozen=True):
    """A completed checkpoint, and the path of its metadata."""

    checkpoint_id: CheckpointId
    metadata_path: MetadataPath
    batch_id: BatchId
    origin: str | None = None
    """The root of its paths, if it is not the job's own checkpoint directory."""
    ours: bool = True
    """False if it was restored with `no_claim`. Then the job only reads it, and neither builds on it nor deletes it."""


class WentBack(msgspec.Struct, frozen=True):
    """A generation went back behind completed batches. What earlier generations wrote from `first` on is void."""

    first: BatchId
    """The first batch that the generation computes again."""
    generation: Generation

    def voids(self, batch: int) -> bool:
        """Whether rows of `batch` do not belong to the job's output any more."""
        return batch >= self.first and generation_of(batch) < self.generation


class Takeover(msgspec.Struct, frozen=True, kw_only=True, tag="takeover", tag_field="type"):
    """A driver began a new generation. From now on, no earlier generation can complete or delete anything.

    The entry repeats all facts about checkpoints, so that older entries may be deleted.
    """

    sequence: Natural
    generation: Generation
    owner: str
    time: Seconds
    nonce: str
    last_checkpoint_id: CheckpointId
    """No later checkpoint gets an id up to this one: the highest id of a completed checkpoint, or of a folder that an
    earlier driver left behind. 0 if there is none."""
    latest: CheckpointRef | None
    retained: tuple[CheckpointId, ...]
    """The ids of all retained checkpoints, newest last."""
    dropped: tuple[CheckpointId, ...] = ()
    """Checkpoints that the last completion dropped. Some of their files may still exist."""
    released: tuple[CheckpointId, ...] = ()
    """Checkpoints in the job's folder that belong to the user, because they were restored with `no_claim`. Only the
    user deletes them."""
    log_id: str | None = None
    """Tells this log from other logs of a job with the same name. None in an entry that an older release wrote."""
    sinks_since: Generation = 0
    """The last generation that was told by `restore=` to go on from a checkpoint of the job. It takes the folders of
    sinks over from another log that had them before. 0 if there was none."""
    went_back: tuple[WentBack, ...] = ()
    """What the job's generations took back, oldest first. Without those that a later one includes."""
    epochs: bool = False
    """Whether durable epochs behind `latest` belong to the job. They are of the generation of its batch. True if the
    generation resumes, as long as no checkpoint includes them. False in an entry that an older release wrote."""


class Completed(msgspec.Struct, frozen=True, kw_only=True, tag="completed", tag_field="type"):
    """A checkpoint is complete. Its sink rows may be published, and the dropped checkpoints deleted."""

    sequence: Natural
    generation: Generation
    checkpoint_id: CheckpointId
    metadata_path: MetadataPath
    batch_id: BatchId
    time: Seconds
    nonce: str
    retained: tuple[CheckpointId, ...]
    """The ids of all checkpoints that are retained from now on, newest last, including this one."""
    dropped: tuple[CheckpointId, ...]
    """The ids that are not retained any more, oldest first."""
    released: tuple[CheckpointId, ...] = ()
    """As in `Takeover`."""
    owner: str = ""
    """Who began the generation. Empty in an entry that an older release wrote."""
    began: Seconds | None = None
    """When the generation began, so that the entry of its takeover may be deleted: the earlier of the driver's and the
    storage's time of the takeover. None in an entry that an older release wrote."""
    log_id: str | None = None
    """As in `Takeover`, and so the next two."""
    sinks_since: Generation = 0
    went_back: tuple[WentBack, ...] = ()


Entry: TypeAlias = Takeover | Completed


class _Envelope(msgspec.Struct, frozen=True):
    crc32: str
    entry: msgspec.Raw


_envelopes = msgspec.json.Decoder(_Envelope)
_entries: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """The content of the entry's file: one line of JSON, with a checksum beside the entry."""
    body = msgspec.json.encode(entry)
    return msgspec.json.encode(_Envelope(_checksum(body), msgspec.Raw(body))) + b"\n"


def decode_entry(data: bytes, where: str) -> Entry:
    """Read an entry's file; `where` names it in messages. Raises `CheckpointError` if it is damaged."""
    try:
        envelope = _envelopes.decode(data)
        if _checksum(bytes(envelope.entry)) != envelope.crc32:
            raise _damaged(where, "its checksum is wrong")
        entry = _entries.decode(envelope.entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(where, str(error)) from error
    latest = entry.latest if isinstance(entry, Takeover) else None
    if latest is not None and latest.ours and latest.origin is not None:
        raise _damaged(where, "it calls a checkpoint in another folder the job's own")
    return entry


class Verdict(enum.Enum):
    """Whose entry is at a position of the log."""

    OURS = "ours"
    FENCED = "fenced"


def judge_conflict(expected_nonce: str, found: Entry) -> Verdict:
    """Decide who won a log entry that existed already, or whose creation had an unknown outcome.

    `found` is the entry as read back. If it carries our nonce, our write took effect. Otherwise another driver was
    first: a completion is fenced, and a takeover may be tried again after the entry that was found.
    """
    return Verdict.OURS if found.nonce == expected_nonce else Verdict.FENCED


def fenced_error(job: str, generation: int, found: Entry) -> FencedError:
    """The error that stops a driver of `generation` when it finds `found` instead of its own entry."""
    by = f"driver {found.owner!r}" if isinstance(found, Takeover) else "another driver"
    return FencedError(
        f"Job {job!r}: {by} took the job over as generation {found.generation} (log entry {found.sequence}), so this "
        f"run, generation {generation}, stops; it has completed and deleted nothing since. "
        "To run both, give them different job names or checkpoint directories."
    )


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a generation starts from, and what happens to the job's other checkpoints."""

    latest: CheckpointRef | None
    retained: tuple[int, ...]
    released: tuple[int, ...]
    generation_above: int = 0
    """The new generation is also greater than this one, so that no batch id of the checkpoint's history is reused."""
    number_above: int = 0
    """The ids of new checkpoints are also greater than this one, so that no folder of a dead driver is used again."""
    takes_sinks: bool = False
    """Whether the user named the checkpoint, so that folders of sinks are taken over from another log of the job."""
    epochs: bool = False
    """Whether the generation also has the durable epochs behind the checkpoint."""
    elsewhere: bool = False
    """Whether the checkpoint is not in the job's own folder. Then this log does not know what is in its history."""
    other: JobLog | None = None
    """The log of the checkpoint, if it is another log of the same job."""


@dataclass(frozen=True, slots=True)
class JobLog:
    """The state of the job after the entries up to `position`. Every method returns a new value.

    Apply an entry only when it is known to be won.
    """

    position: int = -1
    """The sequence number of the last entry; -1 for an empty log."""
    generation: int = 0
    owner: str = ""
    last_checkpoint_id: int = 0
    latest: CheckpointRef | None = None
    """The newest completed checkpoint."""
    retained: tuple[int, ...] = ()
    """The ids of all retained checkpoints, newest last."""
    dropped: tuple[int, ...] = ()
    """Checkpoints that the newest completion dropped. After a crash some of their files may exist: drop them again."""
    released: tuple[int, ...] = ()
    """Checkpoints in the job's folder that belong to the user."""
    began: float | None = None
    """When the generation began; None if an older release wrote the newest entry."""
    nonce: str = ""
    """The nonce of the last entry, which says who wrote it."""
    log_id: str | None = None
    """Tells this log from other logs of a job with the same name. None before the first takeover of this release."""
    sinks_since: int = 0
    """The last generation that may take the folders of sinks over from another log."""
    went_back: tuple[WentBack, ...] = ()
    """What the generations so far took back."""
    epochs: bool = False
    """Whether durable epochs behind `latest` belong to the job; see `Takeover`."""

    @classmethod
    def replay(cls, entries: Iterable[Entry]) -> JobLog:
        """The state after `entries`, in sequence. The first may have any number, because old entries are deleted.

        Raises `CheckpointError` at a gap, or at an entry that contradicts an earlier one.
        """
        log = cls()
        for entry in entries:
            log = log._start(entry) if log.position < 0 else log.apply(entry)
        return log

    @property
    def next_sequence(self) -> int:
        """The number of the next entry."""
        return self.position + 1

    @property
    def next_checkpoint_id(self) -> int:
        """The lowest id that no completed checkpoint has used."""
        return self.last_checkpoint_id + 1

    def apply(self, entry: Entry) -> JobLog:
        """The state after one more entry. Raises `CheckpointError` if it cannot follow."""
        if entry.sequence != self.next_sequence:
            raise CheckpointError(
                f"The job's log has a gap: entry {entry.sequence} follows entry {self.position}, entry "
                f"{self.next_sequence} is missing. {_RESTORE_LOG}"
            )
        if isinstance(entry, Takeover):
            if entry.generation <= self.generation:
                raise self._contradiction(entry, f"it begins generation {entry.generation} after {self.generation}")
            return self._start(entry)
        if entry.generation != self.generation:
            raise self._contradiction(
                entry, f"generation {entry.generation} completes a checkpoint in generation {self.generation}"
            )
        if entry.checkpoint_id <= self.last_checkpoint_id:
            raise self._contradiction(
                entry, f"checkpoint {entry.checkpoint_id} completes after checkpoint {self.last_checkpoint_id}"
            )
        return self._start(entry)

    def resume(self) -> Start:
        """Start from the newest completed checkpoint and the epochs behind it, or from what was restored last."""
        return Start(self.latest, self.retained, self.released, epochs=self.epochs)

    def go_back(self, ref: CheckpointRef) -> Start:
        """Start from an older retained checkpoint of the job.

        The sink rows of newer checkpoints are withdrawn, so they can never be restored again. The newer checkpoints
        are neither retained nor deleted: their files become orphans.
        """
        return Start(ref, tuple(n for n in self.retained if n <= ref.checkpoint_id), self.released)

    def restore_own(self, ref: CheckpointRef, *, claim: bool) -> Start:
        """Start from a checkpoint in the job's own folder that the user named. Newer ones become orphans.

        With `claim` the job retains it. Otherwise it is released to the user, and all older ones with it.
        Raises `CheckpointError` if the job has dropped it, or has gone back to an older one.
        """
        number = ref.checkpoint_id
        known = {*self.retained, *self.released}
        if number not in known:
            raise CheckpointError(
                f"checkpoint {number} cannot be restored: the job has dropped it since, or went back to an older one "
                f"and withdrew its rows. Can be restored: {', '.join(map(str, sorted(known))) or 'none'}."
            )
        older = {n for n in known if n <= number}
        released = {n for n in self.released if n != number or not claim}
        if not claim:
            return Start(msgspec.structs.replace(ref, ours=False), (), tuple(sorted(released | older)))
        return Start(ref, tuple(sorted({*self.retained, number} & older)), tuple(sorted(released)))

    def restore_other(self, ref: CheckpointRef, generation_above: int, other: JobLog | None = None) -> Start:
        """Start from a checkpoint in another folder, which is the user's. The job's own ones are released, too.

        `other` is the log of the checkpoint, if it is a log of the same job.
        """
        released = tuple(sorted({*self.released, *self.retained}))
        ref = msgspec.structs.replace(ref, ours=False)
        return Start(ref, (), released, generation_above, elsewhere=True, other=other)

    def takeover_entry(self, owner: str, now: float, nonce: str, start: Start | None = None) -> Takeover:
        """The entry with which `owner` begins the next generation, from `start` or from `resume()`."""
        start = start or self.resume()
        generation = max(self.generation, start.generation_above) + 1
        restored = start.latest.checkpoint_id if start.latest is not None else 0
        return Takeover(
            sequence=self.next_sequence,
            generation=generation,
            owner=owner,
            time=now,
            nonce=nonce,
            last_checkpoint_id=max(self.last_checkpoint_id, restored, start.number_above),
            latest=start.latest,
            retained=start.retained,
            dropped=tuple(n for n in self.dropped if n not in {*start.retained, *start.released}),
            released=start.released,
            log_id=self.log_id or nonce,
            sinks_since=generation if start.takes_sinks else self.sinks_since,
            went_back=self._went_back(start, generation),
            epochs=start.epochs,
        )

    def goes_back(self, start: Start) -> bool:
        """Whether a completed checkpoint covers batches that the job computes again after `start`."""
        completed = [log.latest.batch_id for log in (self, start.other) if log is not None and log.latest is not None]
        return start.latest is not None and max(completed, default=-1) > start.latest.batch_id

    def _went_back(self, start: Start, generation: int) -> tuple[WentBack, ...]:
        if start.latest is None:
            return ()
        batch = start.latest.batch_id
        known = self.went_back
        if start.elsewhere:
            known = start.other.went_back if start.other is not None else ()
        # A user may have restored a savepoint with void rows before they were withdrawn. Then they are not void.
        known = tuple(one for one in known if not one.voids(batch))
        if not self.goes_back(start):
            return known
        return (*(one for one in known if one.first <= batch), WentBack(batch + 1, generation))

    def completion_entry(
        self,
        checkpoint_id: int,
        metadata_path: str,
        batch_id: int,
        now: float,
        nonce: str,
        retained: tuple[int, ...],
        dropped: tuple[int, ...],
        began: float | None = None,
    ) -> Completed:
        """The entry with which the driver of this generation completes a checkpoint.

        `began` is when the generation began, if the storage's clock says that it was earlier than the takeover says.
        Raises `CheckpointError` before the first takeover, or if the checkpoint is older than a completed one.
        """
        if self.generation == 0:
            raise CheckpointError("A driver must take the job over before it can complete a checkpoint.")
        entry = Completed(
            sequence=self.next_sequence,
            generation=self.generation,
            checkpoint_id=checkpoint_id,
            metadata_path=metadata_path,
            batch_id=batch_id,
            time=now,
            nonce=nonce,
            retained=retained,
            dropped=dropped,
            released=self.released,
            owner=self.owner,
            began=self.began if began is None else began,
            log_id=self.log_id,
            sinks_since=self.sinks_since,
            went_back=self.went_back,
        )
        self.apply(entry)
        return entry

    def _start(self, entry: Entry) -> JobLog:
        if isinstance(entry, Takeover):
            return JobLog(
                position=entry.sequence,
                generation=entry.generation,
                owner=entry.owner,
                last_checkpoint_id=entry.last_checkpoint_id,
                latest=entry.latest,
                retained=entry.retained,
                dropped=entry.dropped,
                released=entry.released,
                began=entry.time,
                nonce=entry.nonce,
                log_id=entry.log_id,
                sinks_since=entry.sinks_since,
                went_back=entry.went_back,
                epochs=entry.epochs,
            )
        if entry.checkpoint_id not in entry.retained or set(entry.retained) & set(entry.dropped):
            raise self._contradiction(
                entry,
                f"checkpoint {entry.checkpoint_id} completes with {entry.retained} retained, {entry.dropped} dropped",
            )
        return JobLog(
            position=entry.sequence,
            generation=entry.generation,
            owner=entry.owner or self.owner,
            last_checkpoint_id=entry.checkpoint_id,
            latest=CheckpointRef(entry.checkpoint_id, entry.metadata_path, entry.batch_id),
            retained=entry.retained,
            dropped=entry.dropped,
            released=entry.released,
            began=entry.began,
            nonce=entry.nonce,
            log_id=entry.log_id,
            sinks_since=entry.sinks_since,
            went_back=entry.went_back,
            # The epochs of an earlier generation end with the checkpoint that a later one makes of them.
            epochs=is_of(entry.batch_id, entry.generation),
        )

    def _contradiction(self, entry: Entry, what: str) -> CheckpointError:
        return CheckpointError(
            f"Entry {entry.sequence} of the job's log contradicts the entries before it: {what}. {_RESTORE_LOG}"
        )


_RESTORE_LOG = (
    "Put the log directory back from a copy, or start the job under a new name from a checkpoint's path (restore=...)."
)


def _checksum(body: bytes) -> str:
    return f"{zlib.crc32(body):08x}"


def _damaged(where: str, how: str) -> CheckpointError:
    return CheckpointError(f"{where}, an entry of the job's log, is damaged: {how}. {_RESTORE_LOG}")
