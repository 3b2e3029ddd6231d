"""The `_metadata` file of a checkpoint: what it holds, as checksummed bytes of a numbered format."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
import pyarrow as pa

from strandline.checkpoint.registry import SharedKey
from strandline.errors import MetadataError, NewerFormatError

FORMAT_VERSION = 2
"""The format this release writes; it reads this one and every earlier one."""

SEGMENT_SUFFIX = ".segment"
"""How the names of changelog segments end; the rest is the number of the last batch that a segment brings."""

Kind = Literal["checkpoint", "savepoint"]

# The structures are arrays on disk: fields may be added at the end with a default, never moved or removed.
# gc=False on what exists a million times: such an object cannot be part of a cycle, so the collector need not visit it.


class FileHandle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An uploaded file, or a part of one; `path` is relative to the root of the checkpoint directory."""

    path: str
    size: int
    checksum: str
    """Algorithm and value, as in `crc32:89abcdef`."""
    offset: int = 0
    """Where in the uploaded file it begins."""
    whole: int = 0
    """The size of the uploaded file, if this is only a part of it; else 0. Since format version 2."""

    @property
    def stored_size(self) -> int:
        """How large the file at `path` must be."""
        return self.whole or self.size

    @property
    def part(self) -> range | None:
        """Which bytes of the stored file are meant; None if it is all of them."""
        return range(self.offset, self.offset + self.size) if self.whole else None


class StateFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One file of a subtask's snapshot: uploaded (`handle`), or so small that it travels here (`inline`)."""

    name: str
    """The name the file must have again when the snapshot is restored."""
    identity: str
    """Names the bytes: two files with one identity are equal wherever they are."""
    shared: bool
    """May be part of later checkpoints too."""
    handle: FileHandle | None = None
    inline: bytes | None = None

    @property
    def size(self) -> int:
        """The bytes of the file itself, wherever they are."""
        return self.handle.size if self.handle is not None else len(self.inline or b"")

    @property
    def is_segment(self) -> bool:
        """A segment of the changelog: changes to the state that the files before it make up."""
        return self.name.endswith(SEGMENT_SUFFIX)


class SubtaskState(msgspec.Struct, frozen=True, array_like=True):
    """The state of one subtask of one operator; `key_group_end` is the first group after its range."""

    operator: str
    subtask: int
    key_group_start: int
    key_group_end: int
    backend: str
    incremental: bool
    files: tuple[StateFile, ...]
    """With the changelog: the files of a materialization, then the segments that follow it, in their order."""
    states: tuple[dict[str, Any], ...] = ()
    """The descriptors of its states as plain values; their meaning belongs to `state/`."""


class SourcePosition(msgspec.Struct, frozen=True, array_like=True):
    """Where the input stood: the files of Spark's own offset log for `batch`, by relative name."""

    batch: int
    files: dict[str, bytes]


class SinkFile(msgspec.Struct, frozen=True, array_like=True):
    """Rows that become visible with this checkpoint: a staged file, and the name it is published under."""

    sink: str
    staged: str
    final: str
    rows: int
    size: int


