"""How a generation is opened: the job is claimed, slots are deployed, the query is planned and started."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from strandline.checkpoint.batch import BatchProtocol
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import SourcePosition
from strandline.checkpoint.restore import plan_restore
from strandline.checkpoint.stats import CheckpointHistory, RestoredCheckpoint
from strandline.config import Config
from strandline.errors import DamagedFileError, StrandlineError
from strandline.operators.base import Operator
from strandline.pyspark_releases import needs_available_now_wrapper
from strandline.runtime.driver.batches import BatchFunction, Outlets
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.cluster_setup import absolute_location
from strandline.runtime.driver.deployment import Deployment, RestorePoint
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.event_times import read_observed
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.logical_plans import all_support_available_now
from strandline.runtime.driver.plan import Graph, Wiring
from strandline.runtime.driver.progress import RunProgress, Shape
from strandline.runtime.driver.query_settings import AVAILABLE_NOW_WRAPPER, query_settings
from strandline.runtime.driver.recoveries import Began, Recovery, slot_recovery
from strandline.runtime.driver.restore.empty_output import make_readable
from strandline.runtime.driver.restore.position import capture, seed
from strandline.runtime.driver.restore.registry_recovery import recover_registry
from strandline.runtime.driver.restore.retries import Retries
from strandline.runtime.driver.restore.source_logs import SourceLogs, uploader, with_logs
from strandline.runtime.driver.restore.takeover import Claim, Restore, Wanted, take_over
from strandline.runtime.driver.rocksdb_factory import pickle_factory
from strandline.runtime.driver.scratch_folder import ScratchFolder
from strandline.runtime.driver.source_reads import SourceReads
from strandline.runtime.driver.spark_times import times_of
from strandline.runtime.driver.watermarks import WatermarkPlan
from strandline.runtime.protocol.messages import BackendSettings, OperatorSpec
from strandline.sinks import ParquetSink
from strandline.storage import JobPaths, open_storage
from strandline.storage.fencing import probe_create

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunContext:
    """What is the same for all generations of a run."""

    job: str
    spark: SparkSession
    graph: Graph
    cluster: Cluster
    history: CheckpointHistory
    progress: RunProgress
    available_now: bool
    allow_non_restored: bool
    """Whether restored state that the job does not declare any more may be dropped."""
    on_claim: Callable[[int], None]
    """Called with the number of every generation as soon as its takeover is in the job's log."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is asked of one generation."""

    config: Config
    """The run's options; a rescale changes the parallelism."""
    after: int | None = None
    """The generation that this run took over last; None for the first one."""
    restore: Restore | None = None
    """What the user wants restored; None for the newest completed checkpoint."""
    after_failure: StrandlineError | None = None
    """Why the generation before ended, if this is a restart."""
    rescale: bool = False
    """Whether this generation changes the parallelism of a running job."""


@dataclass(frozen=True, slots=True)
class _Claimed:
    """The result of the first step."""

    claim: Claim
    coordinator: CheckpointCoordinator


@dataclass(frozen=True, slots=True)
class _Planned:
    """The result of the third step."""

    scratch: ScratchFolder
    """Spark's checkpoint folder, with the restored position in it."""
    clock: Clock
    watermarks: WatermarkPlan
    wiring: Wiring
    rows: DataFrame
    outlets: Outlets
    source_places: tuple[int, ...]


def open_generation(run: RunContext, request: GenerationRequest) -> Generation:
    """Take the job over, restore what the request names, and start the query.

    If slots find that the newest checkpoint is damaged, the job is taken over once more, from the checkpoint before.
    If a checkpoint or a sink's folder does not fit the job, an error is raised before the job is taken over, so that no
    other driver is fenced.
    """
    opening = _Opening(run, request)
    while True:
        claimed = opening.claim()
        try:
            opened = opening.deploy(claimed)
            break
        except DamagedFileError as error:
            opening.exclude_damaged(claimed.claim, error)
    with ExitStack() as undo:
        planned = opening.plan(claimed.claim, undo)
        generation = opening.start(claimed, opened, planned, undo)
        undo.pop_all()
    return generation


