"""The job's log as data: a dense sequence of takeovers and completions that says where the job stands."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from strandline.errors import CheckpointError, FencedError


class CheckpointRef(msgspec.Struct, frozen=True):
    """A completed checkpoint, and where its metadata is."""

    checkpoint_id: int
    metadata_path: str
    batch_id: int
    origin: str | None = None
    """The root that the paths are relative to, if it is not the job's own checkpoint directory."""
    ours: bool = True
    """False if it was restored with `no_claim`: it is read, but never built upon, and never deleted."""


class Takeover(msgspec.Struct, frozen=True, kw_only=True, tag="takeover", tag_field="type"):
    """A driver began a new generation: from here on, no earlier one can complete or delete anything.

    It repeats what is known about checkpoints, so that everything before it may be cut off.
    """

    sequence: int
    generation: int
    owner: str
    time: float
    nonce: str
    last_checkpoint_id: int
    """The highest id that was completed so far; 0 if none was."""
    latest: CheckpointRef | None
    retained: tuple[int, ...]
    """The ids of all retained checkpoints, newest last."""
    dropped: tuple[int, ...] = ()
    """Dropped by the last completion; their files may not all be deleted yet."""
    released: tuple[int, ...] = ()
    """In the job's folder, but the user's: restored with `no_claim`. Only the user deletes them."""


class Completed(msgspec.Struct, frozen=True, kw_only=True, tag="completed", tag_field="type"):
    """A checkpoint is complete: its sink rows may be published, and the dropped checkpoints deleted."""

    sequence: int
    generation: int
    checkpoint_id: int
    metadata_path: str
    batch_id: int
    time: float
    nonce: str
    retained: tuple[int, ...]
    """The ids of all checkpoints that are retained from now on, newest last: this one is among them."""
    dropped: tuple[int, ...]
    """The ids that are not retained any more, oldest first."""
    released: tuple[int, ...] = ()
    """As in `Takeover`."""


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
        return _entries.decode(envelope.entry)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(where, str(error)) from error


class Verdict(enum.Enum):
    """Who won a place in the log."""

    OURS = "ours"
    FENCED = "fenced"


def judge_conflict(expected_nonce: str, found: Entry) -> Verdict:
    """Decide what it means that an entry is there already, or that the outcome of creating it was unknown.

    Read the entry back and hand it in. If it carries our nonce, our write took effect. If not, another driver was
    first: a completion is fenced; a takeover may be tried again behind what was found.
    """
    return Verdict.OURS if found.nonce == expected_nonce else Verdict.FENCED


def fenced_error(job: str, generation: int, found: Entry) -> FencedError:
    """The error with which a driver of `generation` stops when it finds `found` in the place of its own entry."""
    by = f"driver {found.owner!r}" if isinstance(found, Takeover) else "another driver"
    return FencedError(
        f"Job {job!r}: {by} took the job over as generation {found.generation} (log entry {found.sequence}), so this "
        f"run, generation {generation}, stops; it has completed and deleted nothing since. "
        "If both runs should live, give them different job names or checkpoint directories."
    )


@dataclass(frozen=True, slots=True)
class Start:
    """What a generation goes on from, and what becomes of the job's other checkpoints."""

    latest: CheckpointRef | None
    retained: tuple[int, ...]
    released: tuple[int, ...]
    generation_above: int = 0
    """The new generation is above this one too: no batch id of the checkpoint's own history is used again."""


@dataclass(frozen=True, slots=True)
class JobLog:
    """What the entries up to `position` say. Each step gives a new value: apply an entry once it is known to be won."""

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
    """Dropped by the newest completion. After a crash some of their files may still be there: drop them again."""
    released: tuple[int, ...] = ()
    """Checkpoints in the job's folder that belong to the user."""

    @classmethod
    def replay(cls, entries: Iterable[Entry]) -> JobLog:
        """The state after `entries`, in sequence; the first may have any number, for older ones may be cut off.

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
        """The lowest id that no completed checkpoint has had."""
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
        return replace(self._start(entry), owner=self.owner)

    def resume(self) -> Start:
        """Go on from the newest completed checkpoint, or from the one that was restored last."""
        return Start(self.latest, self.retained, self.released)

    def go_back(self, ref: CheckpointRef) -> Start:
        """Go on from an older retained checkpoint of the job.

        Sink rows of the newer ones are withdrawn, so nobody may go on from them any more. They are not retained, and
        not deleted either: their files are orphans.
        """
        return Start(ref, tuple(n for n in self.retained if n <= ref.checkpoint_id), self.released)

    def restore_own(self, ref: CheckpointRef, *, claim: bool) -> Start:
        """Go on from a checkpoint in the job's own folder that the user named, newer ones being orphans then.

        With `claim` it counts as retained; otherwise it is released to the user with all the older ones.
        Raises `CheckpointError` if the job has dropped it, or has gone back behind it.
        """
        number = ref.checkpoint_id
        known = {*self.retained, *self.released}
        if number not in known:
            raise CheckpointError(
                f"checkpoint {number} cannot be restored: the job has dropped it since, or went back to an older one "
                f"and withdrew its rows. Those that can be: {', '.join(map(str, sorted(known))) or 'none'}."
            )
        older = {n for n in known if n <= number}
        released = {n for n in self.released if n != number or not claim}
        if not claim:
            return Start(msgspec.structs.replace(ref, ours=False), (), tuple(sorted(released | older)))
        return Start(ref, tuple(sorted({*self.retained, number} & older)), tuple(sorted(released)))

    def restore_other(self, ref: CheckpointRef, generation_above: int) -> Start:
        """Go on from a checkpoint of another folder; it stays the user's. The job's own ones are released, too."""
        released = tuple(sorted({*self.released, *self.retained}))
        return Start(msgspec.structs.replace(ref, ours=False), (), released, generation_above)

    def takeover_entry(self, owner: str, now: float, nonce: str, start: Start | None = None) -> Takeover:
        """The entry with which `owner` begins the next generation, from `start` or from where the job stands."""
        start = start or self.resume()
        restored = start.latest.checkpoint_id if start.latest is not None else 0
        return Takeover(
            sequence=self.next_sequence,
            generation=max(self.generation, start.generation_above) + 1,
            owner=owner,
            time=now,
            nonce=nonce,
            last_checkpoint_id=max(self.last_checkpoint_id, restored),
            latest=start.latest,
            retained=start.retained,
            dropped=tuple(n for n in self.dropped if n not in start.retained),
            released=start.released,
        )

    def completion_entry(
        self,
        checkpoint_id: int,
        metadata_path: str,
        batch_id: int,
        now: float,
        nonce: str,
        retained: tuple[int, ...],
        dropped: tuple[int, ...],
    ) -> Completed:
        """The entry with which the driver of this generation completes a checkpoint.

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
            )
        if entry.checkpoint_id not in entry.retained or set(entry.retained) & set(entry.dropped):
            raise self._contradiction(
                entry,
                f"checkpoint {entry.checkpoint_id} completes with {entry.retained} retained, {entry.dropped} dropped",
            )
        return JobLog(
            position=entry.sequence,
            generation=entry.generation,
            last_checkpoint_id=entry.checkpoint_id,
            latest=CheckpointRef(entry.checkpoint_id, entry.metadata_path, entry.batch_id),
            retained=entry.retained,
            dropped=entry.dropped,
            released=entry.released,
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
