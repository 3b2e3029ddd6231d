"""A generation: one Spark query with its slots and checkpoints, from a takeover in the job's log to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import CheckpointMetadata, all_files, decode
from strandline.checkpoint.restore import check_compatible, plan_restore
from strandline.checkpoint.stats import CheckpointHistory, RestoredCheckpoint
from strandline.config import Config
from strandline.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedFileError,
    IncompatibleCheckpointError,
    NotFoundError,
    StrandlineError,
)
from strandline.operators.base import Operator
from strandline.runtime.batches import BatchFunction, error_in_task
from strandline.runtime.checkpointing import Checkpoints
from strandline.runtime.cluster import Cluster, Deployment
from strandline.runtime.joblog import JobLogStore
from strandline.runtime.messages import BackendSettings, OperatorSpec
from strandline.runtime.parquet_files import check_sink, recover_sink
from strandline.runtime.plan import Graph, Wiring
from strandline.runtime.rebuild import check_states
from strandline.runtime.spark_position import capture, seed
from strandline.sinks import ParquetSink
from strandline.storage import JobPaths, Storage, open_storage

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
        query: StreamingQuery,
        batch_function: BatchFunction,
        checkpoints: Checkpoints,
        cluster: Cluster,
        scratch: Path,
    ) -> None:
        self.number = number
        self.batch_function = batch_function
        self.checkpoints = checkpoints
        self._query = query
        self._cluster = cluster
        self._scratch = scratch

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
    ) -> Generation:
        """Take the job over, restore its newest completed checkpoint, and start the query.

        Nothing is taken over, and nobody is fenced, when the checkpoint or a sink's folder does not fit the job.
        """
        storage = open_storage(cluster.run.storage.url, cluster.run.storage.options)
        paths = JobPaths(job)
        store = JobLogStore(storage, paths)
        parallelism = config.parallelism or min(spark.sparkContext.defaultParallelism, config.max_parallelism)
        operators = tuple(operator.uid for operator in graph.operators)

        sinks = {
            sink.path: open_storage(sink.path, dict(config.storage_options))
            for _node, sink in graph.sinks
            if isinstance(sink, ParquetSink)
        }

        def latest() -> CheckpointMetadata | None:
            """What to go on from, once it is known to be whole and to fit the job and its sinks."""
            found = _read_latest(storage, paths, store)
            if found is not None:
                check_compatible(found, job, operators, parallelism, config.max_parallelism)
                for operator in graph.operators:
                    for state in found.subtasks:
                        if state.operator == operator.uid:
                            check_states(operator, state)
                _check_files(storage, paths, found)
            for path, sink_storage in sinks.items():
                check_sink(sink_storage, path, job, found)
            return found

        store.load()
        while True:
            position = store.log.position
            try:
                latest()
                break
            except CheckpointError:
                # A run that is alive may have completed a checkpoint since, and deleted the one that was looked at.
                if store.load().position == position:
                    raise
        store.take_over()
        restored = latest()
        generation = store.log.generation
        log.info(
            "job %s: generation %d from %s",
            job,
            generation,
            f"checkpoint {restored.checkpoint_id}" if restored else "the start",
        )

        for path, sink_storage in sinks.items():
            recover_sink(sink_storage, path, job, restored)

        subtasks = [(operator, index) for operator in operators for index in range(parallelism)]
        now = time.time()
        coordinator = CheckpointCoordinator(
            interval=config.checkpoint_interval,
            subtasks=subtasks,
            min_pause=config.min_pause,
            timeout=config.checkpoint_timeout,
            max_concurrent=config.max_concurrent_checkpoints,
            tolerable_failures=config.tolerable_failed_checkpoints
            if config.tolerable_failed_checkpoints >= 0
            else 1 << 62,
            num_retained=config.num_retained,
            first_checkpoint_id=max(store.log.next_checkpoint_id, _next_free_id(storage, paths)),
            start_time=now,
            covered_batch=restored.batch_id if restored else None,
            history=history,
        )
        retained = [restored] if restored else []
        for number in store.log.retained:
            if restored is None or number != restored.checkpoint_id:
                retained += _older(storage, paths, number)
        dropped = [
            metadata
            for number in store.log.dropped
            if storage.exists(paths.metadata(number))
            for metadata in _older(storage, paths, number)
        ]
        leftovers = coordinator.recover(retained, dropped)
        storage.delete([handle.path for handle in leftovers])
        storage.delete([paths.metadata(metadata.checkpoint_id) for metadata in dropped])

        restore_batch = restored.batch_id if restored else -1
        cluster.deploy(
            Deployment(
                generation=generation,
                parallelism=parallelism,
                max_parallelism=config.max_parallelism,
                backend=BackendSettings(
                    config.state_backend,
                    config.state_memory,
                    config.batch_memory,
                    config.incremental,
                    config.snapshot_compression,
                ),
                operators=tuple(OperatorSpec(operator.uid, pickle_operator(operator)) for operator in graph.operators),
                restore=tuple(plan_restore(restored).values()) if restored else (),
                restore_batch=restore_batch,
            )
        )
        if restored is not None and store.log.latest is not None:
            where = f"{storage.url}/{store.log.latest.metadata_path}"
            history.record_restored(RestoredCheckpoint(restored.checkpoint_id, where, restored.kind, time.time()))

        scratch = _scratch_folder(config, job, generation)
        if restored is not None:
            seed(restored.source, scratch)
        guard = threading.RLock()
        checkpoints = Checkpoints(
            coordinator,
            cluster,
            store,
            storage,
            paths,
            JobShape(job, generation, parallelism, config.max_parallelism, operators),
            sinks,
            lambda batch: capture(scratch, batch),
            restored,
            guard,
            config.checkpoint_timeout,
        )
        wiring = Wiring(
            job,
            tuple(cluster.run.coordinator),
            cluster.run.secret,
            parallelism,
            config.max_parallelism,
            dict(config.storage_options),
        )
        try:
            with _settings(spark):
                rows, outlets = graph.build(wiring)
                batch_function = BatchFunction(
                    cluster,
                    generation,
                    outlets,
                    subtasks,
                    restore_batch,
                    guard,
                    checkpoints.committed,
                    checkpoints.slots_replaced,
                    checkpoints.cover if config.checkpoint_every_batch else None,
                )
                writer = rows.writeStream.foreachBatch(batch_function).option("checkpointLocation", str(scratch))
                if available_now:
                    writer = writer.trigger(availableNow=True)
                elif config.batch_interval is not None:
                    writer = writer.trigger(processingTime=f"{int(config.batch_interval * 1000)} milliseconds")
                checkpoints.start()
                query = writer.start()
        except BaseException:
            checkpoints.close()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return cls(generation, query, batch_function, checkpoints, cluster, scratch)

    # --- watching --------------------------------------------------------------------------------

    def watch(self, asked_to_end: Callable[[], bool]) -> StrandlineError | None:
        """Wait for the end: the failure, or None when the source is drained or somebody asked to end."""
        while not asked_to_end():
            failure = self._failure()
            if failure is not None:
                return failure
            if not self._query.isActive:
                return self._failure()
            failure = self._replace_lost_slots()
            if failure is not None:
                return failure
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
        self.checkpoints.cover()

    def figures(self) -> dict[str, Any]:
        rows = state = memory = 0
        for answer in self._cluster.try_fan("figures", None, timeout=5.0).values():
            if not isinstance(answer, StrandlineError):
                for figures in answer.values():
                    rows += figures["rows"]
                    state += figures["state_bytes"]
                    memory += figures["memory_bytes"]
        return {
            "generation": self.number,
            "batches": self.batch_function.batches,
            "rows": rows,
            "state_bytes": state,
            "state_memory_bytes": memory,
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


def pickle_operator(operator: Operator) -> bytes:
    """The operator as bytes, with classes of the user's main script by value."""
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(operator)  # type: ignore[no-untyped-call]
    return data


