"""A run of a job: watches its generations, replaces them after a failure or for a rescale, and ends."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from strandline.checkpoint.stats import CheckpointHistory, CheckpointStats
from strandline.config import Config
from strandline.errors import (
    CheckpointError,
    ConfigError,
    DamagedFileError,
    FencedError,
    JobFailedError,
    StrandlineError,
)
from strandline.progress import Step
from strandline.runtime.driver.batches import FATAL
from strandline.runtime.driver.checkpoint_requests import CheckpointFailedError, CheckpointInterruptedError
from strandline.runtime.driver.cluster import CLOSE_PATIENCE
from strandline.runtime.driver.cluster_setup import absolute_location
from strandline.runtime.driver.events import Rescaled, RunEvent, Terminated
from strandline.runtime.driver.figures import Restoring, RunFigures, RunProcesses, RunSummary, run_processes
from strandline.runtime.driver.generation import LEAST_PATIENCE, Generation
from strandline.runtime.driver.generations import Generations
from strandline.runtime.driver.plan import Graph
from strandline.runtime.driver.queries import answer_within, read_query
from strandline.runtime.driver.recoveries import Began, Recovery, Rescaling, first_line
from strandline.runtime.driver.rescaling import RescaleRequest
from strandline.runtime.driver.restart import RestartStrategy
from strandline.runtime.driver.restore.savepoints import SavepointFormat, SavepointTarget
from strandline.runtime.driver.restore.takeover import Restore
from strandline.runtime.driver.run_figures import run_figures
from strandline.runtime.driver.run_records import RunRecords
from strandline.runtime.driver.sink_functions import refuse_in_sink_function
from strandline.runtime.driver.slot_samples import SlotSample
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.protocol.logs import LogText
from strandline.runtime.protocol.profiles import Folded, Profile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Patience:
    """Seconds that each part of a run gets to end; None: as long as it takes."""

    others: float | None = None
    """For the supervisor, and for a `stop` that is under way."""
    generation: float | None = None
    cluster: float = CLOSE_PATIENCE


AS_LONG_AS_IT_TAKES = _Patience()
WHEN_CANCELLED = _Patience(2.0, 3.5, 2.5)
"""With a second for the driver's server, a `cancel` takes less than ten seconds, whatever is frozen."""

FINAL_ERRORS = (*FATAL, FencedError, ConfigError, CheckpointError)
"""Errors that end the run: after a restart they would occur again."""
PASSING_ERRORS = (DamagedFileError, CheckpointInterruptedError, CheckpointFailedError)
"""Errors among those that do not end a run: a restart restores an older checkpoint, or takes the checkpoint again."""


