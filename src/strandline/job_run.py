"""The run of a job, as its user sees it."""

from __future__ import annotations

import os
from typing import Any, cast, get_args

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import ConfigError
from strandline.progress import steps
from strandline.runtime.driver.recoveries import Recovery, Rescaling
from strandline.runtime.driver.restore.savepoints import SavepointFormat
from strandline.runtime.driver.run import Run


class JobRun:
    """A running job. All methods may be called from any thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.begin()

    @property
    def status(self) -> str:
        """`starting`, `running`, `restarting`, `rescaling`, `finished`, `stopped`, `cancelled` or `failed`."""
        return self._run.status

    @property
    def error(self) -> Exception | None:
        """Why the run failed, if it did."""
        return self._run.error

    def process_all_available(self) -> None:
        """Return when the rows that are there now are processed and a completed checkpoint covers them.

        Raises the run's error if it fails meanwhile.
        """
        self._run.process_all_available()

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the run ends; False if it still runs after `timeout` seconds. Raises its error if it failed."""
        return self._run.await_termination(timeout)

    def checkpoints(self) -> list[CheckpointStats]:
        """The run's checkpoints with their figures, oldest first."""
        return self._run.checkpoints()

    def recoveries(self) -> list[Recovery]:
        """The failures that the run got over, oldest first: what was rebuilt, and from where."""
        return self._run.recoveries()

    def trigger_checkpoint(self) -> CheckpointStats:
        """Take a checkpoint now, and return its figures when it is complete."""
        return self._run.trigger_checkpoint()

    def rescale(self, parallelism: int) -> Rescaling:
        """Go on with another number of subtasks, and return what that took.

        The batch that runs is finished and covered by a checkpoint; then the query behind the run is replaced by one
        with `parallelism` subtasks, spread over all executors that there are. With the number that there is now, only
        the spreading is done: so new executors get work. If it fails, the run goes on as it was. On a terminal a bar
        shows how far it is.
        """
        with steps(f"rescaling to {parallelism}", 4) as step:
            return self._run.rescale(parallelism, step)

    def savepoint(self, directory: str | os.PathLike[str], *, format: SavepointFormat = "canonical") -> str:
        """Write the state of the whole job into a new folder in `directory`, and return the folder's path.

        The run goes on meanwhile. The savepoint is yours: it needs nothing outside its folder, may be moved, and is
        never deleted by a job; see `strandline savepoint --dispose`. A `canonical` one restores into either backend; a
        `native` one holds RocksDB's own files and is faster. Both restore at any parallelism.
        """
        return self._run.savepoint(os.fspath(directory), _known_format(format))

    def stop(
        self,
        *,
        savepoint_dir: str | os.PathLike[str] | None = None,
        format: SavepointFormat = "canonical",
    ) -> str | None:
        """Finish the batch that runs, take a last checkpoint, and end: every row that was processed is visible.

        With `savepoint_dir` a savepoint is made, too, of exactly what was processed; returns its path.
        """
        return self._run.stop(None if savepoint_dir is None else os.fspath(savepoint_dir), _known_format(format))

    def cancel(self) -> None:
        """End at once, without a last checkpoint. What happens to the checkpoints says `Config.on_cancel`."""
        self._run.cancel()

    def query(self, uid: str, state: str, key: Any) -> Any:
        """What a state of the step `uid` holds for `key` now, by the last commit, while the job runs.

        `key` is the value of the key column, or a tuple of values where there are several. A value state gives its
        value or None, a list state a list, a map state a dict. Raises `StrandlineError` for an unknown step or state.
        """
        return self._run.query(uid, state, key)

    def processes(self) -> dict[str, Any]:
        """The run's task managers and slots with their process ids."""
        return self._run.processes()

    def figures(self) -> dict[str, Any]:
        """Counts of the run: generation, batches, restarts, repeated rounds, replaced slots, state size and memory."""
        return self._run.figures()


def _known_format(given: str) -> SavepointFormat:
    for known in get_args(SavepointFormat):
        if given == known:
            return cast(SavepointFormat, known)
    raise ConfigError(f"format={given!r}: a savepoint is {' or '.join(map(repr, get_args(SavepointFormat)))}")
