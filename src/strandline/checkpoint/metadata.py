"""The `_metadata` file of a checkpoint: its content, and the versioned, checksummed format of its bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from backports import zstd

from strandline.checkpoint.home import NAME, Home, Refused
from strandline.checkpoint.registry import SharedKey
from strandline.checkpoint.steps import StepDescription
from strandline.checkpoint.unpacking import MAX_RATIO, unpacked
from strandline.errors import CheckpointNotFoundError, IncompatibleCheckpointError, MetadataError, NewerFormatError

FORMAT_VERSION = 5
"""The format that this release writes. It reads this one and all earlier ones. Since version 5, segments may lie in
files of epochs."""

SEGMENT_SUFFIX = ".segment"
"""The end of the name of a changelog segment. The rest is the number of the last batch in the segment."""

Kind = Literal["checkpoint", "savepoint"]

HIGHEST_KNOWN_GENERATION = (1 << 31) - 1
"""A higher number in the metadata of a checkpoint, or in the name of a sink file, is not believed: a takeover must find
a higher one that the job's log can hold, two thousand million times."""

# Numbers of crafted metadata stay in ranges in which no later computation overflows. Decoding checks them.
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
CheckpointId = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""The ids of its batches stay below 2**62: see `batch.first_batch`."""
KnownGeneration = Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_KNOWN_GENERATION)]
BatchId = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
KeyGroup = Annotated[int, msgspec.Meta(ge=0, le=1 << 15)]
Parallelism = Annotated[int, msgspec.Meta(ge=1, le=1 << 15)]
PlainName = Annotated[str, msgspec.Meta(pattern=rf"\A{NAME}\Z")]
Milliseconds = Annotated[int, msgspec.Meta(gt=-(1 << 60), lt=1 << 60)]
"""Since the epoch. Twice such a number, and a sum of two, are still numbers of 62 bits."""
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=250_000_000_000)]
"""Seconds since the epoch, before the year 9892."""

# The structs are arrays on disk: fields may be added at the end with a default, but never moved or removed.
# gc=False on structs of which a million may exist: they are never part of a cycle, so the collector may skip them.


class FileHandle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An uploaded file, or a part of one. `path` is relative to the root of the checkpoint directory."""

    path: str
    size: Natural
    checksum: str
    """Algorithm and value, as in `crc32:89abcdef`."""
    offset: Natural = 0
    """The position in the uploaded file at which the part begins."""
    whole: Natural = 0
    """The size of the uploaded file if this handle is a part of it, else 0. Since format version 2."""

    @property
    def stored_size(self) -> int:
        """The expected size of the file at `path`."""
        return self.whole or self.size

    @property
    def part(self) -> range | None:
        """The bytes of the stored file that the handle names; None for the whole file."""
        return range(self.offset, self.offset + self.size) if self.whole else None


class StateFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One file of a subtask's snapshot: uploaded (`handle`), or stored in the metadata if it is small (`inline`)."""

    name: str
    """The name that the file must have when the snapshot is restored."""
    identity: str
    """A name for the bytes: two files with the same identity have the same content."""
    shared: bool
    """Whether later checkpoints may refer to the file as well."""
    handle: FileHandle | None = None
    inline: bytes | None = None

    @property
    def size(self) -> int:
        """The size of the file, uploaded or inline."""
        return self.handle.size if self.handle is not None else len(self.inline or b"")

    @property
    def is_segment(self) -> bool:
        """Whether the file is a changelog segment. It holds changes to the state in the files before it."""
        return self.name.endswith(SEGMENT_SUFFIX)


class SubtaskState(msgspec.Struct, frozen=True, array_like=True):
    """The state of one subtask of one operator. `key_group_end` is the first group after its range."""

    operator: str
    subtask: KeyGroup
    key_group_start: KeyGroup
    key_group_end: KeyGroup
    backend: str
    incremental: bool
    files: tuple[StateFile, ...]
    """With the changelog: the files of a materialization, then the later segments in their order."""
    states: tuple[dict[str, Any], ...] = ()
    """The descriptors of its states as plain values. `state/` interprets them."""


