"""Checkpoint metadata, savepoints, the job's log and the notes of local snapshots, as formats that are fuzzed."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from backports import zstd

from strandline.admin.inspection import JobFolder
from strandline.checkpoint.home import Home
from strandline.checkpoint.job_log import (
    CheckpointRef,
    Completed,
    Entry,
    JobLog,
    Takeover,
    WentBack,
    decode_entry,
    encode_entry,
)
from strandline.checkpoint.metadata import (
    FORMAT_VERSION,
    CheckpointMetadata,
    FileHandle,
    SinkFile,
    SourceLog,
    SourceLogPiece,
    SourcePosition,
    StateFile,
    SubtaskState,
    Times,
    all_files,
    decode,
    encode,
    file_paths,
    keyed_files,
    last_batch,
    segment_file,
)
from strandline.checkpoint.restore import SinkRecovery, check_compatible, overlapping, plan_restore
from strandline.checkpoint.steps import StepDescription
from strandline.errors import IncompatibleCheckpointError
from strandline.operators.aggregate.aggregate_operator import AggregateOperator
from strandline.operators.aggregate.functions import count
from strandline.operators.aggregate.functions import sum as sum_of
from strandline.operators.deduplicate import DeduplicateOperator
from strandline.operators.join.join_operator import JoinOperator
from strandline.operators.schema_evolution import check_step, read_states, state_changes
from strandline.operators.windows.specs import SessionWindow, SlidingWindow
from strandline.operators.windows.window_operator import WindowOperator
from strandline.runtime.driver.clock import Clock
from strandline.runtime.driver.restore.position import seed
from strandline.runtime.driver.restore.source_logs import with_logs
from strandline.runtime.driver.spark_times import times_of
from strandline.runtime.driver.watermarks import Seen, SourceTime, WatermarkPlan
from strandline.runtime.slot.local_files import OperatorFolder
from strandline.state.backends.base import SnapshotFile
from strandline.state.coding.ddl import parse_schema
from strandline.storage.external import fetch_file
from strandline.storage.local import LocalStorage
from strandline_bench.fuzz.format import STATES, Format, sealed_tree
from strandline_bench.fuzz.mutation import mutated_bytes, mutated_tree

JOB = "visits"
GROUPS = 16


LOG_LINES = b'\n{"path":"file:///data/in/part-000.json"}' * 33 + b"\n" * 20
PIECE = zstd.compress(LOG_LINES[:1200])


def _piece(path: str, stored: bytes) -> SourceLogPiece:
    """A piece of a source's log: its first 1,200 bytes, stored as `stored`."""
    identity = hashlib.sha256(bytes(8) + LOG_LINES[:1200]).hexdigest()
    return SourceLogPiece(identity, 1200, FileHandle(path, len(stored), f"crc32:{zlib.crc32(stored):08x}"))


def _metadata(kind: Any, prefix: str) -> CheckpointMetadata:
    names = ["000015.sst", "MANIFEST-000004", "CURRENT"]
    states = []
    for subtask in range(2):
        files = tuple(
            StateFile(
                name,
                f"id-{subtask}-{name}",
                name.endswith("sst"),
                FileHandle(f"{prefix}{name}-{subtask}", 40, "crc32:1"),
            )
            for name in names[:2]
        )
        inline = StateFile(names[2], "c", False, inline=b"MANIFEST-000004\n")
        part = FileHandle(f"{prefix}pack", 10, "crc32:2", 30, 100)
        segments = (segment_file(1_000_000_007, part), segment_file(1_000_000_008, part))
        described = tuple(msgspec.to_builtins(state) for state in STATES)
        states.append(
            SubtaskState(
                "count", subtask, subtask * 8, subtask * 8 + 8, "rocksdb", True, (*files, inline, *segments), described
            )
        )
    entries = (("7.compact", 1000), ("8", len(LOG_LINES) - 1000))
    log = SourceLog(0, entries, (_piece(f"{prefix}piece-source", PIECE),), LOG_LINES[1200:])
    final = f"part-{JOB}-{7:020d}-{7:032x}.parquet"
    return CheckpointMetadata(
        job=JOB,
        checkpoint_id=7,
        generation=1,
        batch_id=1_000_000_008,
        kind=kind,
        parallelism=2,
        max_parallelism=GROUPS,
        operators=("count",),
        subtasks=tuple(states),
        source=SourcePosition(
            8, {"offsets/8": OFFSETS, "commits/8": COMMIT, "sources/1/8": b'v1\n{"path":"x"}'}, (log,), TIMES
        ),
        sink_files=(SinkFile("/out", f"_strandline/{final}.staged", final, 10, 2048),),
        trigger_time=1_700_000_000.0,
        completed_time=1_700_000_001.0,
        properties={"owner": JOB},
        steps=(STEP,),
    )


