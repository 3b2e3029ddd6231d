"""The file that makes epochs durable by themselves: its content, its format, and how such files extend a checkpoint.

In real time a driver writes one file for one or several consecutive epochs. The file has all that a checkpoint after
its last epoch has and the checkpoint before it has not: the position of the sources, the changes of every subtask, and
the rows for sinks. A later checkpoint refers to the changes where they are, so that nothing is written twice.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from strandline.checkpoint.batch import numbered
from strandline.checkpoint.home import Refused, check_source
from strandline.checkpoint.metadata import (
    FORMAT_VERSION,
    BatchId,
    CheckpointMetadata,
    FileHandle,
    KeyGroup,
    KnownGeneration,
    Natural,
    Seconds,
    SinkFile,
    SourcePosition,
    StateFile,
    segment_file,
)
from strandline.errors import CheckpointError, MetadataError, NewerFormatError

EPOCHS_VERSION = 1
"""The format that this release writes. It reads this one and all earlier ones."""

Checksum = Annotated[str, msgspec.Meta(max_length=100)]

# The structs are arrays on disk: fields may be added at the end with a default, but never moved or removed.


class EpochSegment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The changes of one subtask in the epochs that end with `batch`: a part of the file."""

    operator: str
    subtask: KeyGroup
    batch: BatchId
    offset: Natural
    size: Natural
    checksum: Checksum
    """Algorithm and value, as in `crc32:89abcdef`."""


class EpochRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of one output of one subtask for the sinks of that output, as an Arrow stream: a part of the file."""

    operator: str
    output: str | None
    """The name of a side output; None for the main one."""
    subtask: KeyGroup
    batch: BatchId
    offset: Natural
    size: Natural
    checksum: Checksum


class EpochEntry(msgspec.Struct, frozen=True, array_like=True):
    """What a file of epochs says beside its parts."""

    job: str
    generation: KnownGeneration
    """The generation of the epochs, whose driver wrote the file."""
    follows: BatchId
    """The last batch before the epochs."""
    batch: BatchId
    """The last epoch."""
    source: SourcePosition
    """The position of the sources, and the times, after the last epoch."""
    segments: tuple[EpochSegment, ...]
    rows: tuple[EpochRows, ...]
    written: Seconds


@dataclass(frozen=True, slots=True)
class StoredEpochs:
    """An entry and the file that has it."""

    entry: EpochEntry
    path: str
    size: int
    """The size of the whole file."""


_MAGIC = b"SLEP"
_START = struct.Struct(">4sH")
_END = struct.Struct(">Q32s")
"""Length of the index, SHA-256 of all but the parts. It is at the end, so that no part is copied for it."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EpochEntry)

Segment = tuple[str, int, int, bytes]
"""Operator, subtask, batch, and the changes."""
Rows = tuple[str, str | None, int, int, bytes]
"""Operator, output, subtask, batch, and the rows as an Arrow stream."""


def encode_epochs(
    job: str,
    generation: int,
    follows: int,
    batch: int,
    source: SourcePosition,
    segments: Iterable[Segment],
    rows: Iterable[Rows],
    written: float,
) -> tuple[bytes, EpochEntry]:
    """The content of the file, and its entry. The parts of one subtask come in the order of their batches."""
    parts: list[bytes] = [_START.pack(_MAGIC, EPOCHS_VERSION)]
    end = _START.size
    named_segments: list[EpochSegment] = []
    for operator, subtask, of, data in segments:
        named_segments.append(EpochSegment(operator, subtask, of, end, len(data), _checksum(data)))
        parts.append(data)
        end += len(data)
    named_rows: list[EpochRows] = []
    for operator, output, subtask, of, data in rows:
        named_rows.append(EpochRows(operator, output, subtask, of, end, len(data), _checksum(data)))
        parts.append(data)
        end += len(data)
    entry = EpochEntry(job, generation, follows, batch, source, tuple(named_segments), tuple(named_rows), written)
    index = _encoder.encode(entry)
    parts += [index, _END.pack(len(index), _digest(EPOCHS_VERSION, end, index))]
    return b"".join(parts), entry


