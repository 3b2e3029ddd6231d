"""Packs several small local files into one uploaded file, so that an object store takes one request for all of them.

A pack is built in memory. `PACK_BYTES` therefore also bounds the memory that one upload takes.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from strandline.checkpoint.metadata import FileHandle
from strandline.storage import Storage
from strandline.storage.checksums import checksum, checksum_text

PACK_BYTES = 32 << 20
"""Small files are packed up to about this size."""


class _Part(NamedTuple):
    offset: int
    size: int
    checksum: str


class Pack:
    """The content of one uploaded file. A file that is alone is uploaded from disk as it is."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read `files`, which must not change any more. Raises `OSError`."""
        self._alone: Path | None = None
        self._data = b""
        if len(files) == 1:
            self._alone = files[0]
            self.size = self._alone.stat().st_size
            self._parts = [_Part(0, self.size, checksum(self._alone))]
            return
        # The buffer gives its bytes away without a copy.
        buffer = io.BytesIO()
        self._parts = []
        for file in files:
            content = file.read_bytes()
            self._parts.append(_Part(buffer.tell(), len(content), checksum_text(zlib.crc32(content))))
            buffer.write(content)
        self._data = buffer.getvalue()
        self.size = len(self._data)

    def store(self, storage: Storage, path: str) -> None:
        """Upload the pack to `path`. Raises `StorageError`."""
        if self._alone is not None:
            storage.upload(self._alone, path)
        else:
            storage.write(path, self._data)

    def handles(self, path: str) -> list[FileHandle]:
        """The handles of the packed files, in their order, for a pack that is stored at `path`."""
        whole = 0 if self._alone is not None else self.size
        return [FileHandle(path, part.size, part.checksum, part.offset, whole) for part in self._parts]
