"""`SQLiteSink`: rows in a table of an SQLite database on the driver's host, exactly once."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from strandline.checkpoint.metadata import SinkFile
from strandline.errors import (
    IncompatibleCheckpointError,
    JobDefinitionError,
    SinkError,
    StorageFullError,
    StorageRefusedError,
)
from strandline.sinks.base import ExactlyOnceSink, SinkContext, SinkTarget, Stager
from strandline.sinks.local_folders import check_folder
from strandline.sinks.marked import MarkedTarget, Marker
from strandline.sinks.staging import ArrowStager, rows_of
from strandline.sinks.tables import (
    MARKERS,
    Column,
    check_columns,
    check_distinct,
    check_not_lost,
    check_text,
    json_text,
    name_list,
    on_conflict,
    quoted,
)
from strandline.sinks.upserts import Mode, upsert_keys

_BUSY_SECONDS = 10.0
"""How long a call waits for another writer of the database."""


@dataclass(frozen=True, slots=True)
class SQLiteSink(ExactlyOnceSink):
    """Writes rows exactly once into a table of an SQLite database on the driver's host.

    The rows of a checkpoint become visible in one transaction. The table is made if it does not exist. Times (in
    UTC), dates and decimals are stored as text, durations as microseconds, nested values as JSON, and NaN as NULL.
    """

    path: str | os.PathLike[str]
    """The database file."""
    table: str
    """The table; it may have more columns than the stream, and rows of others."""
    mode: Mode = "append"
    """`"upsert"` keeps the last row of every key instead of all rows."""
    keys: Sequence[str] = ()
    """The key columns of an upsert, by default the key of the step before. The table needs a unique index on them."""

    @property
    def place(self) -> str:
        """The database and the table."""
        return f"sqlite:{os.fspath(self.path)}#{_folded(self.table)}"

    def bound(self, context: SinkContext) -> SQLiteSink:
        """This sink with an absolute path, and with the key columns of its upserts."""
        what = f"SQLiteSink({self.table!r})"
        if not self.table or "\0" in self.table or self.table.lower().startswith((MARKERS, "sqlite_")):
            raise JobDefinitionError(f"job {context.job!r}: {what}: this is no name for a table; give another one")
        given = os.fspath(self.path)
        if given in ("", ":memory:") or given.startswith("file:"):
            raise JobDefinitionError(
                f"job {context.job!r}: {what}: {given!r} is no file that outlives the driver; give the path of one"
            )
        check_distinct(f"job {context.job!r}: {what}", "SQLite", context.schema.names)
        path = os.path.abspath(os.path.expanduser(given))
        return replace(self, path=path, keys=upsert_keys(what, self.mode, self.keys, context))

    def stager(self, context: SinkContext) -> Stager:
        """Rows wait in the job's checkpoint folder."""
        return ArrowStager.of(context, self.place)

    def target(self, context: SinkContext) -> SinkTarget:
        """Writes the rows of a checkpoint in one transaction."""
        return SQLiteTarget(self, context)