class Run:
    """Watches its generations. It ends when it is told to, or after a failure that no restart can repair.

    Only the supervisor thread restarts, rescales and finishes the run. `stop` and `cancel` wait for the start and for
    the supervisor to end, and then end the run in the caller's thread.
    """

    def __init__(
        self,
        name: str,
        spark: SparkSession,
        config: Config,
        graph: Graph,
        *,
        available_now: bool,
        restore: Restore | None = None,
        allow_non_restored: bool = False,
        on_event: Callable[[RunEvent], None] = lambda _event: None,
    ) -> None:
        """`on_event` learns what happens. It must not wait."""
        self.name = name
        self.id = uuid.uuid4().hex
        """Names the run in the job's log and in the folders of its processes."""
        self.records = RunRecords()
        self.status = RunStatus.STARTING
        self.records.status(self.status)
        self.error: StrandlineError | None = None
        self.restarts = 0
        self._config = config
        self._graph = graph
        self._available_now = available_now
        self._on_event = on_event
        self._generations = Generations(
            name,
            spark,
            graph,
            available_now=available_now,
            restore=restore,
            allow_non_restored=allow_non_restored,
            on_event=self._note,
        )
        self._strategy = RestartStrategy.of(config)
        self._status_changed = threading.Condition()
        self._unsupervised = threading.Event()
        """Set once the start has failed or the supervisor has ended: nobody opens generations any more."""
        self._end_requested = False
        """Whether `stop` or `cancel` was called."""
        self._cancel_requested = False
        self._checkpoints_deleted = False
        """Whether `cancel` has begun to delete the checkpoints, so that the next start begins anew."""
        self._rescale_request: RescaleRequest | None = None
        self._ending = threading.Lock()
        """Held by the caller that ends the run. Other callers wait, and then find that the run has ended."""
        self._done = threading.Event()

    # --- starting --------------------------------------------------------------------------------

    def begin(self, on_claimed: Callable[[], None] = lambda: None) -> None:
        """Start the first generation. Raises what is wrong with the job, its options or its checkpoint.

        `on_claimed` is called as soon as the run has taken the job over, before it restores state. If the run is
        cancelled meanwhile, it is over afterwards. A `stop` waits until the run has started.
        """
        self._generations.on_first_claim = on_claimed
        try:
            self._generations.start_cluster(self.id, self._config)
            if not self._cancel_requested:
                self._open_generation()
        except BaseException as error:
            if not self._cancel_requested or not isinstance(error, Exception):
                self._start_failed(error)
                raise
            log.info("job %s: cancelled while it started: %s", self.name, first_line(str(error)))
        if self._generations.current is None:
            self._unsupervised.set()
            self._done.wait()  # for the caller of `cancel`, who ends the run within seconds
            return
        threading.Thread(target=self._supervise, daemon=True, name=f"strandline-{self.name}").start()

    def _start_failed(self, error: BaseException) -> None:
        self._generations.close_cluster()
        if isinstance(error, StrandlineError):
            self.error = error
            self.records.failed("run", error)
        self._set_status(RunStatus.FAILED)
        self._done.set()
        self._unsupervised.set()

    def _open_generation(self, after_failure: StrandlineError | None = None, rescale: bool = False) -> None:
        self._generations.open(self._config, after_failure, rescale)
        self._set_status(RunStatus.RUNNING)

    def _set_status(self, status: RunStatus) -> None:
        with self._status_changed:
            if self._done.is_set():
                return  # cancelled meanwhile
            self.status = status
            self.records.status(status)
            self._status_changed.notify_all()

    def _note(self, event: RunEvent) -> None:
        self.records.event(event)
        self._on_event(event)

    # --- watching --------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            while not self._done.is_set():
                generation = self._generations.current
                assert generation is not None
                failure = self._watch(generation)
                if self._end_requested:
                    return  # `stop` or `cancel` ends the run
                if failure is None and self._rescale_request is not None:
                    failure = self._replace_generation(generation, self._rescale_request)
                    self._rescale_request = None
                    if failure is None:
                        continue
                    generation = self._generations.current or generation
                if failure is None:
                    failure = self._finish(generation)
                if failure is not None and not self._restart(generation, failure):
                    return
        except BaseException as error:
            log.exception("job %s: the supervisor failed", self.name)
            if not self._end_requested:
                self._fail(StrandlineError(f"job {self.name}: {type(error).__name__}: {error}"))
        finally:
            opened = self._generations.current
            if self._done.is_set() and opened is not None:  # the run was cancelled while a generation was opened
                self._generations.close(opened)
            self._unsupervised.set()

    def _watch(self, generation: Generation) -> StrandlineError | None:
        """Wait for the end of a generation, or for a request to end or rescale it. Returns the failure."""
        try:
            return generation.watch(lambda: self._end_requested or self._rescale_request is not None)
        except StrandlineError as error:
            return error

    def _replace_generation(self, generation: Generation, request: RescaleRequest) -> StrandlineError | None:
        """Replace a generation, between two batches, by one with another parallelism.

        Returns the failure if the old generation is closed and the new one could not be opened. If the old generation
        cannot be checkpointed, it goes on.
        """
        assert self._generations.cluster is not None
        request.began = Began.now()
        try:
            request.step("finishing the batch")
            # Slot processes take long to start and need no state, so they start while the old generation still works.
            self._generations.cluster.start_spares(request.parallelism)
            generation.hold(self._check_not_ending)
            request.held = Began.now()
            request.step("taking a checkpoint")
            generation.checkpoints.take_tolerantly(generation.heal)
            request.covered = Began.now()
            generation.settle_figures()
        except StrandlineError as error:
            self.records.failed("rescale", error)
            request.result.set_exception(error)
            generation.batches.go_on()
            return None
        failure = self._open_rescaled(generation, request)
        if failure is not None:
            self.records.failed("rescale", failure)
            request.result.set_exception(failure)
            return failure
        assert self._generations.current is not None
        rescaling = request.rescaling(generation, self._generations.current, self._config.max_parallelism)
        self.records.rescaled(rescaling)
        self._on_event(Rescaled(rescaling))
        request.result.set_result(rescaling)
        return None

    def _check_not_ending(self) -> None:
        if self._end_requested:
            raise self._ends()

    def _ends(self) -> JobFailedError:
        """The error of a call that the end of the run interrupts."""
        return JobFailedError(f"job {self.name!r} was asked to end meanwhile")

    def _open_rescaled(self, generation: Generation, request: RescaleRequest) -> StrandlineError | None:
        """Close a generation and open one with the requested parallelism. Returns the failure, if there is one."""
        before = self._config
        try:
            request.step("ending the query")
            self._set_status(RunStatus.RESCALING)
            self._generations.close(generation)
            self._config = before.replace(parallelism=request.parallelism)
            request.step(f"opening the state of {request.parallelism} subtasks")
            self._open_generation(rescale=True)
            return None
        except Exception as error:  # noqa: BLE001 - after any error the run goes back to the old parallelism
            self._config = before
            return StrandlineError(
                f"job {self.name}: not rescaled to {request.parallelism}: {type(error).__name__}: {error}"
            )

    def _finish(self, generation: Generation) -> StrandlineError | None:
        """The source is drained. A last checkpoint makes all rows visible, and the run ends. Returns the failure."""
        try:
            generation.checkpoints.take_tolerantly(generation.heal)
        except StrandlineError as error:
            return error
        generation.settle_figures()
        self._end(generation, RunStatus.FINISHED)
        return None

    def _restart(self, generation: Generation, failure: StrandlineError) -> bool:
        """Go back to the last completed checkpoint. Returns False if the run ends instead."""
        final = isinstance(failure, FINAL_ERRORS) and not isinstance(failure, PASSING_ERRORS)
        while True:
            self._generations.close(generation)
            delay = None if final else self._strategy.after_failure(time.monotonic())
            if delay is None:
                self._fail(failure)
                return False
            log.warning("job %s: restarting in %.1f s after: %s", self.name, delay, failure)
            self.restarts += 1
            self.records.failed("restart", failure)
            self._set_status(RunStatus.RESTARTING)
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline and not self._end_requested:
                time.sleep(0.02)
            if self._end_requested:
                return False
            try:
                self._open_generation(failure)
                return True
            except StrandlineError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - Spark raises many types; the restart strategy decides about all
                failure = StrandlineError(f"job {self.name}: {type(error).__name__}: {error}")
            # Not even `PASSING_ERRORS` pass here: `open_generation` has tried the older checkpoints already.
            final = isinstance(failure, FINAL_ERRORS)

    def _fail(self, error: StrandlineError) -> None:
        log.error("job %s failed: %s", self.name, error)
        self.error = error
        self.records.failed("run", error)
        self._end(self._generations.current, RunStatus.FAILED)

    def _end(self, generation: Generation | None, status: RunStatus, patience: _Patience = AS_LONG_AS_IT_TAKES) -> None:
        try:
            if generation is not None:
                self._generations.close(generation, patience.generation)
            self._generations.close_cluster(patience.cluster)
        finally:
            self._set_status(status)
            self._on_event(Terminated())
            self._done.set()
            late = self._generations.current
            if late is not None:  # it was opened while the run was cancelled
                self._generations.close(late)

    # --- what the user asks ------------------------------------------------------------------------

    def process_all_available(self) -> None:
        """Return once all rows that are there now are processed and covered by a completed checkpoint."""
        refuse_in_sink_function(self.name, "process_all_available()")
        if self._available_now:
            self.await_termination(None)
            return
        while True:
            generation = self._running()
            try:
                generation.process_all_available()
                return
            except Exception as error:
                running = self._generations.current is generation and self.status is RunStatus.RUNNING
                if running and not generation.has_failed(10.0):
                    raise
                log.info("job %s: waiting for the restart after: %s", self.name, error)

    def _in_generation(self, act: Callable[[Generation], T]) -> T:
        """The result of `act` with the running generation; if that generation ends, with the next one."""
        while True:
            generation = self._running()
            try:
                return act(generation)
            except StrandlineError as error:
                if self._generations.current is generation and generation.checkpoints.failure is None:
                    raise
                log.info("job %s: waiting for the restart after: %s", self.name, error)
            with self._status_changed:
                while self._generations.current is generation and not self.status.ended:
                    self._status_changed.wait(0.2)

    def _running(self) -> Generation:
        """The running generation; waits while the run starts or restarts. Raises if the run has ended."""
        while True:
            with self._status_changed:
                self._status_changed.wait_for(lambda: self.status is RunStatus.RUNNING or self.status.ended)
            self._raise_if_failed()
            generation = self._generations.current
            if self.status is not RunStatus.RUNNING:
                raise self._over()
            if generation is not None:
                return generation
            time.sleep(0.05)  # the generation has just failed; the supervisor is about to change the status

    def _over(self) -> JobFailedError:
        """The error of a call that needs a run that has not ended."""
        goes_on = "starts it again"
        if not self._checkpoints_deleted:
            goes_on = "goes on from its newest completed checkpoint"
        return JobFailedError(f"job {self.name!r} does not run any more: it is {self.status}; job.start() {goes_on}")

    def _raise_if_failed(self) -> None:
        if self.status is RunStatus.FAILED and self.error is not None:
            raise self.error

    def await_termination(self, timeout: float | None) -> bool:
        """Wait until the run ends; False if it still runs after `timeout` seconds. Raises its error if it failed."""
        if timeout is None:
            refuse_in_sink_function(self.name, "await_termination()")
        ended = self._done.wait(timeout)
        self._raise_if_failed()
        return ended

    def checkpoints(self) -> list[CheckpointStats]:
        """The run's checkpoints, oldest first."""
        return self._generations.history.checkpoints()

    def summary(self) -> RunSummary:
        """What the driver knows of the run, without a call to any other process."""
        counts = self._generations.counts()
        return RunSummary(
            name=self.name,
            status=self.status,
            generation=counts.generation,
            batches=counts.batches,
            rows=self._generations.progress.rows,
            last_checkpoint=self._generations.history.last_completed,
            error=self.error,
        )

    def recoveries(self) -> list[Recovery]:
        """The run's recoveries, oldest first."""
        return list(self._generations.cluster.recoveries) if self._generations.cluster is not None else []

    def trigger_checkpoint(self, full: bool = False) -> CheckpointStats:
        """Take a checkpoint now, and return when it is complete. A `full` one uploads the whole state."""
        refuse_in_sink_function(self.name, "trigger_checkpoint()")
        taken = self._in_generation(lambda generation: generation.checkpoints.take(full=full))
        if taken is None:
            raise CheckpointError(
                f"job {self.name!r} has not processed anything yet, so there is nothing to checkpoint"
            )
        return taken

    def rescale(self, parallelism: int, step: Step) -> Rescaling:
        """Continue with another parallelism, and return once the new generation runs."""
        refuse_in_sink_function(self.name, "rescale()")
        wanted = self._config.replace(parallelism=parallelism).parallelism  # it may be given as text
        if wanted is None:
            raise ConfigError(f"job {self.name!r}: a rescale needs the number of subtasks")
        if self._available_now:
            raise ConfigError("a run with available_now=True cannot be rescaled; start it with another parallelism")
        request = RescaleRequest(wanted, step)
        with self._status_changed:
            if self._rescale_request is not None:
                raise StrandlineError(f"job {self.name!r} is being rescaled already")
            self._rescale_request = request
        while True:
            with suppress(TimeoutError):
                return request.result.result(timeout=0.2)
            if self._done.is_set() and not request.result.done():
                self._rescale_request = None
                self._raise_if_failed()
                raise self._over()

    def savepoint(self, directory: str | None, format_: SavepointFormat) -> str:
        """Write a savepoint into a new folder in `directory`, or in `savepoint_dir`, and return the folder's path."""
        refuse_in_sink_function(self.name, "savepoint()")
        directory = directory or self._config.savepoint_dir
        if directory is None:
            raise ConfigError(
                f"job {self.name!r}: a savepoint needs a directory; give one, or set savepoint_dir in the config"
            )
        self._savepoint_target(directory, format_)  # a wrong directory is the caller's error, not the generation's
        folder = directory
        return self._in_generation(lambda generation: self._savepoint(generation, folder, format_, None))

    def _savepoint_target(self, directory: str, format_: SavepointFormat) -> SavepointTarget:
        options = dict(self._config.storage_options)
        return SavepointTarget.within(absolute_location(directory), self.name, format_, options)

    def _savepoint(
        self, generation: Generation, directory: str, format_: SavepointFormat, heal: Callable[[], None] | None
    ) -> str:
        taken = generation.checkpoints.savepoint(lambda: self._savepoint_target(directory, format_), heal)
        if taken is None:
            raise CheckpointError(
                f"job {self.name!r} has not processed anything yet, so there is nothing to make a savepoint of"
            )
        if generation.checkpoints.staged_bytes():
            # The savepoint counts on rows that are only staged. Whoever restores it later must find them published.
            generation.checkpoints.cover(heal)
        assert taken.path is not None
        return taken.path

    def stop(
        self, savepoint_dir: str | None = None, format_: SavepointFormat = "canonical", *, drain: bool = False
    ) -> str | None:
        """Finish the batch, take a last checkpoint, and end. With `savepoint_dir`, returns the path of a savepoint.

        With `drain`, event time moves to its end before the last checkpoint.
        """
        refuse_in_sink_function(self.name, "stop()")
        if savepoint_dir is not None and not self.status.ended:
            # Once the run has begun to end, it cannot go on. So a wrong directory must be noticed before.
            self._savepoint_target(savepoint_dir, format_).try_out()
        made: list[str] = []

        def finish(generation: Generation) -> None:
            generation.hold(self._check_not_cancelled)
            if drain:
                generation.drain(self._check_not_cancelled)
            generation.checkpoints.take_tolerantly(generation.heal)
            if savepoint_dir is not None:
                made.append(self._savepoint(generation, savepoint_dir, format_, generation.heal))
            generation.settle_figures()

        # Between two generations there is nothing to finish. A savepoint and a drain need one all the same.
        self._end_on_request(RunStatus.STOPPED, finish, reopens=drain or savepoint_dir is not None)
        if savepoint_dir is not None and not made:
            raise JobFailedError(
                f"job {self.name!r} was ended by somebody else meanwhile, and no savepoint was made: it is "
                f"{self.status}. Its newest checkpoint holds what it processed; start it again to take a savepoint"
            )
        return made[0] if made else None

    def _check_not_cancelled(self) -> None:
        if self._cancel_requested:
            raise self._ends()

    def cancel(self, *, keep_checkpoints: bool = False) -> None:
        """End without a last checkpoint. With `on_cancel="delete"`, checkpoints are deleted unless they are kept.

        Returns within ten seconds even if some process of the run is frozen. Checkpoints get up to a minute more to be
        deleted.
        """
        refuse_in_sink_function(self.name, "cancel()")
        self._end_requested = self._cancel_requested = True
        if self._generations.cluster is not None and not self._done.is_set():
            self._generations.cluster.abandon()
        stopping = self._generations.current
        if stopping is not None and self._ending.locked():
            stopping.checkpoints.give_up(self._ends())  # `stop` may wait for one

        def abandon(generation: Generation) -> None:
            if self._config.on_cancel == "delete" and not keep_checkpoints:
                self._checkpoints_deleted = generation.checkpoints.delete_all()

        self._end_on_request(RunStatus.CANCELLED, abandon, WHEN_CANCELLED)
        if self._config.on_cancel == "delete" and not keep_checkpoints and not self._checkpoints_deleted:
            log.warning("job %s: its checkpoints are not deleted; start and cancel it once more", self.name)

    def _end_on_request(
        self,
        status: RunStatus,
        last_acts: Callable[[Generation], None],
        patience: _Patience = AS_LONG_AS_IT_TAKES,
        *,
        reopens: bool = False,
    ) -> None:
        """End the run. Its start and its supervisor end first, so that no generation is opened meanwhile.

        What takes longer than `patience` allows ends in the background. If the run waits for a restart and `reopens`,
        it is restarted for `last_acts`.
        """
        self._end_requested = True
        began = time.monotonic()
        if not self._unsupervised.wait(patience.others):
            log.warning("job %s: its start, or its supervisor, ends in the background", self.name)
        left = -1 if patience.others is None else max(LEAST_PATIENCE, began + patience.others - time.monotonic())
        alone = self._ending.acquire(timeout=left)
        if not alone:
            log.warning("job %s: the call of stop() ends in the background", self.name)
        try:
            if self._done.is_set():
                self._raise_if_failed()
                return
            generation = self._generations.current
            try:
                if generation is None and self._cancel_requested and status is not RunStatus.CANCELLED:
                    raise self._ends()
                if generation is None and reopens:
                    generation = self._reopened()
                if generation is not None:
                    last_acts(generation)
            except StrandlineError as error:
                if self._cancel_requested and status is not RunStatus.CANCELLED:
                    raise self._ends() from error  # `cancel` ends the run
                self._fail(error)
                raise
            self._end(generation, status, patience)
        finally:
            if alone:
                self._ending.release()

    def _reopened(self) -> Generation | None:
        """A generation from the last checkpoint, for a run that waited for its restart when it was asked to end."""
        try:
            self._open_generation()
        except StrandlineError:
            raise
        except Exception as error:
            raise StrandlineError(f"job {self.name}: {type(error).__name__}: {error}") from error
        return self._generations.current

    def query(self, uid: str, state: str | None, key: Any, timeout: float) -> Any:
        """What the step `uid` keeps for one key, as of the last commit. Waits through restarts, up to `timeout`."""
        request = read_query(self._graph.operators, uid, state, key)
        try:
            return answer_within(timeout, lambda: self._running().query(request), self.name)
        except TimeoutError:
            raise StrandlineError(
                f"job {self.name!r}: no answer to query({uid!r}) within {timeout:g} s; the run is {self.status}. Ask "
                "again, or give a longer timeout="
            ) from None

    def processes(self) -> RunProcesses:
        """The run's task managers and slots with their process ids."""
        if self._generations.cluster is None or self._done.is_set():
            return RunProcesses()
        return run_processes(self._generations.cluster.processes())

    def profile(self, subtask: int, seconds: float, hz: float = 100.0) -> Folded:
        """Sample the Python threads of the slot that runs subtask `subtask` of every step.

        Raises `StrandlineError` if there is no such slot, if it is lost meanwhile, or is being sampled already.
        """
        parallelism = self._running().parallelism
        if not 0 <= subtask < parallelism:
            raise StrandlineError(f"job {self.name!r} has no subtask {subtask}; there are 0 to {parallelism - 1}")
        assert self._generations.cluster is not None
        return self._generations.cluster.profile(subtask, Profile(seconds, hz))

    def log_processes(self) -> tuple[str, ...]:
        """The names of the processes whose logs can be read, now or after the end of the run."""
        cluster = self._generations.cluster
        return () if cluster is None else cluster.logs.processes()

    def read_log(self, process: str, max_bytes: int = 100_000) -> LogText:
        """The end of the log of a process. Raises `StrandlineError` if there is none."""
        cluster = self._generations.cluster
        if cluster is None:
            raise StrandlineError(f"job {self.name!r} has not begun, so there is no log of {process!r}")
        return cluster.logs.read(process, max_bytes)

    def keep_logs(self) -> None:
        """After the end of the run: write the ends of its logs into the job's history. Never raises."""
        cluster = self._generations.cluster
        if cluster is not None:
            cluster.logs.keep_durably()

    def figures(self) -> RunFigures:
        """Figures of the run: fresh ones while a generation runs, else the last ones."""
        generation = self._generations.current
        if generation is not None and not self._done.is_set():
            generation.refresh_figures()
        return self.last_figures()

    def last_figures(self) -> RunFigures:
        """The figures of the run as they were taken last, at most seconds ago. Asks no other process."""
        generations = self._generations
        return run_figures(
            self.status,
            self.restarts,
            generations.counts(),
            generations.progress,
            generations.restoring(),
            generations.running_batch(),
        )

    def restoring(self) -> Restoring | None:
        """How far a generation is that opens its state; None if none does."""
        return self._generations.restoring()

    def slot_samples(self) -> list[SlotSample]:
        """What each slot said last, at most seconds ago. Asks no other process."""
        return self._generations.progress.slots()

    def history(self) -> CheckpointHistory:
        """The checkpoints of the run."""
        return self._generations.history

    @property
    def config(self) -> Config:
        """The options of the run; after a rescale, with the new parallelism."""
        return self._config

    def wait_until_over(self, timeout: float) -> bool:
        """Whether the run is over within `timeout` seconds. Unlike `await_termination`, never raises its error."""
        return self._done.wait(timeout)

    def recent_progress(self) -> list[dict[str, Any]]:
        """The reports on the last batches, oldest first."""
        generation = self._generations.current
        if generation is not None and not self._done.is_set():
            generation.read_reports()
        return self._generations.progress.recent()
