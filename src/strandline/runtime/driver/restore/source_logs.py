"""The logs that Spark's file sources keep of all files they have read: uploaded piece by piece, each byte once.

Spark needs the whole log to recognise a file that it has read before. The log grows with every file, so a checkpoint
must not contain it. Every tenth entry of the log is a compacted one, which repeats all entries before it. Without their
headers, the entries from the last compacted one on are therefore one stream of lines that only grows. A checkpoint
refers to the uploaded pieces of this stream, and contains the rest of it.

Private Spark API: the format of the log is internal.
"""

from __future__ import annotations

import hashlib
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import msgspec
from backports import zstd

from strandline.checkpoint.metadata import FileHandle, SourceLog, SourceLogPiece, SourcePosition
from strandline.checkpoint.unpacking import MAX_RATIO, unpacked
from strandline.errors import CheckpointError, DamagedFileError, NotFoundError
from strandline.storage import JobPaths, Storage
from strandline.storage.checksums import checksum_text
from strandline.storage.retries import Retries

HEADER = b"v1"
"""The beginning of every entry. A line feed and a line follow for each file that the source has read."""

LONGEST_REST = 64 << 10
"""Bytes of a log that a checkpoint contains at most: the names of about 500 files."""

GROWTH = 2
"""A piece is merged with the ones before it that are less than so many times as long. So a log has few pieces."""


def named_log(source: int, entries: list[Path]) -> SourceLog | None:
    """The log of a source, not read yet; None if a file does not have the format of an entry."""
    lengths: list[tuple[str, int]] = []
    for path in entries:
        with path.open("rb") as file:
            if file.read(len(HEADER) + 1) not in (HEADER, HEADER + b"\n"):
                return None
        lengths.append((path.name, path.stat().st_size - len(HEADER)))
    return SourceLog(source, tuple(lengths))


class SourceLogs:
    """The logs of one generation's sources. Only the thread that completes checkpoints uses it.

    `folders` has the number of each source's folder in Spark's checkpoint folder `scratch`.
    """

    def __init__(
        self,
        scratch: Path,
        folders: Mapping[int, int],
        upload: Callable[[bytes], FileHandle],
        confirmed: SourcePosition | None,
    ) -> None:
        """`confirmed` is the position of the checkpoint that the generation builds on; None if it builds on none."""
        self._scratch = scratch
        self._folders = folders
        self._upload = upload
        self._confirmed: dict[int, SourceLog] = {}
        if confirmed is not None:
            self.confirm(confirmed)

    def confirm(self, position: SourcePosition) -> None:
        """Build on the pieces of `position` from now on: its checkpoint is complete."""
        self._confirmed = {log.source: log for log in position.logs}

    def store(self, position: SourcePosition, *, whole: bool = False) -> tuple[SourcePosition, list[FileHandle]]:
        """The position with its logs, and the files that were uploaded for them.

        Short logs become part of the position's files. So do all logs if `whole` is set, as for a savepoint. Raises
        `CheckpointError` if Spark has deleted an entry meanwhile, and `StorageError`.
        """
        files = dict(position.files)
        logs: list[SourceLog] = []
        uploaded: list[FileHandle] = []
        for log in position.logs:
            stream = _Stream(self._scratch / "sources" / str(self._folders.get(log.source, log.source)), log)
            if whole or stream.length <= LONGEST_REST:
                files |= _as_files(log, [stream.read(0, stream.length)])
                continue
            pieces = self._pieces(log, stream)
            start = sum(piece.length for piece in pieces)
            if stream.length - start > LONGEST_REST:
                while pieces and pieces[-1].length < GROWTH * (stream.length - start):
                    start -= pieces.pop().length
                data = stream.read(start, stream.length)
                handle = self._upload(_packed(data))
                pieces.append(SourceLogPiece(_identity(start, data), len(data), handle))
                uploaded.append(handle)
                start = stream.length
            rest = stream.read(start, stream.length)
            logs.append(msgspec.structs.replace(log, pieces=tuple(pieces), rest=rest))
        return msgspec.structs.replace(position, files=files, logs=tuple(logs)), uploaded

    def _pieces(self, log: SourceLog, stream: _Stream) -> list[SourceLogPiece]:
        """The confirmed pieces that the log begins with."""
        known = self._confirmed.get(log.source)
        if known is None:
            return []
        if log.entries[: len(known.entries)] == known.entries:
            return list(known.pieces)  # Spark has only added entries, so there is no need to read the old ones.
        pieces: list[SourceLogPiece] = []
        start = 0
        for piece in known.pieces:
            end = start + piece.length
            if end > stream.length or _identity(start, stream.read(start, end)) != piece.identity:
                break
            pieces.append(piece)
            start = end
        return pieces


