"""Why a command cannot do what it was asked: each reason has its own exit code, for scripts."""

from __future__ import annotations

from enum import IntEnum

from strandline.errors import JobFailedError, StrandlineError


class ExitCode(IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    """The operation failed, or something that was checked is not in order."""
    USAGE = 2
    """The command line is wrong."""
    NO_SUCH_JOB = 3
    NOT_RUNNING = 4
    """The job does not run, or does not run any more."""
    NOT_REACHED = 5
    """The job cannot be reached, or does not allow it."""


class UsageError(StrandlineError):
    """The arguments of a command contradict each other."""


class NoSuchJobError(StrandlineError):
    """There is no such job, or several of that name."""


class NotRunningError(StrandlineError):
    """The job does not run, or does not run any more."""


class NotReachedError(StrandlineError):
    """The server of a job does not answer, or answers something else than a server of a job does."""


class NotAllowedError(StrandlineError):
    """The server of a job refuses a call: no token, or a wrong one. Or a token cannot be read."""


_CODES: tuple[tuple[type[StrandlineError], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (NoSuchJobError, ExitCode.NO_SUCH_JOB),
    (NotRunningError, ExitCode.NOT_RUNNING),
    (JobFailedError, ExitCode.NOT_RUNNING),
    (NotReachedError, ExitCode.NOT_REACHED),
    (NotAllowedError, ExitCode.NOT_REACHED),
)


def exit_code(error: StrandlineError) -> ExitCode:
    """The exit code of a command that ends with `error`."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)
