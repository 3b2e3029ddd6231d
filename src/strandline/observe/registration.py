"""Where running jobs can be found: every run leaves an entry on its host and beside its checkpoints.

An entry on the host lies in a folder that only its user can enter. The token that steers the job lies beside it, in a
file of its own. The entry in storage has no token: whoever may read checkpoints may not steer the job by that.
"""

from __future__ import annotations

import logging
import os
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from strandline.config import Config
from strandline.errors import AuthenticationError, JobDefinitionError, NotFoundError
from strandline.observe.background import Background
from strandline.observe.facts import job_id
from strandline.observe.run_entries import (
    MAX_ENTRY_BYTES,
    FoundRun,
    RunEntry,
    decode_entry,
    encode_entry,
    own_entry,
    unreadable,
)
from strandline.observe.views import JobView
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.protocol.user_folder import make_private, user_folder
from strandline.storage import JobPaths, Storage, StoredFile, open_storage

log = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
"""How often a run renews its entry in storage."""
WRITE_AGAIN_SECONDS = 3600.0
"""How often a run writes its entry on the host again, changed or not: cleaners of `/tmp` delete files by their age."""
KEPT_SECONDS = 24 * 3600.0
"""How long the entry of a run that is over stays on its host."""
KEPT_ENTRIES = 200
"""How many entries of runs that are over stay on a host."""
RUNS_DIR_VARIABLE = "STRANDLINE_RUNS_DIR"
"""The environment variable that names another place than `/tmp` for the folder of the user."""

# --- the run's side --------------------------------------------------------------------------------


def register(job: JobView, config: Config, url: str = "", token: str = "") -> Registration:
    """Makes a run of this process known, until the registration is closed. Never raises.

    Call it when the run has taken the job over. `url` and `token` are those of its REST server.
    """
    return Registration(job, open_storage(config.checkpoint_dir, config.storage_options), url, token)


