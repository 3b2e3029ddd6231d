"""A target that can do one atomic write with a marker in it: rows are there exactly once, whatever fails.

The marker says which rows of the job the target has. Every write adds rows and replaces the marker in one step, and
only if the marker is the one that the driver has seen. So a write that is repeated changes nothing, and a driver that
was taken over while it stood still cannot write: its successor has replaced the marker.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

import msgspec

from strandline.checkpoint.batch import generation_of
from strandline.checkpoint.job_log import JobLog
from strandline.checkpoint.metadata import (
    BatchId,
    CheckpointId,
    CheckpointMetadata,
    Generation,
    KnownGeneration,
    SinkFile,
)
from strandline.decoding import json_decoder
from strandline.errors import (
    DirectoryNotOursError,
    FencedError,
    IncompatibleCheckpointError,
    MarkerMovedError,
    SinkAheadError,
    SinkError,
    SinkFilesMissingError,
)
from strandline.sinks.base import SinkCommit, SinkContext, SinkStart, SinkTakeover, SinkTarget
from strandline.sinks.dropped import DroppedRows
from strandline.sinks.names import batch_of
from strandline.sinks.positions import position_in
from strandline.sinks.staging import StagingArea, waiting_rows
from strandline.storage.retries import Retries

logger = logging.getLogger(__name__)

_MOST_RACES = 10
"""How often a write is tried while somebody else keeps changing the marker."""


class Marker(msgspec.Struct, frozen=True):
    """What a target says about the rows of one job that it has."""

    job: str
    log_id: str | None
    """The log of the job that may write; see `JobLog`."""
    generation: KnownGeneration
    """The generation that may write. Earlier ones are fenced."""
    checkpoint: CheckpointId = 0
    """The last checkpoint whose rows are there; 0 before the first."""
    batch: BatchId = -1
    """The last batch whose rows are there; -1 before the first."""

    def encoded(self) -> str:
        """The marker as text, for targets that keep a text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decoded(cls, text: str, where: str) -> Marker:
        """Reads what `encoded` made. Raises `DirectoryNotOursError` if it is damaged; `where` says where it is."""
        try:
            return json_decoder(cls).decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DirectoryNotOursError(
                f"{where} has a damaged marker of a job, so it is not known which rows it has: {error}. Bring it back "
                "from a backup, or give the sink another target."
            ) from error


