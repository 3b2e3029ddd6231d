"""A job's folder without Spark: real slots run real operators and write checkpoints of every kind and savepoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
from pyspark import cloudpickle

from strandline.checkpoint.metadata import CheckpointMetadata, encode
from strandline.checkpoint.pending import SubtaskAck
from strandline.operators.base import KEY_GROUP_COLUMN, Operator
from strandline.operators.columns.schemas import arrow_schema
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.runtime.driver.restore.savepoints import SavepointTarget
from strandline.runtime.protocol.exchange import ExchangeHeader
from strandline.runtime.protocol.messages import BatchTime, OperatorSpec, StepWatermarks
from strandline.runtime.protocol.slot_calls import Freeze
from strandline.runtime.taskmanager.savepoint_uploads import upload_savepoint
from strandline.state.coding.keys import subtask_of
from strandline.storage import JobPaths, Storage
from strandline.storage.local import LocalStorage
from tests.factories import checkpoint_metadata
from tests.operators.mini_slot import key_group
from tests.runtime.taskmanager.changelog.host import (
    GROUPS,
    JOB,
    PARALLELISM,
    Host,
    changelog_settings,
    run_info,
    slot_spec,
)

Rows = Sequence[tuple[Any, ...]]


class Written:
    """Runs batches of some operators in two slots, and writes what the driver would write of a checkpoint."""

    def __init__(
        self,
        folder: Path,
        operators: Sequence[Operator],
        kind: str = "rocksdb",
        *,
        changelog: bool = False,
        storage: Storage | None = None,
        inline_bytes: int = 0,
    ) -> None:
        self.folder = folder
        self.operators = {operator.uid: operator for operator in operators}
        self.storage = storage or LocalStorage(str(folder / "durable"))
        settings = changelog_settings(upload_timeout=10.0) if changelog else None
        self.host = Host(run_info(folder, self.storage, settings, inline_bytes=inline_bytes), self.storage)
        dumps: Any = cloudpickle.dumps  # Spark's copy has no types
        pickled = [OperatorSpec(operator.uid, dumps(operator)) for operator in operators]
        self.host.start(
            *(slot_spec(self.host.run, index, kind=kind, operators=pickled) for index in range(PARALLELISM))
        )
        self.paths = JobPaths(JOB)
        self.log = JobLogStore(self.storage, self.paths)
        self.log.load()
        self.log.take_over()
        self.batch = -1
        self.watermark_ms: int | None = None
        self.checkpoints = 0
        self.retained: tuple[int, ...] = ()

    @property
    def job(self) -> str:
        """The folder of the job."""
        return f"{self.storage.url}/{JOB}"

    def run(
        self,
        rows: Mapping[str, Rows],
        processing_ms: int = 0,
        watermark_ms: int | None = None,
    ) -> None:
        """One batch, committed: the input rows of every operator."""
        self.batch += 1
        for index, slot in self.host.slots.items():
            for uid, running in slot.operators.items():
                times = BatchTime(processing_ms, {uid: StepWatermarks(watermark_ms, self.watermark_ms)})
                header = ExchangeHeader(slot.spec.generation, self.batch, 0, uid, index, 0, times)
                arrow = self._arrow(self.operators[uid], rows.get(uid, ()), index)
                fresh = partial(slot._check_fresh, header, running)
                running.work(header, partial(iter, [arrow]), lambda: False, fresh)
        self.watermark_ms = watermark_ms
        self.host.wait_until_durable(self.batch, 0)
        self.host.commit(self.batch)

    def checkpoint(self) -> str:
        """Take a checkpoint, complete it in the job's log, and return its folder."""
        self.checkpoints += 1
        number = self.checkpoints
        if self.host.has_changelog:
            acks = self.host.acknowledged(number)
            self.host.changelog.completed(number)
        else:
            acks = self.host.upload_snapshots(number)
            self.host.uploader.completed(number, {})
        self.storage.create(self.paths.metadata(number), encode(self._metadata(number, acks)))
        self.retained = (*self.retained, number)
        self.log.complete(number, self.paths.metadata(number), self.batch, self.retained, ())
        return f"{self.storage.url}/{self.paths.checkpoint_dir(number)}"

    def savepoint(self, canonical: bool) -> str:
        """Take a savepoint, and return its folder."""
        self.checkpoints += 1
        target = SavepointTarget.within(str(self.folder / "savepoints"), JOB, "canonical", {})
        for slot in self.host.slots.values():
            slot.freeze(Freeze(self.checkpoints, canonical))
        snapshots = [one for slot in self.host.slots.values() for one in self.host._snapshots(slot, self.checkpoints)]
        metadata = self._metadata(self.checkpoints, upload_savepoint(target.storage, snapshots))
        return target.complete(msgspec.structs.replace(metadata, kind="savepoint"))

    def _metadata(self, number: int, acks: Sequence[SubtaskAck]) -> CheckpointMetadata:
        return checkpoint_metadata(
            number,
            job=JOB,
            batch_id=self.batch,
            parallelism=PARALLELISM,
            max_parallelism=GROUPS,
            operators=tuple(self.operators),
            subtasks=tuple(ack.state for ack in acks),
            steps=tuple(operator.describe() for operator in self.operators.values()),
        )

    def _arrow(self, operator: Operator, rows: Rows, index: int) -> pa.RecordBatch:
        """The rows of one subtask, sorted by key if the operator needs that."""
        struct = operator.input_struct
        places = [struct.fieldNames().index(name) for name in operator.key_columns]
        full = [(*row, group_of(tuple(row[at] for at in places))) for row in rows]
        own = [row for row in full if subtask_of(row[-1], PARALLELISM, GROUPS) == index]
        if operator.sorted_input:
            own.sort(key=lambda row: repr([row[at] for at in places]))
        schema = arrow_schema(struct).append(pa.field(KEY_GROUP_COLUMN, pa.int32()))
        columns = [pa.array([row[at] for row in own], field.type) for at, field in enumerate(schema)]
        return pa.RecordBatch.from_arrays(columns, names=schema.names)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.host.kill()


def group_of(key: tuple[Any, ...]) -> int:
    """The key group of a key in these tests."""
    return key_group(key) % GROUPS
