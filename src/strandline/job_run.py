"""The run of a job, as its user sees it."""

from __future__ import annotations

from typing import Any

from strandline.checkpoint.stats import CheckpointStats
from strandline.runtime.recoveries import Recovery
from strandline.runtime.run import Run


class JobRun:
    """A running job. All methods may be called from any thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        run.begin()

    @property
    def status(self) -> str:
        """`starting`, `running`, `restarting`, `finished`, `stopped`, `cancelled` or `failed`."""
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

    def stop(self) -> None:
        """Finish the batch that runs, take a last checkpoint, and end: every row that was processed is visible."""
        self._run.stop()

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