class MarkedTarget(SinkTarget):
    """The base of targets with a marker. A subclass has `check_target`, `prepare`, `committed` and `commit`."""

    replays: bool = False
    """Whether rows that arrive again lead to the same content, because the last row of a key counts. Then the job may
    go back without being asked."""

    def __init__(self, context: SinkContext, place: str, staging: StagingArea | None = None) -> None:
        """`staging` is where the stager of the sink puts rows; by default the job's checkpoint folder."""
        self.place = place
        self.job = context.job
        self.staging = staging or waiting_rows(context, place)
        self._dropped = DroppedRows(context, place)
        self._seen: Marker | None = None
        self._claims: tuple[str | None, Generation] | None = None
        """The log and the generation for which this target has tried to write the marker."""
        self.reached = False
        """Whether the run was let into the target before. Then a refusal of the connection may pass."""
        self._accepted = -1
        """The last batch that the target may have when the job goes on: `check` has seen it."""
        self._last_seen = -1
        """The last batch that this driver has seen in the target since it claimed it, or has written there."""

    # --- what a target does -----------------------------------------------------------------------

    @abstractmethod
    def check_target(self) -> None:
        """Raise an error unless the target can be reached and fits the rows. Changes nothing.

        A target that does not exist yet is fine if `prepare` can make it.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Make what is missing: the table, and the place of the marker."""

    @abstractmethod
    def committed(self) -> Marker | None:
        """The marker of the job; None if there is none, or nothing that could hold one."""

    @abstractmethod
    def commit(self, staged: Sequence[SinkFile], marker: Marker, replaces: Marker | None) -> None:
        """Add the rows of `staged` and put `marker` in the place of `replaces`, both or neither.

        `staged` is in the order in which the rows were written, and may be empty. Raises `MarkerMovedError`, and
        changes nothing, if the target's marker is another one than `replaces`. Raises `SinkError` for what may pass,
        and `StorageRefusedError` for what the target would refuse again.
        """

    def settle(self, generation: Generation) -> None:
        """Delete what commits of this and of earlier generations have written that did not take effect.

        Called when the target is claimed and has all rows that it should have, so that none of these commits can take
        effect any more. Raises nothing: what cannot be deleted now is deleted by a later start.
        """

    @property
    def marker_home(self) -> str:
        """Where the marker is, for errors, if it is not in the place of the rows: ` in ...`."""
        return ""

    # --- for subclasses ---------------------------------------------------------------------------

    def check_not_moved(self, found: Marker | None, replaces: Marker | None) -> None:
        """Raise `MarkerMovedError` unless the marker that `commit` has found is the one that it is to replace."""
        if found != replaces:
            raise MarkerMovedError(f"{self.place}: another driver has written the marker of job {self.job!r}")

    # --- what the driver calls --------------------------------------------------------------------

    @property
    def can_go_back(self) -> bool:
        return self.replays

    @property
    def position(self) -> int | None:
        return self._seen.batch if self._seen is not None else None

    def check(self, start: SinkStart) -> int:
        self.reached = self.reached or start.reached
        self.check_target()
        marker = self._look()
        restored = start.restored
        if marker is not None:
            self._check_log(marker, start)
        if restored is None:
            if marker is not None and marker.batch >= 0 and not self.replays:
                raise DirectoryNotOursError(
                    f"{self.place} has rows of job {self.job!r} (up to checkpoint {marker.checkpoint}), but the job "
                    "has no checkpoint to go on from, so it would write them again. Bring the checkpoint back, give "
                    "the job another name or another target; or empty the target, with its marker."
                )
            return marker.generation if marker is not None else 0
        batch = marker.batch if marker is not None else -1
        self._check_complete(restored, batch, start.retries)
        if restored.job == self.job and position_in(restored, self.place) is None:
            logger.warning(
                "job %s: %s %d was taken without %s, which gets no rows of the batches before",
                self.job,
                restored.kind,
                restored.checkpoint_id,
                self.place,
            )
        if batch > restored.batch_id and not self._may_go_back(batch, start):
            assert marker is not None
            raise SinkAheadError(
                f"{restored.kind} {restored.checkpoint_id} of job {self.job!r} cannot be restored: {self.place} has "
                f"rows of later batches already (up to checkpoint {marker.checkpoint}). It cannot take them back, and "
                "the job would write them a second time. Go on from the newest checkpoint; or delete these rows "
                "yourself, and start with restore= and repeat_rows=True."
            )
        self._check_not_about_to_be_ahead(restored, start)
        self._accepted = max(batch, restored.batch_id)
        return marker.generation if marker is not None else 0

    def claim(self, log: JobLog) -> None:
        self.prepare()
        for _ in range(_MOST_RACES):
            found = self._look()
            if found is not None:
                self._check_not_later(found, log)
                if (found.log_id, found.generation) == (log.log_id, log.generation):
                    self._check_not_shared(log)
                    return
            self._claims = (log.log_id, log.generation)
            checkpoint, batch = (found.checkpoint, found.batch) if found is not None else (0, -1)
            if self._replace(found, Marker(self.job, log.log_id, log.generation, checkpoint, batch)):
                return
        raise self._too_many_races()

    def recover(self, takeover: SinkTakeover) -> None:
        restored, log = takeover.restored, takeover.log
        if restored is not None:
            files = tuple(file for file in restored.sink_files if file.sink == self.place)
            self.publish(SinkCommit(restored.checkpoint_id, restored.batch_id, files, log))
        found = self._look()
        published = found.batch if found is not None else -1
        self._go_back(restored, log)
        self.staging.discard(
            log.generation,
            takeover.check_not_fenced,
            lambda batches: self._note_dropped(batches, published, log.generation),
        )
        self.settle(log.generation)

    def publish(self, commit: SinkCommit) -> None:
        if not commit.files:
            return  # nothing is written, so it does not matter yet whose target it is
        for _ in range(_MOST_RACES):
            found = self._look()
            self._check_ours(found, commit.log)
            assert found is not None
            self._last_seen = found.batch
            staged = [file for file in commit.files if batch_of(file) > found.batch]
            if not staged:
                break
            marker = Marker(self.job, found.log_id, found.generation, commit.checkpoint, commit.batch)
            if self._replace(found, marker, staged):
                break
        else:
            raise self._too_many_races()
        self.staging.delete(commit.files)

    def check_still_ours(self, log: JobLog) -> None:
        self._check_ours(self._look(), log)

    # --- inside -----------------------------------------------------------------------------------

    def _look(self) -> Marker | None:
        self._seen = self.committed()
        return self._seen

    def _replace(self, found: Marker | None, marker: Marker, staged: Sequence[SinkFile] = ()) -> bool:
        """Write if the marker is still the one that was found; False if it is not."""
        try:
            self.commit(staged, marker, found)
        except MarkerMovedError:
            return False
        except SinkFilesMissingError:
            if self.committed() == found:
                raise
            return False  # another driver has published the rows, and deleted them where they waited
        self._seen = marker
        self._last_seen = marker.batch
        return True

    def _note_dropped(self, batches: Sequence[int], published: int, generation: int) -> None:
        """Note that staged rows of batches after `published`, the last one in the target, never get there."""
        first = next((batch for batch in batches if batch > published), None)
        if first is not None:
            self._dropped.note(first, generation)

    def _may_go_back(self, batch: int, start: SinkStart) -> bool:
        """Whether rows up to `batch`, which the target has, may arrive again. An earlier start may have decided it."""
        return self.replays or start.repeat_rows or any(one.voids(batch) for one in start.log.went_back)

    def _check_not_about_to_be_ahead(self, restored: CheckpointMetadata, start: SinkStart) -> None:
        """Raise `SinkAheadError` if a driver that still runs may publish later rows before it is fenced."""
        latest = start.log.latest
        if latest is None or latest.batch_id <= restored.batch_id or self._may_go_back(latest.batch_id, start):
            return
        if self.staging.holds(restored.batch_id, latest.batch_id):
            raise SinkAheadError(
                f"{restored.kind} {restored.checkpoint_id} of job {self.job!r} cannot be restored: rows of checkpoint "
                f"{latest.checkpoint_id} are staged for {self.place}, and a run that is still alive may write them at "
                "any moment. Stop that run. If none is alive, start with restore= and repeat_rows=True: "
                "the staged rows are dropped."
            )

    def _go_back(self, restored: CheckpointMetadata | None, log: JobLog) -> None:
        """Have the marker say what the job goes on from, if the target has later rows: `check` has accepted that."""
        checkpoint, batch = (restored.checkpoint_id, restored.batch_id) if restored is not None else (0, -1)
        for _ in range(_MOST_RACES):
            found = self._look()
            self._check_ours(found, log)
            assert found is not None
            if found.batch <= batch:
                return
            if found.batch > self._accepted and not self.replays:
                raise SinkAheadError(
                    f"{self.place} got rows of checkpoint {found.checkpoint} of job {self.job!r} while the job was "
                    f"taken over to go back to checkpoint {checkpoint}, so it would get them a second time. Stop the "
                    "other run; then delete these rows, and start with restore= and repeat_rows=True."
                )
            logger.warning(
                "%s: job %s goes back to checkpoint %d, and rows of checkpoints up to %d arrive again",
                self.place,
                self.job,
                checkpoint,
                found.checkpoint,
            )
            if self._replace(found, Marker(self.job, found.log_id, found.generation, checkpoint, batch)):
                return
        raise self._too_many_races()

    def _check_log(self, marker: Marker, start: SinkStart) -> None:
        """Raise `DirectoryNotOursError` if the target belongs to another log of the job."""
        known = start.log
        if marker.log_id == known.log_id or start.takes_sinks or marker.generation < known.sinks_since:
            return
        raise DirectoryNotOursError(
            f"{self.place} has rows of job {self.job!r} from another checkpoint_dir: a job with that name runs, or "
            "ran, with the same target. To go on from that job, stop it and start this one with restore= and the path "
            "of its newest checkpoint, or of a savepoint. To run both, give them different names or targets. If the "
            "other checkpoint_dir is gone, bring it back; or empty the target, with its marker."
        )

    def _check_complete(self, restored: CheckpointMetadata, batch: int, retries: Retries) -> None:
        """Raise `SinkFilesMissingError` if rows that the checkpoint covers are neither in the target nor staged."""
        noted = position_in(restored, self.place)
        # A savepoint may take longer than a later checkpoint. Then it notes rows that it does not cover.
        if noted is not None and batch < min(noted, restored.batch_id):
            if self._seen is None:
                raise SinkFilesMissingError(
                    f"{restored.kind} {restored.checkpoint_id} of job {self.job!r} cannot be restored: {self.place} "
                    f"had more rows of the job when that checkpoint was taken than it has now: the job's marker"
                    f"{self.marker_home} is gone. Somebody deleted it or the target, made the target anew, or rolled "
                    "it back. Bring its newest state back. To begin anew without these rows, empty the target, and "
                    "give the job another checkpoint_dir."
                )
            raise SinkFilesMissingError(
                f"{restored.kind} {restored.checkpoint_id} of job {self.job!r} cannot be restored: {self.place} had "
                "more rows of the job when that checkpoint was taken than it has now. Perhaps it was emptied, or "
                "brought back from a backup. Bring its newest state back; or go on from a checkpoint as old as it is."
            )
        named = [file for file in restored.sink_files if file.sink == self.place]
        self._check_not_dropped(restored, [file for file in named if batch_of(file) <= batch], batch)
        files = [file for file in named if batch_of(file) > batch]
        strange = next((file for file in files if not self.staging.has_named(file)), None)
        if strange is not None:
            raise IncompatibleCheckpointError(
                f"{restored.kind} {restored.checkpoint_id} of job {self.job!r} cannot be restored: {strange.rows} rows "
                f"for {self.place} are staged as another mode= of the sink does it, in {strange.staged}. Start the job "
                "once with the sink as it was, which publishes them, and change it then."
            )
        for attempt in range(retries.tries):
            gone = self.staging.missing(files)
            if gone is None:
                return
            marker = self._look()
            if marker is not None and marker.batch > batch:  # a driver that still runs has published them meanwhile
                self._check_complete(restored, marker.batch, retries)
                return
            if attempt < retries.tries - 1:
                retries.pause(attempt)  # some stores show files late
        assert gone is not None
        raise SinkFilesMissingError(
            f"{restored.kind} {restored.checkpoint_id} of job {self.job!r} cannot be restored: it covers {gone.rows} "
            f"rows for {self.place} which are not there, and {gone.staged}, where they waited, is missing. Bring the "
            "file back, or restore another checkpoint."
        )

    def _check_not_dropped(self, restored: CheckpointMetadata, files: Sequence[SinkFile], batch: int) -> None:
        """Raise `SinkFilesMissingError` if one of the files, up to the target's last batch, never reached the target.

        That takes a target with rows of a later generation, which went on from an older checkpoint.
        """
        older = (file for file in files if generation_of(batch_of(file)) < generation_of(batch))
        found = self._dropped.among(older)
        if found is not None:
            file, generation = found
            raise SinkFilesMissingError(
                f"{restored.kind} {restored.checkpoint_id} of job {self.job!r} cannot be restored: it counts on "
                f"{file.rows} rows for {self.place} that were staged, and that generation {generation} dropped when it "
                "went on from an older checkpoint. They may have come again since, in other batches, or not. Restore "
                f"another checkpoint; or, if rows may be missing in the target, delete {self._dropped.location} first."
            )

    def _check_ours(self, found: Marker | None, log: JobLog) -> None:
        if found is None:
            raise SinkError(
                f"{self.place} has lost the marker of job {self.job!r}: somebody has deleted it, or made the target "
                "anew. Bring the target back, or stop the job and give it another target."
            )
        self._check_not_later(found, log)
        if found.log_id != log.log_id or found.generation < log.generation:
            raise SinkError(
                f"{self.place}: generation {log.generation} of job {self.job!r} has not claimed it, or its claim is "
                "gone; the next start of the job claims it"
            )
        if found.batch < self._last_seen:
            raise SinkFilesMissingError(
                f"{self.place} has lost rows of job {self.job!r}: it has those up to checkpoint {found.checkpoint}, "
                "and had later ones already. Perhaps it was rolled back, or brought back from a backup, or a standby "
                "took over that lacks the last commits. Bring its newest state back; or go on from a checkpoint as "
                "old as it is."
            )

    def _check_not_later(self, found: Marker, log: JobLog) -> None:
        """Raise `FencedError` if another driver claimed the target after this one took the job over."""
        if found.log_id == log.log_id and found.generation > log.generation:
            raise FencedError(
                f"Job {self.job!r}: generation {found.generation} writes to {self.place} now, so this run, generation "
                f"{log.generation}, stops and writes nothing there any more."
            )
        if found.log_id != log.log_id and found.generation >= log.generation:
            raise FencedError(
                f"Job {self.job!r}: a job of that name with another checkpoint_dir (generation {found.generation}) "
                f"writes to {self.place} now, so this run, generation {log.generation}, stops and writes nothing there "
                "any more. To run both, give them different names or targets."
            )

    def _check_not_shared(self, log: JobLog) -> None:
        """Raise `DirectoryNotOursError` if another sink of the job has claimed the same target under another name.

        The two would share one marker, so each would take the other's rows for its own.
        """
        if self._claims != (log.log_id, log.generation):
            raise DirectoryNotOursError(
                f"{self.place} is the target of another sink of job {self.job!r} too, which spells the place in "
                "another way (a link, another name of the host). Give each sink its own table."
            )

    def _too_many_races(self) -> SinkError:
        return SinkError(
            f"{self.place}: somebody else changed the marker of job {self.job!r} {_MOST_RACES} times; look for a "
            "second driver of the job, and end it"
        )
