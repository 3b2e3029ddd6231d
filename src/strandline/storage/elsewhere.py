"""Files outside the root of a storage: a path `root//path` names a file of the storage at `root`.

So a checkpoint can refer to a changelog that has a storage of its own, and whoever reads the checkpoint finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from strandline.storage.base import Storage, StoredFile

_SEPARATOR = "//"


def outside(storage: Storage, path: str) -> str:
    """How a file of `storage` is named from the root of another one."""
    return f"{storage.url}{_SEPARATOR}{path}"


def root_of(path: str) -> str | None:
    """The root that `path` names; None if it is a path like any other."""
    root, separator, _rest = path.rpartition(_SEPARATOR)
    return root if separator and not root.endswith(":") else None


def inner_path(path: str) -> str:
    """The path in the storage that holds the file, wherever that is."""
    return path.rpartition(_SEPARATOR)[2]


def located(storage: Storage, path: str) -> tuple[Storage, str]:
    """The storage that holds the file at `path`, as seen from `storage`, and its path there."""
    root = root_of(path)
    if root is None:
        return storage, path
    return _opened(root, tuple(sorted(storage.options.items()))), inner_path(path)


def fetch_located(storage: Storage, path: str, target: Path, part: range | None = None) -> None:
    """Bring the file at `path`, or only the bytes in `part`, to local disk."""
    place, inside = located(storage, path)
    if part is not None:
        target.write_bytes(place.read_range(inside, part.start, len(part)))
    else:
        place.download(inside, target)


def delete_located(storage: Storage, paths: Iterable[str]) -> None:
    """Delete files wherever they lie, as seen from `storage`. Raises `StorageError`."""
    places: dict[str | None, list[str]] = {}
    for path in paths:
        places.setdefault(root_of(path), []).append(path)
    for some in places.values():
        located(storage, some[0])[0].delete([located(storage, path)[1] for path in some])


def list_located(storage: Storage, prefix: str, seen_from_here: Iterable[str]) -> Iterator[StoredFile]:
    """The files below `prefix`, here and in every other storage that one of the paths `seen_from_here` names."""
    yield from storage.list(prefix)
    for path in {root_of(path): path for path in seen_from_here if root_of(path) is not None}.values():
        place = located(storage, path)[0]
        for file in place.list(prefix):
            yield replace(file, path=outside(place, file.path))


@lru_cache(maxsize=16)
def _opened(root: str, options: tuple[tuple[str, str], ...]) -> Storage:
    from strandline.storage import open_storage

    return open_storage(root, dict(options))