class CheckpointMetadata(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Everything needed to go on from a checkpoint."""

    format_version: int = FORMAT_VERSION
    job: str
    checkpoint_id: int
    generation: int
    batch_id: int
    kind: Kind
    parallelism: int
    max_parallelism: int
    operators: tuple[str, ...]
    subtasks: tuple[SubtaskState, ...]
    source: SourcePosition
    sink_files: tuple[SinkFile, ...]
    trigger_time: float
    completed_time: float
    properties: dict[str, str]


_MAGIC = b"SLMD"
_START = struct.Struct(">4sH")
_REST = struct.Struct(">QQ32s")
"""Length of the compressed body, length of the body, SHA-256 of everything else."""
_HEADER_SIZE = _START.size + _REST.size

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CheckpointMetadata)


def encode(metadata: CheckpointMetadata) -> bytes:
    """The content of the checkpoint's `_metadata` file."""
    body = _encoder.encode(metadata)
    packed: bytes = pa.compress(body, codec="zstd", asbytes=True)
    digest = _digest(FORMAT_VERSION, len(packed), len(body), packed)
    return _START.pack(_MAGIC, FORMAT_VERSION) + _REST.pack(len(packed), len(body), digest) + packed


def decode(data: bytes, where: str) -> CheckpointMetadata:
    """Read a `_metadata` file; `where` names it in messages.

    Raises `MetadataError` if it is something else, truncated, damaged, or written by a newer release.
    """
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
    try:
        return _decoder.decode(pa.decompress(packed, decompressed_size=body_size, codec="zstd", asbytes=True))
    except (msgspec.MsgspecError, pa.ArrowException, OSError) as error:
        raise _damaged(where, f"its checksum is right, but its content is not metadata: {error}") from error


def file_key(state: SubtaskState, file: StateFile) -> SharedKey:
    """The registry's key for a file of `state`. A file that is not shared is known by the place it was uploaded to."""
    identity = file.identity
    if not file.shared and file.handle is not None:
        identity = f"{file.handle.path}#{file.name}"
    return SharedKey(state.operator, state.key_group_start, state.key_group_end, identity)


def all_files(metadata: CheckpointMetadata) -> Iterator[tuple[SubtaskState, StateFile]]:
    """Every state file of the checkpoint with the subtask it belongs to, uploaded or inline."""
    for state in metadata.subtasks:
        for file in state.files:
            yield state, file


def keyed_files(states: Iterable[SubtaskState]) -> Iterator[tuple[SharedKey, FileHandle]]:
    """Every uploaded file of `states` with the registry's key, one at a time."""
    # A million times a checkpoint: SharedKey(...) would go through a Python function for each of them.
    new, kind = tuple.__new__, SharedKey
    for state in states:
        operator, start, end = state.operator, state.key_group_start, state.key_group_end
        for file in state.files:
            handle = file.handle
            if handle is None:
                continue
            identity = file.identity if file.shared else f"{handle.path}#{file.name}"
            yield new(kind, (operator, start, end, identity)), handle


def file_paths(metadata: CheckpointMetadata) -> set[str]:
    """The paths of all uploaded files of the checkpoint."""
    return set(paths_of(file for _state, file in all_files(metadata)))


def paths_of(files: Iterable[StateFile]) -> Iterator[str]:
    """The paths of those files that are uploaded."""
    return (file.handle.path for file in files if file.handle is not None)


def state_bytes(state: SubtaskState) -> int:
    """The full size of a subtask's state, whichever checkpoint its files were uploaded for."""
    return sum(file.size for file in state.files)


def full_bytes(metadata: CheckpointMetadata) -> int:
    """The full size of the checkpoint's state, whichever checkpoint its files were uploaded for."""
    return sum(map(state_bytes, metadata.subtasks))


def _digest(version: int, packed_size: int, body_size: int, packed: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(struct.pack(">HQQ", version, packed_size, body_size))
    digest.update(packed)
    return digest.digest()


def _not_metadata(where: str) -> MetadataError:
    return MetadataError(
        f"{where} is not a metadata file: it does not begin with SLMD. "
        "Give the path of a checkpoint directory (chk-N) or of the _metadata file in it."
    )


def _truncated(where: str, how: str) -> MetadataError:
    return MetadataError(f"{where} is truncated: {how}. {_GO_BACK}")


def _damaged(where: str, how: str) -> MetadataError:
    return MetadataError(f"{where} is damaged: {how}. {_GO_BACK}")


_GO_BACK = "Restore from an older retained checkpoint, or put the file back from a copy."


def segment_name(batch: int) -> str:
    """The name of the segment that ends with `batch`; the order of names is the order of batches."""
    return f"{batch:020d}{SEGMENT_SUFFIX}"


def segment_file(batch: int, handle: FileHandle) -> StateFile:
    """An uploaded segment that ends with `batch`. Every upload is a file of its own to checkpoints."""
    return StateFile(segment_name(batch), f"{handle.path}#{handle.offset}", True, handle)


def last_batch(file: StateFile) -> int:
    """The last batch that a segment brings."""
    return int(file.name.removesuffix(SEGMENT_SUFFIX))