class SourceLogPiece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a source's log, uploaded once. All later checkpoints refer to it."""

    identity: str
    """The SHA-256 of its place in the log and its bytes before they were compressed."""
    length: Natural
    """How many bytes it has before they are compressed."""
    handle: FileHandle


class SourceLog(msgspec.Struct, frozen=True, array_like=True):
    """The log that Spark's file source keeps of all files it has read: the bytes of `pieces`, and then `rest`.

    Spark merges the entries of the log again and again into one, but the bytes stay the same and only grow.
    """

    source: Natural
    entries: tuple[tuple[PlainName, Natural], ...]
    """The log's files in their order, each with its length without the header."""
    pieces: tuple[SourceLogPiece, ...] = ()
    rest: bytes = b""


class Times(msgspec.Struct, frozen=True, array_like=True):
    """What the time of the next batch follows from. See `runtime/driver/watermarks.py`."""

    processing_ms: Milliseconds
    """The processing time of the checkpoint's batch."""
    latest: tuple[tuple[Milliseconds | None, ...], ...] = ()
    """The latest event times that the rows of every source have shown, in the order of `job.source(...)`. There is one
    for each watermark of the source; it is None before the first row."""
    steps: dict[str, Milliseconds] = {}
    """The watermark of every stateful step in the checkpoint's batch, by uid."""
    columns: tuple[tuple[str, ...], ...] = ()
    """The columns of the event times in `latest`. Empty in checkpoints of releases that did not note them."""


class SourcePosition(msgspec.Struct, frozen=True, array_like=True):
    """The position of the sources: the files of Spark's own offset log for `batch`, by relative name."""

    batch: BatchId
    files: dict[str, bytes]
    logs: tuple[SourceLog, ...] = ()
    """The logs of file sources that are too long to be among `files`. Since format version 3."""
    times: Times | None = None
    """Since format version 4. In earlier ones, the times are those in the entries of Spark's logs among `files`."""


class SinkFile(msgspec.Struct, frozen=True, array_like=True):
    """Staged rows that are published with this checkpoint."""

    sink: str
    """The place of the sink; see `strandline.sinks.base`."""
    staged: str
    """Where the rows wait: in the folder of the sink, or in the checkpoint directory."""
    final: str
    """The name under which a sink of files publishes them; empty if another target reads them."""
    rows: Natural
    size: Natural
    handle: str = ""
    """What the sink notes about the rows, such as a checksum. The sink checks it before it believes it."""


