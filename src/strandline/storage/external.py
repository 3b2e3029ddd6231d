"""External files: a path `root//path` names a file of another storage, the one at `root`.

A checkpoint uses such paths to refer to a changelog that has a storage of its own. Whoever reads the checkpoint can
open that storage from the path alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from strandline.storage.base import TEMPORARY, Storage, StoredFile
from strandline.storage.schemes import open_storage

_SEPARATOR = "//"
_PIECE_BYTES = 64 << 20
"""How much of a part of a file is in memory at a time. Most parts are far smaller."""


def external_path(storage: Storage, path: str) -> str:
    """The path that names a file of `storage` in every other storage."""
    return f"{storage.url}{_SEPARATOR}{path}"


def root_of(path: str) -> str | None:
    """The root of the storage that an external path names; None for an ordinary path."""
    root, separator, _rest = path.rpartition(_SEPARATOR)
    return root if separator and not root.endswith(":") else None


def inner_path(path: str) -> str:
    """The path of a file inside the storage that holds it; an ordinary path is returned unchanged."""
    return path.rpartition(_SEPARATOR)[2]


def resolve(storage: Storage, path: str) -> tuple[Storage, str]:
    """The storage that holds the file, and the file's path in that storage. An ordinary path belongs to `storage`."""
    root = root_of(path)
    if root is None:
        return storage, path
    return _opened(root, tuple(sorted(storage.options.items()))), inner_path(path)


def fetch_file(storage: Storage, path: str, target: Path, part: range | None = None) -> None:
    """Download the file at `path` to local disk; with `part`, only those bytes of the file."""
    holder, inside = resolve(storage, path)
    if part is not None:
        with target.open("wb") as out:
            for start in range(part.start, part.stop, _PIECE_BYTES):
                length = min(_PIECE_BYTES, part.stop - start)
                piece = holder.read_range(inside, start, length)
                out.write(piece)
                if len(piece) < length:
                    break  # the file ends before the part does, which the checksum shows
    else:
        holder.download(inside, target)


def delete_files(storage: Storage, paths: Iterable[str]) -> None:
    """Delete files of `storage` and external files, temporary ones too. Raises `StorageError`."""
    by_root: dict[str | None, list[str]] = {}
    for path in paths:
        by_root.setdefault(root_of(path), []).append(path)
    for some in by_root.values():
        holder = resolve(storage, some[0])[0]
        inside = [inner_path(path) for path in some]
        holder.delete_unfinished(path for path in inside if _is_temporary(path))
        holder.delete(path for path in inside if not _is_temporary(path))


def list_files(storage: Storage, prefix: str, known_paths: Iterable[str]) -> Iterator[StoredFile]:
    """The files below `prefix` in `storage`, and in every other storage that one of the `known_paths` names.

    Temporary files of writers, killed or at work, are among them.
    """
    yield from storage.list(prefix)
    yield from storage.unfinished(prefix)
    for path in {root_of(path): path for path in known_paths if root_of(path) is not None}.values():
        holder = resolve(storage, path)[0]
        for file in (*holder.list(prefix), *holder.unfinished(prefix)):
            yield replace(file, path=external_path(holder, file.path))


def _is_temporary(path: str) -> bool:
    return path.rpartition("/")[2].startswith(TEMPORARY)


@lru_cache(maxsize=16)
def _opened(root: str, options: tuple[tuple[str, str], ...]) -> Storage:
    return open_storage(root, dict(options))
