"""A generation: one Spark query with its slots and checkpoints, from a takeover in the job's log to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.checkpoint.restore import plan_restore
from strandline.checkpoint.stats import CheckpointHistory, RestoredCheckpoint
from strandline.config import Config
from strandline.errors import DamagedFileError, StrandlineError
from strandline.operators.base import Operator
from strandline.runtime.driver.batches import BatchFunction, error_in_task
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import Base, Cluster, Deployment
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.plan import Graph, Wiring
from strandline.runtime.driver.recoveries import Recovery, slot_recovery
from strandline.runtime.driver.restore.position import capture, seed, with_watermark
from strandline.runtime.driver.restore.takeover import Claim, Restore, Wanted, take_over
from strandline.runtime.driver.rocksdb_factory import pickle_factory
from strandline.runtime.protocol.messages import BackendSettings, OperatorSpec
from strandline.sinks import ParquetSink
from strandline.storage import open_storage
from strandline.storage.external import delete_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

SPARK_SETTINGS = {
    # Finds out at run time that an input is empty, and then skips the relay.
    "spark.sql.adaptive.enabled": "false",
    # Spark's checkpoint folder is scratch on the driver's disk: the cheapest manager is enough.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # Spark refuses every sort of a stream; ours is inside the partitions of a batch, and makes keys contiguous.
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.streaming.stopTimeout": "60s",
}


class Generation:
    """Runs until it fails, is closed, or (with `available_now`) its source is drained."""

    def __init__(
        self,
        number: int,
        parallelism: int,
        opened: Recovery,
        query: StreamingQuery,
        start_again: Callable[[], StreamingQuery],
        batch_function: BatchFunction,
        checkpoints: Checkpoints,
        cluster: Cluster,
        scratch: Path,
        clock: Clock,
        state_memory: int,
    ) -> None:
        self.number = number
        self.parallelism = parallelism
        self.opened = opened
        """How its slots came up."""
        self.batch_function = batch_function
        self.checkpoints = checkpoints
        self._query = query
        self._start_again = start_again
        self._cluster = cluster
        self._scratch = scratch
        self._clock = clock
        self._state_memory = state_memory

    @classmethod
    def open(
        cls,
        job: str,
        spark: SparkSession,
        config: Config,
        graph: Graph,
        cluster: Cluster,
        history: CheckpointHistory,
        available_now: bool,
        after: int | None,
        claimed: Callable[[int], None],
        restore: Restore | None = None,
        allow_non_restored: bool = False,
        after_failure: StrandlineError | None = None,
        rescale: bool = False,
    ) -> Generation:
        """Take the job over, restore `restore` or else its newest completed checkpoint, and start the query.

        `after` is the run's last generation, if this is a restart; `claimed` learns the new one as soon as it is won.
        If slots find the newest checkpoint damaged, the job is taken over once more, from the one before.

        Nothing is taken over, and nobody is fenced, when the checkpoint or a sink's folder does not fit the job.
        """
        parallelism = config.parallelism or min(spark.sparkContext.defaultParallelism, config.max_parallelism)
        operators = tuple(operator.uid for operator in graph.operators)
        subtasks = [(operator, index) for operator in operators for index in range(parallelism)]
        sinks = {
            sink.path: open_storage(sink.path, dict(config.storage_options))
            for _node, sink in graph.sinks
            if isinstance(sink, ParquetSink)
        }
        storage = open_storage(cluster.run.storage.url, cluster.run.storage.options)
        wanted = Wanted(
            job,
            graph.operators,
            config.max_parallelism,
            sinks,
            can_withdraw=all(isinstance(sink, ParquetSink) for _node, sink in graph.sinks),
            restore=restore,
            allow_non_restored=allow_non_restored,
        )
        backend = _backend_settings(config)
        began = time.time()
        while True:
            claim = take_over(storage, cluster.run.storage, wanted, after)
            claimed(claim.generation)
            generation, restored = claim.generation, claim.restored
            start = f"checkpoint {restored.checkpoint_id}" if restored else "the start"
            log.info("job %s: generation %d from %s", job, generation, start)
            coordinator = _coordinator(config, claim, subtasks, history)
            try:
                rebuilt = cluster.deploy(
                    _deployment(config, backend, graph, claim, parallelism, rescale, allow_non_restored)
                )
                break
            except DamagedFileError as error:
                if restored is None or not claim.owned or wanted.restore is not None:
                    raise
                damaged = {**wanted.damaged, restored.checkpoint_id: str(error)}
                wanted, after = replace(wanted, damaged=damaged), claim.generation
        opened = slot_recovery(began, claim.restored_batch, rebuilt)
        if after_failure is not None:
            cluster.recoveries.append(replace(opened, kind="restart", reason=str(after_failure)))
        if restored is not None and claim.restored_path is not None:
            history.record_restored(
                RestoredCheckpoint(restored.checkpoint_id, claim.restored_path, restored.kind, time.time())
            )

        scratch = _scratch_folder(config, job, generation)
        clock = Clock(
            scratch, frozenset(operator.time_mode for operator in graph.operators), restored=restored is not None
        )
        wiring = Wiring(
            job,
            tuple(cluster.run.coordinator),
            cluster.run.secret,
            parallelism,
            config.max_parallelism,
            dict(config.storage_options),
            clock.ticks,
        )
        with _settings(spark):
            rows, outlets = graph.build(wiring)
        ticks = clock.ticks is not None
        places = graph.source_places(rows, ticks)
        if restored is not None:
            seed(restored.source, scratch, ticks=ticks, places=places)
        # Inside the batch function nobody can wait for what Spark does after it.
        patience = 5.0 if ticks and not config.checkpoint_every_batch else 0.0
        guard = threading.RLock()
        checkpoints = Checkpoints(
            coordinator,
            cluster,
            JobShape(job, generation, parallelism, config.max_parallelism, operators),
            dict(claim.properties),
            CheckpointInputs(
                restored,
                lambda batch: capture(scratch, batch, places),
                lambda position: with_watermark(scratch, position, patience),
            ),
            DurableCheckpoints(claim),
            guard,
            config.checkpoint_timeout,
        )
        try:
            with _settings(spark):
                batch_function = BatchFunction(
                    cluster,
                    generation,
                    outlets,
                    subtasks,
                    claim.restored_batch,
                    guard,
                    checkpoints.committed,
                    checkpoints.slots_replaced,
                    checkpoints.cover if config.checkpoint_every_batch else None,
                    clock,
                )
                writer = rows.writeStream.foreachBatch(batch_function).option("checkpointLocation", str(scratch))
                if available_now:
                    writer = writer.trigger(availableNow=True)
                elif config.batch_interval is not None:
                    writer = writer.trigger(processingTime=f"{int(config.batch_interval * 1000)} milliseconds")
                checkpoints.start()
                known = restored.operators if restored is not None else ()
                batch_function.initialize(graph.initial_rows(wiring, known))
                query = writer.start()
        except BaseException:
            checkpoints.close()
            shutil.rmtree(scratch, ignore_errors=True)
            raise

        def start_again() -> StreamingQuery:
            with _settings(spark):
                return writer.start()

        return cls(
            generation,
            parallelism,
            opened,
            query,
            start_again,
            batch_function,
            checkpoints,
            cluster,
            scratch,
            clock,
            config.state_memory,
        )

    # --- watching --------------------------------------------------------------------------------

    def watch(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        """Wait for the end: the failure, or None when the source is drained or somebody asked to end."""
        while not asked_to_end():
            failure = self._failure()
            if failure is not None:
                return failure
            if not self._query.isActive:
                failure = self._failure()
                if failure is not None or not self._clock.watermark_moved():
                    return failure
                self._clock.tick()  # the source is drained, but its last rows made something due
                self._query = self._start_again()
            failure = self._replace_lost_slots()
            if failure is not None:
                return failure
            self._clock.tick_if_due()
            time.sleep(0.1)
        return None

    def _failure(self) -> StrandlineError | None:
        if self.checkpoints.failure is not None:
            return self.checkpoints.failure
        if self.batch_function.failure is not None:
            return self.batch_function.failure
        if not self._query.isActive:
            error = self._query.exception()
            if error is not None:
                text = str(error)
                return error_in_task(text) or StrandlineError(f"the query failed: {text}")
        return None

    def _replace_lost_slots(self) -> StrandlineError | None:
        """Between batches nobody else notices that a slot is gone."""
        if not self._cluster.suspects() or not self.batch_function.busy.acquire(blocking=False):
            return None
        try:
            self.batch_function.recover()
            return None
        except StrandlineError as error:
            return error
        finally:
            self.batch_function.busy.release()

    def heal(self) -> None:
        """Replace lost slots between batches, waiting for the batch that runs."""
        with self.batch_function.busy:
            self.batch_function.recover()

    def has_failed(self, patience: float) -> bool:
        """Whether this generation is over, as far as one can tell within `patience` seconds."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self._failure() is not None or not self._query.isActive:
                return True
            time.sleep(0.05)
        return False

    # --- what the run asks -----------------------------------------------------------------------

    def process_all_available(self) -> None:
        """All rows that are there now are processed, and a completed checkpoint covers them."""
        self._query.processAllAvailable()
        # What these rows made due is part of the answer, also timers that other timers set.
        while self._clock.watermark_moved() or self._clock.event_timer_due():
            self._clock.tick()
            self._query.processAllAvailable()
        self.checkpoints.cover()

    def query(self, uid: str, state: str, key: tuple[Any, ...]) -> Any:
        """The state of one key: the slot that owns its key group has it."""
        body = {"operator": uid, "state": state, "key": pickle.dumps(key)}
        found: list[Any] = [pickle.loads(answer) for answer in self._cluster.fan("query", body, timeout=10.0).values()]
        return next((value for value in found if value not in (None, [], {})), found[0])

    def figures(self) -> dict[str, Any]:
        rows = late = state = memory = 0
        budgets, used = [], []
        for answer in self._cluster.try_fan("figures", None, timeout=5.0).values():
            if not isinstance(answer, StrandlineError):
                budgets.append(answer["budget_bytes"])
                used.append(answer["used_bytes"])
                for figures in answer["operators"].values():
                    rows += figures["rows"]
                    late += figures["late_rows"]
                    state += figures["state_bytes"]
                    memory += figures["memory_bytes"]
        changelog = self._cluster.changelog_figures()
        return {
            "generation": self.number,
            "parallelism": self.parallelism,
            "restore": {
                "duration_ms": self.opened.duration_ms,
                "local_bytes": self.opened.local_bytes,
                "durable_bytes": self.opened.durable_bytes,
            },
            "batches": self.batch_function.batches,
            "rows": rows,
            "late_rows": late,
            "state_bytes": state,
            "state_memory_bytes": memory,
            "state_memory": {
                "executor_budget_bytes": self._state_memory,
                "slot_budget_bytes": min(budgets, default=0),
                "used_bytes": sum(used),
                "most_used_bytes": max(used, default=0),
            },
            **({"changelog": changelog} if changelog else {}),
        }

    def close(self) -> None:
        """End the query and the checkpoints; slots are the cluster's business."""
        self.batch_function.end(self._stop_query, lambda: self._query.isActive)
        self.checkpoints.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _stop_query(self) -> None:
        try:
            self._query.stop()
        except Exception as error:  # noqa: BLE001 - a query that failed on its own may say so again
            log.info("the query ended with: %s", str(error).splitlines()[0] if str(error) else error)