class CheckpointMetadata(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Everything that a restore needs to know about a checkpoint."""

    format_version: int = FORMAT_VERSION
    job: str
    checkpoint_id: CheckpointId
    generation: KnownGeneration
    batch_id: BatchId
    kind: Kind
    parallelism: Parallelism
    max_parallelism: Parallelism
    operators: tuple[str, ...]
    subtasks: tuple[SubtaskState, ...]
    source: SourcePosition
    sink_files: tuple[SinkFile, ...]
    trigger_time: Seconds
    completed_time: Seconds
    properties: dict[str, str]
    steps: tuple[StepDescription, ...] = ()
    """The stateful steps of the job, in the order of `operators`. Since format version 4; empty in earlier ones."""


_MAGIC = b"SLMD"
_START = struct.Struct(">4sH")
_REST = struct.Struct(">QQ32s")
"""Length of the compressed body, length of the body, SHA-256 of everything else."""
_HEADER_SIZE = _START.size + _REST.size

_COMPRESSION = 1
"""Zstandard's fastest level. The library is a small one: Arrow's would take most of the time of `checkpoints ls`."""

_MAX_SMALL_BODY = 16 << 20
"""A body is at most this large, or at most `MAX_RATIO` times as large as its compressed form. So a small file cannot
take much memory."""
_SKIPPED = struct.Struct("<II")
_SKIPPED_MAGIC = 0x184D2A50
"""The start of a frame that Zstandard's readers skip: magic number and length."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CheckpointMetadata)


def encode(metadata: CheckpointMetadata) -> bytes:
    """The content of the checkpoint's `_metadata` file."""
    body = _encoder.encode(metadata)
    packed = zstd.compress(body, _COMPRESSION)
    if len(body) > _most_bytes(len(packed)):
        padding = len(body) // MAX_RATIO
        packed += _SKIPPED.pack(_SKIPPED_MAGIC, padding) + bytes(padding)
    digest = _digest(FORMAT_VERSION, len(packed), len(body), packed)
    return _START.pack(_MAGIC, FORMAT_VERSION) + _REST.pack(len(packed), len(body), digest) + packed


def decode(data: bytes, where: str, home: Home) -> CheckpointMetadata:
    """Read a `_metadata` file that lies at `home`; `where` names it in messages.

    Raises `MetadataError` if it is something else, truncated, damaged, or written by a newer release, or if a name or a
    path in it leads elsewhere than to `home`. Raises `IncompatibleCheckpointError` if it is another checkpoint's, and
    `CheckpointNotFoundError` if a checkpoint is in the place of a savepoint.
    """
    version, body = _body(data, where)
    try:
        metadata = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(where, f"its checksum is right, but its content is not metadata: {error}") from error
    if metadata.format_version > version:
        raise _damaged(where, f"its content has format version {metadata.format_version}, its header {version}")
    _check_belongs(metadata, where, home)
    try:
        home.check(metadata)
    except Refused as error:
        raise MetadataError(f"{where} is refused: {error}. Nothing was changed. {_GO_BACK}") from error
    return metadata


def _body(data: bytes, where: str) -> tuple[int, bytes]:
    """The format version and the uncompressed content of a `_metadata` file."""
    if len(data) < _START.size:
        if not _MAGIC.startswith(data[:4]):
            raise _not_metadata(where)
        raise _truncated(where, f"it has {len(data)} bytes, less than its header")
    magic, version = _START.unpack_from(data)
    if magic != _MAGIC:
        raise _not_metadata(where)
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{where} has metadata format version {version}, too new for this release, which reads up to version "
            f"{FORMAT_VERSION}. Use the release of strandline that wrote it, or a later one."
        )
    if version < 1:
        raise _damaged(where, f"there is no format version {version}")
    if len(data) < _HEADER_SIZE:
        raise _truncated(where, f"it has {len(data)} bytes, less than its header")
    packed_size, body_size, digest = _REST.unpack_from(data, _START.size)
    packed = memoryview(data)[_HEADER_SIZE:]
    if len(packed) < packed_size:
        raise _truncated(where, f"{packed_size} bytes should follow the header, but only {len(packed)} do")
    if len(packed) > packed_size:
        raise _damaged(where, f"{len(packed) - packed_size} bytes too many follow the metadata")
    if _digest(version, packed_size, body_size, packed) != digest:
        raise _damaged(where, "its checksum is wrong")
    if body_size > _most_bytes(packed_size):
        raise _damaged(where, f"{packed_size} compressed bytes cannot hold {body_size} bytes")
    try:
        body = unpacked(packed, body_size)
    except zstd.ZstdError as error:
        raise _damaged(where, f"its checksum is right, but its content cannot be decompressed: {error}") from error
    if len(body) != body_size:
        raise _damaged(where, f"its content does not have the announced {body_size} bytes")
    return version, body


def _check_belongs(metadata: CheckpointMetadata, where: str, home: Home) -> None:
    if home.job is None:
        if metadata.kind != "savepoint":
            raise CheckpointNotFoundError(f"{where} is that of a checkpoint, not of a savepoint")
    elif home.others is not None and (metadata.kind, metadata.job, metadata.checkpoint_id) != (
        "checkpoint",
        home.job,
        home.checkpoint_id,
    ):
        raise IncompatibleCheckpointError(
            f"{where} is {metadata.kind} {metadata.checkpoint_id} of job {metadata.job!r}. Bring back the file that "
            "belongs there, or give the folder the name it had."
        )


def _most_bytes(packed_size: int) -> int:
    return max(_MAX_SMALL_BODY, MAX_RATIO * packed_size)


