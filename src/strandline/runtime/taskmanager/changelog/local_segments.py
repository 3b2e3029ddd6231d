"""Knows where the segments of the changelog lie on local disk, so that they can be merged without a download."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from pathlib import Path

from strandline.checkpoint.metadata import SEGMENT_SUFFIX, StateFile
from strandline.runtime.taskmanager.local_copies import LocalCopies


class LocalSegments:
    """The local files of segments, by the identity of the uploaded file. Used under the lock of the changelog.

    Segments that slots sealed belong to their slots. Merged segments are kept in the folder `scratch`.
    """

    def __init__(self, scratch: Path, copies: LocalCopies | None) -> None:
        """`copies` keeps a second copy of every segment, for local recovery."""
        self._scratch = scratch
        self._copies = copies
        self._paths: dict[str, Path] = {}

    def keep(self, file: StateFile, path: Path, *, temporary: bool = False) -> None:
        """Note that `path` holds the bytes of `file`. A `temporary` file is only copied, because it goes at once."""
        if self._copies is not None:
            self._copies.keep(file.identity, path)
        if not temporary:
            self._paths[file.identity] = path

    def __contains__(self, file: StateFile) -> bool:
        return file.identity in self._paths

    def path(self, file: StateFile) -> Path:
        return self._paths[file.identity]

    def new_path(self) -> Path:
        """Where a merged segment can be written."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self._scratch / f"{uuid.uuid4().hex}{SEGMENT_SUFFIX}"

    def forget_all_but(self, needed: Collection[str]) -> None:
        """Forget every segment whose identity is not `needed`. Merged segments are deleted."""
        for identity in [identity for identity in self._paths if identity not in needed]:
            path = self._paths.pop(identity)
            if path.parent == self._scratch:
                path.unlink(missing_ok=True)
