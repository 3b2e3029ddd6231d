"""Rows that wait to be published: where they lie, and how they are found again or deleted.

The rows of most sinks wait as Arrow files in the job's checkpoint folder. A task writes them, and the driver reads them
when a checkpoint covers them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from re import Pattern
from typing import Protocol, TypeVar

import pyarrow as pa

from strandline.checkpoint.batch import generation_of
from strandline.checkpoint.metadata import SinkFile
from strandline.errors import DamagedFileError, NotFoundError, SinkFilesMissingError, StorageError, StorageRefusedError
from strandline.sinks.base import SinkContext, Stager
from strandline.sinks.local_scratch import scratch_folder
from strandline.sinks.names import (
    FINAL_NAME,
    STAGING_FOLDER,
    WAITING_NAME,
    new_final_name,
    new_waiting_path,
    staged_name,
    waiting_area,
)
from strandline.state.disk_full import disk_full_error
from strandline.storage import Storage, open_storage
from strandline.storage.base import intended_name

log = logging.getLogger(__name__)

RENAMES_AT_ONCE = 16

_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class StagingArea:
    """The folder in which the rows of one sink wait."""

    storage: Storage
    folder: str
    job: str
    name: Pattern[str]
    """Matches the names of staged files, without `.staged`."""

    def has_named(self, file: SinkFile) -> bool:
        """Whether the file has such a name as the stager of this area gives."""
        return self.name.fullmatch(file.staged.rpartition("/")[2].removesuffix(".staged")) is not None

    def missing(self, files: Iterable[SinkFile]) -> SinkFile | None:
        """The first of the files that is neither staged nor has its final name; None if there is none."""
        for file in files:
            if not self.storage.exists(file.staged) and not (file.final and self.storage.exists(file.final)):
                return file
        return None

    def holds(self, after: int, until: int) -> bool:
        """Whether rows of a batch after `after`, up to `until`, are staged."""
        return any(after < batch <= until for _path, batch in self._staged())

    def _staged(self) -> Iterator[tuple[str, int]]:
        """The path and the batch of every file of the job."""
        for listed in self.storage.list(self.folder):
            batch = self._batch(listed.path.rpartition("/")[2])
            if batch is not None:
                yield listed.path, batch

    def _batch(self, name: str) -> int | None:
        """The batch of a staged file of the job; None if the name is that of another file."""
        match = self.name.fullmatch(name.removesuffix(".staged"))
        return int(match["batch"]) if match and match["job"] == self.job else None

    def discard(
        self,
        generation: int,
        check_not_fenced: Callable[[], None],
        note: Callable[[Sequence[int]], None] = lambda _batches: None,
    ) -> None:
        """Delete all files of generations before `generation`.

        Before that, `note` is called with their batches, and then `check_not_fenced`, which may raise an error instead.
        """
        doomed = {path: batch for path, batch in self._staged() if generation_of(batch) < generation}
        if doomed:
            note(sorted(doomed.values()))
            check_not_fenced()
            self.storage.delete(list(doomed))
        self.discard_halves(generation)

    def discard_halves(self, generation: int) -> None:
        """Delete files that processes of generations before `generation` have begun, and did not complete."""
        halves = ((file.path, self._batch(intended_name(file.path))) for file in self.storage.unfinished(self.folder))
        doomed = [path for path, batch in halves if batch is not None and generation_of(batch) < generation]
        if doomed:
            self.storage.delete_unfinished(doomed)

    def delete(self, files: Iterable[SinkFile]) -> None:
        """Delete rows that the target has. A failure is only logged: the next start deletes what is left."""
        try:
            self.storage.delete([file.staged for file in files])
        except StorageError as error:
            log.warning("job %s: staged rows are deleted later: %s", self.job, error)


def publish(storage: Storage, files: Iterable[SinkFile]) -> None:
    """Make staged files visible by renaming them. May be repeated: published files stay as they are.

    An object store copies a file to rename it, so many files are renamed at the same time. If one cannot be published,
    the others are, and its error is raised.
    """
    with ThreadPoolExecutor(RENAMES_AT_ONCE, thread_name_prefix="publish") as pool:
        renamed = [pool.submit(_publish_one, storage, file) for file in files]
    for one in renamed:
        one.result()


def _publish_one(storage: Storage, file: SinkFile) -> None:
    try:
        storage.rename(file.staged, file.final)
    except NotFoundError:
        if not storage.exists(file.final):
            raise NotFoundError(
                f"{storage.url}: neither the staged file {file.staged} nor {file.final} is there, though a completed "
                f"checkpoint covers its {file.rows} rows. Bring the file back, or restore an older checkpoint."
            ) from None


def waiting_rows(context: SinkContext, place: str) -> StagingArea:
    """The part of the job's checkpoint folder in which rows for `place` wait."""
    storage = open_storage(context.checkpoint_dir, dict(context.storage_options))
    return StagingArea(storage, waiting_area(context.job, place), context.job, WAITING_NAME)


def staged_files(storage: Storage, job: str) -> StagingArea:
    """The folder in which files of a table wait for their final names."""
    return StagingArea(storage, STAGING_FOLDER, job, FINAL_NAME)