def with_logs(storage: Storage, position: SourcePosition) -> SourcePosition:
    """The position with all logs among its files. Raises `DamagedFileError` if a piece is damaged or missing."""
    files = dict(position.files)
    for log in position.logs:
        starts = accumulate((piece.length for piece in log.pieces), initial=0)
        pieces = [_fetched(storage, piece, start) for piece, start in zip(log.pieces, starts, strict=False)]
        files |= _as_files(log, [*pieces, log.rest])
    return SourcePosition(position.batch, files)


def uploader(storage: Storage, paths: JobPaths, retries: Retries) -> Callable[[bytes], FileHandle]:
    """A function that uploads a piece of a log, under a name of its own."""

    def upload(data: bytes) -> FileHandle:
        path = paths.shared(f"{uuid.uuid4().hex}-source")
        retries.call(f"job {paths.job}: uploading {path}", lambda: storage.write(path, data))
        return FileHandle(path, len(data), checksum_text(zlib.crc32(data)))

    return upload


def _as_files(log: SourceLog, parts: list[bytes]) -> dict[str, bytes]:
    data = memoryview(b"".join(parts))
    ends = list(accumulate(length for _name, length in log.entries))
    return {
        f"sources/{log.source}/{name}": HEADER + data[end - length : end]
        for (name, length), end in zip(log.entries, ends, strict=True)
    }


def _packed(data: bytes) -> bytes:
    """The stored form of a piece: compressed, or as it is if a small file could take much memory otherwise."""
    packed = zstd.compress(data)
    return packed if len(data) <= MAX_RATIO * len(packed) else data


def _fetched(storage: Storage, piece: SourceLogPiece, start: int) -> bytes:
    where = f"{storage.url}/{piece.handle.path}"
    try:
        packed = storage.read(piece.handle.path)
    except NotFoundError as error:
        raise DamagedFileError(f"{where}, a piece of a source's log, is missing: bring the file back") from error
    if piece.length > MAX_RATIO * len(packed):
        raise DamagedFileError(f"{where}, a piece of a source's log, cannot hold {piece.length} bytes")
    if len(packed) == piece.length and _identity(start, packed) == piece.identity:
        return packed
    try:
        data = unpacked(packed, piece.length)
    except zstd.ZstdError as error:
        raise DamagedFileError(f"{where}, a piece of a source's log, cannot be decompressed: {error}") from error
    if len(data) != piece.length or _identity(start, data) != piece.identity:
        raise DamagedFileError(f"{where}, a piece of a source's log, does not have the expected content")
    return data


def _identity(start: int, data: bytes) -> str:
    """Names the bytes and their place in the log, so that no two pieces of a log are one file."""
    return hashlib.sha256(start.to_bytes(8, "big") + data).hexdigest()


class _Stream:
    """The bytes of a log's entries without their headers, one entry after the other."""

    def __init__(self, folder: Path, log: SourceLog) -> None:
        self._folder = folder
        self._entries = log.entries
        self.length = sum(length for _name, length in log.entries)

    def read(self, start: int, end: int) -> bytes:
        return b"".join(self._parts(start, end))

    def _parts(self, start: int, end: int) -> Iterator[bytes]:
        begin = 0
        for name, length in self._entries:
            first, last = max(start - begin, 0), min(end - begin, length)
            begin += length
            if first >= last:
                continue
            path = self._folder / name
            try:
                with path.open("rb") as file:
                    file.seek(len(HEADER) + first)
                    data = file.read(last - first)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}, an entry of the log of Spark's source: {error}") from error
            if len(data) != last - first:
                raise CheckpointError(f"{path}, an entry of the log of Spark's file source, has become shorter")
            yield data
