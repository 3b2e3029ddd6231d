"""Finds the checkpoint or savepoint that a user names: its own folder, or the folder of its job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.errors import CheckpointNotFoundError, JobDefinitionError
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.runtime.driver.restore.savepoints import METADATA, open_savepoint
from strandline.storage import JobPaths, Storage, is_local, open_storage

MAX_SHOWN: Final = 5
"""How many jobs an error names."""


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint or savepoint, and the storage that holds its files."""

    storage: Storage
    metadata: CheckpointMetadata
    path: str
    """Its own folder, in full."""
    newest: bool = False
    """Whether it was found as the newest checkpoint of its job. Then a newer one may take its place."""

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"{self.metadata.kind} {self.metadata.checkpoint_id} of job {self.metadata.job} ({self.path})"


def locate(path: str, options: Mapping[str, str] | None = None, changelog_dirs: Sequence[str] = ()) -> Located:
    """The checkpoint at `path` (`…/job/chk-N`), the savepoint at `path`, or the newest checkpoint of the job at `path`.

    The path of the `_metadata` file in a folder stands for the folder. `changelog_dirs` are other storages that may
    hold files of the job. Raises `CheckpointNotFoundError` if `path` is none of these, and `MetadataError` if the
    metadata is damaged or names files elsewhere.
    """
    settings = dict(options or {})
    others = tuple(open_storage(one, settings).url for one in changelog_dirs)
    parts = JobPaths.split_checkpoint(path)
    if parts is not None:
        root, paths, number = parts
        if _is_folder(root):
            storage = open_storage(root, settings)
            if storage.exists(paths.metadata(number)):
                metadata = read_metadata(storage, paths, number, others)
                return Located(storage, metadata, f"{storage.url}/{paths.checkpoint_dir(number)}")
    found = _newest_of_job(path, settings, others)
    if found is not None:
        return found
    if parts is not None:
        raise CheckpointNotFoundError(
            f"{path} has no {METADATA}, so it is no completed checkpoint, or its job has dropped it. To read the "
            f"newest one, give the job's folder, {path.rstrip('/').removesuffix(f'/{METADATA}').rpartition('/')[0]}"
        )
    return _savepoint(path, settings)


def _newest_of_job(path: str, options: dict[str, str], others: tuple[str, ...]) -> Located | None:
    """The newest checkpoint of the job whose folder is `path`; None if `path` is not the folder of a job."""
    parent, _, name = path.rstrip("/").rpartition("/")
    parent = parent or ("/" if path.startswith("/") else ".")
    if parent.endswith(":/") or not _is_folder(parent):
        return None
    try:
        paths = JobPaths(name)
    except JobDefinitionError:
        return None
    storage = open_storage(parent, options)
    if not any(paths.parse_log_entry(file.path) is not None for file in storage.list(paths.log_dir)):
        return None
    while True:
        job_log = JobLogStore(storage, paths).load()
        latest = job_log.latest
        if latest is None:
            raise CheckpointNotFoundError(
                f"job {name!r} in {storage.url} has no completed checkpoint yet, so there is no state to read"
            )
        if not latest.ours:
            restored = f"{latest.origin or storage.url}/{latest.metadata_path}".removesuffix(f"/{METADATA}")
            raise CheckpointNotFoundError(
                f"job {name!r} in {storage.url} has completed no checkpoint since it was restored from {restored}; "
                "give that path, to read the state from which the job has begun"
            )
        number = latest.checkpoint_id
        try:
            metadata = read_metadata(storage, paths, number, others)
        except CheckpointNotFoundError:
            if JobLogStore(storage, paths).load().position == job_log.position:
                raise
            continue  # a running job has completed another one meanwhile, and dropped this one
        return Located(storage, metadata, f"{storage.url}/{paths.checkpoint_dir(number)}", newest=True)


def _savepoint(path: str, options: dict[str, str]) -> Located:
    try:
        storage, metadata = open_savepoint(path, options)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"there is no state to read at {path}{_jobs_below(path)}. Give the folder of a checkpoint "
            "(checkpoint_dir/job/chk-N), of a savepoint (savepoint-<job>-<id>), or of a job (checkpoint_dir/job), "
            "whose newest checkpoint is read then."
        ) from error
    return Located(storage, metadata, storage.url)


def _jobs_below(path: str) -> str:
    """For an error: the jobs of a local checkpoint directory, which was given in place of the folder of a job."""
    from pathlib import Path

    folder = Path(path).expanduser()
    found: list[str] = []
    with suppress(OSError):  # it is no folder, or cannot be read: the error stands without this
        for name in sorted(one.name for one in folder.iterdir()):
            with suppress(JobDefinitionError):  # no name of a job
                if (folder / JobPaths(name).log_dir).is_dir():
                    found.append(f"{path.rstrip('/')}/{name}")
    shown = ", ".join(found[:MAX_SHOWN]) + (", …" if len(found) > MAX_SHOWN else "")
    return f", but it is the checkpoint_dir of: {shown}" if found else ""


def _is_folder(root: str) -> bool:
    """Whether a local root exists. Whether a root in an object store does cannot be told before it is listed."""
    if not is_local(root):
        return True
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    place = unquote(urlsplit(root).path) if root.startswith("file:") else root
    return Path(place).expanduser().is_dir()