TIMES = Times(1_700_000_000_000, ((1_690_000_000_000,),), {"count": 1_680_000_000_000})
WATERMARKS = WatermarkPlan((SourceTime((1000,)),), {"count": {0: 5}})
STEP = StepDescription(
    "count",
    "window",
    (("user", "string"),),
    (("ts", "timestamp"),),
    {"size_ms": 60_000, "slide_ms": 60_000, "offset_ms": 0, "allowed_lateness_ms": 0, "emit": "close", "more": None},
    {"aggregates": (("count", ""), ("sum:x", "bigint"))},
)
_INPUT = parse_schema("user string, ts timestamp, x long")
OPERATORS = (
    WindowOperator("count", ["user"], _INPUT, SlidingWindow(120_000, 60_000), "ts", {"n": count()}),
    WindowOperator("count", ["user"], _INPUT, SessionWindow(60_000), "ts", {"n": count()}),
    AggregateOperator("count", ["user"], _INPUT, {"n": count(), "total": sum_of("x")}),
    DeduplicateOperator("count", ["user"], _INPUT, 60_000, "ts"),
    JoinOperator("count", ["user"], ["user"], _INPUT, parse_schema("user string, y int")),
)
"""Every vectorised step, over the state of whichever step the metadata describes."""
OFFSETS = b'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{}}\n{"logOffset":8}\n{"tick":3}'
COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'


def seal_metadata(body: bytes) -> bytes:
    """A `_metadata` file with right checksums around any content."""
    packed = zstd.compress(body, 1)
    head = struct.pack(">HQQ", FORMAT_VERSION, len(packed), len(body))
    digest = hashlib.sha256(head + packed).digest()
    return b"SLMD" + head + digest + packed


class Metadata(Format):
    """`_metadata` of a checkpoint, with everything that a restore and the commands for people do with it."""

    name = "checkpoint metadata"
    weight = 20

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._bodies = [self._body(metadata) for metadata in self._metadatas()]
        self.samples = tuple(map(seal_metadata, self._bodies))
        for metadata in self._metadatas():
            assert decode(encode(metadata), "sample", self._home()) == metadata
        self._jobs = JobFolder(LocalStorage(str(folder)), JOB)

    def _metadatas(self) -> list[CheckpointMetadata]:
        full = _metadata("checkpoint", f"{JOB}/shared/")
        return [full, msgspec.structs.replace(full, subtasks=(), operators=(), steps=())]

    def _home(self) -> Home:
        return Home(JOB, 7, ("s3://log",))

    @staticmethod
    def _body(metadata: CheckpointMetadata) -> bytes:
        return msgspec.msgpack.encode(metadata)

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
        return seal_metadata(mutated_bytes(random, random.choice(self._bodies), tuple(self._bodies)))

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        return sealed_tree(random, random.choice(self._bodies), seal_metadata)

    def read(self, data: bytes) -> None:
        metadata = decode(data, "fuzz/_metadata", self._home())
        file_paths(metadata)
        list(keyed_files(metadata.subtasks))
        json.dumps(self._jobs.details(metadata))
        SinkRecovery.plan(metadata, [])
        assert all(step.line().isprintable() for step in metadata.steps)
        for state, file in all_files(metadata):
            _ = file.size, file.handle and file.handle.part
            if file.is_segment:
                last_batch(file)
            state_changes(state.operator, read_states(state.operator, state.states), STATES, lambda _name: True)
        for operator in OPERATORS:
            for step in metadata.steps:
                for state in metadata.subtasks:
                    with suppress(IncompatibleCheckpointError):
                        check_step(operator, operator.check(), step, state, True)
        check_compatible(metadata, JOB, ["count"], GROUPS, any_job=True, allow_non_restored=True)
        overlapping(plan_restore(metadata), range(3, 12))


class Savepoint(Metadata):
    """`_metadata` of a savepoint."""

    name = "savepoint metadata"
    weight = 10

    def _metadatas(self) -> list[CheckpointMetadata]:
        return [_metadata("savepoint", "")]

    def _home(self) -> Home:
        return Home(None)


class Position(Metadata):
    """The source position of a checkpoint, which becomes Spark's checkpoint folder."""

    name = "source position"
    weight = 4

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._storage = LocalStorage(str(folder / "store"))
        self._storage.write(f"{JOB}/shared/piece-source", PIECE)

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        metadata = self._metadatas()[0]
        tree = msgspec.msgpack.decode(self._body(metadata))
        place = CheckpointMetadata.__struct_fields__.index("source")
        tree[place] = mutated_tree(random, tree[place])
        try:
            return seal_metadata(msgspec.msgpack.encode(tree))
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None

    def read(self, data: bytes) -> None:
        metadata = decode(data, "fuzz/_metadata", self._home())
        target = self.folder / "spark"
        try:
            seed(with_logs(self._storage, metadata.source), target, ticks=True, places=(0,))
            clock = Clock(target, WATERMARKS, {"count": "event"}, times_of(metadata.source, ("count",), WATERMARKS))
            when = clock.of(8)
            msgspec.json.encode(when)
            clock.committed(when, {0: Seen((1,), 1)}, [{"count": 1}])
            clock.event_timer_due()
        finally:
            shutil.rmtree(target, ignore_errors=True)


