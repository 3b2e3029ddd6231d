"""Files of durable epochs, as a format that is fuzzed."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from random import Random

import msgspec
import pyarrow as pa

from strandline.checkpoint.epochs import (
    EPOCHS_VERSION,
    EpochEntry,
    StoredEpochs,
    chain,
    damaged_part,
    decode_epochs,
    encode_epochs,
    extended,
    misfit,
)
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition, StateFile, SubtaskState, decode, encode
from strandline.runtime.driver.restore.epoch_rows import check_rows_have_sinks
from strandline_bench.fuzz.checkpoint_formats import COMMIT, GROUPS, JOB, OFFSETS, TIMES
from strandline_bench.fuzz.format import Format, sealed_tree
from strandline_bench.fuzz.mutation import mutated_bytes

FIRST = 1_000_000_009
POSITION = SourcePosition(10, {"offsets/10": OFFSETS, "commits/10": COMMIT, "sources/0/0": b"\0v1\n{}"}, times=TIMES)
CHECKPOINT = CheckpointMetadata(
    job=JOB,
    checkpoint_id=7,
    generation=1,
    batch_id=FIRST - 1,
    kind="checkpoint",
    parallelism=2,
    max_parallelism=GROUPS,
    operators=("count",),
    subtasks=tuple(
        SubtaskState("count", n, n * 8, n * 8 + 8, "rocksdb", True, (StateFile("CURRENT", "c", False, inline=b"x"),))
        for n in range(2)
    ),
    source=SourcePosition(8, {"offsets/8": OFFSETS, "commits/8": COMMIT}, times=TIMES),
    sink_files=(),
    trigger_time=1.7e9,
    completed_time=1.7e9,
    properties={},
)
"""The checkpoint that the epochs extend."""


class Epochs(Format):
    """A file of epochs, up to the checkpoint that a takeover makes of it."""

    name = "epochs"
    weight = 15

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        out = pa.BufferOutputStream()
        rows = pa.record_batch({"user": ["a", "b"], "n": [1, None]})
        with pa.ipc.new_stream(out, rows.schema) as writer:
            writer.write_batch(rows)
        stream = out.getvalue().to_pybytes()
        both = (FIRST, FIRST + 1)
        self.samples = tuple(
            encode_epochs(JOB, 1, FIRST - 1, last, POSITION, segments, outputs, 1.7e9)[0]
            for last, segments, outputs in (
                (
                    FIRST + 1,
                    [("count", n, batch, b"changes" * n) for batch in both for n in range(2)],
                    [("count", output, 0, batch, stream) for batch in both for output in (None, "late")],
                ),
                (FIRST, [], []),
            )
        )

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
        parts, index = _split(data)
        return _sealed(parts, mutated_bytes(random, index, tuple(_split(other)[1] for other in others)))

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        parts, index = _split(data)
        return sealed_tree(random, index, lambda body: _sealed(parts, body))

    def read(self, data: bytes) -> None:
        entry = decode_epochs(data, "fuzz/epochs", JOB)
        damaged_part(data, entry)
        stored = StoredEpochs(entry, f"{JOB}/epochs/1/{9:020d}", len(data))
        if misfit(CHECKPOINT, entry) is not None or not list(chain(FIRST - 1, {FIRST: stored}.get)):
            return
        made = extended(
            CHECKPOINT, [stored], checkpoint_id=8, generation=2, sink_files=(), now=1.7e9, properties={"owner": JOB}
        )
        decode(encode(made), "fuzz/_metadata", Home(JOB, 8))
        if damaged_part(data, entry) is None:
            rows = [
                (one.operator, one.output, one.subtask, one.batch, data[one.offset : one.offset + one.size])
                for one in entry.rows
            ]
            check_rows_have_sinks(JOB, rows, {}, allow_non_restored=True)


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The parts of a file, with its start, and its index."""
    (length,) = struct.unpack_from(">Q", data, len(data) - 40)
    end = len(data) - 40 - length
    index = data[end : end + length]
    assert isinstance(msgspec.msgpack.decode(index, type=EpochEntry), EpochEntry)
    return data[:end], index


def _sealed(parts: bytes, index: bytes) -> bytes:
    digest = hashlib.sha256(struct.pack(">HQQ", EPOCHS_VERSION, len(parts), len(index)) + index).digest()
    return parts + index + struct.pack(">Q32s", len(index), digest)