def file_key(state: SubtaskState, file: StateFile) -> SharedKey:
    """The registry's key for a file of `state`. The path of the upload identifies a file that is not shared."""
    identity = file.identity
    if not file.shared and file.handle is not None:
        identity = f"{file.handle.path}#{file.name}"
    return SharedKey(state.operator, state.key_group_start, state.key_group_end, identity)


def all_files(metadata: CheckpointMetadata) -> Iterator[tuple[SubtaskState, StateFile]]:
    """Every state file of the checkpoint, uploaded or inline, with the state of its subtask."""
    for state in metadata.subtasks:
        for file in state.files:
            yield state, file


def keyed_files(states: Iterable[SubtaskState]) -> Iterator[tuple[SharedKey, FileHandle]]:
    """Every uploaded file of `states` with the registry's key, one at a time."""
    # Runs up to a million times per checkpoint, and SharedKey(...) would call a Python function every time.
    new, kind = tuple.__new__, SharedKey
    for state in states:
        operator, start, end = state.operator, state.key_group_start, state.key_group_end
        for file in state.files:
            handle = file.handle
            if handle is None:
                continue
            identity = file.identity if file.shared else f"{handle.path}#{file.name}"
            yield new(kind, (operator, start, end, identity)), handle


def source_files(position: SourcePosition) -> Iterator[tuple[SharedKey, FileHandle]]:
    """Every uploaded piece of a source's log with the registry's key."""
    for log in position.logs:
        for piece in log.pieces:
            yield source_key(log, piece), piece.handle


def source_key(log: SourceLog, piece: SourceLogPiece) -> SharedKey:
    """The registry's key for a piece of a source's log. No operator has an empty uid."""
    return SharedKey("", log.source, log.source, piece.identity)


def registered_files(metadata: CheckpointMetadata) -> Iterator[tuple[SharedKey, FileHandle]]:
    """Every uploaded file of the checkpoint with the registry's key."""
    return chain(keyed_files(metadata.subtasks), source_files(metadata.source))


def file_paths(metadata: CheckpointMetadata) -> set[str]:
    """The paths of all uploaded files of the checkpoint."""
    return {handle.path for _key, handle in registered_files(metadata)}


def paths_of(files: Iterable[StateFile]) -> Iterator[str]:
    """The paths of the uploaded files among `files`."""
    return (file.handle.path for file in files if file.handle is not None)


def state_bytes(state: SubtaskState) -> int:
    """The full size of a subtask's state, including files that were uploaded for earlier checkpoints."""
    return sum(file.size for file in state.files)


def full_bytes(metadata: CheckpointMetadata) -> int:
    """The full size of the checkpoint's state, including files that were uploaded for earlier checkpoints."""
    return sum(map(state_bytes, metadata.subtasks))


def _digest(version: int, packed_size: int, body_size: int, packed: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(struct.pack(">HQQ", version, packed_size, body_size))
    digest.update(packed)
    return digest.digest()


def _not_metadata(where: str) -> MetadataError:
    return MetadataError(
        f"{where} is not a metadata file: it does not begin with SLMD. "
        "It is damaged, or the path that was given is not that of a checkpoint directory (chk-N), or of its _metadata."
    )


def _truncated(where: str, how: str) -> MetadataError:
    return MetadataError(f"{where} is truncated: {how}. {_GO_BACK}")


def _damaged(where: str, how: str) -> MetadataError:
    return MetadataError(f"{where} is damaged: {how}. {_GO_BACK}")


_GO_BACK = "Restore from an older retained checkpoint, or put the file back from a copy."


def segment_name(batch: int) -> str:
    """The name of the segment that ends with `batch`. Names sort in the order of batches."""
    return f"{batch:020d}{SEGMENT_SUFFIX}"


def segment_file(batch: int, handle: FileHandle) -> StateFile:
    """An uploaded segment that ends with `batch`. Its identity is the place of the upload."""
    return StateFile(segment_name(batch), f"{handle.path}#{handle.offset}", True, handle)


def last_batch(file: StateFile) -> int:
    """The last batch in a segment."""
    return int(file.name.removesuffix(SEGMENT_SUFFIX))