class SQLiteTarget(MarkedTarget):
    """A table in an SQLite database, with its marker in another table of the database."""

    def __init__(self, sink: SQLiteSink, context: SinkContext) -> None:
        super().__init__(context, sink.place)
        self.replays = sink.mode == "upsert"
        self._path = os.fspath(sink.path)
        self._table = sink.table
        self._schema = context.schema
        self._keys = tuple(sink.keys)

    def check_target(self) -> None:
        folder = os.path.dirname(self._path)
        check_folder(self.place, self.job, folder)  # SQLite puts its journal beside the database
        if not os.path.lexists(folder):
            raise StorageRefusedError(
                f"{self.place}: there is no folder {folder} in which job {self.job!r} could write; make it, or give "
                "the sink another path"
            )
        if not os.path.exists(self._path):
            return
        if not os.path.isfile(self._path):
            raise StorageRefusedError(
                f"{self.place}: {self._path} is no file, and SQLite keeps a database in one; give the sink the path of "
                "a file"
            )
        with self._connection() as database:
            database.execute("BEGIN IMMEDIATE")  # raises an error if the file is read-only; ends with the connection
            kind = database.execute(
                "SELECT type FROM sqlite_master WHERE name = ? COLLATE NOCASE", (self._table,)
            ).fetchone()
            if kind is None:
                check_not_lost(self.place, self._read_marker(database))
                return
            if kind != ("table",):
                raise IncompatibleCheckpointError(f"{self.place} is no table, but a {kind[0]}; give another name")
            self._check_table(database)

    def _check_table(self, database: sqlite3.Connection) -> None:
        described = database.execute("SELECT * FROM pragma_table_info(?)", (self._table,)).fetchall()
        # SQLite numbers the rows in the column that is the primary key alone, if it is an INTEGER.
        numbered = [name for _n, name, kind, _required, _default, key in described if key and kind.upper() == "INTEGER"]
        numbered = numbered if sum(key > 0 for *_others, key in described) == 1 else []
        columns = {
            name.lower(): Column(_affinity(kind.upper()), bool(required) and default is None and name not in numbered)
            for _n, name, kind, required, default, _key in described
        }
        check_columns(
            self.place,
            self.job,
            pa.schema([field.with_name(field.name.lower()) for field in self._schema]),
            columns,
            _column_type,
            lambda field: _fits(field.type, columns[field.name].type),
        )
        if self._keys and not self._is_unique(database):
            raise IncompatibleCheckpointError(
                f"{self.place} has no unique index on {list(self._keys)}, which an upsert needs; make one: "
                f"CREATE UNIQUE INDEX ... ON {quoted(self._table)} ({name_list(self._keys)})"
            )

    def _is_unique(self, database: sqlite3.Connection) -> bool:
        """Whether the table has a unique index, or a primary key, on exactly the key columns."""
        wanted = sorted(key.lower() for key in self._keys)
        primary = database.execute("SELECT name FROM pragma_table_info(?) WHERE pk > 0", (self._table,)).fetchall()
        indexes = database.execute(
            'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (self._table,)
        ).fetchall()
        columns = [database.execute("SELECT name FROM pragma_index_info(?)", (name,)).fetchall() for (name,) in indexes]
        return any(sorted(str(name).lower() for (name,) in one) == wanted for one in [primary, *columns])

    def prepare(self) -> None:
        columns = [f"{quoted(field.name)} {_column_type(field.type)}" for field in self._schema]
        key = [f"PRIMARY KEY ({name_list(self._keys)})"] if self._keys else []
        with self._connection() as database:
            database.execute(f"CREATE TABLE IF NOT EXISTS {quoted(self._table)} ({', '.join([*columns, *key])})")
            database.execute(
                f"CREATE TABLE IF NOT EXISTS {MARKERS} "
                "(job TEXT, target TEXT, marker TEXT NOT NULL, PRIMARY KEY (job, target))"
            )

    def committed(self) -> Marker | None:
        if not os.path.exists(self._path):
            return None
        with self._connection() as database:
            return self._read_marker(database)

    def _read_marker(self, database: sqlite3.Connection) -> Marker | None:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (MARKERS,)).fetchone():
            return None
        found = database.execute(
            f"SELECT marker FROM {MARKERS} WHERE job = ? AND target = ?", (self.job, _folded(self._table))
        ).fetchone()
        return Marker.decoded(str(found[0]), self.place) if found is not None else None

    def commit(self, staged: Sequence[SinkFile], marker: Marker, replaces: Marker | None) -> None:
        with self._connection() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                self.check_not_moved(self._read_marker(database), replaces)
                for batch in rows_of(self.staging.storage, staged, self._schema.names):
                    check_text(self.place, batch, nul=True)
                    self._write(database, batch)
                database.execute(
                    f"INSERT OR REPLACE INTO {MARKERS} (job, target, marker) VALUES (?, ?, ?)",
                    (self.job, _folded(self._table), marker.encoded()),
                )
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    def _write(self, database: sqlite3.Connection, batch: pa.RecordBatch) -> None:
        names = self._schema.names
        insert = f"INSERT INTO {quoted(self._table)} ({name_list(names)}) VALUES ({', '.join('?' * len(names))})"
        if not self._keys:
            database.executemany(insert, _values(batch))
            return
        # For a unique index of SQLite, NULL differs from NULL, so such rows are not in conflict.
        has_null = reduce(pc.or_, (pc.is_null(batch.column(key)) for key in self._keys))
        upsert = f"{insert} {on_conflict(names, self._keys)}"
        database.executemany(upsert, _values(batch.filter(pc.invert(has_null))))
        changes = ", ".join(f"{quoted(name)} = ?{number}" for number, name in enumerate(names, 1))
        same = " AND ".join(f"{quoted(key)} IS ?{names.index(key) + 1}" for key in self._keys)
        for row in _values(batch.filter(has_null)):
            if not database.execute(f"UPDATE {quoted(self._table)} SET {changes} WHERE {same}", row).rowcount:
                database.execute(insert, row)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection with errors of ours. Transactions are begun by hand."""
        try:
            database = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                database.execute("PRAGMA synchronous = FULL")
                yield database
            finally:
                database.close()
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: sqlite3.Error) -> SinkError | StorageRefusedError | StorageFullError:
        text, name = str(error), getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            return StorageFullError(f"{self.place}: no space is left for the database; free some on its disk")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR")):
            return SinkError(
                f"{self.place}: {text}. If another process writes to the database, let it end its transaction; if that "
                "is a driver of the job that stands still, end it"
            )
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return StorageRefusedError(
                f"{self.place}: the user that runs job {self.job!r} (uid {os.geteuid()}) may not write the database: "
                f"{text}. Rows that are staged stay so; give it write access to {self._path} and to the folder, and "
                "start the job again"
            )
        if name == "SQLITE_NOTADB":
            return StorageRefusedError(
                f"{self.place}: {self._path} is no SQLite database, and is left as it is; give the sink another path"
            )
        return StorageRefusedError(
            f"{self.place} refuses what job {self.job!r} writes: {text}. The rows stay staged; change the table, "
            "or the rights of its file, and start the job again"
        )


def _column_type(kind: pa.DataType) -> str:
    """The type of the column that holds values of an Arrow type."""
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_duration(kind):
        return "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else "TEXT"


def _affinity(declared: str) -> str:
    """What SQLite makes of the declared type of a column (section 3.1 of its page on datatypes)."""
    return next((kind for part, kind in _AFFINITIES if part in declared), "NUMERIC" if declared else "BLOB")


_AFFINITIES = (
    ("INT", "INTEGER"),
    ("CHAR", "TEXT"),
    ("CLOB", "TEXT"),
    ("TEXT", "TEXT"),
    ("BLOB", "BLOB"),
    ("REAL", "REAL"),
    ("FLOA", "REAL"),
    ("DOUB", "REAL"),
)


def _fits(kind: pa.DataType, affinity: str) -> bool:
    """Whether a column of the affinity keeps the values of an Arrow type as they are."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_nested(kind):
        return affinity in ("TEXT", "BLOB")  # others turn what looks like a number into one
    if pa.types.is_decimal(kind) and affinity == "NUMERIC":
        return bool(kind.precision <= sys.float_info.dig)
    if (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and affinity == "REAL":
        return bool(kind.bit_width < sys.float_info.mant_dig)
    return affinity in (_column_type(kind), "BLOB", "NUMERIC")


def _values(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    columns = [_plain(field.name, column) for field, column in zip(batch.schema, batch.columns, strict=True)]
    return zip(*columns, strict=True)


def _plain(name: str, column: pa.Array) -> Iterable[Any]:
    kind = column.type
    if pa.types.is_nested(kind):
        return json_text(name, column)
    if pa.types.is_duration(kind):
        column = column.cast(pa.duration("us")).cast(pa.int64())
    elif pa.types.is_timestamp(kind) and kind.tz:
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    values: list[Any] = column.to_pylist()
    if any(check(column.type) for check in _PLAIN):
        return values
    return (None if value is None else _text(value) for value in values)


_PLAIN = (
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_null,
)


def _text(value: Any) -> str:
    """A time, a date or a decimal as text. Times sort like their texts."""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="microseconds")
    return f"{value:f}" if isinstance(value, Decimal) else value.isoformat()


def _folded(table: str) -> str:
    """The name that all spellings of a table have in common: SQLite compares letters of ASCII without their case."""
    return "".join(letter.lower() if letter.isascii() else letter for letter in table)
