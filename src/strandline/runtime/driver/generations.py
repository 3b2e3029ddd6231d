"""The generations of a run, one after the other: opens and closes them, and adds up what they counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.stats import CheckpointHistory
from strandline.config import Config
from strandline.errors import StrandlineError
from strandline.runtime.driver.cluster import CLOSE_PATIENCE, Cluster
from strandline.runtime.driver.cluster_setup import make_cluster
from strandline.runtime.driver.events import CheckpointEnded, Progressed, Recovered, RunEvent
from strandline.runtime.driver.figures import RestoreFigures, Restoring, RunningBatch
from strandline.runtime.driver.first_offsets import FirstOffsets
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.opening import GenerationRequest, RunContext, open_generation
from strandline.runtime.driver.plan import Graph
from strandline.runtime.driver.progress import RunProgress
from strandline.runtime.driver.restore.takeover import Restore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class GenerationCounts:
    """Counts over all generations of a run, and facts about the last one."""

    rounds_repeated: int = 0
    replaced_slots: int = 0
    generation: int = 0
    """The number of the last generation; the following fields are about that one, too."""
    parallelism: int = 0
    batches: int = 0
    restore: RestoreFigures = field(default_factory=RestoreFigures)

    def plus(self, generation: Generation) -> GenerationCounts:
        """These counts, and those of the next generation."""
        work = generation.batches
        return GenerationCounts(
            self.rounds_repeated + work.rounds_repeated,
            self.replaced_slots + work.replaced_slots,
            generation.number,
            generation.parallelism,
            work.committed,
            generation.restore,
        )


class Generations:
    """All generations of one run, with the cluster and the records that they share. At most one is open at a time."""

    def __init__(
        self,
        job: str,
        spark: SparkSession,
        graph: Graph,
        *,
        available_now: bool,
        restore: Restore | None,
        allow_non_restored: bool,
        on_event: Callable[[RunEvent], None],
    ) -> None:
        self.current: Generation | None = None
        """The generation that is open; None before the first one, between two of them, and after the end."""
        self.cluster: Cluster | None = None
        self.history = CheckpointHistory(on_end=lambda stats: on_event(CheckpointEnded(stats)))
        self.progress = RunProgress(job, lambda report: on_event(Progressed(report)))
        self.on_first_claim: Callable[[], None] = lambda: None
        """Called when the run has taken the job over."""
        self._first_offsets = FirstOffsets()
        self._job = job
        self._spark = spark
        self._graph = graph
        self._available_now = available_now
        self._restore = restore
        self._allow_non_restored = allow_non_restored
        self._on_event = on_event
        self._last_claimed: int | None = None
        """The number of the generation that this run took over last, even if that generation did not start."""
        self._closed = GenerationCounts()

    def start_cluster(self, run_id: str, config: Config) -> None:
        """Start what all generations share: the driver's server, through which it gets its task managers and slots."""
        self.cluster = make_cluster(self._job, run_id, self._spark, config)
        self.cluster.on_recovery = lambda recovery: self._on_event(Recovered(recovery))

    def close_cluster(self, patience: float = CLOSE_PATIENCE) -> None:
        """End all task managers and slots. They get `patience` seconds."""
        if self.cluster is not None:
            self.cluster.close(patience)

    def open(self, config: Config, after_failure: StrandlineError | None = None, rescale: bool = False) -> None:
        """Open the next generation. Raises what is wrong with the job, its options or its checkpoint."""
        assert self.cluster is not None
        run = RunContext(
            self._job,
            self._spark,
            self._graph,
            self.cluster,
            self.history,
            self.progress,
            available_now=self._available_now,
            allow_non_restored=self._allow_non_restored,
            first_offsets=self._first_offsets,
            on_claim=self._claimed,
        )
        request = GenerationRequest(
            config,
            after=self._last_claimed,
            # The first takeover writes into the job's log what it restored; later ones go on from there.
            restore=self._restore if self._last_claimed is None else None,
            after_failure=after_failure,
            rescale=rescale,
        )
        self.current = open_generation(run, request)

    def _claimed(self, number: int) -> None:
        first = self._last_claimed is None
        self._last_claimed = number
        if first:
            self.on_first_claim()

    def close(self, generation: Generation, patience: float | None = None) -> None:
        """Close the generation, unless that was done before; see `Generation.close`."""
        if self.current is generation:
            self.current = None
            self._closed = self._closed.plus(generation)
            generation.close(patience)

    def restoring(self) -> Restoring | None:
        """How far a generation is that opens its state; None if none does."""
        return self.cluster.restored.progress() if self.cluster is not None else None

    def running_batch(self) -> RunningBatch | None:
        """The batch that is being worked on; None if there is none."""
        generation = self.current
        running = generation.batches.running if generation is not None else None
        if generation is None or running is None:
            return None
        batch, began = running
        return RunningBatch(
            number=batch - first_batch(generation.number),
            id=batch,
            since_ms=int(began.time * 1000),
            running_ms=began.ms_until(),
            first=generation.batches.committed == 0,
        )

    def counts(self) -> GenerationCounts:
        """What all generations have counted up to now."""
        generation = self.current
        return self._closed if generation is None else self._closed.plus(generation)
