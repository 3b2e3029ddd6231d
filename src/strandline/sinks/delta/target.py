"""A Delta table as the driver sees it: a checkpoint is one commit with its rows and the marker.

A commit is made only as the version after the one that was read, so nobody can have replaced the marker meanwhile. If
somebody else made that version, it is read, and the commit is tried again.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from strandline.checkpoint.metadata import SinkFile
from strandline.errors import (
    DirectoryNotOursError,
    IncompatibleCheckpointError,
    NotFoundError,
    SinkError,
    SinkFilesMissingError,
    StorageRefusedError,
)
from strandline.sinks.base import SinkContext
from strandline.sinks.delta.access import delta_options, open_table, translate, translated
from strandline.sinks.delta.columns import check_fits, check_partitions, stored_schema
from strandline.sinks.delta.marker import commit_properties, read_marker
from strandline.sinks.delta.sink import DeltaSink
from strandline.sinks.delta.stager import FileFacts, as_stored
from strandline.sinks.local_folders import check_folder
from strandline.sinks.marked import MarkedTarget, Marker
from strandline.sinks.staging import publish, rows_of, staged_files
from strandline.sinks.tables import name_list, quoted
from strandline.sinks.upserts import last_rows
from strandline.storage import is_local, open_storage

logger = logging.getLogger(__name__)

_MOST_CONFLICTS = 30
"""How often a commit is tried while others write into the table."""
_LONGEST_PAUSE = 1.0
_KNOWN_FEATURES = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "identityColumns",
    "invariants",
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Features of a table that are checked one by one, or that do not matter to files that are added."""


_MOST_LOOKED_THROUGH = 10_000_000
"""Up to how many rows a table is looked through for several rows of a key: about ten seconds on two cores."""


