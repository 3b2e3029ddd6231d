"""Every error that Strandline raises, under one base class.

Each message says what happened, where (job, operator, subtask, path) and what to do next.
"""

from __future__ import annotations

from strandline.redaction import shown


class StrandlineError(Exception):
    """Base of all Strandline errors.

    The text never shows the password of a URL, and never holds a character that a terminal obeys.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(shown(one) if isinstance(one, str) else one for one in args))


# --- what the user wrote -------------------------------------------------------------------------


class ConfigError(StrandlineError):
    """An option has a wrong value, or options contradict each other."""


class UnknownOptionError(ConfigError):
    """An option does not exist; the message names the nearest one that does."""


class JobDefinitionError(StrandlineError):
    """The job cannot run as it is described: no sink, a uid twice, an unsupported source, a wrong column."""


class SchemaError(StrandlineError):
    """A row or a state value does not fit the schema that was declared for it."""


class UserCodeError(StrandlineError):
    """User code raised an exception; the message holds its traceback, the key and the batch."""


class SourceError(StrandlineError):
    """A source cannot be read for a reason that may pass; the run restarts, as its options say."""


class SourceDataLostError(SourceError):
    """Rows that the job has not read yet are not in the source any more; the run ends, because no restart helps."""


class SinkError(StrandlineError):
    """A sink failed for a reason that may pass; nothing that is staged is lost. The call is tried again, and then the
    run restarts, as its options say."""


class MarkerMovedError(SinkError):
    """The marker in the target of a sink is not the one that was to be replaced; nothing was written."""


# --- durable storage -----------------------------------------------------------------------------


class StorageError(StrandlineError):
    """Durable storage refused or failed an operation."""


class AlreadyExistsError(StorageError):
    """A file that had to be new exists already."""


class NotFoundError(StorageError):
    """A file or folder does not exist."""


class UnknownOutcomeError(StorageError):
    """A write may have happened or not; read the path back before you do anything else."""


class StorageFullError(StorageError):
    """The disk or the storage has no space left."""


class StorageRefusedError(StorageError):
    """The storage refuses an operation, and would refuse it again: no permission, read-only, a file for a folder."""


# --- checkpoints ---------------------------------------------------------------------------------


class CheckpointError(StrandlineError):
    """A checkpoint could not be taken, read or restored."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint at the path."""


class MetadataError(CheckpointError):
    """A `_metadata` file is damaged, or this release cannot read its version."""


class NewerFormatError(MetadataError):
    """A later release wrote the `_metadata` file; the file itself is in order."""


class DamagedFileError(CheckpointError):
    """A file of a checkpoint is missing, or its size or checksum is wrong."""


class SinkFilesMissingError(CheckpointError):
    """Rows that a checkpoint covers are neither in the target of a sink nor staged, so it cannot be restored."""


class SinkAheadError(CheckpointError):
    """The target of a sink has later rows than the checkpoint covers, and cannot take them back."""


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint belongs to another job, or to a job of another shape."""


class DirectoryNotOursError(CheckpointError):
    """A directory must be empty or belong to this job, but holds something else."""


class FencedError(CheckpointError):
    """Another run took this job over; this run must not complete or delete anything any more."""


# --- running -------------------------------------------------------------------------------------


class JobFailedError(StrandlineError):
    """The run has ended, or was asked to end meanwhile, so the call cannot be carried out."""


class SlotLostError(StrandlineError):
    """A slot process has died or cannot be reached."""


class SegmentsLostError(SlotLostError):
    """The changes that a lost slot needs are lost as well; the run restarts from its last completed checkpoint."""


class StaleAttemptError(StrandlineError):
    """A task attempt belongs to an older generation, batch or round, and was refused."""


class HistoryError(StrandlineError):
    """A part of a job's history is damaged, or a later release wrote it; the job itself does not need it."""


class UnsafeFolderError(StrandlineError):
    """A local folder that must be this user's alone belongs to somebody else, or is open to others."""


class AuthenticationError(StrandlineError):
    """A call came without the secret of the run, and was refused."""
