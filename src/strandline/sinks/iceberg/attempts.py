"""Notes on attempts to commit to an Iceberg table: what an attempt writes that no snapshot refers to can be deleted.

A commit writes files before it takes effect: data files that it rewrites, manifests, their list, and in some catalogues
the table's metadata. A driver that is killed then leaves them behind. So a note lies in the job's checkpoint folder
before the first of these files is written, and goes when the attempt has ended. All names of an attempt follow from its
note. Who finds a note after a takeover asks the table whether a snapshot refers to the files, and deletes them if not.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count, takewhile
from typing import TYPE_CHECKING, Annotated

import msgspec

from strandline.checkpoint.metadata import BatchId, Generation, KnownGeneration
from strandline.decoding import json_decoder
from strandline.errors import MetadataError, NotFoundError
from strandline.sinks.names import commit_notes, final_name
from strandline.storage import Storage, StoredFile
from strandline.storage.base import intended_name

if TYPE_CHECKING:
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

logger = logging.getLogger(__name__)

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DIGITS, _OWN = 32, 28
"""How many hex digits the name of a data file has, and how many of them are the attempt's. The others number its files.
Four zeros are among the attempt's digits, which the random names of staged files hardly ever have there."""
_VERSION = re.compile(r"(\d{5,18})-.*\.metadata\.json")
_METADATA_NAME = re.compile(rf"(?P<version>\d{{5,18}})-{_UUID}\.metadata\.json")
_MANIFEST = re.compile(rf"{_UUID}-m\d+\.avro")
_MOST_VERSIONS = 100
"""In how many versions of the table's metadata, after the one that the attempt has seen, a file of it is looked for."""
_CLOCK_DIFFERENCE = 3600.0
"""Seconds by which the clocks of storage and of other writers of the table may differ."""
_MOST_SNAPSHOTS = 1000
"""How many snapshots are looked through for files of an attempt."""


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to commit, as its note describes it. No field is a path: paths are built from what the table says."""

    job: str
    generation: KnownGeneration
    batch: BatchId
    """The last batch whose rows the commit adds."""
    commit: Annotated[str, msgspec.Meta(pattern=rf"\A{_UUID}\Z")]
    """A part of the names of all files of the attempt."""
    snapshot: int
    """The snapshot that the commit adds."""
    parent: int | None
    """The snapshot that the table must have for the commit to take effect."""
    sequence: Annotated[int, msgspec.Meta(ge=0)]
    """The sequence number of the snapshot; 0 in a table without numbers. Earlier ones cannot refer to its files."""
    version: Annotated[int, msgspec.Meta(ge=-1, lt=10**15)]
    """The version of the table's metadata that the attempt has seen; -1 if the server of the catalogue writes it."""
    table: str
    """The table's UUID."""
    data: str
    """The folder of the data files, as the table named it."""
    metadata: str
    """The folder of the manifests, as the table named it."""
    cleared_by: KnownGeneration | None = None
    """The generation that has deleted the files. A driver that stood still may have gone on writing afterwards."""

    @property
    def data_prefix(self) -> str:
        """What the names of the data files that the attempt writes begin with."""
        return final_name(self.job, self.batch, f"{uuid.UUID(self.commit).hex[: _OWN - 4]}0000").removesuffix(
            ".parquet"
        )

    def data_names(self) -> Iterator[str]:
        """Names for the data files that the attempt writes."""
        return (f"{self.data_prefix}{number:0{_DIGITS - _OWN}x}.parquet" for number in count())

    def is_data(self, name: str) -> bool:
        """Whether this is the name of a data file that the attempt has written."""
        return re.fullmatch(rf"{re.escape(self.data_prefix)}[0-9a-f]{{{_DIGITS - _OWN}}}\.parquet", name) is not None

    def may_go_on(self, generation: Generation) -> bool:
        """Whether its driver may have written files after `generation`, or an earlier one, has deleted them."""
        return self.generation < generation and self.cleared_by in (None, generation)

    def is_manifest(self, name: str) -> bool:
        """Whether this is the name of a manifest that the attempt has written."""
        return name.startswith(f"{self.commit}-") and is_manifest(name)


