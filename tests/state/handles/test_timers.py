"""Stored timers move with their key groups, on either timer service, and can be read without an operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from strandline.operators.base import KEY_GROUP_COLUMN, BatchInfo, SubtaskInfo
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.backends.base import StateBackend
from strandline.state.backends.factory import open_backend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import key_group_range
from strandline.state.handles.query import encode_key, read_timers
from strandline.state.handles.timers import encode_time, time_of

STRUCT = parse_schema("k long, t long")
GROUPS = 16


class Ring(KeyedProcessor):
    """Sets a timer for each row."""

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
        for row in rows:
            context.register_timer(row.t)

    def on_timer(self, key: Any, timestamp: int, context: Any) -> Any:
        return [(*key, timestamp)]


def opened(service: str, subtask: int, parallelism: int) -> ProcessOperator:
    operator = ProcessOperator(
        "ring", Ring(), ["k"], STRUCT, STRUCT, time_mode="event", timer_service=service  # type: ignore[arg-type]
    )  # fmt: skip
    operator.open(SubtaskInfo("job", "ring", subtask, parallelism, GROUPS))
    return operator


def batch(
    operator: ProcessOperator, backend: StateBackend, spill: Path, number: int, watermark: int, rows: Any = ()
) -> list[tuple[int, int]]:
    columns = [[row[0] for row in rows], [row[1] for row in rows], [row[0] % GROUPS for row in rows]]
    kinds = [pa.int64(), pa.int64(), pa.int32()]
    arrays = [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)]
    changes = ChangeSet(backend, 8 << 10, spill)
    incoming = pa.RecordBatch.from_arrays(arrays, names=["k", "t", KEY_GROUP_COLUMN])
    made = []
    for out in operator.run(iter([incoming]), changes, BatchInfo(number, 0, watermark)):
        assert isinstance(out, pa.RecordBatch)
        made += [(row["k"], row["t"]) for row in out.to_pylist()]
    for keys, values in changes.chunks():
        backend.apply(keys, values)
    changes.discard()
    return made


@pytest.mark.parametrize("kind", ["heap", "rocksdb"])
@pytest.mark.parametrize("service", ["heap", "rocksdb"])
def test_each_subtask_fires_the_timers_of_its_key_groups_after_a_rescale(
    service: str, kind: Any, tmp_path: Path
) -> None:
    backend = open_backend(kind, tmp_path / "state", memory=16 << 20, incremental=False, restored_files=())
    spill = tmp_path / "spill"
    one = opened(service, 0, 1)
    timers = [(key, 1000 - key) for key in range(200)] + [(key, 5000 + key) for key in range(200)]
    assert batch(one, backend, spill, 1, 0, sorted(timers)) == []
    assert one.next_timer_ms == 801
    one.close()
    other = {"heap": "rocksdb", "rocksdb": "heap"}[service]
    for subtask in range(3):
        part = opened(other, subtask, 3)
        groups = key_group_range(subtask, 3, GROUPS)
        mine = sorted((t, key) for key, t in timers if key % GROUPS in groups)
        fired = batch(part, backend, spill, 2 + subtask, 1000)
        assert [(t, key) for key, t in fired] == [pair for pair in mine if pair[0] <= 1000]
        assert part.next_timer_ms == next(t for t, _ in mine if t > 1000)
    for key in (0, 7, 199):
        assert read_timers(backend, encode_key(parse_schema("k long"), (key,), key % GROUPS)) == [5000 + key]
    backend.close()


def test_encoded_times_sort_as_times_do() -> None:
    times = [-(1 << 63), -1, 0, 1, 255, 256, 1 << 40, (1 << 63) - 1]
    encoded = [encode_time(time) for time in times]
    assert encoded == sorted(encoded)
    assert [time_of(time) for time in encoded] == times