class LocalFile(Protocol):
    """A finished file on local disk."""

    @property
    def path(self) -> Path: ...


LocalFileT = TypeVar("LocalFileT", bound=LocalFile)


@dataclass(frozen=True, slots=True)
class LocalRows:
    """A finished file with rows on local disk."""

    path: Path
    rows: int
    handle: str = ""
    """As in `SinkFile`."""


def written_locally(write: Callable[[Path], Iterator[LocalFileT]]) -> Iterator[LocalFileT]:
    """The files that `write` makes in a temporary folder. Each is there until the next one is asked for.

    Raises `StorageFullError` if the local disk is full.
    """
    with scratch_folder() as folder:
        files = write(folder)
        while True:
            with disk_full_error(folder):
                file = next(files, None)
            if file is None:
                return
            yield file
            file.path.unlink()


def stage_files(
    storage: Storage, job: str, sink: str, batch: int, write: Callable[[Path], Iterator[LocalRows]]
) -> Iterator[SinkFile]:
    """Put the files that `write` makes into the staging folder of a table, from where `publish` renames them."""
    for file in written_locally(write):
        final = new_final_name(job, batch)
        storage.upload(file.path, staged_name(final))
        yield SinkFile(sink, staged_name(final), final, file.rows, file.path.stat().st_size, file.handle)


@dataclass(frozen=True, slots=True)
class ArrowStager(Stager):
    """Writes the rows of a task to an Arrow file in the job's checkpoint folder."""

    job: str
    sink: str
    checkpoint_dir: str
    options: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, context: SinkContext, place: str) -> ArrowStager:
        """The stager for the rows of one sink."""
        return cls(context.job, place, context.checkpoint_dir, dict(context.storage_options))

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        first = next((some for some in batches if some.num_rows), None)
        if first is None:
            return
        storage = open_storage(self.checkpoint_dir, self.options)
        for file in written_locally(partial(_write_arrow, first, batches)):
            path = new_waiting_path(self.job, self.sink, batch)
            storage.upload(file.path, path)
            yield SinkFile(self.sink, path, "", file.rows, file.path.stat().st_size, _checksum(file.path))


def _write_arrow(first: pa.RecordBatch, others: Iterator[pa.RecordBatch], folder: Path) -> Iterator[LocalRows]:
    local = folder / "rows.arrow"
    rows = first.num_rows
    with (
        pa.OSFile(str(local), "wb") as out,
        pa.ipc.new_file(out, first.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer,
    ):
        writer.write_batch(first)
        for some in others:
            rows += some.num_rows
            writer.write_batch(some)
    yield LocalRows(local, rows)


@contextmanager
def opened(storage: Storage, file: SinkFile) -> Iterator[Iterator[pa.RecordBatch]]:
    """The rows of a file that `ArrowStager` wrote, batch by batch, inside the block.

    Raises `SinkFilesMissingError` if it is not there, and `DamagedFileError` if it has another content.
    """
    with scratch_folder() as folder:
        local = folder / "rows.arrow"
        with disk_full_error(folder):
            try:
                storage.download(file.staged, local)
            except NotFoundError as error:
                raise SinkFilesMissingError(
                    f"{storage.url}/{file.staged} is missing. It holds {file.rows} rows for {file.sink} that a "
                    "completed checkpoint covers. Bring the file back, or restore an older checkpoint."
                ) from error
        if local.stat().st_size != file.size or _checksum(local) != file.handle:
            raise DamagedFileError(
                f"{storage.url}/{file.staged}, with {file.rows} rows for {file.sink}, is damaged: its size or its "
                "checksum is wrong. Bring the file back, or restore an older checkpoint."
            )
        with pa.memory_map(str(local)) as source, pa.ipc.open_file(source) as reader:
            yield (reader.get_batch(number) for number in range(reader.num_record_batches))


def rows_of(
    storage: Storage, files: Sequence[SinkFile], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of several files, one file at a time, in the order in which they were written.

    They were perhaps staged before the job was changed. They get `columns` in their order, with null in new ones; None
    leaves the rows as they were staged.
    Raises `StorageRefusedError` if values would be lost.
    """
    for file in files:
        with opened(storage, file) as batches:
            for batch in batches:
                yield batch if columns is None else _with_columns(batch, columns, file)


def _with_columns(batch: pa.RecordBatch, columns: Sequence[str], file: SinkFile) -> pa.RecordBatch:
    staged = batch.schema.names
    if staged == list(columns):
        return batch
    lost = [name for name in staged if name not in columns]
    if lost:
        raise StorageRefusedError(
            f"{file.rows} rows for {file.sink} were staged before the job was changed. They have the column "
            f"{lost[0]!r}, which the job writes no more. They stay staged. Start the job once as it was, which "
            "publishes them, and change it then."
        )
    nulls = pa.nulls(batch.num_rows)
    arrays = [batch.column(name) if name in staged else nulls for name in columns]
    return pa.RecordBatch.from_arrays(arrays, list(columns))


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while data := file.read(_BUFFER):
            value = zlib.crc32(data, value)
    return f"crc32:{value:08x}"