class SourceLogPieces(Format):
    """A piece of the log of a file source, with its size and checksum in the metadata."""

    name = "source log pieces"
    weight = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._storage = LocalStorage(str(folder / "store"))
        self.samples = (PIECE, LOG_LINES[:1200])

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
        return zstd.compress(mutated_bytes(random, LOG_LINES[:1200], (LOG_LINES,)))

    def read(self, data: bytes) -> None:
        self._storage.write("piece", data)
        log = SourceLog(0, (("8", 1200),), (_piece("piece", data),))
        with_logs(self._storage, SourcePosition(8, {}, (log,)))


class PackedFiles(Metadata):
    """The handles of a checkpoint: files and parts of files that are fetched."""

    name = "files and parts"
    weight = 4

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._storage = LocalStorage(str(folder / "store"))
        for path in file_paths(self._metadatas()[0]):
            self._storage.write(path, bytes(range(100)))

    def read(self, data: bytes) -> None:
        metadata = decode(data, "fuzz/_metadata", Home(JOB, 7))
        for _state, file in all_files(metadata):
            if file.handle is not None:
                fetch_file(self._storage, file.handle.path, self.folder / "fetched", file.handle.part)


# --- the job's log, markers ----------------------------------------------------------------------------


class JobLogEntry(Format):
    """An entry of the job's log."""

    name = "job log entry"
    weight = 15

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        ref = CheckpointRef(7, f"{JOB}/chk-7/_metadata", 8, "s3://bucket/x", False)
        takeover = Takeover(
            sequence=3,
            generation=2,
            owner="host/1",
            time=1.7e9,
            nonce="n",
            last_checkpoint_id=7,
            latest=ref,
            retained=(5, 7),
            dropped=(4,),
            released=(1,),
            log_id="log",
            sinks_since=1,
            went_back=(WentBack(1_000_000_007, 2),),
        )
        completed = Completed(
            sequence=4,
            generation=2,
            checkpoint_id=8,
            metadata_path=f"{JOB}/chk-8/_metadata",
            batch_id=9,
            time=1.7e9,
            nonce="m",
            retained=(7, 8),
            dropped=(5,),
        )
        self._entries: tuple[Entry, ...] = (takeover, completed)
        self.samples = tuple(encode_entry(entry) for entry in self._entries)

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
        bodies = tuple(msgspec.json.encode(entry) for entry in self._entries)
        return self._wrap(mutated_bytes(random, random.choice(bodies), bodies))

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        tree = mutated_tree(random, msgspec.to_builtins(random.choice(self._entries)))
        try:
            return self._wrap(json.dumps(tree, default=str).encode(errors="surrogatepass"))
        except RecursionError:
            return None

    @staticmethod
    def _wrap(body: bytes) -> bytes:
        return b'{"crc32":"%08x","entry":' % zlib.crc32(body) + body + b"}\n"

    def read(self, data: bytes) -> None:
        entry = decode_entry(data, "fuzz/log")
        log = JobLog.replay([entry])
        encode_entry(log.takeover_entry("me", 1.0, "n"))
        if log.generation:
            number = log.next_checkpoint_id
            encode_entry(log.completion_entry(number, f"{JOB}/chk-{number}/_metadata", 1, 1.0, "n", (number,), ()))


class SnapshotNotes(Format):
    """The marker of a local snapshot, and the names of local segments."""

    name = "local snapshot notes"
    weight = 4

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = OperatorFolder(folder / "operator")
        self._folder.mark(3, 8, [SnapshotFile("CURRENT", folder / "CURRENT", 16, "i", False)])
        self._marker = folder / "operator" / "snap-3.json"
        self._folder.segment(8, 9).touch()
        self.samples = (self._marker.read_bytes(),)

    def sealed(self, random: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
        body = json.dumps(json.loads(data)["marker"]).encode()
        return self._wrap(mutated_bytes(random, body, (body,)))

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        try:
            return self._wrap(json.dumps(mutated_tree(random, json.loads(data)["marker"]), default=str).encode())
        except RecursionError:
            return None

    @staticmethod
    def _wrap(body: bytes) -> bytes:
        return b'{"crc32":%d,"marker":' % zlib.crc32(body) + body + b"}"

    def read(self, data: bytes) -> None:
        self._marker.write_bytes(data)
        for start in self._folder.rebuild_starts(8, 9):
            if start.snapshot is not None:
                where = self._folder.snapshot(start.snapshot.checkpoint_id)
                for name, _identity, _size, _shared in start.snapshot.files:
                    (where / name).exists()
