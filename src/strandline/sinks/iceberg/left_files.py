"""What an attempt to commit to an Iceberg table has written that no snapshot refers to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from strandline.sinks.iceberg.attempts import Attempt, version_of
from strandline.sinks.iceberg.outcomes import CannotTellError
from strandline.storage import Storage, StoredFile
from strandline.storage.base import intended_name

if TYPE_CHECKING:
    from pyiceberg.table import Table

_MOST_VERSIONS = 100
"""In how many versions of the table's metadata, after the one that the attempt has seen, a file of it is looked for."""
_CLOCK_DIFFERENCE = 3600.0
"""Seconds by which the clocks of storage and of other writers of the table may differ."""


@dataclass(frozen=True, slots=True)
class TableFolders:
    """The folders of a table."""

    data: Storage
    metadata: Storage

    def manifests(self, attempt: Attempt) -> Iterator[StoredFile]:
        """The manifests that an attempt has written. Lists them."""
        listed = _beginning_with(self.metadata, attempt.commit)
        return (file for file in listed if attempt.is_manifest(file.path))

    def data_files(self, attempt: Attempt) -> Iterator[StoredFile]:
        """The data files that an attempt has written. Lists the folder."""
        listed = _beginning_with(self.data, attempt.data_prefix)
        return (file for file in listed if attempt.is_data(file.path))

    def halves(self, attempt: Attempt) -> Iterator[StoredFile]:
        """Data files that an attempt has begun and not completed. Walks through the folder."""
        return (file for file in self.data.unfinished() if attempt.is_data(intended_name(file.path)))


def _beginning_with(storage: Storage, prefix: str) -> Iterator[StoredFile]:
    """The files whose paths begin with `prefix`. They come one after the other in a listing."""
    return takewhile(lambda file: file.path.startswith(prefix), storage.list(after=prefix))


@dataclass(frozen=True, slots=True)
class LeftFiles:
    """What an attempt that failed has written: data files, halves of them, and manifests."""

    data: tuple[str, ...]
    halves: tuple[str, ...]
    manifests: tuple[str, ...]

    @classmethod
    def found(cls, attempt: Attempt, table: Table, folders: TableFolders) -> LeftFiles:
        """Those of a driver of which nothing is known but its note. Looks into the table's folders.

        Raises `CannotTellError` if a file is older than the state of the table for which the note says that it was
        written. A note whose numbers are wrong could make files of an older commit look as if nobody referred to them.
        """
        found = tuple(tuple(files) for files in (folders.data_files(attempt), folders.halves(attempt)))
        found = (*found, tuple(folders.manifests(attempt)))
        before = [one.timestamp_ms for one in table.snapshots() if (one.sequence_number or 0) < attempt.sequence]
        earliest = max(before, default=0) / 1000 - _CLOCK_DIFFERENCE
        for file in (file for files in found for file in files):
            if file.modified < earliest:
                raise CannotTellError(f"{file.path} is older than the table's state for which it was written")
        return cls(*(tuple(file.path for file in files) for files in found))

    def delete(self, attempt: Attempt, table: Table, folders: TableFolders) -> None:
        """Delete the files, the list of the manifests, and the table's metadata that the attempt has written, if any.

        Files that are not there do not matter.
        """
        names = [name for name in _metadata_names(attempt, table) if not _is_metadata(name, attempt, table)]
        folders.data.delete_unfinished(self.halves)
        folders.data.delete(self.data)
        folders.metadata.delete([*self.manifests, f"snap-{attempt.snapshot}-0-{attempt.commit}.avro", *names])


def unused_manifests(written: Iterable[str], attempt: Attempt, table: Table) -> list[str]:
    """Manifests of an attempt that took effect, and merged them into others, so that its snapshot does not name them.

    `written` are the names of all manifests of the attempt.
    """
    snapshot = table.snapshot_by_id(attempt.snapshot)
    if snapshot is None:
        return []
    named = {one.manifest_path.rpartition("/")[2] for one in snapshot.manifests(table.io)}
    return [name for name in written if name not in named]


def _metadata_names(attempt: Attempt, table: Table) -> list[str]:
    """The names that a file with the table's metadata may have, if the attempt has written one."""
    if attempt.version < 0:
        return []
    last = min(version_of(table.metadata_location) + 1, attempt.version + _MOST_VERSIONS)
    return [f"{version:05d}-{attempt.commit}.metadata.json" for version in range(attempt.version + 1, last + 1)]


def _is_metadata(name: str, attempt: Attempt, table: Table) -> bool:
    """Whether the file has the table's metadata, of now or of before."""
    return f"{attempt.metadata}/{name}" in {
        table.metadata_location,
        *(one.metadata_file for one in table.metadata.metadata_log),
    }
