"""The files of epochs in durable storage: written by the driver of their generation, read by the takeover after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from strandline.checkpoint.batch import numbered
from strandline.checkpoint.epochs import (
    Rows,
    Segment,
    StoredEpochs,
    chain,
    damaged_part,
    decode_epochs,
    encode_epochs,
    misfit,
    segment_files,
)
from strandline.checkpoint.metadata import CheckpointMetadata, FileHandle, SourcePosition, StateFile, file_paths
from strandline.errors import (
    AlreadyExistsError,
    CheckpointError,
    MetadataError,
    NewerFormatError,
    NotFoundError,
    StorageError,
)
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.storage import JobPaths, Storage

if TYPE_CHECKING:
    from strandline.runtime.driver.restore.takeover import Claim

log = logging.getLogger(__name__)

READS_AT_ONCE = 16
"""How many files of a chain are read at the same time."""


class EpochLog:
    """Makes epochs of one generation durable, in their order. One thread writes; every thread may ask."""

    def __init__(
        self, storage: Storage, paths: JobPaths, store: JobLogStore, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._paths = paths
        self._store = store
        self._generation = store.job_log.generation
        self._clock = clock
        self._written: dict[str, int] = {}
        """The files, and the last epoch in each."""

    @classmethod
    def of(cls, claim: Claim) -> EpochLog:
        """The log of the generation that `claim` has begun."""
        return cls(claim.storage, claim.paths, claim.store)

    def write(
        self, follows: int, batch: int, source: SourcePosition, segments: Iterable[Segment], rows: Iterable[Rows]
    ) -> list[tuple[str, int, StateFile]]:
        """Make the epochs after `follows`, up to `batch`, durable. Both are ids of batches.

        Returns the segments as checkpoints name them. When this returns, every later takeover has seen the epochs.
        Raises `FencedError` if another driver has taken the job over, and `StorageError` if storage fails for too long.
        After an error the epochs may be durable or not, so the driver must not go on: the next takeover decides.
        """
        path = self._paths.epochs(*numbered(follows + 1))
        data, entry = encode_epochs(
            self._paths.job, self._generation, follows, batch, source, segments, rows, self._clock()
        )
        self._written[path] = batch  # before the first try: nobody knows what becomes of a try that fails
        retries = self._store.retries
        retries.call(f"job {self._paths.job}: writing {path}", lambda: self._create(path, data))
        retries.call(f"job {self._paths.job}: looking for other drivers", self._store.check_not_fenced)
        return segment_files(entry, path, len(data))

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._storage.create(path, data)
        except AlreadyExistsError:
            if self._storage.read(path) == data:
                return  # an earlier try, whose outcome was unknown
            self._store.check_not_fenced()
            raise CheckpointError(
                f"{self._storage.url}/{path} exists with another content, though only this driver, of generation "
                f"{self._generation}, may write it: somebody has changed the folder. A start goes on from the last "
                "durable epoch."
            ) from None

    def covered(self, batch: int) -> list[str]:
        """The files with no epoch after `batch`. They stay in this list until `forget`."""
        return [path for path, last in list(self._written.items()) if last <= batch]

    def forget(self, paths: Iterable[str]) -> None:
        """The files are deleted, or somebody else takes care of them."""
        for path in paths:
            self._written.pop(path, None)


class EpochChain:
    """The epochs that extend a checkpoint, as far as they have been read.

    Files never change, so a driver can read most of them before it takes the job over, and the rest afterwards.
    """

    def __init__(self, storage: Storage, paths: JobPaths, store: JobLogStore, metadata: CheckpointMetadata) -> None:
        """`metadata` is the checkpoint that the epochs extend."""
        self._storage = storage
        self._paths = paths
        self._retries = store.retries
        self._metadata = metadata
        self.files: list[StoredEpochs] = []
        self.rows: list[Rows] = []
        """The rows of all epochs that were read, in their order."""
        self._damaged: set[str] = set()

    def read_on(self) -> None:
        """Read what comes next, until there is nothing.

        The files are found by their names. A listing, which may be late, only says what to read ahead. A damaged file
        ends the chain: the rows after it come from the sources again. Raises `NewerFormatError` if a later release
        wrote one, or `StorageError`.
        """
        last = self.files[-1].entry.batch if self.files else self._metadata.batch_id
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="epochs") as pool:
            ahead = _Ahead(self._storage, self._listed(last), pool)
            self.files.extend(chain(last, partial(self._read, ahead)))
            ahead.cancel()

    def _listed(self, last: int) -> list[str]:
        """The files behind a batch that a listing has, which may not be all."""
        generation, number = numbered(last + 1)
        folder, _, _name = self._paths.epochs(generation, number).rpartition("/")
        found = self._retries.call(
            f"job {self._paths.job}: listing {folder}", lambda: [file.path for file in self._storage.list(folder)]
        )
        names = [(name, path) for path in found if (name := self._paths.parse_epochs(path)) is not None]
        return [path for name, path in sorted(names) if name >= (generation, number)]

    def _read(self, ahead: _Ahead, first: int) -> StoredEpochs | None:
        path = self._paths.epochs(*numbered(first))
        where = f"{self._storage.url}/{path}"
        if path in self._damaged:
            return None
        data = ahead.content(path)
        if data is None:
            data = self._retries.call(f"job {self._paths.job}: reading {path}", lambda: self._content(path))
        if data is None:
            return None
        try:
            entry = decode_epochs(data, where, self._paths.job)
            wrong = misfit(self._metadata, entry) or (
                "a part has a wrong checksum" if damaged_part(data, entry) else None
            )
            if wrong is not None:
                raise MetadataError(f"{where}: {wrong}.")
        except NewerFormatError:
            raise
        except MetadataError as error:
            self._damaged.add(path)
            log.warning(
                "job %s: epochs from %d on cannot be restored, and their rows are read again: %s",
                self._paths.job,
                first,
                error,
            )
            return None
        self.rows += [
            (one.operator, one.output, one.subtask, one.batch, data[one.offset : one.offset + one.size])
            for one in entry.rows
        ]
        return StoredEpochs(entry, path, len(data))

    def _content(self, path: str) -> bytes | None:
        try:
            return self._storage.read(path)
        except NotFoundError:
            return None


class _Ahead:
    """Reads listed files before they are asked for: an object store needs as long for one as for many at a time."""

    def __init__(self, storage: Storage, paths: Iterable[str], pool: Executor) -> None:
        self._storage = storage
        self._paths = iter(paths)
        self._pool = pool
        self._running: dict[str, Future[bytes]] = {}
        self._go_on()

    def _go_on(self) -> None:
        for path in islice(self._paths, READS_AT_ONCE - len(self._running)):
            self._running[path] = self._pool.submit(self._storage.read, path)

    def content(self, path: str) -> bytes | None:
        """The content of a file; None if it was not listed, or cannot be read, so that the caller has to try."""
        running = self._running.pop(path, None)
        self._go_on()
        if running is None:
            return None
        try:
            return running.result()
        except StorageError as error:
            log.info("%s is read once more: %s", path, error)
            return None

    def cancel(self) -> None:
        """Read nothing more."""
        for running in self._running.values():
            running.cancel()


def epochs_of_no_checkpoint(
    storage: Storage, paths: JobPaths, store: JobLogStore, others: tuple[str, ...]
) -> list[FileHandle]:
    """The files of epochs that no checkpoint names which anybody may restore.

    Raises `CheckpointError` if such a checkpoint cannot be read.
    """
    files = [file for file in storage.list(paths.epochs_dir) if paths.parse_epochs(file.path) is not None]
    named: set[str] = set()
    for number in (*store.job_log.retained, *store.released()) if files else ():
        named |= file_paths(read_metadata(storage, paths, number, others))
    return [FileHandle(file.path, file.size, "") for file in files if file.path not in named]
