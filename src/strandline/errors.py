"""Every error that Strandline raises, under one base class.

Each message says what happened, where (job, operator, subtask, path) and what to do next.
"""

from __future__ import annotations


class StrandlineError(Exception):
    """Base of all Strandline errors."""


# --- what the user wrote -------------------------------------------------------------------------


class ConfigError(StrandlineError):
    """An option has a wrong value, or options contradict each other."""


class UnknownOptionError(ConfigError):
    """An option that does not exist; the message names the nearest one that does."""


class JobDefinitionError(StrandlineError):
    """The job graph cannot run: a missing sink, a duplicate uid, an unsupported source, a wrong column."""


class SchemaError(StrandlineError):
    """A row or a state value does not fit the schema that was declared for it."""


class UserCodeError(StrandlineError):
    """User code raised; the message carries its traceback, the key and the batch."""


# --- durable storage -----------------------------------------------------------------------------


class StorageError(StrandlineError):
    """Durable storage refused or failed an operation."""


class AlreadyExistsError(StorageError):
    """A create-if-absent found something there already."""


class NotFoundError(StorageError):
    """A path that was expected does not exist."""


class UnknownOutcomeError(StorageError):
    """A write may or may not have happened; read back before doing anything else."""


class StorageFullError(StorageError):
    """No space left where data had to be written."""


# --- checkpoints ---------------------------------------------------------------------------------


class CheckpointError(StrandlineError):
    """A checkpoint could not be taken, read or restored."""


class CheckpointNotFoundError(CheckpointError):
    """The path that should hold a checkpoint holds none."""


class MetadataError(CheckpointError):
    """A `_metadata` file is damaged, truncated, or of a version this release cannot read."""


class NewerFormatError(MetadataError):
    """A `_metadata` file of a later release; nothing is wrong with it."""


class DamagedFileError(CheckpointError):
    """A file of a checkpoint is missing, or its size or checksum is wrong."""


class IncompatibleCheckpointError(CheckpointError):
    """The checkpoint belongs to another job, or to a job of another shape."""


class DirectoryNotOursError(CheckpointError):
    """A directory that should be empty or ours holds something else."""


class FencedError(CheckpointError):
    """Another driver took this job over; this run may not complete or delete anything any more."""


# --- running -------------------------------------------------------------------------------------


class JobFailedError(StrandlineError):
    """The run ended with a failure that its restart strategy does not cover."""


class SlotLostError(StrandlineError):
    """A slot process is gone or cannot be reached."""


class SegmentsLostError(SlotLostError):
    """A lost slot cannot be rebuilt from local files; the run must go back to its last checkpoint."""


class StaleAttemptError(StrandlineError):
    """A task attempt of an older generation, batch or round; its work is refused."""


class AuthenticationError(StrandlineError):
    """A call without the run's secret."""
