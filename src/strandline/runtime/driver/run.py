"""A run: one driver's life of a job, through as many generations as its failures need."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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
from strandline.pyspark_releases import check_supported
from strandline.runtime.driver.batches import FATAL
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.opening import GenerationRequest, RunContext, open_generation
from strandline.runtime.driver.plan import Graph
from strandline.runtime.driver.recoveries import Recovery, Rescaling, moved_key_groups
from strandline.runtime.driver.restart import RestartStrategy
from strandline.runtime.driver.restore.savepoints import SavepointFormat, SavepointTarget
from strandline.runtime.driver.restore.takeover import Restore
from strandline.runtime.protocol.messages import ChangelogSettings, RunInfo, StorageSettings, UploadSettings
from strandline.runtime.protocol.wire import ANY, default_bind_host

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ENDED = ("finished", "stopped", "cancelled", "failed")
FINAL_ERRORS = (*FATAL, FencedError, ConfigError, CheckpointError)
"""A restart would only meet these again."""


class Run:
    """Starts generations, watches over them, and ends when told to or when a failure cannot be mended."""

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
    ) -> None:
        self.name = name
        self.status = "starting"
        self.error: StrandlineError | None = None
        self.restarts = 0
        self._spark = spark
        self._config = config
        self._graph = graph
        self._available_now = available_now
        self._restore = restore
        self._allow_non_restored = allow_non_restored
        self._history = CheckpointHistory()
        self._strategy = RestartStrategy.of(config)
        self._generation: Generation | None = None
        self._number: int | None = None
        """The generation that this run took over last, whether it came to life or not."""
        self._cluster: Cluster | None = None
        self._changed = threading.Condition()
        self._asked = False
        """Whether somebody asked the run to end."""
        self._rescale: tuple[int, Future[Rescaling], Step] | None = None
        """The parallelism that somebody asked for, and whom to tell."""
        self._ending = threading.Lock()
        self._totals = {"rounds_repeated": 0, "replaced_slots": 0}
        self._done = threading.Event()

    # --- starting --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first generation; what is wrong with the job, its options or its checkpoint is raised here."""
        _check_spark(self._spark, self._config)
        self._cluster = self._make_cluster()
        try:
            self._open_generation()
        except BaseException:
            self._close_cluster()
            self.status = "failed"
            self._done.set()
            raise
        self._supervisor = threading.Thread(target=self._supervise, daemon=True, name=f"strandline-{self.name}")
        self._supervisor.start()

    def _make_cluster(self) -> Cluster:
        context = self._spark.sparkContext
        run_id = uuid.uuid4().hex
        secret = secrets.token_hex(32)
        bind_host = default_bind_host(str(context.master), self._config.bind_host)
        # Executors reach Spark's own driver by this name, so they reach us, too.
        driver_host = context.getConf().get("spark.driver.host", None) if bind_host in ANY else bind_host

        def info(coordinator: list[Any]) -> RunInfo:
            return RunInfo(
                job=self.name,
                run_id=run_id,
                secret=secret,
                coordinator=coordinator,
                local_dir=self._config.local_dir or tempfile.gettempdir(),
                bind_host=bind_host,
                heartbeat_timeout=self._config.heartbeat_timeout,
                storage=StorageSettings(_absolute(self._config.checkpoint_dir), dict(self._config.storage_options)),
                uploads=UploadSettings(
                    self._config.inline_threshold,
                    self._config.small_file_threshold,
                    self._config.max_space_amplification,
                ),
                local_recovery=self._config.local_recovery,
                changelog=_changelog(self._config),
                sys_path=[os.path.abspath(entry) for entry in sys.path if entry] + [os.getcwd()],
            )

        return Cluster(
            context, info, run_id=run_id, secret=secret, bind_host=bind_host, advertise_host=driver_host or bind_host
        )

    def _open_generation(self, after_failure: StrandlineError | None = None, rescale: bool = False) -> None:
        assert self._cluster is not None
        run = RunContext(
            self.name,
            self._spark,
            self._graph,
            self._cluster,
            self._history,
            available_now=self._available_now,
            allow_non_restored=self._allow_non_restored,
            on_claim=self._claimed,
        )
        request = GenerationRequest(
            self._config,
            after=self._number,
            # The first takeover writes into the job's log what it restored; later ones go on from there.
            restore=self._restore if self._number is None else None,
            after_failure=after_failure,
            rescale=rescale,
        )
        self._generation = open_generation(run, request)
        self._set_status("running")

    def _claimed(self, number: int) -> None:
        self._number = number

    def _set_status(self, status: str) -> None:
        with self._changed:
            self.status = status
            self._changed.notify_all()

    # --- watching --------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            while not self._done.is_set():
                generation = self._generation
                assert generation is not None
                failure = generation.watch(lambda: self._asked or self._rescale is not None)
                if self._asked:
                    return  # whoever asked ends the run
                if failure is None and self._rescale is not None:
                    failure = self._replace_generation(generation, *self._rescale)
                    self._rescale = None
                    if failure is None:
                        continue
                    generation = self._generation or generation
                if failure is None:
                    self._finish(generation)
                elif not self._restart(generation, failure):
                    return
        except BaseException as error:
            log.exception("job %s: the supervisor failed", self.name)
            self._fail(StrandlineError(f"job {self.name}: {type(error).__name__}: {error}"))

    def _replace_generation(
        self, generation: Generation, parallelism: int, asked: Future[Rescaling], step: Step
    ) -> StrandlineError | None:
        """Replace a generation, between two batches, by one of another parallelism; returns what went wrong.

        What is slow and needs no state is done while the old generation still works.
        """
        assert self._cluster is not None
        before, began = self._config, time.time()
        try:
            step("finishing the batch")
            self._cluster.warm(parallelism)
            generation.batch_function.hold()
            held = time.time()
            step("taking a checkpoint")
            generation.checkpoints.take(generation.heal)
            covered = time.time()
            step("ending the query")
        except StrandlineError as error:
            asked.set_exception(error)
            generation.batch_function.go_on()
            return None
        try:
            self._set_status("rescaling")
            self._close_generation(generation)
            self._config = before.replace(parallelism=parallelism)
            step(f"opening the state of {parallelism} subtasks")
            self._open_generation(rescale=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on as it was if it can
            self._config = before
            failure = StrandlineError(
                f"job {self.name}: not rescaled to {parallelism}: {type(error).__name__}: {error}"
            )
            asked.set_exception(failure)
            return failure
        assert self._generation is not None
        opened, now = self._generation.opened, time.time()
        asked.set_result(
            Rescaling(
                time=began,
                parallelism_before=generation.parallelism,
                parallelism=parallelism,
                batch=generation.batch_function.decided,
                duration_ms=(now - began) * 1000,
                pause_ms=(now - held) * 1000,
                checkpoint_ms=(covered - held) * 1000,
                slots_ms=opened.duration_ms,
                moved_key_groups=moved_key_groups(generation.parallelism, parallelism, before.max_parallelism),
                local_bytes=opened.local_bytes,
                durable_bytes=opened.durable_bytes,
            )
        )
        return None

    def _finish(self, generation: Generation) -> None:
        """The source is drained: a last checkpoint makes everything visible."""
        try:
            generation.checkpoints.take(generation.heal)
        except StrandlineError as error:
            self._fail(error)
            return
        self._end(generation, "finished")

    def _restart(self, generation: Generation, failure: StrandlineError) -> bool:
        """Go back to the last completed checkpoint, as long as the restart strategy allows."""
        # A file that a slot found damaged while the job ran: the next start looks for an older checkpoint.
        final = isinstance(failure, FINAL_ERRORS) and not isinstance(failure, DamagedFileError)
        while True:
            self._close_generation(generation)
            delay = None if final else self._strategy.after_failure(time.monotonic())
            if delay is None:
                self._fail(failure)
                return False
            log.warning("job %s: restarting in %.1f s after: %s", self.name, delay, failure)
            self.restarts += 1
            self._set_status("restarting")
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline and not self._asked:
                time.sleep(0.02)
            if self._asked:
                return False
            try:
                self._open_generation(failure)
                return True
            except StrandlineError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - whatever Spark raises, the strategy decides
                failure = StrandlineError(f"job {self.name}: {type(error).__name__}: {error}")
            final = isinstance(failure, FINAL_ERRORS)

    def _close_generation(self, generation: Generation) -> None:
        if self._generation is generation:
            self._generation = None
            self._totals["rounds_repeated"] += generation.batch_function.rounds_repeated
            self._totals["replaced_slots"] += generation.batch_function.replaced_slots
            generation.close()

    def _fail(self, error: StrandlineError) -> None:
        log.error("job %s failed: %s", self.name, error)
        self.error = error
        if self._generation is not None:
            self._close_generation(self._generation)
        self._close_cluster()
        self._set_status("failed")
        self._done.set()

    def _end(self, generation: Generation | None, status: str) -> None:
        if generation is not None:
            self._close_generation(generation)
        self._close_cluster()
        self._set_status(status)
        self._done.set()

    def _close_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.close()

    # --- what the user asks ------------------------------------------------------------------------

    def process_all_available(self) -> None:
        if self._available_now:
            self.await_termination(None)
            return
        while True:
            generation = self._running()
            try:
                generation.process_all_available()
                return
            except Exception as error:
                if self._generation is generation and self.status == "running" and not generation.has_failed(10.0):
                    raise
                log.info("job %s: waiting for the restart after: %s", self.name, error)

    def _running(self) -> Generation:
        """The generation that runs, once there is one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.status in ("running", *ENDED))
            self._raise_if_failed()
            generation = self._generation
            if self.status != "running":
                raise JobFailedError(f"job {self.name!r} does not run any more: it is {self.status}")
            if generation is not None:
                return generation
            time.sleep(0.05)  # it has just failed, and is about to be restarted or given up

    def _raise_if_failed(self) -> None:
        if self.status == "failed" and self.error is not None:
            raise self.error

    def await_termination(self, timeout: float | None) -> bool:
        ended = self._done.wait(timeout)
        self._raise_if_failed()
        return ended

    def checkpoints(self) -> list[CheckpointStats]:
        return self._history.checkpoints()

    def recoveries(self) -> list[Recovery]:
        return list(self._cluster.recoveries) if self._cluster is not None else []

    def trigger_checkpoint(self) -> CheckpointStats:
        taken = self._running().checkpoints.take()
        if taken is None:
            raise CheckpointError(
                f"job {self.name!r} has not processed anything yet, so there is nothing to checkpoint"
            )
        return taken

    def rescale(self, parallelism: int, step: Step) -> Rescaling:
        self._config.replace(parallelism=parallelism)  # raises what is wrong with it
        if self._available_now:
            raise ConfigError("a run with available_now=True cannot be rescaled; start it with another parallelism")
        asked: Future[Rescaling] = Future()
        with self._changed:
            if self._rescale is not None:
                raise StrandlineError(f"job {self.name!r} is being rescaled already")
            self._rescale = (parallelism, asked, step)
        while True:
            with suppress(TimeoutError):
                return asked.result(timeout=0.2)
            if self._done.is_set() and not asked.done():
                self._rescale = None
                self._raise_if_failed()
                raise JobFailedError(f"job {self.name!r} does not run any more: it is {self.status}")

    def savepoint(self, directory: str, format_: SavepointFormat) -> str:
        generation = self._running()
        return self._savepoint(generation, directory, format_, None)

    def _savepoint(
        self, generation: Generation, directory: str, format_: SavepointFormat, heal: Callable[[], None] | None
    ) -> str:
        def target() -> SavepointTarget:
            return SavepointTarget.within(_absolute(directory), self.name, format_, dict(self._config.storage_options))

        taken = generation.checkpoints.savepoint(target, heal)
        if taken is None:
            raise CheckpointError(
                f"job {self.name!r} has not processed anything yet, so there is nothing to make a savepoint of"
            )
        assert taken.path is not None
        return taken.path

    def stop(self, savepoint_dir: str | None = None, format_: SavepointFormat = "canonical") -> str | None:
        """End after a last checkpoint, and a savepoint if a directory for it is given; returns its path."""
        made: list[str] = []

        def orderly(generation: Generation) -> None:
            generation.batch_function.hold()
            generation.checkpoints.take(generation.heal)
            if savepoint_dir is not None:
                made.append(self._savepoint(generation, savepoint_dir, format_, generation.heal))

        self._ask("stopped", orderly)
        return made[0] if made else None

    def cancel(self) -> None:
        def at_once(generation: Generation) -> None:
            if self._config.on_cancel == "delete":
                generation.checkpoints.delete_all()

        self._ask("cancelled", at_once)

    def _ask(self, status: str, last_acts: Callable[[Generation], None]) -> None:
        """End the run: the supervisor steps back first, so that it does not restart what is being ended."""
        self._asked = True
        self._supervisor.join()
        with self._ending:
            if self._done.is_set():
                self._raise_if_failed()
                return
            generation = self._generation
            try:
                if generation is not None:
                    last_acts(generation)
            except StrandlineError as error:
                self._fail(error)
                raise
            self._end(generation, status)

    def query(self, uid: str, state: str, key: Any) -> Any:
        return self._running().query(uid, state, key if isinstance(key, tuple) else (key,))

    def processes(self) -> dict[str, Any]:
        return self._cluster.describe() if self._cluster is not None and not self._done.is_set() else {}

    def figures(self) -> dict[str, Any]:
        generation = self._generation
        repeated, replaced = self._totals["rounds_repeated"], self._totals["replaced_slots"]
        state: dict[str, Any] = {}
        if generation is not None:
            repeated += generation.batch_function.rounds_repeated
            replaced += generation.batch_function.replaced_slots
            state = generation.figures()
        return {
            "status": self.status,
            "restarts": self.restarts,
            "rounds_repeated": repeated,
            "replaced_slots": replaced,
            **state,
        }


def _changelog(config: Config) -> ChangelogSettings | None:
    if not config.changelog:
        return None
    return ChangelogSettings(
        upload_timeout=config.changelog_upload_timeout,
        upload_attempts=config.changelog_upload_attempts,
        max_behind_bytes=config.changelog_max_in_flight,
        materialization_interval=config.materialization_interval,
        max_amplification=config.changelog_max_amplification,
        storage=(
            StorageSettings(_absolute(config.changelog_dir), dict(config.storage_options))
            if config.changelog_dir is not None
            else None
        ),
    )


def _absolute(location: str) -> str:
    """A local path must mean the same folder in every process, whatever its working directory."""
    return location if "://" in location else os.path.abspath(location)


def _check_spark(spark: SparkSession, config: Config) -> None:
    check_supported(spark.version)
    context = spark.sparkContext
    if str(context.master).startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable  # the workers must find this package
    limit = context.getConf().get("spark.executor.pyspark.memory", None)
    if limit is not None:
        raise ConfigError(
            f"spark.executor.pyspark.memory={limit} limits the address space of Python workers and of all processes "
            f"they start, so slots could not have state_memory of {config.state_memory} bytes. Remove the setting."
        )
