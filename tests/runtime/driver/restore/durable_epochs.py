"""A job in real time without Spark and slots: checkpoints, durable epochs, and takeovers with real sinks on disk.

Every batch has a row of the main output, for a folder of Parquet files, and one of the side output `late`, for a table
of SQLite. A row says which batch it is of. The changes of a batch are its number, too.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.decisions import CompletionPlan
from strandline.checkpoint.epochs import Rows, Segment
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    SinkFile,
    SourcePosition,
    StateFile,
    SubtaskState,
    all_files,
)
from strandline.checkpoint.retention import retain
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import count
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.restore.epoch_log import EpochLog
from strandline.runtime.driver.restore.takeover import Claim, Restore, Wanted, take_over
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.protocol.messages import StorageSettings
from strandline.sinks.base import ExactlyOnceSink, SinkContext, Stager
from strandline.sinks.parquet.sink import ParquetSink
from strandline.sinks.positions import with_positions
from strandline.sinks.sqlite import SQLiteSink
from strandline.state.coding.ddl import parse_schema
from strandline.storage import JobPaths, Storage, open_storage
from strandline.storage.retries import Retries
from tests.factories import checkpoint_metadata

JOB = "visits"
PATHS = JobPaths(JOB)
STEP = "count"
SCHEMA = pa.schema([("n", pa.int64())])
OUTPUTS = (None, "late")


def step(uid: str = STEP) -> AggregateOperator:
    return AggregateOperator(uid, ["user"], parse_schema("user string"), {"n": count()})


@dataclass
class EpochJob:
    """The job's folder, its sinks, and the drivers that run it."""

    root: Path
    outputs: Sequence[str | None] = OUTPUTS
    """The outputs of the step that have a sink."""

    def start(
        self,
        storage: Storage | None = None,
        *,
        faults: dict[str, str] | None = None,
        restore: str | None = None,
        after: int | None = None,
        run: str | None = None,
        allow_non_restored: bool = False,
        num_retained: int = 1,
        uid: str = STEP,
    ) -> EpochDriver:
        """A driver takes the job over. `faults` are those of all storages, in the order of their calls."""
        options = faults or {}
        prefix = "faulty+file://" if faults else ""
        checkpoints = f"{prefix}{self.root}/checkpoints"
        storage = storage or open_storage(checkpoints, options)
        sinks: dict[str | None, ExactlyOnceSink] = {}
        context = SinkContext(JOB, SCHEMA, storage.url, (), options)
        (self.root / "out").mkdir(exist_ok=True)
        if None in self.outputs:
            sinks[None] = ParquetSink(f"{prefix}{self.root}/out").bound(context)
        if "late" in self.outputs:
            sinks["late"] = SQLiteSink(str(self.root / "rows.db"), "late").bound(context)
        stagers: dict[str, list[tuple[str | None, Stager]]] = {
            uid: [(output, sink.stager(context)) for output, sink in sinks.items()]
        }
        wanted = Wanted(
            JOB,
            (step(uid),),
            128,
            # Checkpoints name a sink by its place, which has to be the same with and without faults.
            {sink.place: sink.target(context) for sink in sinks.values()},
            can_go_back=True,
            restore=Restore(restore) if restore is not None else None,
            allow_non_restored=allow_non_restored,
            stagers=lambda: stagers,
            num_retained=num_retained,
        )
        settings = StorageSettings(storage.url, options)
        claim = take_over(storage, settings, wanted, after, run=run, retries=Retries(1, first_pause=0))
        return EpochDriver(self, claim, stagers)

    def location(self, number: int) -> str:
        return f"{self.root}/checkpoints/{PATHS.checkpoint_dir(number)}"

    def visible(self) -> dict[str | None, list[int]]:
        """What readers of the targets see."""
        files = [path for path in (self.root / "out").iterdir() if path.suffix == ".parquet"]
        late: list[int] = []
        if (self.root / "rows.db").exists():
            with contextlib.closing(sqlite3.connect(self.root / "rows.db")) as database:
                late = [n for (n,) in database.execute("select n from late")]
        main = [n for path in files for n in pq.read_table(path).column("n").to_pylist()]
        return {None: sorted(main), "late": sorted(late)}

    def epochs(self) -> set[str]:
        """The files of epochs that are there."""
        return {file.path for file in open_storage(f"{self.root}/checkpoints").list(PATHS.epochs_dir)}