def _coordinator(
    config: Config, claim: Claim, subtasks: list[tuple[str, int]], history: CheckpointHistory
) -> CheckpointCoordinator:
    """A coordinator that knows the retained checkpoints; what an earlier driver should have deleted is deleted."""
    tolerable = config.tolerable_failed_checkpoints
    coordinator = CheckpointCoordinator(
        interval=config.checkpoint_interval,
        subtasks=subtasks,
        min_pause=config.min_pause,
        timeout=config.checkpoint_timeout,
        max_concurrent=config.max_concurrent_checkpoints,
        tolerable_failures=tolerable if tolerable >= 0 else sys.maxsize,
        num_retained=config.num_retained,
        first_checkpoint_id=claim.first_checkpoint_id(),
        start_time=time.time(),
        covered_batch=claim.restored.batch_id if claim.restored else None,
        history=history,
    )
    dropped: list[int] = []

    def noted() -> Iterator[CheckpointMetadata]:
        for metadata in claim.dropped():
            dropped.append(metadata.checkpoint_id)
            yield metadata

    leftovers = coordinator.recover(claim.retained(), noted())
    delete_files(claim.storage, [handle.path for handle in leftovers])
    claim.storage.delete([claim.paths.metadata(number) for number in dropped])
    return coordinator


def _backend_settings(config: Config) -> BackendSettings:
    factory = config.rocksdb_factory
    return BackendSettings(
        config.state_backend,
        config.state_memory,
        config.batch_memory,
        config.incremental,
        config.snapshot_compression,
        config.rocksdb,
        pickle_factory(factory) if factory is not None and config.state_backend == "rocksdb" else None,
    )


