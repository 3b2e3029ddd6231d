"""How jobs are found, looked at and steered, whether they run in this process, elsewhere, or have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from strandline.checkpoint.stats import CheckpointStats
from strandline.observe.facts import JobFacts
from strandline.runtime.driver.recoveries import Rescaling
from strandline.runtime.driver.restore.savepoints import SavepointFormat
from strandline.runtime.protocol.logs import LogText
from strandline.runtime.protocol.profiles import Folded

__all__ = ["Folded", "JobControl", "JobView", "Jobs", "LogText"]


class JobControl(Protocol):
    """What can be asked of a job that runs. Every call may take long; errors are `StrandlineError`."""

    def trigger_checkpoint(self, full: bool = False) -> CheckpointStats: ...

    def savepoint(self, directory: str | None, format: SavepointFormat) -> str:
        """Returns the path. Without a directory, the job's own option `savepoint_dir` is taken."""
        ...

    def stop(self, directory: str | None, format: SavepointFormat, *, drain: bool = False) -> str | None:
        """Ends the run after a last checkpoint, and after a savepoint if there is a directory; returns its path."""
        ...

    def cancel(self) -> None: ...

    def rescale(self, parallelism: int, step: Callable[[str], None] = lambda _text: None) -> Rescaling: ...

    def profile(self, subtask: int, seconds: float) -> Folded:
        """Samples the Python threads of a slot."""
        ...


class JobView(Protocol):
    """One job as somebody sees it."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def control(self) -> JobControl | None:
        """None for a job that cannot be steered from here: it has ended, or runs elsewhere."""
        ...

    def facts(self) -> JobFacts:
        """The newest facts, at most a second old while the job runs. Never waits for the job."""
        ...

    def processes(self) -> Sequence[str]:
        """The names of the processes whose logs can be read."""
        ...

    def log(self, process: str, max_bytes: int = 100_000) -> LogText:
        """The end of a log. Raises `StrandlineError` if there is none."""
        ...


class Jobs(Protocol):
    """The jobs that one server shows."""

    def all(self) -> Sequence[JobView]:
        """The jobs, newest first."""
        ...

    def get(self, job: str) -> JobView | None:
        """The newest run of the job of that id or name."""
        ...