def decode_epochs(data: bytes, where: str, job: str) -> EpochEntry:
    """Read the entry of a file of epochs of `job`; `where` names the file in messages.

    Raises `MetadataError` if the file is something else, truncated, damaged, or another job's, and `NewerFormatError`
    if a later release wrote it. The parts are not looked at: see `damaged_part`.
    """
    end, index = _index(data, where)
    try:
        entry = _decoder.decode(index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(where, f"its checksum is right, but its content is no entry of epochs: {error}") from error
    if entry.job != job:
        raise _damaged(where, f"it is of job {entry.job!r}, not of job {job!r}")
    wrong = _contradiction(entry, end)
    if wrong is not None:
        raise _damaged(where, wrong)
    return entry


def _index(data: bytes, where: str) -> tuple[int, memoryview]:
    """Where the parts of the file end, and its index."""
    if len(data) < _START.size or data[:4] != _MAGIC:
        raise _damaged(where, "it does not begin with SLEP")
    _magic, version = _START.unpack_from(data)
    if version > EPOCHS_VERSION:
        raise NewerFormatError(
            f"{where}, a file of epochs, has format version {version}, too new for this release, which reads up to "
            f"version {EPOCHS_VERSION}. Use the release of strandline that wrote it, or a later one."
        )
    if version < 1:
        raise _damaged(where, f"there is no format version {version}")
    if len(data) < _START.size + _END.size:
        raise _damaged(where, f"it has only {len(data)} bytes")
    length, digest = _END.unpack_from(data, len(data) - _END.size)
    end = len(data) - _END.size - length
    if end < _START.size:
        raise _damaged(where, f"its {len(data)} bytes cannot hold an index of {length} bytes")
    index = memoryview(data)[end : end + length]
    if _digest(version, end, index) != digest:
        raise _damaged(where, "it is truncated, or the checksum of its index is wrong")
    return end, index


def _contradiction(entry: EpochEntry, end: int) -> str | None:
    """What in an entry cannot be, as a part of a sentence; `end` is where the parts end."""
    generations = {numbered(entry.follows)[0], numbered(entry.batch)[0]}
    if generations != {entry.generation} or entry.follows >= entry.batch:
        return f"it has epochs {entry.follows + 1} to {entry.batch} of generation {entry.generation}"
    for part in _parts(entry):
        if not entry.follows < part.batch <= entry.batch:
            return f"it has a part of batch {part.batch}"
        if part.offset < _START.size or part.offset + part.size > end:
            return "it has a part that is not between its start and its index"
    order: dict[tuple[str, int], int] = {}
    for segment in entry.segments:
        if order.get((segment.operator, segment.subtask), -1) >= segment.batch:
            return f"it has segments of subtask {segment.subtask} of {segment.operator!r} in a wrong order"
        order[segment.operator, segment.subtask] = segment.batch
    try:
        check_source(entry.source)
    except Refused as error:
        return str(error)
    return None if not entry.source.logs else "it names logs of file sources, which real time does not have"


def damaged_part(data: bytes, entry: EpochEntry) -> EpochSegment | EpochRows | None:
    """The first part of a file whose checksum is wrong."""
    view = memoryview(data)
    for part in _parts(entry):
        if _checksum(view[part.offset : part.offset + part.size]) != part.checksum:
            return part
    return None


def _parts(entry: EpochEntry) -> Iterator[EpochSegment | EpochRows]:
    yield from entry.segments
    yield from entry.rows


def segment_files(entry: EpochEntry, path: str, whole: int) -> list[tuple[str, int, StateFile]]:
    """The segments of a file of `whole` bytes at `path`, as checkpoints name them: operator, subtask, file."""
    return [
        (
            one.operator,
            one.subtask,
            segment_file(one.batch, FileHandle(path, one.size, one.checksum, one.offset, whole)),
        )
        for one in entry.segments
    ]


# --- which epochs extend a checkpoint, and what they make of it --------------------------------------


def chain(batch: int, read: Callable[[int], StoredEpochs | None]) -> Iterator[StoredEpochs]:
    """The files that extend a checkpoint that covers `batch`, in their order.

    `read` gives the file whose first epoch is the given one; None if there is none, or it is damaged. Only epochs of
    the batch's own generation count, each right behind the one before.
    """
    while (found := read(batch + 1)) is not None and found.entry.follows == batch:
        yield found
        batch = found.entry.batch


def misfit(metadata: CheckpointMetadata, entry: EpochEntry) -> str | None:
    """Why the entry cannot extend the checkpoint, as a part of a sentence; None if it can."""
    if entry.job != metadata.job or numbered(metadata.batch_id)[0] != entry.generation:
        return f"it has epochs of generation {entry.generation} of job {entry.job!r}"
    known = {(state.operator, state.subtask) for state in metadata.subtasks}
    strange = next((one for one in entry.segments if (one.operator, one.subtask) not in known), None)
    if strange is None:
        return None
    return f"it has changes of subtask {strange.subtask} of {strange.operator!r}, which the checkpoint does not have"


def extended(
    metadata: CheckpointMetadata,
    epochs: Sequence[StoredEpochs],
    *,
    checkpoint_id: int,
    generation: int,
    sink_files: Iterable[SinkFile],
    now: float,
    properties: Mapping[str, str],
) -> CheckpointMetadata:
    """The checkpoint that covers all that `metadata` covers, and the epochs behind it.

    `epochs` are its chain, at least one. `sink_files` hold their rows. Rows that `metadata` covers are covered still:
    they may not be published yet. Raises `CheckpointError` if an entry does not fit.
    """
    more: dict[tuple[str, int], list[StateFile]] = {}
    for one in epochs:
        wrong = misfit(metadata, one.entry)
        if wrong is not None:
            raise CheckpointError(f"{one.path} cannot extend checkpoint {metadata.checkpoint_id}: {wrong}")
        for operator, subtask, file in segment_files(one.entry, one.path, one.size):
            more.setdefault((operator, subtask), []).append(file)
    last = epochs[-1].entry
    return msgspec.structs.replace(
        metadata,
        format_version=FORMAT_VERSION,
        checkpoint_id=checkpoint_id,
        generation=generation,
        batch_id=last.batch,
        subtasks=tuple(
            msgspec.structs.replace(state, files=(*state.files, *more.get((state.operator, state.subtask), ())))
            for state in metadata.subtasks
        ),
        source=last.source,
        sink_files=(*metadata.sink_files, *sink_files),
        trigger_time=now,
        completed_time=now,
        properties=dict(properties),
    )


def _checksum(data: bytes | memoryview) -> str:
    return f"crc32:{zlib.crc32(data):08x}"


def _digest(version: int, end: int, index: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(struct.pack(">HQQ", version, end, len(index)))
    digest.update(index)
    return digest.digest()


def _damaged(where: str, how: str) -> MetadataError:
    return MetadataError(f"{where}, a file of epochs, is damaged: {how}.")
