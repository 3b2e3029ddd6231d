"""Writes the rows of a checkpoint and the marker into PostgreSQL, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from strandline.checkpoint.metadata import SinkFile
from strandline.errors import IncompatibleCheckpointError, StorageRefusedError
from strandline.sinks.base import SinkContext
from strandline.sinks.marked import MarkedTarget, Marker
from strandline.sinks.postgres.session import Session, session
from strandline.sinks.postgres.types import PostgresColumn, csv_text, declared, fits, rounds
from strandline.sinks.staging import rows_of
from strandline.sinks.tables import MARKERS, check_columns, check_not_lost, check_text, name_list, on_conflict, quoted

_NULL_IS_A_KEY = 150_000
"""The version of PostgreSQL from which a unique index can hold NULL as a key like any other."""
_WAITING = "pg_temp.strandline_rows"

_COLUMNS = """
SELECT a.attname::text,
       format_type(base.oid, CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END),
       base.typcategory::text,
       (a.attnotnull OR t.typnotnull)
           AND NOT a.atthasdef AND t.typdefault IS NULL AND a.attidentity = '' AND a.attgenerated = ''
FROM pg_attribute AS a
JOIN pg_type AS t ON t.oid = a.atttypid
JOIN pg_type AS base ON base.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
"""
"""Of a domain, the type beneath it."""
_KEYS = """
SELECT key.columns, key.not_null, (to_jsonb(i) ->> 'indnullsnotdistinct')::boolean
FROM pg_index AS i
CROSS JOIN LATERAL (
    SELECT array_agg(a.attname::text) AS columns, bool_and(a.attnotnull) AS not_null
    FROM pg_attribute AS a
    WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
) AS key
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL
"""
"""Unique indexes by which `ON CONFLICT` finds a row. Through JSON, because old releases lack the last column."""


class PostgresTarget(MarkedTarget):
    """A table of PostgreSQL, with its marker in another table of its schema."""

    def __init__(
        self,
        context: SinkContext,
        place: str,
        *,
        uri: Callable[[], str],
        schema: str,
        table: str,
        keys: tuple[str, ...],
        patience: float,
    ) -> None:
        super().__init__(context, place)
        self.replays = bool(keys)
        self._uri = uri
        self._schema = schema
        self._table = table
        self._fields = context.schema
        self._keys = keys
        self._patience = patience
        self._quoted_table = f"{quoted(schema)}.{quoted(table)}"
        self._quoted_markers = f"{quoted(schema)}.{quoted(MARKERS)}"
        markers = self._quoted_markers.replace("%", "%%")  # in statements with parameters
        self._select_marker = f"SELECT marker FROM {markers} WHERE job = %s AND target = %s"
        self._write_marker = (
            f"INSERT INTO {markers} (job, target, marker) VALUES (%s, %s, %s) "
            f"{on_conflict(['marker'], ['job', 'target'])}"
        )

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with session(self._uri(), self.place, self.job, self._patience, reached=self.reached) as database:
            self.reached = True
            yield database

    # --- before the takeover ----------------------------------------------------------------------

    def check_target(self) -> None:
        with self._session() as database, database.transaction():
            if not database.rows("SELECT 1 FROM pg_namespace WHERE nspname = %s", [self._schema]):
                raise StorageRefusedError(f"{self.place}: there is no schema {self._schema!r}; create it")
            table = _oid(database, self._quoted_table)
            has_markers = _oid(database, self._quoted_markers) is not None
            if (table is None or not has_markers) and not self._may_create(database):
                raise StorageRefusedError(
                    f"{self.place}: the user {database.user!r} may not create tables in the schema {self._schema!r}: "
                    f"GRANT CREATE ON SCHEMA {quoted(self._schema)} TO {quoted(database.user)}, or create the table, "
                    f"and {MARKERS} as the page on sinks shows"
                )
            if self._keys:
                self._check_temporary(database)
            if has_markers:
                # EXPLAIN checks rights and changes nothing.
                with self._needs(database, "SELECT, INSERT, UPDATE", self._quoted_markers):
                    database.rows(f"EXPLAIN {self._write_marker}", ["", "", ""])
                    database.rows(f"EXPLAIN {self._select_marker}", ["", ""])
            if table is None:
                check_not_lost(self.place, self._read_marker(database) if has_markers else None)
            else:
                self._check_table(database, table)

    def _may_create(self, database: Session) -> bool:
        [(may,)] = database.rows("SELECT has_schema_privilege(%s, 'CREATE')", [self._schema])
        return bool(may)

    def _check_temporary(self, database: Session) -> None:
        [(may, name)] = database.rows(
            "SELECT has_database_privilege(current_database(), 'TEMPORARY'), current_database()::text"
        )
        if not may:
            raise StorageRefusedError(
                f"{self.place}: an upsert needs a temporary table, which the user {database.user!r} may not create: "
                f"GRANT TEMPORARY ON DATABASE {quoted(name)} TO {quoted(database.user)}"
            )

    @contextmanager
    def _needs(self, database: Session, rights: str, table: str) -> Iterator[None]:
        """Has the error of a statement that is not allowed name the rights which the user must get."""
        import psycopg

        try:
            yield
        except psycopg.errors.InsufficientPrivilege as error:
            raise StorageRefusedError(
                f"{self.place}: the user {database.user!r} of job {self.job!r} lacks a right ("
                f"{error.diag.message_primary}): GRANT {rights} ON {table} TO {quoted(database.user)}"
            ) from error

    def _check_table(self, database: Session, table: int) -> None:
        [(kind, persistence, has_row_security)] = database.rows(
            "SELECT relkind::text, relpersistence::text, row_security_active(oid) FROM pg_class WHERE oid = %s", [table]
        )
        if kind not in "rp":
            raise IncompatibleCheckpointError(f"{self.place} is no table; name one, not a view or the like")
        if persistence == "u":
            raise IncompatibleCheckpointError(
                f"{self.place} is unlogged: a crash of the server would empty it, and leave the marker that says that "
                f"it has its rows; ALTER TABLE {self._quoted_table} SET LOGGED"
            )
        if has_row_security and not self._keys:
            raise IncompatibleCheckpointError(
                f"{self.place} has policies for rows, with which COPY does not work; let the user bypass them"
            )
        columns = {
            name: PostgresColumn(type_, required, category)
            for name, type_, category, required in database.rows(_COLUMNS, [table])
        }
        check_columns(
            self.place,
            self.job,
            self._fields,
            columns,
            lambda kind: declared(kind) or "text",
            lambda field: fits(field.type, columns[field.name]),
        )
        if self._keys:
            self._check_keys(
                database.rows(_KEYS, [table]), all(columns[name].required for name in self._keys), database
            )
            for name in self._keys:
                if rounds(self._fields.field(name).type, columns[name]):
                    raise IncompatibleCheckpointError(
                        f"{self.place}: the key column {name!r} is of type {columns[name].type}, which rounds times, "
                        "so different keys would become one row; give it all six digits, or round it in a transform "
                        "and key the step by that"
                    )
        names = self._fields.names
        conflict = on_conflict(names, self._keys) if self._keys else ""
        nothing = ", ".join(["NULL"] * len(names))
        with self._needs(database, "SELECT, INSERT, UPDATE" if self._keys else "INSERT", self._quoted_table):
            database.rows(
                f"EXPLAIN INSERT INTO {self._quoted_table} ({name_list(names)}) VALUES ({nothing}) {conflict}"
            )
            if self._keys:
                database.rows(f"EXPLAIN SELECT {name_list(names)} FROM {self._quoted_table}")

    def _check_keys(
        self, indexes: Sequence[tuple[list[str], bool, bool | None]], required: bool, database: Session
    ) -> None:
        """`required` says whether the key columns refuse NULL, so that any unique index on them will do."""
        found = [index for index in indexes if sorted(index[0]) == sorted(self._keys)]
        if not found:
            null = "" if required else " NULLS NOT DISTINCT" if _null_is_a_key(database) else ", and SET NOT NULL there"
            raise IncompatibleCheckpointError(
                f"{self.place} has no unique index on {list(self._keys)}, which an upsert needs; make one: CREATE "
                f"UNIQUE INDEX ON {self._quoted_table} ({name_list(self._keys)}){null}"
            )
        if not any(not_null or nulls_are_equal for _columns, not_null, nulls_are_equal in found):
            raise IncompatibleCheckpointError(
                f"{self.place}: the unique index on {list(self._keys)} holds any number of rows with NULL in the key, "
                "so an upsert would not replace them; make these columns NOT NULL, or the index NULLS NOT DISTINCT"
            )

    # --- tables and marker ------------------------------------------------------------------------

    def prepare(self) -> None:
        with self._session() as database, database.alone(f"strandline tables\0{self._schema}"):
            if _oid(database, self._quoted_markers) is None:
                database.rows(
                    f"CREATE TABLE {self._quoted_markers} "
                    "(job text, target text, marker text NOT NULL, PRIMARY KEY (job, target))"
                )
            if _oid(database, self._quoted_table) is None:
                columns = [f"{quoted(field.name)} {declared(field.type)}" for field in self._fields]
                if self._keys:
                    key = "UNIQUE NULLS NOT DISTINCT" if _null_is_a_key(database) else "PRIMARY KEY"
                    columns.append(f"{key} ({name_list(self._keys)})")
                database.rows(f"CREATE TABLE {self._quoted_table} ({', '.join(columns)})")

    @property
    def marker_home(self) -> str:
        return f" in {self._quoted_markers}"

    def committed(self) -> Marker | None:
        with self._session() as database, database.transaction():
            return self._read_marker(database) if _oid(database, self._quoted_markers) is not None else None

    def _read_marker(self, database: Session, *, lock: bool = False) -> Marker | None:
        found = database.rows(f"{self._select_marker}{' FOR UPDATE' if lock else ''}", [self.job, self._table])
        return Marker.decoded(found[0][0], self.place) if found else None

    # --- rows -------------------------------------------------------------------------------------

    def commit(self, staged: Sequence[SinkFile], marker: Marker, replaces: Marker | None) -> None:
        name = "\0".join(("strandline", self._schema, self._table, self.job))
        with self._session() as database:

            def still_wanted() -> None:
                self.check_not_moved(self._read_marker(database), replaces)

            with database.alone(name, still_wanted):
                self.check_not_moved(self._read_marker(database, lock=True), replaces)
                if staged and self._keys:
                    self._upsert(database, staged)
                elif staged:
                    self._copy(database, staged, self._quoted_table)
                database.rows(self._write_marker, [self.job, self._table, marker.encoded()])

    def _copy(self, database: Session, staged: Sequence[SinkFile], table: str) -> None:
        columns = name_list(self._fields.names)
        database.copy(f"COPY {table} ({columns}) FROM STDIN (FORMAT csv)", self._texts(staged))

    def _texts(self, staged: Sequence[SinkFile]) -> Iterator[memoryview]:
        for batch in rows_of(self.staging.storage, staged, self._fields.names):
            check_text(self.place, batch, nul=False)
            yield memoryview(csv_text(batch))

    def _upsert(self, database: Session, staged: Sequence[SinkFile]) -> None:
        """The rows go into a temporary table first, numbered: one INSERT cannot write a row twice."""
        columns, keys = name_list(self._fields.names), name_list(self._keys)
        number = "number"
        while number in self._fields.names:
            number += "_"
        database.rows(
            f"CREATE TEMPORARY TABLE {_WAITING} ON COMMIT DROP AS "
            f"SELECT {columns} FROM {self._quoted_table} WITH NO DATA;"
            f"ALTER TABLE {_WAITING} ADD COLUMN {number} bigserial"
        )
        self._copy(database, staged, _WAITING)
        # In the order of the keys, so that two jobs that write the same keys do not wait for each other.
        database.rows(
            f"INSERT INTO {self._quoted_table} ({columns}) SELECT {columns} FROM "
            f"(SELECT DISTINCT ON ({keys}) {columns} FROM {_WAITING} ORDER BY {keys}, {number} DESC) AS last "
            f"{on_conflict(self._fields.names, self._keys)}"
        )


def _null_is_a_key(database: Session) -> bool:
    [(version,)] = database.rows("SELECT current_setting('server_version_num')::int")
    return bool(version >= _NULL_IS_A_KEY)


def _oid(database: Session, table: str) -> Any:
    """The number of a table; None if it does not exist."""
    return database.rows("SELECT to_regclass(%s)::oid", [table])[0][0]