def is_manifest(location: str) -> bool:
    """Whether this is the name, or the location, of a manifest that PyIceberg has written."""
    return _MANIFEST.fullmatch(location.rpartition("/")[2]) is not None


def metadata_folder(table: Table) -> str:
    """The folder of a table's manifests and metadata, as a URL or a path."""
    return str(table.location_provider().new_metadata_location("")).rstrip("/")


def version_of(metadata_location: str) -> int:
    """The number in the name of a file with a table's metadata; 0 if the name has none."""
    match = _VERSION.fullmatch(metadata_location.rpartition("/")[2])
    return int(match[1]) if match else 0


def named_for(metadata_location: str, commit: str) -> str:
    """The location of a new file with a table's metadata, with the commit's name in place of a random one."""
    folder, slash, name = metadata_location.rpartition("/")
    match = _METADATA_NAME.fullmatch(name)
    return f"{folder}{slash}{match['version']}-{commit}.metadata.json" if match else metadata_location


class Outcome(Enum):
    """What a table says about an attempt."""

    UNDECIDED = auto()
    """It may take effect yet."""
    TOOK_EFFECT = auto()
    """A snapshot refers to its files, or did when they were written."""
    FAILED = auto()
    """No snapshot refers to its files, and none ever will."""
    UNKNOWN = auto()
    """Nothing can be told, now or later."""


def outcome(attempt: Attempt, table: Table, folders: tuple[str, str]) -> Outcome:
    """What the table says about an attempt of a driver that has ended, or been fenced, before the table was loaded.

    `folders` are those of the table's data files and manifests. Reads the manifests that are newer than the attempt.
    """
    if attempt.table != str(table.metadata.table_uuid) or folders != (attempt.data, attempt.metadata):
        return Outcome.UNKNOWN
    if any(one.snapshot_id == attempt.snapshot or attempt.commit in one.manifest_list for one in table.snapshots()):
        return Outcome.TOOK_EFFECT
    newest = table.snapshot_by_name("main")
    if (newest.snapshot_id if newest is not None else None) == attempt.parent:
        return Outcome.UNDECIDED
    later = [one for one in table.snapshots() if (one.sequence_number or 0) >= attempt.sequence]
    if len(later) > _MOST_SNAPSHOTS:
        return Outcome.UNKNOWN
    # The snapshot may have expired. Its files live on in later ones.
    if any(_refers(manifest, attempt, table) for manifest in _manifests(later, table, attempt.sequence)):
        return Outcome.TOOK_EFFECT
    return Outcome.FAILED


def _manifests(snapshots: list[Snapshot], table: Table, since: int) -> Iterator[ManifestFile]:
    """The manifests of the snapshots that are not older than the sequence number `since`, each once."""
    seen = set()
    for snapshot in snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen and (manifest.sequence_number or 0) >= since:
                seen.add(manifest.manifest_path)
                yield manifest


def _refers(manifest: ManifestFile, attempt: Attempt, table: Table) -> bool:
    if manifest.added_snapshot_id == attempt.snapshot or attempt.commit in manifest.manifest_path:
        return True
    entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
    return any(attempt.is_data(one.data_file.file_path.rpartition("/")[2]) for one in entries)