class Registration:
    """Keeps the two entries of a run up to date. A disk or a storage that fails is logged once; the job goes on."""

    def __init__(
        self,
        job: JobView,
        storage: Storage | None,
        url: str = "",
        token: str = "",
        *,
        parent: str | None = None,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        """`parent` is where the folder of the user lies. Without `storage`, there is no entry in storage."""
        self._job = job
        self._storage = storage
        self._token = token
        self._parent = parent
        self._beat_seconds = beat_seconds
        facts = job.facts()
        self._entry = own_entry(facts, url)
        self._began = time.monotonic()
        self._began_ms = int(time.time() * 1000)
        self._here: RunStatus | None = None
        """The status in the entry on this host; None before there is one."""
        self._written = 0.0
        """When the entry on this host was written last."""
        self._there: RunStatus | None = None
        self._beat = 0.0
        name = f"job {facts.name}"
        self._local = Background("strandline-registration", f"{name}: its entry on this host", self._renew_here)
        self._stored = Background("strandline-heartbeat", f"{name}: its entry in storage", self._renew_there)

    def look(self) -> None:
        """Has a change of the status noted now, in the background. Without this call, that happens once a second."""
        self._local.now()
        self._stored.now()

    def finish(self) -> None:
        """Has the final status noted, in the background. `close` waits for that."""
        self._local.finish()
        self._stored.finish()

    def close(self) -> None:
        """Notes the final status, and deletes the token. Returns within some seconds. Never raises."""
        self.finish()
        self._local.close()
        self._stored.close()

    def _current(self) -> RunEntry:
        elapsed = time.monotonic() - self._began
        return msgspec.structs.replace(
            self._entry, status=self._job.facts().status, beat_ms=self._began_ms + int(elapsed * 1000)
        )

    def _renew_here(self, last: bool) -> bool:
        entry = self._current()
        if self._here == entry.status and not last and self._is_still_here(entry.run):
            return False
        folder = make_runs_folder(user_runs_folder(self._parent))
        if self._here is None:
            prune(folder)
        if self._token and not last:
            _write_private(token_path(folder, entry.run), self._token.encode())
        _write_private(entry_path(folder, entry.run), encode_entry(entry))
        self._here = entry.status
        self._written = time.monotonic()
        if last:
            token_path(folder, entry.run).unlink(missing_ok=True)
        return True

    def _is_still_here(self, run: str) -> bool:
        """Whether the files of this host are there, and so new that no cleaner of `/tmp` deletes them."""
        folder = user_runs_folder(self._parent)
        if time.monotonic() - self._written > WRITE_AGAIN_SECONDS or not entry_path(folder, run).exists():
            return False
        return not self._token or token_path(folder, run).exists()

    def _renew_there(self, last: bool) -> bool:
        entry = self._current()
        due = time.monotonic() >= self._beat
        if self._storage is None or not (last or due or entry.status != self._there):
            return False
        self._beat = time.monotonic() + self._beat_seconds  # also after a failure
        self._there = entry.status
        self._storage.write(JobPaths(entry.job).run_entry(entry.started_ms, entry.run), encode_entry(entry))
        return True


# --- the folder of the user ------------------------------------------------------------------------


def user_runs_folder(parent: str | None = None) -> Path:
    """The folder with the entries of this user's runs on this host. `make_runs_folder` makes it."""
    return user_folder(parent or os.environ.get(RUNS_DIR_VARIABLE) or "/tmp") / ".runs"


def make_runs_folder(folder: Path) -> Path:
    """Makes the folder of the entries, or one in it. Raises what `make_private` raises."""
    return make_private(folder, f"the environment variable {RUNS_DIR_VARIABLE}")


def entry_path(folder: Path, run: str) -> Path:
    """The file of the entry of a run in `folder`."""
    return folder / f"{run}.json"


def token_path(folder: Path, run: str) -> Path:
    """The file of the token of a run whose entry is in `folder`."""
    return folder / f"{run}.token"


def local_runs(parent: str | None = None) -> list[FoundRun]:
    """The runs of this user on this host, newest first; also those that ended in the last day.

    A file that cannot be an entry of this user's is left out; an entry that cannot be read has a `problem`. Raises
    `UnsafeFolderError` if the folder belongs to somebody else, or others can write there.
    """
    folder = user_runs_folder(parent)
    if not os.path.lexists(folder.parent):
        return []
    make_runs_folder(folder)
    prune(folder)
    return sorted(_entries(folder), key=lambda run: run.entry.started_ms, reverse=True)


def read_token(run: FoundRun) -> str:
    """The token that steers a run of this host. Raises `AuthenticationError` if there is none that can be trusted."""
    if run.token_file is not None:
        with suppress(OSError, ValueError, _NotOurs):
            return _read_private(run.token_file, secret=True).decode("ascii")
    raise AuthenticationError(
        f"there is no token for job {run.entry.job!r}: its run is over, or {run.token_file or 'its file'} is not this "
        "user's alone. Run the command as the user that runs the job, on its host, or give the token of the option "
        "rest_token"
    )


def prune(folder: Path) -> None:
    """Deletes the entries of runs that were over a day ago, and all but the newest ones of those that are over."""
    over = [(path, run) for path, run in _found(folder) if not run.alive]
    over.sort(key=lambda pair: _modified(pair[0]), reverse=True)
    for place, (path, run) in enumerate(over):
        if place >= KEPT_ENTRIES or time.time() - _modified(path) > KEPT_SECONDS:
            with suppress(OSError):
                path.unlink(missing_ok=True)
                token_path(folder, run.entry.run).unlink(missing_ok=True)


def _entries(folder: Path) -> list[FoundRun]:
    return [run for _path, run in _found(folder)]


def _found(folder: Path) -> Iterator[tuple[Path, FoundRun]]:
    for path in sorted(folder.glob("*.json")):
        try:
            data = _read_private(path)
        except (OSError, _NotOurs) as error:
            log.debug("%s is no entry of this user's: %s", path, error)
            continue
        found = decode_entry(data, str(path), path.stem, 0)
        if found.problem == "" and found.entry.run != path.stem:
            continue  # a copy of another entry
        secret = token_path(folder, path.stem)
        yield path, replace(found, token_file=secret if found.alive and secret.exists() else None)


class _NotOurs(Exception):
    """A file is not one that this user wrote for itself."""


def _read_private(path: Path, *, secret: bool = False) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MAX_ENTRY_BYTES:
            raise _NotOurs("not a file, another user's, or too large")
        if stat.S_IMODE(found.st_mode) & (0o077 if secret else 0o022):
            raise _NotOurs("open to others")
        return file.read(MAX_ENTRY_BYTES)


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


# --- entries in storage ----------------------------------------------------------------------------


def runs_in(checkpoint_dir: str, storage_options: Mapping[str, str] | None = None, newest: int = 5) -> list[FoundRun]:
    """The `newest` runs of every job below a checkpoint directory, newest first. Raises `StorageError`."""
    storage = open_storage(checkpoint_dir, storage_options)
    found = [run for job in jobs_in(storage) for run in runs_of(storage, job, newest)]
    return sorted(found, key=lambda run: run.entry.started_ms, reverse=True)


def jobs_in(storage: Storage) -> list[str]:
    """The names of the folders below a checkpoint directory that may be jobs."""
    found = []
    for name in storage.folders():
        with suppress(JobDefinitionError):
            found.append(JobPaths(name).job)
    return found


def runs_of(storage: Storage, job: str, newest: int = 5) -> list[FoundRun]:
    """The `newest` runs of a job, newest first."""
    paths = JobPaths(job)
    entries: dict[tuple[int, str], StoredFile | None] = {}
    for file in storage.list(paths.history_runs_dir):
        part = paths.parse_history(file.path)
        if part is not None:
            key = (part.started_ms, part.run)
            entries[key] = file if part.number is None else entries.get(key)
    chosen = sorted(entries, reverse=True)[: max(0, newest)]
    return [stored_run(storage, paths, *key, entries[key]) for key in chosen]


def stored_run(storage: Storage, paths: JobPaths, started_ms: int, run: str, file: StoredFile | None) -> FoundRun:
    """The run whose entry is the stored `file`; None if a run has left other files, but no entry."""
    path = paths.run_entry(started_ms, run)
    source = f"{storage.url}/{path}"
    if file is None:
        return unreadable(source, run, started_ms, "the entry is missing", paths.job)
    if file.size > MAX_ENTRY_BYTES:
        return unreadable(source, run, started_ms, f"it has {file.size:,} bytes, too many for an entry", paths.job)
    try:
        data = storage.read_range(path, 0, MAX_ENTRY_BYTES)
    except NotFoundError:
        return unreadable(source, run, started_ms, "the entry is missing", paths.job)
    found = decode_entry(data, source, run, started_ms, file.modified)
    if found.problem:
        return replace(found, entry=msgspec.structs.replace(found.entry, job=paths.job))
    if (found.entry.run, found.entry.started_ms, found.entry.job) != (run, started_ms, paths.job):
        return unreadable(source, run, started_ms, "it is the entry of another run", paths.job)
    # Where the entry was found counts, not what it says: whoever follows it must not be led to another storage.
    here = msgspec.structs.replace(found.entry, checkpoint_dir=storage.url, job_id=job_id(storage.url, paths.job))
    return replace(found, entry=here)
