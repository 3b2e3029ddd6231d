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
from threading import Lock
from typing import TYPE_CHECKING, Annotated

import msgspec

from strandline.checkpoint.metadata import BatchId, Generation, KnownGeneration
from strandline.decoding import json_decoder
from strandline.errors import MetadataError, NotFoundError, StorageRefusedError
from strandline.sinks.names import FINAL_NAME, commit_notes, final_name
from strandline.storage import Storage

if TYPE_CHECKING:
    from pyiceberg.table import Table

logger = logging.getLogger(__name__)

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OF_COMMIT = 24
"""How many hex digits of the commit are in the name of a data file."""
_APART = "0000"
"""What follows them. The random names of staged files hardly ever have it there, so a note cannot name those."""
_OF_NUMBER = 4
"""How many hex digits, the last ones, number the data files of a commit."""
_VERSION = re.compile(r"(\d{5,18})-.*\.metadata\.json")
_METADATA_NAME = re.compile(rf"(?P<version>\d{{5,18}})-{_UUID}\.metadata\.json")
_MANIFEST = re.compile(rf"{_UUID}-m\d+\.avro")


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to commit, as its note describes it.

    A note is not believed. Its folders are compared with those of the table, and only the table's are opened. Names in
    them are built from the note's numbers, or are checked to be names of the job's own data files.
    """

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

    rewritten: tuple[str, ...] = ()
    """Names of files that the table must not get because it was partitioned anew after they had been staged. The commit
    adds their rows in other files. An earlier try may have given them these names, which are their final ones."""

    def __post_init__(self) -> None:
        for name in self.rewritten:
            match = FINAL_NAME.fullmatch(name)
            if match is None or match["job"] != self.job or int(match["batch"]) > self.batch:
                raise ValueError(f"{name!r} is not the name of a data file that the commit writes anew")

    @property
    def data_prefix(self) -> str:
        """What the names of the data files that the attempt writes begin with."""
        unnumbered = final_name(self.job, self.batch, f"{uuid.UUID(self.commit).hex[:_OF_COMMIT]}{_APART}")
        return unnumbered.removesuffix(".parquet")

    def data_names(self) -> Iterator[str]:
        """Names for the data files that the attempt writes: as many as `is_data` knows."""
        return (f"{self.data_prefix}{number:0{_OF_NUMBER}x}.parquet" for number in range(16**_OF_NUMBER))

    def is_data(self, name: str) -> bool:
        """Whether this is the name of a data file that the attempt has written."""
        return re.fullmatch(rf"{re.escape(self.data_prefix)}[0-9a-f]{{{_OF_NUMBER}}}\.parquet", name) is not None

    def may_go_on(self, generation: Generation) -> bool:
        """Whether its driver may have written files after `generation`, or an earlier one, has deleted them."""
        return self.generation < generation and self.cleared_by in (None, generation)

    def is_manifest(self, name: str) -> bool:
        """Whether this is the name of a manifest that the attempt has written."""
        return name.startswith(f"{self.commit}-") and is_manifest(name)


class DataNames:
    """Gives names to the data files that one attempt writes, in any thread, and knows which ones it gave."""

    def __init__(self, attempt: Attempt) -> None:
        self._names = attempt.data_names()
        self._lock = Lock()
        self.given: list[str] = []

    def new(self) -> str:
        """A name that no other file has. Raises `StorageRefusedError` if there are no more."""
        with self._lock:
            name = next(self._names, None)
            if name is None:
                raise StorageRefusedError(
                    f"a commit to an Iceberg table writes more than {len(self.given)} data files. The rows stay "
                    "staged; let the table have larger files or fewer partitions, and start the job again"
                )
            self.given.append(name)
            return name


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