@dataclass(frozen=True, slots=True)
class LeftFiles:
    """What an attempt has written: data files, halves of them, and manifests."""

    data: tuple[StoredFile, ...]
    halves: tuple[StoredFile, ...]
    manifests: tuple[StoredFile, ...]

    @classmethod
    def of(cls, attempt: Attempt, data: Storage, metadata: Storage) -> LeftFiles:
        """Looks into the folders of the table's data files and manifests."""
        return cls(
            tuple(file for file in _beginning_with(data, attempt.data_prefix) if attempt.is_data(file.path)),
            tuple(file for file in data.unfinished() if attempt.is_data(intended_name(file.path))),
            tuple(file for file in _beginning_with(metadata, attempt.commit) if attempt.is_manifest(file.path)),
        )

    def fit(self, attempt: Attempt, table: Table) -> bool:
        """Whether no file is older than the state of the table for which the note says that it was written.

        A note whose numbers are wrong could make files of an older commit look as if nobody referred to them.
        """
        before = [one.timestamp_ms for one in table.snapshots() if (one.sequence_number or 0) < attempt.sequence]
        earliest = max(before, default=0) / 1000 - _CLOCK_DIFFERENCE
        return all(file.modified >= earliest for file in (*self.data, *self.halves, *self.manifests))

    def delete(self, attempt: Attempt, table: Table, data: Storage, metadata: Storage) -> int:
        """Delete the files, the list of the manifests, and the table's metadata that the attempt has written, if any.

        Returns how many files were found.
        """
        names = [name for name in _metadata_names(attempt, table) if not _is_metadata(name, attempt, table)]
        data.delete_unfinished([file.path for file in self.halves])
        data.delete([file.path for file in self.data])
        manifests = [file.path for file in self.manifests]
        metadata.delete([*manifests, f"snap-{attempt.snapshot}-0-{attempt.commit}.avro", *names])
        return len(self.data) + len(self.halves) + len(self.manifests)


def unused_manifests(attempt: Attempt, table: Table, metadata: Storage) -> list[str]:
    """Manifests that an attempt wrote, took effect, and merged into others, so that its snapshot does not name them."""
    snapshot = table.snapshot_by_id(attempt.snapshot)
    if snapshot is None:
        return []
    named = {one.manifest_path.rpartition("/")[2] for one in snapshot.manifests(table.io)}
    written = (file.path for file in _beginning_with(metadata, attempt.commit))
    return [path for path in written if attempt.is_manifest(path) and path not in named]


def _beginning_with(storage: Storage, prefix: str) -> Iterator[StoredFile]:
    """The files whose paths begin with `prefix`. They come one after the other in a listing."""
    return takewhile(lambda file: file.path.startswith(prefix), storage.list(after=prefix))


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


class AttemptNotes:
    """The notes of one sink. Each attempt has a file of its own, so that two drivers never write the same one."""

    def __init__(self, checkpoints: Storage, job: str, place: str) -> None:
        self._checkpoints = checkpoints
        self._job = job
        self._folder = commit_notes(job, place)

    def write(self, attempt: Attempt) -> None:
        """Note an attempt; a note on it is replaced."""
        self._checkpoints.write(self._path(attempt), msgspec.json.encode(attempt))

    def remove(self, attempt: Attempt) -> None:
        """Remove the note on an attempt, if there is one."""
        self._checkpoints.delete([self._path(attempt)])

    def until(self, generation: Generation) -> list[Attempt]:
        """The noted attempts of all generations up to this one. Those of later drivers may still be at work."""
        found = []
        for file in self._checkpoints.list(self._folder):
            try:
                attempt = self._read(file.path)
            except NotFoundError:
                continue  # the driver that wrote it has ended the attempt
            except MetadataError as error:
                logger.warning("%s", error)
                continue
            if attempt.generation <= generation:
                found.append(attempt)
        return found

    def _read(self, path: str) -> Attempt:
        """Raises `MetadataError` for a note that is damaged, or that none of our drivers has written."""
        try:
            attempt = json_decoder(Attempt).decode(self._checkpoints.read(path))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(path, str(error)) from error
        if attempt.job != self._job or path != self._path(attempt):
            raise self._damaged(path, "it is the note on another attempt, or of another job")
        return attempt

    def _damaged(self, path: str, why: str) -> MetadataError:
        return MetadataError(
            f"{self._checkpoints.url}/{path}, a note on a commit to an Iceberg table, is damaged: {why}. Files of that "
            "commit may stay in the table's folder; delete the note, and let remove_orphan_files look for them"
        )

    def _path(self, attempt: Attempt) -> str:
        return f"{self._folder}/{attempt.commit}.json"