def read_metadata(storage: Storage, path: str) -> CheckpointMetadata:
    """The metadata of a checkpoint. Raises `MetadataError` if damaged, `CheckpointNotFoundError` if it is gone."""
    where = f"{storage.url}/{path}"
    try:
        return decode(storage.read(path), where)
    except NotFoundError as error:
        raise CheckpointNotFoundError(
            f"{where} is missing, though the job's log names it as a completed checkpoint. Bring the file back; or, to "
            "begin anew without its state, use another job name or empty the job's folder."
        ) from error


def _read_latest(storage: Storage, paths: JobPaths, store: JobLogStore) -> CheckpointMetadata | None:
    latest = store.log.latest
    if latest is None:
        return None
    if latest.metadata_path != paths.metadata(latest.checkpoint_id):
        raise IncompatibleCheckpointError(
            f"{storage.url}/{paths.root} belongs to another job, not to job {paths.job!r}: its log names "
            f"{latest.metadata_path!r} as the newest checkpoint. Start the job under the name it had, with its folder "
            "where it was; or use a name that has no folder yet."
        )
    return read_metadata(storage, latest.metadata_path)


def _older(storage: Storage, paths: JobPaths, number: int) -> list[CheckpointMetadata]:
    """The metadata of a checkpoint that the job does not start from: if it cannot be read, nothing depends on it.

    Its files stay, for nobody knows them.
    """
    try:
        return [read_metadata(storage, paths.metadata(number))]
    except CheckpointError as error:
        log.warning("job %s: checkpoint %d is not retained any more: %s", paths.job, number, error)
        return []


def _check_files(storage: Storage, paths: JobPaths, metadata: CheckpointMetadata) -> None:
    """Raise `DamagedFileError` unless every file of the checkpoint is there with its size; slots check the content."""
    sizes = {file.path: file.size for file in storage.list(paths.root)}
    for state, file in all_files(metadata):
        if file.handle is None or sizes.get(file.handle.path) == file.handle.size:
            continue
        found = sizes.get(file.handle.path)
        what = "is missing" if found is None else f"has {found} bytes instead of {file.handle.size}"
        raise DamagedFileError(
            f"job {metadata.job}, operator {state.operator}, subtask {state.subtask}: {storage.url}/{file.handle.path} "
            f"{what}, and checkpoint {metadata.checkpoint_id} needs it. Bring the file back; or, to begin anew without "
            "the state, use another job name or empty the job's folder."
        )


def _next_free_id(storage: Storage, paths: JobPaths) -> int:
    """Above every checkpoint folder that exists: a fenced driver may have left one behind."""
    found = (paths.parse_metadata(file.path) for file in storage.list(paths.root))
    return max((number for number in found if number is not None), default=0) + 1


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