def _deployment(
    config: Config,
    backend: BackendSettings,
    graph: Graph,
    claim: Claim,
    parallelism: int,
    rescale: bool,
    allow_non_restored: bool,
) -> Deployment:
    uids = {operator.uid for operator in graph.operators}
    restored = plan_restore(claim.restored) if claim.restored else ()
    return Deployment(
        generation=claim.generation,
        parallelism=parallelism,
        max_parallelism=config.max_parallelism,
        backend=backend,
        operators=tuple(OperatorSpec(operator.uid, pickle_operator(operator)) for operator in graph.operators),
        base=Base(
            claim.restored_batch,
            tuple(state for state in restored if state.operator in uids),
            claim.origin,
            claim.owned,
        ),
        rescale=rescale,
        allow_non_restored=allow_non_restored,
    )


def pickle_operator(operator: Operator) -> bytes:
    """The operator as bytes, with classes of the user's main script by value."""
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(operator)  # type: ignore[no-untyped-call]
    return data


def _scratch_folder(config: Config, job: str, generation: int) -> Path:
    """A fresh folder for Spark's own checkpoint; folders of drivers that are gone are removed."""
    shm = Path("/dev/shm")
    base = (
        Path(config.spark_checkpoint_dir)
        if config.spark_checkpoint_dir
        else (shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir()))
    )
    base.mkdir(parents=True, exist_ok=True)
    for old in base.glob("strandline-spark-*"):
        owner = old.name.split("-")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"strandline-spark-{os.getpid()}-{job}-{generation}-", dir=base))


@contextlib.contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    """Spark's settings for our query; it copies them when it starts, so the user's session gets its own back."""
    before = {name: spark.conf.get(name, None) for name in SPARK_SETTINGS}
    try:
        for name, value in SPARK_SETTINGS.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
