"""An Iceberg table as the driver sees it: data files of a checkpoint and the marker in one snapshot."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa

from strandline.checkpoint.metadata import Generation, SinkFile
from strandline.errors import (
    IncompatibleCheckpointError,
    MetadataError,
    NotFoundError,
    SinkError,
    SinkFilesMissingError,
    StorageError,
)
from strandline.sinks.base import SinkContext
from strandline.sinks.iceberg.attempts import AttemptNotes
from strandline.sinks.iceberg.catalogues import open_catalogue, translated
from strandline.sinks.iceberg.commits import MovedError, read_marker
from strandline.sinks.iceberg.data_files import (
    FileHandle,
    Layout,
    data_folder,
    nested_source,
    open_folder,
)
from strandline.sinks.iceberg.loading import DataFiles
from strandline.sinks.iceberg.noted_commits import NotedCommits
from strandline.sinks.iceberg.schemas import DoesNotFitError, table_columns
from strandline.sinks.local_folders import check_folder
from strandline.sinks.marked import MarkedTarget, Marker
from strandline.sinks.names import target_description
from strandline.sinks.staging import RENAMES_AT_ONCE, publish, rows_of, staged_files
from strandline.sinks.upserts import last_rows
from strandline.storage import Storage, open_storage

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from strandline.sinks.iceberg.sink import IcebergSink

    _Described = dict[int, list[DataFile]]
    """Data files of a checkpoint, for each partitioning of the table that was seen."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 10
"""How often a snapshot is built anew because other writers of the table were faster."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_DEFAULTS = {
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Properties of a table that the sink makes: a commit every few seconds must not leave a file each for good."""


