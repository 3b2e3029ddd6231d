"""The folder of a savepoint, which holds the whole state of a job and can be moved.

`<directory>/savepoint-<job>-<id>/` contains `_metadata`, which names all other files by their names in that folder. A
canonical savepoint consists of full snapshots that every backend can restore; a native one, of the backend's own files.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

import msgspec

from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    StateFile,
    decode,
    encode,
)
from strandline.checkpoint.pending import SavepointFormat
from strandline.errors import CheckpointError, CheckpointNotFoundError, ConfigError, NotFoundError, StorageError
from strandline.runtime.protocol.messages import StorageSettings
from strandline.storage import Storage, open_storage
from strandline.storage.external import inner_path

__all__ = ["METADATA", "SavepointFormat", "SavepointTarget", "open_savepoint"]

METADATA = "_metadata"
PROBE = "_probe"


@dataclass(frozen=True, slots=True)
class SavepointTarget:
    """The folder and the format of a savepoint that is to be written."""

    settings: StorageSettings
    """The savepoint's own folder, and how to reach it."""
    format: SavepointFormat

    @classmethod
    def within(cls, directory: str, job: str, format_: SavepointFormat, options: dict[str, str]) -> SavepointTarget:
        """A target in a new folder in `directory`. Raises `ConfigError` if no folder can have that name."""
        name = f"savepoint-{job}-{uuid.uuid4().hex[:12]}"
        settings = StorageSettings(f"{directory.rstrip('/')}/{name}", options)
        if not settings.url.isprintable():
            raise ConfigError(
                f"a savepoint cannot be written to {directory!r}: the name has characters that are not text"
            )
        open_storage(settings.url, options)  # contacts nobody, but refuses what is not a place
        return cls(settings, format_)

    def try_out(self) -> None:
        """Write a file where the savepoint will be, and delete it. Raises `CheckpointError` if that is not possible."""
        parent, _, name = self.settings.url.rpartition("/")
        probe = f"{name}/{PROBE}"
        try:
            storage = open_storage(parent or "/", self.settings.options)
            storage.write(probe, b"")
            storage.delete([probe])
        except StorageError as error:
            raise CheckpointError(f"no savepoint can be written to {parent or '/'}: {error}") from error

    @property
    def storage(self) -> Storage:
        return open_storage(self.settings.url, self.settings.options)

    def complete(self, metadata: CheckpointMetadata) -> str:
        """Write the metadata, which makes the folder a savepoint. Returns the folder's path."""
        states = tuple(
            msgspec.structs.replace(state, files=tuple(map(_named_inside, state.files))) for state in metadata.subtasks
        )
        storage = self.storage
        storage.create(METADATA, encode(msgspec.structs.replace(metadata, subtasks=states)))
        return storage.url


def open_savepoint(location: str, options: dict[str, str]) -> tuple[Storage, CheckpointMetadata]:
    """The savepoint at `location`, which is its folder or the `_metadata` file in it.

    Raises `CheckpointNotFoundError` if there is none, `MetadataError` if it is damaged or names files elsewhere.
    """
    place = location.rstrip("/").removesuffix(f"/{METADATA}") or "/"
    if "://" not in place:
        place = os.path.abspath(os.path.expanduser(place))
        if not os.path.isdir(place):  # `open_storage` would create the folder
            raise _no_savepoint(place)
    storage = open_storage(place, options)
    try:
        metadata = decode(storage.read(METADATA), f"{storage.url}/{METADATA}", Home(None))
    except NotFoundError as error:
        raise _no_savepoint(storage.url) from error
    return storage, metadata


def _named_inside(file: StateFile) -> StateFile:
    """The file with its path inside the savepoint's folder, so that the folder can be moved."""
    if file.handle is None:
        return file
    return msgspec.structs.replace(file, handle=msgspec.structs.replace(file.handle, path=inner_path(file.handle.path)))


def _no_savepoint(place: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no savepoint at {place}: a savepoint's folder (savepoint-<job>-<id>) has a {METADATA} file"
    )