class DeltaTarget(MarkedTarget):
    """A Delta table, with the marker in its log."""

    def __init__(self, sink: DeltaSink, context: SinkContext) -> None:
        storage_options = {} if is_local(sink.path) else dict(context.storage_options)
        self._storage = open_storage(sink.path, storage_options, private=False)
        self._upserts = sink.mode == "upsert"
        super().__init__(context, sink.place, None if self._upserts else staged_files(self._storage, context.job))
        self.replays = self._upserts
        self._path = sink.path
        self._options = delta_options(sink.path, storage_options)
        self._schema = stored_schema(f"job {context.job!r}", context.schema)
        self._keys = tuple(sink.keys)
        self._partition_by = tuple(sink.partition_by)

    # --- before the takeover ----------------------------------------------------------------------

    def check_target(self) -> None:
        check_folder(self.place, self.job, self._path)
        with translated(self.place, self._options):
            table = open_table(self._path, self._options)
            if table is None:
                self._check_empty()
                return
            columns = pa.schema(table.schema().to_arrow())
            check_fits(self.place, self.job, columns, self._schema)
            check_partitions(self.place, table.metadata().partition_columns, self._partition_by)
            self._check_features(table)
            if self._upserts and read_marker(table, self.job, self.place) is None:
                self._check_one_row_per_key(table)

    def _check_empty(self) -> None:
        """Raise `DirectoryNotOursError` if the folder has files that are no table."""
        for file in self._storage.list():
            if not file.path.startswith("_"):
                raise DirectoryNotOursError(
                    f"{self.place} is no Delta table, and not empty: it has {file.path!r}. Give the sink another "
                    "folder; or make a table of the files there (CONVERT TO DELTA)."
                )

    def _check_features(self, table: DeltaTable) -> None:
        """Raise `IncompatibleCheckpointError` if the table asks for something that our commits do not do."""
        settings = table.metadata().configuration
        refused = [name for name in (table.protocol().writer_features or ()) if name not in _KNOWN_FEATURES]
        if settings.get("delta.columnMapping.mode", "none") != "none":
            refused.append("columnMapping")
        if self._upserts and settings.get("delta.appendOnly", "false").lower() == "true":
            refused.append("appendOnly, which forbids upserts")
        if not self._upserts:
            refused += [name for name in settings if name.startswith("delta.constraints.")]
        for field in table.schema().fields:
            names = [name for name in field.metadata if name.startswith(("delta.generation", "delta.identity"))]
            names += ["delta.invariants"] if "delta.invariants" in field.metadata and not self._upserts else []
            refused += [f"{name} of the column {field.name!r}" for name in names]
        if refused:
            raise IncompatibleCheckpointError(
                f"{self.place} asks its writers for what DeltaSink cannot do: {', '.join(refused)}. Drop that from the "
                "table, or give the sink another one."
            )

    def _check_one_row_per_key(self, table: DeltaTable) -> None:
        """Raise `IncompatibleCheckpointError` if a table to which the job is new has several rows of a key.

        That reads the key columns of the whole table. So it is done once for a job, and not for a large table; what it
        misses, and what others append later, is noticed by the merge that meets such a key.
        """
        rows = table.count()
        if rows > _MOST_LOOKED_THROUGH:
            logger.warning(
                "%s has %d rows: whether it has several rows of a key is only noticed when job %s writes such a key",
                self.place,
                rows,
                self.job,
            )
            return
        found = QueryBuilder().register("rows", table).execute(_several_rows("rows", self._keys)).read_all()
        if found.num_rows:
            raise IncompatibleCheckpointError(
                f"{self.place} has several rows of a key in {list(self._keys)}, so job {self.job!r} cannot upsert into "
                f"it: each of them would get the new values. {self._one_row_per_key()} Or give the sink another table"
            )

    def _one_row_per_key(self) -> str:
        return f"To find such rows: {_several_rows(quoted(self._path), self._keys)}. Delete all but one of each key."

    def prepare(self) -> None:
        with translated(self.place, self._options):
            if open_table(self._path, self._options) is not None:
                return
            try:
                DeltaTable.create(
                    self._path,
                    schema=Schema.from_arrow(self._schema),
                    mode="ignore",
                    partition_by=list(self._partition_by),
                    storage_options=self._options,
                )
            except CommitFailedError as error:  # another driver makes the table as well
                if open_table(self._path, self._options) is None:
                    raise translate(self.place, self._options, error) from None

    # --- marker and rows --------------------------------------------------------------------------

    def committed(self) -> Marker | None:
        with translated(self.place, self._options):
            table = open_table(self._path, self._options)
            return read_marker(table, self.job, self.place) if table is not None else None

    def commit(self, staged: Sequence[SinkFile], marker: Marker, replaces: Marker | None) -> None:
        write = self._writer(staged, replaces)
        with translated(self.place, self._options):
            for attempt in range(_MOST_CONFLICTS):
                table = self._with_marker(replaces)
                try:
                    write(table, commit_properties(marker))
                    return
                except CommitFailedError as error:  # the table has a new version: of another writer, or this one
                    failure = error
                time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.01 * 2**attempt)))
            failed = translate(self.place, self._options, failure)
            raise type(failed)(f"{failed} ({_MOST_CONFLICTS} times; do others write into the table all the time?)")

    def _with_marker(self, wanted: Marker | None) -> DeltaTable:
        """The table as it is now. Raises `MarkerMovedError` if it has another marker."""
        table = open_table(self._path, self._options)
        if table is None:
            raise SinkError(f"{self.place} is not there any more; bring it back, or stop the job")
        self.check_not_moved(read_marker(table, self.job, self.place), wanted)
        return table

    def _writer(
        self, staged: Sequence[SinkFile], replaces: Marker | None
    ) -> Callable[[DeltaTable, CommitProperties], None]:
        """What adds the rows to a version of the table. All that needs no version is done here."""
        if not self._upserts or not staged:
            facts = [FileFacts.of(file, self._schema, self._partition_by) for file in staged]
            self._publish(staged, replaces)
            return lambda table, properties: self._append(table, staged, facts, properties)
        rows = last_rows(self._rows(staged), self._keys)
        return lambda table, properties: self._merge(table, rows, properties)

    def _publish(self, staged: Sequence[SinkFile], replaces: Marker | None) -> None:
        """Give the files the names that the table's log will have."""
        if not staged:
            return
        with translated(self.place, self._options):
            self._with_marker(replaces)
            try:
                publish(self._storage, staged)
            except NotFoundError as error:
                self._with_marker(replaces)
                raise SinkFilesMissingError(str(error)) from error

    def _append(
        self, table: DeltaTable, staged: Sequence[SinkFile], facts: Sequence[FileFacts], properties: CommitProperties
    ) -> None:
        now = time.time_ns() // 1_000_000
        columns = pa.schema(table.schema().to_arrow())
        required = [field.name for field in columns if not field.nullable]
        actions = []
        for file, known in zip(staged, facts, strict=True):
            for name in required:
                if known.nulls.get(name) or (name in known.partition and known.partition[name] is None):
                    raise self._null(name)
            actions.append(
                AddAction(file.final, file.size, known.partition, now, True, known.statistics(file.rows, columns))
            )
        table.create_write_transaction(
            list(actions), "append", table.schema(), list(self._partition_by), commit_properties=properties
        )

    def _rows(self, staged: Sequence[SinkFile]) -> pa.Table:
        rows = pa.Table.from_batches(rows_of(self.staging.storage, staged, self._schema.names))
        return as_stored(rows, self._schema, self._partition_by)

    def _merge(self, table: DeltaTable, rows: pa.Table, properties: CommitProperties) -> None:
        for field in table.schema().fields:
            if not field.nullable and field.name in rows.column_names and rows[field.name].null_count:
                raise self._null(field.name)
        merge = table.merge(
            rows, self._same_key(rows), source_alias="source", target_alias="target", commit_properties=properties
        )
        done = merge.when_matched_update_all().when_not_matched_insert_all().execute()
        surplus = done["num_target_rows_updated"] + done["num_target_rows_inserted"] - rows.num_rows
        if surplus > 0:
            raise StorageRefusedError(
                f"{self.place}: a merge of job {self.job!r} met {surplus} rows too many: the table has several rows of "
                f"a key in {list(self._keys)}, perhaps from another writer. The rows of the checkpoint are in the "
                f"table, and each row of such a key has the new values. {self._one_row_per_key()} Then start the job "
                "again"
            )

    def _same_key(self, rows: pa.Table) -> str:
        """Two rows have the same key also if a key column is null in both. Plain equality is quicker."""
        parts = []
        for key in self._keys:
            same = "IS NOT DISTINCT FROM" if rows[key].null_count else "="
            parts.append(f"target.{quoted(key)} {same} source.{quoted(key)}")
        return " AND ".join(parts)

    def _null(self, column: str) -> StorageRefusedError:
        return StorageRefusedError(
            f"{self.place}: the column {column!r} must not be null, and rows of job {self.job!r} have nulls there. The "
            "rows stay staged; drop NOT NULL from the table, start the job again, and filter such rows in a transform"
        )


def _several_rows(table: str, keys: Sequence[str]) -> str:
    """The statement that finds the keys of which a table has several rows."""
    columns = name_list(keys)
    return f"SELECT {columns}, count(*) FROM {table} GROUP BY {columns} HAVING count(*) > 1 LIMIT 10"