class IcebergTarget(MarkedTarget):
    """A table in a catalogue."""

    def __init__(self, sink: IcebergSink, context: SinkContext, options: dict[str, str]) -> None:
        super().__init__(context, sink.place)
        self.replays = sink.mode == "upsert"
        self._sink = sink
        self._identifier = tuple(sink.table.split("."))
        self._schema = context.schema
        self._keys = tuple(sink.keys)
        self._options = options
        self._checkpoints = open_storage(context.checkpoint_dir, dict(context.storage_options))
        self._commits = NotedCommits(
            AttemptNotes(self._checkpoints, self.job, self.place), options, self.place, self._errors
        )
        self._catalogue: Catalog | None = None
        self._left: Layout | None = None
        """The layout that tasks find."""

    def close(self) -> None:
        if self._catalogue is not None:
            self._catalogue.close()
            self._catalogue = None

    def check_target(self) -> None:
        with self._errors():
            table = self._load()
            if table is not None:
                self._layout(table)
            folder = data_folder(table.metadata) if table is not None else self._warehouse()
            if folder is not None:
                check_folder(self.place, self.job, folder)

    def _warehouse(self) -> str | None:
        """The local folder in which the table will be made; None if it is not local, or not known before."""
        folder = str(self._open().properties.get("warehouse", ""))
        known = folder.startswith(("/", "file:")) and not self._open().namespace_exists(self._identifier[:-1])
        return folder if known else None

    def prepare(self) -> None:
        from pyiceberg.exceptions import NamespaceAlreadyExistsError, TableAlreadyExistsError

        with self._errors():
            table = self._load()
            if table is None:
                catalogue, namespace = self._open(), self._identifier[:-1]
                try:
                    if not catalogue.namespace_exists(namespace):
                        catalogue.create_namespace(namespace)
                except NamespaceAlreadyExistsError:
                    logger.debug("%s: another driver has made the namespace meanwhile", self.place)
                try:
                    table = self._make(catalogue)
                except TableAlreadyExistsError:
                    table = self._loaded()
            self._left = None
            self._leave_layout(table)

    def committed(self) -> Marker | None:
        with self._errors():
            table = self._load()
            return self._marker(table) if table is not None else None

    def commit(self, staged: Sequence[SinkFile], marker: Marker, replaces: Marker | None) -> None:
        with self._errors():
            moved = False
            described: _Described = {}
            for tried in range(_TRIES):
                if tried:
                    time.sleep(random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**tried))
                table = self._loaded()
                found = self._marker(table)
                if moved:
                    self._settle_own(table)
                    if found == marker:
                        return  # the commit came through, and only its answer said that it had not
                self.check_not_moved(found, replaces)
                try:
                    if self._keys:
                        self._upsert(table, staged, marker)
                    else:
                        self._append(table, staged, marker, described)
                except MovedError:
                    moved = True
                    continue
                self._commits.settle_own(self._loaded)
                if staged:
                    self._follow(table)
                return
            self._commits.settle_own(self._loaded)
        raise SinkError(
            f"{self.place}: {_TRIES} commits of job {self.job!r} in a row failed, because other writers of the table "
            "were faster"
        )

    def _settle_own(self, table: Table) -> None:
        self._commits.settle_own(lambda: table)

    def settle(self, generation: Generation) -> None:
        self._commits.settle_earlier(generation, self._loaded)

    # --- the table --------------------------------------------------------------------------------

    def _errors(self) -> AbstractContextManager[None]:
        return translated(self.place, self.job, self._sink.catalog)

    def _open(self) -> Catalog:
        if self._catalogue is None:
            self._catalogue = open_catalogue(self._sink.catalog, self._options)
        return self._catalogue

    def _load(self) -> Table | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            table = self._open().load_table(self._identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        if not self._keys:
            self.staging = staged_files(self._folder(table), self.job)
        return table

    def _loaded(self) -> Table:
        table = self._load()
        if table is None:
            raise SinkError(f"{self.place} is gone: somebody has dropped it. Bring it back, or stop the job.")
        return table

    def _make(self, catalogue: Catalog) -> Table:
        from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
        from pyiceberg.transforms import IdentityTransform

        columns = table_columns(self._schema)
        spec = UNPARTITIONED_PARTITION_SPEC
        if self._sink.partition_by:
            spec = PartitionSpec(
                *(
                    PartitionField(columns.find_field(name).field_id, 1000 + at, IdentityTransform(), name)
                    for at, name in enumerate(self._sink.partition_by)
                )
            )
        properties = {**_DEFAULTS, **self._sink.properties}
        return catalogue.create_table(self._identifier, columns, partition_spec=spec, properties=properties)

    def _folder(self, table: Table) -> Storage:
        return open_folder(data_folder(table.metadata), self._options)

    def _marker(self, table: Table) -> Marker | None:
        text = read_marker(table, self.job)
        return Marker.decoded(text, self.place) if text is not None else None

    # --- what tasks must know ---------------------------------------------------------------------

    def _layout(self, table: Table) -> Layout:
        """What tasks must know. Raises `IncompatibleCheckpointError` if the rows do not fit the table."""
        advice = "change the table, leave the column out or cast it in a transform, or give the sink another table"
        if table.metadata.format_version > 2:
            raise IncompatibleCheckpointError(
                f"{self.place} has version {table.metadata.format_version} of Iceberg's format, and the sink writes "
                "versions 1 and 2. Give it a table of one of these"
            )
        if table.properties.get("write.format.default", "parquet").lower() != "parquet":
            raise IncompatibleCheckpointError(
                f"{self.place} is to have no Parquet files, and the sink writes no others"
            )
        folder = data_folder(table.metadata)
        if not os.path.isabs(folder) and "://" not in folder:
            raise IncompatibleCheckpointError(
                f"{self.place} has its files in {folder!r}, which is another folder for every process. Give the "
                "catalogue a warehouse with an absolute path or a URL, and make the table anew"
            )
        nested = nested_source(table.spec(), table.schema())
        if nested is not None:
            raise IncompatibleCheckpointError(
                f"{self.place} is partitioned by {nested!r}, which is inside of a column: the sink cannot write such "
                "partitions. Partition it by a column, or give the sink another table"
            )
        try:
            return Layout.of(table.metadata, self._schema)
        except DoesNotFitError as error:
            raise IncompatibleCheckpointError(
                f"{self.place} cannot take the rows of job {self.job!r}: {error}; {advice}"
            ) from error

    def _leave_layout(self, table: Table) -> None:
        layout = self._layout(table)
        if not self._keys and layout != self._left:
            self._checkpoints.write(target_description(self.job, self.place), msgspec.json.encode(layout))
        self._left = layout

    def _follow(self, table: Table) -> None:
        """Let tasks know of a change of the table. Rows that do not fit any more are found at the next start: files
        keep their meaning, because columns have ids."""
        try:
            self._leave_layout(table)
        except IncompatibleCheckpointError as error:
            logger.warning("job %s goes on with the columns that the table had at its start: %s", self.job, error)
        except StorageError as error:  # the commit took effect, and tasks know of the table as it was
            logger.warning("job %s tells its tasks of a change of %s later: %s", self.job, self.place, error)

    # --- appends ----------------------------------------------------------------------------------

    def _append(self, table: Table, staged: Sequence[SinkFile], marker: Marker, described: _Described) -> None:
        """Add the files of the checkpoint, under their final names. `described` is what earlier tries know of them."""
        spec_id = table.spec().spec_id
        handles = [FileHandle.of(file) for file in staged]
        for file, handle in zip(staged, handles, strict=True):
            if handle.table != str(table.metadata.table_uuid):
                raise SinkFilesMissingError(
                    f"{self.place}: {file.rows} rows of job {self.job!r} were staged for another table of that name, "
                    "which is gone. Bring that table back, or restore an older checkpoint."
                )
        storage = self._folder(table)
        files = DataFiles(table, storage)
        fitting = [(file, handle) for file, handle in zip(staged, handles, strict=True) if handle.spec_id == spec_id]
        # The table was partitioned anew after the rows of the others were staged.
        others = [file for file, handle in zip(staged, handles, strict=True) if handle.spec_id != spec_id]
        if spec_id not in described:
            try:
                publish(storage, [file for file, _handle in fitting])
            except NotFoundError as error:
                raise SinkFilesMissingError(f"{self.place}: {error}") from error
            described[spec_id] = self._at_once(lambda both: [self._described(files, *both)], fitting)

        def write(new_name: Callable[[], str]) -> list[DataFile]:
            anew = self._at_once(lambda file: files.written_anew(file, new_name, self.place), others)
            return [*described[spec_id], *anew]

        self._commits.commit(table, marker, write, rewritten=[file.final for file in others])

    @staticmethod
    def _at_once(call: Callable[[T], Sequence[DataFile]], things: Sequence[T]) -> list[DataFile]:
        with ThreadPoolExecutor(RENAMES_AT_ONCE, thread_name_prefix="iceberg") as pool:
            return [one for some in pool.map(call, things) for one in some]

    def _described(self, files: DataFiles, file: SinkFile, handle: FileHandle) -> DataFile:
        try:
            return files.of(file.final, file.rows, handle.partition, handle.schema_id)
        except (ValueError, TypeError) as error:
            raise MetadataError(
                f"the checkpoint says of {file.final}, with {file.rows} rows for {self.place}, what does not fit the "
                f"file or the table: {error}. Restore another checkpoint."
            ) from error

    # --- upserts ----------------------------------------------------------------------------------

    def _upsert(self, table: Table, staged: Sequence[SinkFile], marker: Marker) -> None:
        """Rewrite the data files that hold keys of the rows, without these keys and with the rows."""
        batches = list(rows_of(self._checkpoints, staged, self._schema.names))
        if not batches:
            self._commits.commit(table, marker, lambda _new_name: [])
            return
        self._layout(table)  # somebody may have dropped or renamed a column
        rows = last_rows(pa.Table.from_batches(batches), self._keys)
        files = DataFiles(table, self._folder(table))
        replaced, kept = files.without(rows, self._keys)
        self._commits.commit(table, marker, lambda new_name: files.write([rows, *kept], new_name, self.place), replaced)