@dataclass
class EpochDriver:
    """A driver in one generation. It goes on whether or not another driver has taken over."""

    job: EpochJob
    claim: Claim
    stagers: dict[str, list[tuple[str | None, Stager]]]
    number: int = -1

    def __post_init__(self) -> None:
        self.log = EpochLog.of(self.claim)
        restored = self.claim.restored
        self.uncovered: list[int] = []
        """The batches whose rows no checkpoint covers."""
        files = restored.subtasks[0].files if restored is not None else ()
        self.files = tuple(file for file in files if file.is_segment)
        self.inline = [int(word) for file in files for word in (file.inline or b"").split()]

    @property
    def batch(self) -> int:
        """The last batch."""
        return batch_id(self.claim.generation, self.number)

    def write(self, epochs: int = 1) -> None:
        """Some epochs, durable in one file."""
        first = self.number + 1
        self.number += epochs
        batches = [batch_id(self.claim.generation, number) for number in range(first, self.number + 1)]
        segments: list[Segment] = [(STEP, 0, batch, str(batch).encode()) for batch in batches]
        rows: list[Rows] = [(STEP, output, 0, batch, stream(batch)) for batch in batches for output in OUTPUTS]
        self.uncovered += batches
        made = self.log.write(batches[0] - 1, batches[-1], SourcePosition(self.number, {}), segments, rows)
        self.files += tuple(file for _operator, _subtask, file in made)

    def checkpoint(self, *, publish: bool = True, num_retained: int = 1, epoch: bool = True) -> None:
        """A checkpoint, by default with an epoch of its own. Its state is stored in it."""
        if epoch:
            self.number += 1
            self.inline.append(self.batch)
            self.uncovered.append(self.batch)
        state = StateFile("state", str(self.batch), False, inline=" ".join(map(str, self.inline)).encode())
        number = self.claim.first_checkpoint_id()
        metadata = checkpoint_metadata(
            number,
            job=JOB,
            generation=self.claim.generation,
            batch_id=self.batch,
            operators=(STEP,),
            subtasks=(SubtaskState(STEP, 0, 0, 128, "heap", True, (*self.files, state)),),
            source=SourcePosition(self.number, {}),
            sink_files=tuple(self._staged()),
            properties=with_positions({}, SinkCommits(self.claim).positions()),
        )
        durable = DurableCheckpoints(self.claim)
        durable.write_metadata(metadata)
        retained, dropped = retain(self.claim.store.job_log.retained, number, num_retained)
        durable.win_log_entry(CompletionPlan(metadata, (), retained, dropped))
        self.uncovered = []
        if publish:
            SinkCommits(self.claim).publish(metadata)

    def _staged(self) -> Iterator[SinkFile]:
        for _output, stager in self.stagers[STEP]:
            rows = (some for batch in self.uncovered for some in batches_of(batch))
            yield from stager.stage(rows, self.batch, 0)

    def check(self, batches: Sequence[int], outputs: Sequence[str | None] = OUTPUTS) -> None:
        """The job goes on from exactly these batches: its state, its position, and what readers see."""
        restored = self.claim.restored
        assert restored is not None
        assert restored.batch_id == batches[-1]
        assert restored.source.batch == batches[-1] % 1_000_000_000
        assert state_of(self.claim.storage, restored) == sorted(batches)
        seen = self.job.visible()
        for output in outputs:
            assert seen[output] == sorted(batches)


def state_of(storage: Storage, metadata: CheckpointMetadata) -> list[int]:
    """The batches whose changes the state has."""
    found: list[int] = []
    for _state, file in all_files(metadata):
        data = file.inline or b""
        if file.handle is not None:
            assert file.handle.part is not None
            data = storage.read_range(file.handle.path, file.handle.offset, file.handle.size)
        found += [int(word) for word in data.split()]
    return sorted(found)


def batches_of(batch: int) -> list[pa.RecordBatch]:
    return [pa.record_batch([pa.array([batch], pa.int64())], schema=SCHEMA)]


def stream(batch: int) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, SCHEMA) as writer:
        for some in batches_of(batch):
            writer.write_batch(some)
    data: bytes = out.getvalue().to_pybytes()
    return data


def interrupted(storage: Storage, at: int, act: Callable[[], None]) -> Storage:
    """The storage, but before call number `at`, something else happens."""
    calls = 0
    kind = type(storage)

    class Interrupted(kind):  # type: ignore[misc, valid-type]  # any storage
        def __getattribute__(self, name: str) -> object:
            nonlocal calls
            if name in ("read", "create", "write", "list", "exists", "delete", "rename"):
                calls += 1
                if calls == at:
                    act()
            return super().__getattribute__(name)

    made: Storage = Interrupted(storage.url)
    return made
