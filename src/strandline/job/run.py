"""The run of a job, as its user sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, cast, get_args

from strandline.checkpoint.stats import CheckpointStats
from strandline.config.option import DurationLike, parse_duration
from strandline.errors import ConfigError, StrandlineError
from strandline.job.left_runs import end_at_exit
from strandline.job.listener import Listeners, RunListener, check_listener
from strandline.job.observation import Observation
from strandline.job.run_summary import summary_html, summary_text
from strandline.observe.facts import Finding
from strandline.progress import byte_bar, steps
from strandline.runtime.driver.events import RunEvent
from strandline.runtime.driver.figures import RunFigures, RunProcesses
from strandline.runtime.driver.recoveries import Recovery, Rescaling
from strandline.runtime.driver.restore.savepoints import SavepointFormat
from strandline.runtime.driver.run import Run
from strandline.runtime.driver.status import RunStatus

_NO_KEY: Any = object()


class JobRun:
    """A run of a job; `Job.start` returns one. All methods may be called from any thread.

    A run is a context manager. Leaving the `with` block normally calls `stop()`: the run takes a last checkpoint, and
    every processed row is visible. Leaving it with an exception ends the run at once, as `cancel()` does, but keeps the
    checkpoints even with `on_cancel="delete"`; the exception goes on:

    ```python
    with job.start() as run:
        run.process_all_available()
    ```
    """

    def __init__(
        self,
        make_run: Callable[[Callable[[RunEvent], None]], Run],
        observe: Callable[[Run], Observation],
        listeners: Iterable[RunListener],
    ) -> None:
        """`make_run` makes the run of a function that takes its events; `observe` makes it visible."""
        self._listeners = Listeners(self)
        for listener in listeners:
            self._listeners.add(listener)
        self._run = make_run(self._listeners.post)
        self._observation = observe(self._run)
        try:
            with byte_bar(f"restoring {self._run.name}", self._restored_bytes):
                self._run.begin(self._observation.claimed)
        except BaseException:
            self._observation.close()
            raise
        self._listeners.start()
        end_at_exit(self)
        self._tell_end()  # if it was cancelled while it started

    def _restored_bytes(self) -> tuple[int, int] | None:
        seen = self._run.restoring()
        return None if seen is None else (seen.done_bytes, seen.total_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
            return
        try:
            self._abandon()
        except StrandlineError as failure:
            # The exception of the block tells more: as a rule it is the error of the run.
            if failure is not error:
                error.add_note(f"the run could not be cancelled: {failure}")

    def __repr__(self) -> str:
        """Name, status, generation, batches, rows and last checkpoint, as far as the driver knows; it never waits."""
        return summary_text(self._run.summary())

    def _repr_html_(self) -> str:
        """The same facts as a table, for notebooks, with the health of the run and a link to its page."""
        return summary_html(self._run.summary(), self.health(), self.ui_url)

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._run.name

    @property
    def status(self) -> RunStatus:
        """Where the run stands: `starting`, `running`, `restarting`, `rescaling`, or how it ended."""
        return self._run.status

    @property
    def error(self) -> Exception | None:
        """The error that ended the run, or None."""
        return self._run.error

    @property
    def ui_url(self) -> str | None:
        """The address of the run's web page and REST API; None if it has none."""
        return self._observation.ui_url

    def health(self) -> list[Finding]:
        """Returns the rules of health that the run breaks, worst first; empty if all is well.

        The rules are those of the operations guide. The figures behind them are at most seconds old.
        """
        return self._observation.health()

    def process_all_available(self) -> None:
        """Waits until the rows that the sources hold now are processed and a completed checkpoint covers them.

        Raises the error of the run if the run fails meanwhile, and `JobFailedError` if the run is over.
        """
        self._run.process_all_available()

    def await_termination(self, timeout: float | None = None) -> bool:
        """Waits until the run ends, and returns True; returns False if it still runs after `timeout` seconds.

        Raises the error of the run if the run failed.
        """
        try:
            return self._run.await_termination(timeout)
        finally:
            self._tell_end()

    def checkpoints(self) -> list[CheckpointStats]:
        """Returns the checkpoints of the run with their figures, oldest first; the newest 1000 are kept."""
        return self._run.checkpoints()

    def recoveries(self) -> list[Recovery]:
        """Returns the failures that the run recovered from, oldest first: what was rebuilt, and from where."""
        return self._run.recoveries()

    def trigger_checkpoint(self, *, full: bool = False) -> CheckpointStats:
        """Takes a checkpoint now, and returns its figures when it is complete.

        With `full`, it uploads the whole state, also the files that the last checkpoint holds. Later checkpoints build
        on the new copies.

        Raises `CheckpointError` if the checkpoint fails or if nothing was processed yet, `ConfigError` if it is to be
        full and the job has a changelog, and `JobFailedError` if the run is over.
        """
        return self._run.trigger_checkpoint(full)

    def rescale(self, parallelism: int) -> Rescaling:
        """Changes the number of subtasks to `parallelism` while the run goes on, and returns what that took.

        The run finishes the current batch and covers it with a checkpoint. Then it replaces the query by one with
        `parallelism` subtasks, spread over all executors. A rescale to the current number spreads the subtasks anew:
        that is how new executors get work. A terminal shows a progress bar.

        Raises `ConfigError` for a number that the job cannot have, and `StrandlineError` if the rescale fails. Then the
        run goes on as before.
        """
        with steps(f"rescaling to {parallelism}", 4) as step:
            return self._run.rescale(parallelism, step)

    def savepoint(
        self, directory: str | os.PathLike[str] | None = None, *, format: SavepointFormat = "canonical"
    ) -> str:
        """Writes the state of the whole job into a new folder in `directory`, and returns the path of the folder.

        Without `directory`, the folder is made in `Config.savepoint_dir`.

        The run goes on meanwhile. The savepoint is yours: it needs nothing outside its folder, you may move it, and no
        job deletes it (`strandline savepoint --dispose` does). A `canonical` savepoint restores into either backend. A
        `native` one holds RocksDB's own files and is faster. Both restore at any parallelism.

        Raises `CheckpointError` if the savepoint fails or if nothing was processed yet, and `ConfigError` if there is
        no directory.
        """
        return self._run.savepoint(None if directory is None else os.fspath(directory), _known_format(format))

    def stop(
        self,
        *,
        savepoint_dir: str | os.PathLike[str] | None = None,
        format: SavepointFormat = "canonical",
        drain: bool = False,
    ) -> str | None:
        """Finishes the current batch, takes a last checkpoint, and ends the run: every processed row is visible.

        `drain` is for a job that has done its work. It moves event time to its end before the last checkpoint, so that
        all windows close and all event-time timers fire; each step does so after the steps before it. Timers in
        processing time do not fire. A later run can go on from there, but rows that belong to a window that was closed
        early open it again, and their result comes as a second one. If the drain fails, so does the run, and nothing of
        the drain is visible. A processor whose timers set new timers without end cannot be drained.

        With `savepoint_dir`, the run also makes a savepoint of exactly what it processed, and `stop` returns its path.
        If the run waits for a restart, a plain `stop` leaves it at its last checkpoint; a drain or a savepoint restarts
        it first. `stop` does nothing if the run is over, unless a savepoint is wanted.

        Raises the error of the run if it failed, before or meanwhile, and `JobFailedError` if another thread cancels
        the run meanwhile, or if it was over and a savepoint is wanted.
        """
        try:
            folder = None if savepoint_dir is None else os.fspath(savepoint_dir)
            return self._run.stop(folder, _known_format(format), drain=drain)
        finally:
            self._tell_end()

    def cancel(self) -> None:
        """Ends the run at once, without a last checkpoint.

        `Config.on_cancel` says whether the checkpoints of the job are kept. `cancel` does nothing if the run is over.
        Raises the error of the run if it failed.
        """
        try:
            self._run.cancel()
        finally:
            self._tell_end()

    def _abandon(self) -> None:
        """Ends the run as `cancel` does, but keeps the checkpoints even with `on_cancel="delete"`."""
        try:
            self._run.cancel(keep_checkpoints=True)
        finally:
            self._tell_end()

    def _tell_end(self) -> None:
        """Give listeners a moment to learn that the run is over: the program may end next."""
        if self.status.ended:
            self._listeners.join()
            self._observation.join()

    def add_listener(self, listener: RunListener) -> None:
        """Adds a `RunListener`, which is told what happens from now on. `Job.add_listener` misses nothing.

        Raises `ConfigError` if it is something else.
        """
        self._listeners.add(check_listener(listener)).start()

    def query(self, uid: str, state: str | None = None, key: Any = _NO_KEY, *, timeout: DurationLike = 10) -> Any:
        """Returns what the step `uid` holds for `key` after the last committed batch.

        `key` is the value of the key column, or a tuple if there are several key columns. A processor has named states:
        a value state gives its value or None, a list state a list, a map state a dict. `state` may be left out if there
        is only one. Other steps take no `state`:

        | step | what the query gives | for a key without state |
        |---|---|---|
        | `aggregate` | the values of the aggregates, as a dict | None |
        | `window(...).aggregate` | a list of dicts, one per kept window: start, end, and the aggregates | `[]` |
        | `join` | `{"left": [...], "right": [...]}`: the rows that are kept, as dicts | both lists are empty |
        | `deduplicate` | `{"expires": ...}`: until when the key is remembered, None for ever | None |

        While the run restarts or replaces a slot, the query waits, for `timeout` in all (seconds, or text such as
        `"1min"`). Raises `StrandlineError` if there is no answer in that time, and for an unknown step or state,
        `SchemaError` for a key that does not fit the key columns, and `JobFailedError` if the run is over.
        """
        if key is _NO_KEY:
            raise ConfigError(f"query({uid!r}): give the key, such as key='alice'")
        try:
            seconds = parse_duration(timeout)
        except ValueError as error:
            raise ConfigError(f"query({uid!r}): timeout={timeout!r}: {error}") from None
        return self._run.query(uid, state, key, seconds)

    def processes(self) -> RunProcesses:
        """Returns the task managers and slots of the run with their process ids; none if the run is over.

        The call asks every task manager, and leaves out those that do not answer within seconds.
        """
        return self._run.processes()

    def figures(self) -> RunFigures:
        """Returns figures of the run: rows and rates in and out, watermark and lag, sources, steps, state, changelog.

        The call asks every slot how large its state is. If one does not answer within seconds, the sizes are those of
        the time before. After the end of the run the last figures stay.
        """
        return self._run.figures()

    @property
    def last_progress(self) -> dict[str, Any] | None:
        """What happened in the last batch, like Spark's `lastProgress`; None before the first batch.

        Fields that mean the same have Spark's names: `batchId`, `timestamp`, `numInputRows`, `inputRowsPerSecond`,
        `processedRowsPerSecond`, `durationMs`, `eventTime`, `stateOperators`, `sources`, `sink`. `batchId` is the
        number that checkpoints and sinks know. Sizes of state are at most seconds old.
        """
        recent = self._run.recent_progress()
        return recent[-1] if recent else None

    @property
    def recent_progress(self) -> list[dict[str, Any]]:
        """The same for each of the last 100 batches, oldest first."""
        return self._run.recent_progress()


def _known_format(given: str) -> SavepointFormat:
    for known in get_args(SavepointFormat):
        if given == known:
            return cast(SavepointFormat, known)
    raise ConfigError(f"format={given!r}: a savepoint is {' or '.join(map(repr, get_args(SavepointFormat)))}")