class _Opening:
    """The four steps of opening one generation; `open_generation` calls them in order."""

    def __init__(self, run: RunContext, request: GenerationRequest) -> None:
        config, graph = request.config, run.graph
        self._run = run
        self._request = request
        self._config = config
        self._began = Began.now()
        self._after = request.after
        self._position: SourcePosition | None = None
        self._parallelism = config.parallelism or min(run.spark.sparkContext.defaultParallelism, config.max_parallelism)
        self._uids = tuple(operator.uid for operator in graph.operators)
        self._backend = _backend_settings(config)
        self._subtasks = [(uid, index) for uid in self._uids for index in range(self._parallelism)]
        self._storage = open_storage(run.cluster.run.storage.url, run.cluster.run.storage.options)
        self._wanted = Wanted(
            run.job,
            graph.operators,
            config.max_parallelism,
            {
                sink.path: open_storage(sink.path, dict(config.storage_options), private=False)
                for _node, sink in graph.sinks
                if isinstance(sink, ParquetSink)
            },
            can_withdraw=all(isinstance(sink, ParquetSink) for _node, sink in graph.sinks),
            columns=graph.written_columns(),
            restore=request.restore,
            allow_non_restored=run.allow_non_restored,
            others=_other_roots(config),
        )

    # --- claim ------------------------------------------------------------------------------------

    def claim(self) -> _Claimed:
        """Win a takeover in the job's log. From here on every other driver of the job is fenced."""
        self._check_fencing()
        info = self._run.cluster.run
        claim = take_over(
            self._storage, info.storage, self._wanted, self._after, run=info.run_id, on_won=self._run.on_claim
        )
        self._make_outputs_readable()
        start = f"checkpoint {claim.restored.checkpoint_id}" if claim.restored else "the start"
        log.info("job %s: generation %d from %s", self._run.job, claim.generation, start)
        return _Claimed(claim, self._coordinator(claim))

    def _make_outputs_readable(self) -> None:
        retries = Retries()
        for path, columns in self._wanted.columns.items():
            storage = self._wanted.sinks[path]
            retries.call(
                f"job {self._run.job}: the columns of {storage.url}",
                partial(make_readable, storage, self._run.job, columns),
            )

    def _check_fencing(self) -> None:
        """Refuse a storage in which two drivers could both win."""
        if self._after is not None or self._config.allow_unfenced_storage or not self._storage.must_be_probed:
            return
        paths = JobPaths(self._run.job)
        probe_create(self._storage, lambda: paths.probe(uuid.uuid4().hex))

    def exclude_damaged(self, claim: Claim, error: DamagedFileError) -> None:
        """Do not restore this checkpoint again. Raises `error` if the job may not go back to an older one."""
        if claim.restored is None or not claim.owned or self._wanted.restore is not None:
            raise error
        damaged = {**self._wanted.damaged, claim.restored.checkpoint_id: str(error)}
        self._wanted, self._after = replace(self._wanted, damaged=damaged), claim.generation

    def _coordinator(self, claim: Claim) -> CheckpointCoordinator:
        """A coordinator that knows the retained checkpoints. Deletes what an earlier driver could not delete."""
        config = self._config
        tolerable = config.tolerable_failed_checkpoints
        coordinator = CheckpointCoordinator(
            interval=config.checkpoint_interval,
            subtasks=self._subtasks,
            min_pause=config.min_pause,
            timeout=config.checkpoint_timeout,
            max_concurrent=config.max_concurrent_checkpoints,
            tolerable_failures=tolerable if tolerable >= 0 else sys.maxsize,
            num_retained=config.num_retained,
            first_checkpoint_id=claim.first_checkpoint_id(),
            start_time=time.monotonic(),
            covered_batch=claim.restored.batch_id if claim.restored else None,
            history=self._run.history,
        )
        recover_registry(coordinator, claim)
        return coordinator

    # --- deploy -----------------------------------------------------------------------------------

    def deploy(self, claimed: _Claimed) -> Recovery:
        """Start all slots from the restored checkpoint. Raises `DamagedFileError` if its files are damaged."""
        claim, cluster = claimed.claim, self._run.cluster
        self._position = _position(claim)
        rebuilt = cluster.deploy(self._deployment(claim))
        opened = slot_recovery(self._began, claim.restored_batch, rebuilt)
        if self._request.after_failure is not None:
            cluster.note_recovery(replace(opened, kind="restart", reason=str(self._request.after_failure)))
        if claim.restored is not None and claim.restored_path is not None:
            self._run.history.record_restored(
                RestoredCheckpoint(claim.restored.checkpoint_id, claim.restored_path, claim.restored.kind, time.time())
            )
        return opened

    def _deployment(self, claim: Claim) -> Deployment:
        restored = plan_restore(claim.restored) if claim.restored else ()
        return Deployment(
            generation=claim.generation,
            parallelism=self._parallelism,
            max_parallelism=self._config.max_parallelism,
            backend=self._backend,
            operators=tuple(
                OperatorSpec(operator.uid, pickle_operator(operator)) for operator in self._run.graph.operators
            ),
            restore=RestorePoint(
                claim.restored_batch,
                tuple(state for state in restored if state.operator in self._uids),
                claim.origin,
                claim.owned,
                claim.restored.checkpoint_id if claim.restored is not None else 0,
                claim.restored.steps if claim.restored is not None else (),
            ),
            rescale=self._request.rescale,
            allow_non_restored=self._run.allow_non_restored,
        )

    # --- plan -------------------------------------------------------------------------------------

    def plan(self, claim: Claim, undo: ExitStack) -> _Planned:
        """Build the streaming plan, and put the restored position where Spark will look for it."""
        run, config, restored = self._run, self._config, claim.restored
        scratch = ScratchFolder(config.spark_checkpoint_dir, run.job, claim.generation)
        undo.callback(scratch.remove)
        watermarks = run.graph.watermark_plan()
        clock = Clock(
            scratch.path,
            watermarks,
            {operator.uid: operator.time_mode for operator in run.graph.operators},
            times_of(restored.source, restored.operators, watermarks) if restored is not None else None,
        )
        wiring = Wiring(
            run.job,
            run.cluster.run.run_id,
            run.cluster.run.coordinator,
            run.cluster.run.secret,
            self._parallelism,
            config.max_parallelism,
            dict(config.storage_options),
            run.cluster.run.heartbeat_timeout,
            clock.ticks,
            run.cluster.run.tls,
        )
        with query_settings(run.spark):
            rows, outlets = run.graph.build(wiring)
        places = run.graph.source_places(rows, ticks=clock.ticks is not None)
        if self._position is not None:
            seed(self._position, scratch.path, ticks=clock.ticks is not None, places=places)
        return _Planned(scratch, clock, watermarks, wiring, rows, outlets, places)

    # --- start ------------------------------------------------------------------------------------

    def start(self, claimed: _Claimed, opened: Recovery, planned: _Planned, undo: ExitStack) -> Generation:
        """Start the checkpoints, hand out initial state, and start the query."""
        run, claim = self._run, claimed.claim
        checkpoints = self._checkpoints(claimed, planned)
        undo.callback(checkpoints.close)
        batch_function = BatchFunction(
            run.cluster,
            claim.generation,
            BatchProtocol(self._subtasks, claim.generation, claim.restored_batch),
            planned.outlets,
            checkpoints,
            planned.clock,
            run.progress,
            lambda: read_observed(run.spark, planned.watermarks),
            SourceReads(run.spark, planned.source_places).look,
            checkpoint_every_batch=self._config.checkpoint_every_batch,
        )
        run.progress.begin(
            Shape(
                claim.generation,
                self._parallelism,
                claim.restored_batch,
                planned.source_places,
                run.graph.steps_of_functions(),
            ),
            self._uids,
        )
        writer = self._writer(planned, batch_function)
        wrapper = run.available_now and needs_available_now_wrapper() and all_support_available_now(planned.rows)

        def start_query() -> StreamingQuery:
            with query_settings(run.spark, AVAILABLE_NOW_WRAPPER if wrapper else {}):
                return writer.start()

        checkpoints.start()
        restored = claim.restored.operators if claim.restored is not None else ()
        with query_settings(run.spark):
            batch_function.initialize(run.graph.initial_rows(planned.wiring, restored))
        generation = Generation(
            number=claim.generation,
            parallelism=self._parallelism,
            opened=opened,
            query=start_query(),
            start_query=start_query,
            batch_function=batch_function,
            checkpoints=checkpoints,
            cluster=run.cluster,
            scratch=planned.scratch,
            clock=planned.clock,
            state_memory=self._config.state_memory,
            progress=run.progress,
        )
        generation.start_figures()
        return generation

    def _checkpoints(self, claimed: _Claimed, planned: _Planned) -> Checkpoints:
        config, claim, scratch, places = self._config, claimed.claim, planned.scratch.path, planned.source_places
        return Checkpoints(
            claimed.coordinator,
            self._run.cluster,
            JobShape(
                self._run.job,
                claim.generation,
                self._parallelism,
                config.max_parallelism,
                self._uids,
                tuple(operator.describe() for operator in self._run.graph.operators),
            ),
            dict(claim.properties),
            CheckpointInputs(
                claim.restored,
                lambda batch: capture(scratch, batch, places, planned.clock.times),
                SourceLogs(
                    scratch,
                    {source: number for number, source in enumerate(dict.fromkeys(places))},
                    uploader(claim.storage, claim.paths, claim.store.retries),
                    claim.restored.source if claim.restored is not None and claim.owned else None,
                ),
            ),
            DurableCheckpoints(claim),
            config.checkpoint_timeout,
        )

    def _writer(self, planned: _Planned, batch_function: BatchFunction) -> DataStreamWriter:
        writer = planned.rows.writeStream.foreachBatch(batch_function)
        writer = writer.option("checkpointLocation", str(planned.scratch.path))
        if self._run.available_now:
            return writer.trigger(availableNow=True)
        if self._config.batch_interval is not None:
            return writer.trigger(processingTime=f"{int(self._config.batch_interval * 1000)} milliseconds")
        return writer


def _position(claim: Claim) -> SourcePosition | None:
    """The restored position with all logs of its sources. Raises `DamagedFileError` if a piece of one is damaged."""
    if claim.restored is None:
        return None
    origin = claim.origin
    return with_logs(open_storage(origin.url, origin.options) if origin else claim.storage, claim.restored.source)


def _other_roots(config: Config) -> tuple[str, ...]:
    """The roots outside `checkpoint_dir` that may hold files of the job, as they are written in checkpoints."""
    locations = [*([config.changelog_dir] if config.changelog_dir is not None else []), *config.trusted_dirs]
    options = dict(config.storage_options)
    return tuple(open_storage(absolute_location(location), options).url for location in locations)


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


def pickle_operator(operator: Operator) -> bytes:
    """The operator as bytes. Classes of the user's main script are pickled by value, because slots cannot import it."""
    # Private Spark API: PySpark bundles cloudpickle without documenting it. Spark pickles user functions with it, so
    # slots unpickle what Spark's Python workers can unpickle.
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(operator)  # type: ignore[no-untyped-call]
    return data
