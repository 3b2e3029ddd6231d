"""How a generation is opened: the job is claimed, slots are deployed, the query is planned and started."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strandline.checkpoint.batch import BatchProtocol
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import SourcePosition
from strandline.checkpoint.restore import plan_restore
from strandline.checkpoint.stats import CheckpointHistory, RestoredCheckpoint
from strandline.config import Config
from strandline.errors import DamagedFileError, JobDefinitionError, StrandlineError
from strandline.operators.base import Operator
from strandline.pyspark_releases import needs_available_now_wrapper
from strandline.runtime.driver.batches import Batches, Outlets
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.cluster_setup import absolute_location
from strandline.runtime.driver.deployment import Deployment, RestorePoint
from strandline.runtime.driver.draining import Drain
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.event_times import read_observed
from strandline.runtime.driver.first_offsets import FirstOffsets
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.logical_plans import all_support_available_now, kafka_topics
from strandline.runtime.driver.micro_batches import MicroBatches
from strandline.runtime.driver.plan import Graph, StreamedPlan, Wiring
from strandline.runtime.driver.progress import RunProgress, Shape
from strandline.runtime.driver.query_settings import (
    AVAILABLE_NOW_WRAPPER,
    QUICK_LOGS,
    one_start_at_a_time,
    query_settings,
    restore,
)
from strandline.runtime.driver.realtime.cuts import Cuts
from strandline.runtime.driver.realtime.epochs import Epochs
from strandline.runtime.driver.realtime.event_times import EventTimes
from strandline.runtime.driver.realtime.generation import RealtimeGeneration
from strandline.runtime.driver.realtime.offsets import (
    EpochPosition,
    Offsets,
    all_offsets,
    for_realtime,
    with_offsets,
)
from strandline.runtime.driver.realtime.query import (
    SPARK_BATCH,
    allow_python,
    check_realtime,
    realtime_settings,
)
from strandline.runtime.driver.realtime.staged_rows import StagedRows
from strandline.runtime.driver.realtime.topics import Topics, within
from strandline.runtime.driver.recoveries import Began, Recovery, first_line, slot_recovery
from strandline.runtime.driver.restore.epoch_log import EpochLog
from strandline.runtime.driver.restore.position import capture, seed
from strandline.runtime.driver.restore.registry_recovery import recover_registry
from strandline.runtime.driver.restore.source_logs import SourceLogs, uploader, with_logs
from strandline.runtime.driver.restore.takeover import Claim, Restore, Wanted, take_over
from strandline.runtime.driver.rocksdb_factory import pickle_factory
from strandline.runtime.driver.scratch_folder import ScratchFolder
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.driver.source_reads import SourceReads
from strandline.runtime.driver.spark_times import times_of
from strandline.runtime.driver.watermarks import WatermarkPlan
from strandline.runtime.protocol.messages import BackendSettings, OperatorSpec, StagerSpec
from strandline.sinks.base import ExactlyOnceSink, Stager
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
    first_offsets: FirstOffsets
    """Where each Kafka source of the run first began to read."""
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
    epoch_position: EpochPosition | None = None
    """In real time: the position between two epochs."""
    topics: Topics | None = None
    """In real time: asks Kafka about the sources."""
    source_of_stream: Mapping[int, int] = field(default_factory=dict)
    """In real time: see `StreamedPlan.source_of_stream`."""


def open_generation(run: RunContext, request: GenerationRequest) -> Generation:
    """Take the job over, restore what the request names, and start the query.

    If slots find that the newest checkpoint is damaged, the job is taken over once more, from the checkpoint before.
    If a checkpoint or a sink's target does not fit the job, an error is raised before the job is taken over, so that no
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
        self._realtime = config.latency_mode == "realtime"
        if self._realtime:
            check_realtime(run.job, graph, config, run.spark, available_now=run.available_now)
        self._direct = self._realtime or _direct(graph, config)
        self._storage = open_storage(run.cluster.run.storage.url, run.cluster.run.storage.options)
        targets = graph.targets(run.job, run.cluster.run.storage.url, config.storage_options)
        self._wanted = Wanted(
            run.job,
            graph.operators,
            config.max_parallelism,
            targets,
            can_go_back=all(isinstance(sink, ExactlyOnceSink) for _node, sink in graph.sinks)
            and all(target.can_go_back for target in targets.values()),
            restore=request.restore,
            allow_non_restored=run.allow_non_restored,
            others=_other_roots(config),
            stagers=self._output_stagers,
            num_retained=config.num_retained,
        )

    # --- claim ------------------------------------------------------------------------------------

    def claim(self) -> _Claimed:
        """Win a takeover in the job's log. From here on every other driver of the job is fenced."""
        self._check_fencing()
        if self._realtime and self._after is None:
            self._streamed(self._wiring(0, None))  # raises what would be raised after the takeover
        info = self._run.cluster.run
        claim = take_over(
            self._storage, info.storage, self._wanted, self._after, run=info.run_id, on_won=self._run.on_claim
        )
        start = f"checkpoint {claim.restored.checkpoint_id}" if claim.restored else "the start"
        log.info("job %s: generation %d from %s", self._run.job, claim.generation, start)
        return _Claimed(claim, self._coordinator(claim))

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
        stagers = self._stagers() if self._direct else {}
        pushed = list(self._run.graph.callbacks()) if self._direct else []
        feeds = self._run.graph.feeds() if self._direct else {}
        return Deployment(
            generation=claim.generation,
            parallelism=self._parallelism,
            max_parallelism=self._config.max_parallelism,
            backend=self._backend,
            operators=tuple(
                OperatorSpec(
                    operator.uid,
                    pickled(operator),
                    stagers.get(operator.uid, []),
                    [name for uid, name in pushed if uid == operator.uid],
                    feeds.get(operator.uid, []),
                )
                for operator in self._run.graph.operators
            ),
            levels=self._run.graph.levels(),
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

    def _stagers(self) -> dict[str, list[StagerSpec]]:
        """What the slots of each step stage for sinks."""
        found = self._output_stagers()
        return {uid: [StagerSpec(name, pickled(stager)) for name, stager in some] for uid, some in found.items()}

    def _output_stagers(self) -> dict[str, list[tuple[str | None, Stager]]]:
        run = self._run
        return run.graph.stagers(run.job, run.cluster.run.storage.url, dict(self._config.storage_options))

    # --- plan -------------------------------------------------------------------------------------

    def plan(self, claim: Claim, undo: ExitStack) -> _Planned:
        """Build the streaming plan, and put the restored position where Spark will look for it."""
        run, config, restored = self._run, self._config, claim.restored
        scratch = ScratchFolder(config.spark_checkpoint_dir, run.job, claim.generation)
        undo.callback(scratch.remove)
        if self._position is None:
            run.first_offsets.seed(scratch.path)
        watermarks = run.graph.watermark_plan()
        clock = Clock(
            scratch.path,
            watermarks,
            {operator.uid: operator.time_mode for operator in run.graph.operators},
            times_of(restored.source, restored.operators, watermarks) if restored is not None else None,
            asks_spark=not self._realtime,
        )
        wiring = self._wiring(claim.generation, clock.ticks)
        if self._realtime:
            return self._plan_streamed(scratch, clock, watermarks, wiring)
        with query_settings(run.spark):
            rows, outlets = run.graph.build(wiring)
        places = run.graph.source_places(rows, ticks=clock.ticks is not None)
        if self._position is not None:
            seed(self._position, scratch.path, ticks=clock.ticks is not None, places=places)
        return _Planned(scratch, clock, watermarks, wiring, rows, outlets, places)

    def _wiring(self, generation: int, ticks: Path | None) -> Wiring:
        run, config = self._run, self._config
        return Wiring(
            run.job,
            run.cluster.run.run_id,
            run.cluster.run.coordinator,
            run.cluster.run.secret,
            self._parallelism,
            config.max_parallelism,
            run.cluster.run.storage.url,
            dict(config.storage_options),
            run.cluster.run.heartbeat_timeout,
            ticks,
            run.cluster.run.tls,
            self._direct,
            generation,
            run.cluster.addresses,
        )

    def _streamed(self, wiring: Wiring) -> StreamedPlan:
        with query_settings(self._run.spark):
            return self._run.graph.build_streamed(wiring, released_at_once=self._config.transfer_rows == 1)

    def _plan_streamed(
        self, scratch: ScratchFolder, clock: Clock, watermarks: WatermarkPlan, wiring: Wiring
    ) -> _Planned:
        """As `plan`, for a query in real time."""
        streamed = self._streamed(wiring)
        places = streamed.places
        topics = Topics(streamed.rows, places, scratch.path)
        restored = self._position
        if restored is not None:
            offsets = dict(enumerate(all_offsets(restored)))
            if len(offsets) == len(topics):  # else `seed` says that the job reads other sources
                restored = with_offsets(restored, self._within(topics, offsets))
            seed(for_realtime(restored), scratch.path, ticks=False, places=places)
        position = EpochPosition(scratch.path, places, restored)
        if restored is None:
            position.begin_at(self._within(topics, position.first_offsets()))
        outlets = Outlets(None, (), direct=True, callbacks=self._run.graph.callbacks())
        return _Planned(
            scratch,
            clock,
            watermarks,
            wiring,
            streamed.rows,
            outlets,
            places,
            position,
            topics,
            streamed.source_of_stream,
        )

    def _within(self, topics: Topics, offsets: dict[int, Offsets]) -> dict[int, Offsets]:
        """The next offsets of some streams, moved to the first rows that Kafka still has; see `topics.within`."""
        if not offsets:
            return offsets
        try:
            held = topics.held()
        except Exception as error:  # noqa: BLE001 - Py4J raises many types
            log.warning(
                "job %s: Kafka did not say what it holds, so rows that it has deleted are not noticed: %s",
                self._run.job,
                first_line(str(error)),
            )
            return offsets
        return within(self._run.job, offsets, held)

    # --- start ------------------------------------------------------------------------------------

    def start(self, claimed: _Claimed, opened: Recovery, planned: _Planned, undo: ExitStack) -> Generation:
        """Start the checkpoints, hand out initial state, and start the query."""
        run, claim = self._run, claimed.claim
        epoch_log = EpochLog.of(claim) if self._realtime and self._config.changelog else None
        checkpoints = self._checkpoints(claimed, planned, epoch_log)
        undo.callback(checkpoints.close)
        batches = self._batches(claim, checkpoints, planned, epoch_log)
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
        writer = self._writer(planned, batches)
        wrapper = run.available_now and needs_available_now_wrapper() and all_support_available_now(planned.rows)

        more: dict[str, str] = dict(AVAILABLE_NOW_WRAPPER) if wrapper else {}
        if self._realtime:
            more |= realtime_settings(self._config.transfer_rows)
        else:
            more |= QUICK_LOGS

        def start_query() -> StreamingQuery:
            with one_start_at_a_time(), query_settings(run.spark, more) as users:
                if isinstance(batches, MicroBatches):
                    logs = {name: users[name] for name in QUICK_LOGS}
                    batches.query_began = lambda session: restore(session, logs)
                return writer.start()

        checkpoints.start()
        restored = claim.restored.operators if claim.restored is not None else ()
        with query_settings(run.spark):
            batches.initialize(run.graph.initial_rows(planned.wiring, restored))
        parts: dict[str, Any] = {
            "number": claim.generation,
            "parallelism": self._parallelism,
            "opened": opened,
            "start_query": start_query,
            "checkpoints": checkpoints,
            "cluster": run.cluster,
            "scratch": planned.scratch,
            "clock": planned.clock,
            "state_memory": self._config.state_memory,
            "progress": run.progress,
            "topics": kafka_topics(planned.rows),
            "first_offsets": run.first_offsets,
            "drain": Drain(run.job, run.spark, run.graph, planned.wiring, planned.clock, batches),
        }
        if isinstance(batches, Epochs):
            assert planned.epoch_position is not None
            assert planned.topics is not None
            run.cluster.cuts = batches.cuts
            generation: Generation = RealtimeGeneration(
                epochs=batches,
                position=planned.epoch_position,
                topics_of_kafka=planned.topics,
                query=start_query(),
                **parts,
            )
            batches.begin()
        else:
            run.cluster.cuts = None
            generation = Generation(batches=batches, query=start_query(), **parts)
        generation.start_figures()
        return generation

    def _batches(
        self, claim: Claim, checkpoints: Checkpoints, planned: _Planned, epoch_log: EpochLog | None
    ) -> Batches:
        run = self._run
        protocol: BatchProtocol[None] = BatchProtocol(self._subtasks, claim.generation, claim.restored_batch)
        every_batch = self._config.checkpoint_every_batch
        if planned.epoch_position is not None:
            assert planned.topics is not None
            return Epochs(
                run.cluster,
                claim.generation,
                protocol,
                planned.outlets,
                checkpoints,
                planned.clock,
                run.progress,
                checkpoint_every_batch=every_batch,
                cuts=Cuts(run.job, self._config.heartbeat_timeout),
                position=planned.epoch_position,
                interval=self._config.epoch_interval,
                event_times=EventTimes(
                    planned.source_of_stream, [len(source.delays_ms) for source in planned.watermarks.sources]
                ),
                ends=planned.topics.ends,
                cores=run.spark.sparkContext.defaultParallelism,
                rows=StagedRows(run.job, self._output_stagers(), claim.store.retries, checkpoints.note_staged),
                epoch_log=epoch_log,
            )
        return MicroBatches(
            run.cluster,
            claim.generation,
            protocol,
            planned.outlets,
            checkpoints,
            planned.clock,
            run.progress,
            read_seen=lambda: read_observed(run.spark, planned.watermarks),
            count_reads=SourceReads(run.spark, planned.source_places).look,
            checkpoint_every_batch=every_batch,
        )

    def _checkpoints(self, claimed: _Claimed, planned: _Planned, epoch_log: EpochLog | None) -> Checkpoints:
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
                self._capture(planned),
                SourceLogs(
                    scratch,
                    {source: number for number, source in enumerate(dict.fromkeys(places))},
                    uploader(claim.storage, claim.paths, claim.store.retries),
                    claim.restored.source if claim.restored is not None and claim.owned else None,
                ),
            ),
            DurableCheckpoints(claim),
            SinkCommits(claim, self._run.progress.sinks, config.sink_backlog),
            config.checkpoint_timeout,
            epoch_log,
        )

    def _capture(self, planned: _Planned) -> Callable[[int], SourcePosition]:
        """How a checkpoint learns the position in the sources after a batch."""
        clock, position = planned.clock, planned.epoch_position
        if position is not None:
            return lambda number: position.capture(number, clock.times)
        return lambda batch: capture(planned.scratch.path, batch, planned.source_places, clock.times)

    def _writer(self, planned: _Planned, batches: Batches) -> DataStreamWriter:
        if self._realtime:
            allow_python(self._run.spark)
            streaming = planned.rows.writeStream.format("noop").outputMode("update")
            streaming = streaming.option("checkpointLocation", str(planned.scratch.path))
            made: DataStreamWriter = streaming.trigger(realTime=SPARK_BATCH)  # type: ignore[call-overload]  # not typed
            return made
        assert isinstance(batches, MicroBatches)
        writer = planned.rows.writeStream.foreachBatch(batches)
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


def _direct(graph: Graph, config: Config) -> bool:
    """Whether relays deliver rows straight to the slots. Raises `JobDefinitionError` if they must and cannot."""
    if config.shuffle == "spark":
        return False
    why_not = graph.why_not_direct()
    if why_not is not None and config.shuffle == "direct":
        raise JobDefinitionError(f"shuffle='direct' does not fit this job: {why_not}; use shuffle='auto'")
    return why_not is None


def pickled(value: Operator | Stager) -> bytes:
    """A value as bytes. Classes of the user's main script are pickled by value, because slots cannot import it."""
    # Private Spark API: PySpark bundles cloudpickle without documenting it. Spark pickles user functions with it, so
    # slots unpickle what Spark's Python workers can unpickle.
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return data
