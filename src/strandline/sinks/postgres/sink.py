"""`PostgresSink`: what a user writes into a job to get rows into a table of PostgreSQL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from strandline.config.option import DurationLike, because, parse_duration
from strandline.errors import ConfigError, JobDefinitionError
from strandline.sinks.base import ExactlyOnceSink, SinkContext, SinkTarget, Stager
from strandline.sinks.extras import required
from strandline.sinks.postgres.target import PostgresTarget
from strandline.sinks.postgres.types import declared
from strandline.sinks.staging import ArrowStager
from strandline.sinks.tables import MARKERS
from strandline.sinks.upserts import Mode, upsert_keys

_ENVIRONMENT = "env:"
_LONGEST_NAME = 63
"""Bytes. PostgreSQL cuts longer names off."""
_SYSTEM_COLUMNS = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}


@dataclass(frozen=True, slots=True)
class PostgresSink(ExactlyOnceSink):
    """Writes rows exactly once into a table of a PostgreSQL database.

    The rows of a checkpoint become visible in one transaction. The table is made if it does not exist. Needs the extra
    `strandline[postgres]` where the driver runs.
    """

    uri: str | Callable[[], str] = field(repr=False)
    """Where the database is: `"env:NAME"` for an environment variable of the driver that holds the URI, a function
    that returns it, or the URI itself, `postgresql://user@host:5432/database`. What it leaves out, such as the
    password, comes from libpq's variables and files (`PGPASSWORD`, `~/.pgpass`). It is read for every connection, so
    passwords may change. Host, port and database may not, for as long as the job lives."""
    table: str
    """The table; it may have more columns than the stream, and rows of others."""
    mode: Mode = "append"
    """`"upsert"` keeps the last row of every key instead of all rows."""
    keys: Sequence[str] = ()
    """The key columns of an upsert, by default the key of the step before. The table needs a unique index on them."""
    schema: str = "public"
    """The schema of the table. Strandline keeps its marker in a table `strandline_markers` of the same schema."""
    timeout: DurationLike = "5min"
    """How long one statement may take, such as the COPY of the rows of a checkpoint."""

    @property
    def place(self) -> str:
        """Host, port, database, schema and table."""
        return f"postgresql:{_server(self.read_uri())}#{self.schema}.{self.table}"

    def read_uri(self) -> str:
        """The URI, which may hold a password. Raises `ConfigError` if there is none."""
        if callable(self.uri):
            return self.uri()
        if not self.uri.startswith(_ENVIRONMENT):
            return self.uri
        name = self.uri.removeprefix(_ENVIRONMENT)
        found = os.environ.get(name)
        if not found:
            raise ConfigError(
                f"PostgresSink({self.table!r}): the environment variable {name!r} is not set; set it where the driver "
                "runs, to a URI such as postgresql://user:password@host/database"
            )
        return found

    def bound(self, context: SinkContext) -> PostgresSink:
        """This sink with the key columns of its upserts, and its timeout in seconds."""
        what = f"PostgresSink({self.table!r})"
        where = f"job {context.job!r}: {what}"
        _server(self.read_uri())
        for name in (self.schema, self.table, *context.schema.names):
            if not name or "\0" in name or len(name.encode()) > _LONGEST_NAME:
                raise JobDefinitionError(
                    f"{where}: PostgreSQL takes no name like {name!r}: one has 1 to {_LONGEST_NAME} bytes"
                )
        if re.fullmatch(r"\w+\.\w+", self.table):
            schema, _, table = self.table.partition(".")
            raise JobDefinitionError(
                f"{where}: the schema is named by itself: PostgresSink(uri, {table!r}, schema={schema!r})"
            )
        if self.table == MARKERS:
            raise JobDefinitionError(f"{where}: this table is Strandline's own; give another name")
        system = _SYSTEM_COLUMNS.intersection(context.schema.names)
        if system:
            raise JobDefinitionError(
                f"{where}: every table of PostgreSQL has a column {min(system)!r} of its own; rename that of the stream"
            )
        for column in context.schema:
            if declared(column.type) is None:
                raise JobDefinitionError(
                    f"{where}: there is no type for the column {column.name!r} ({column.type}); cast it in a transform"
                )
        try:
            seconds = parse_duration(self.timeout)
        except ValueError as error:
            raise ConfigError(
                f"{where}: timeout={self.timeout!r} is no duration{because(error)}; write one such as '5min'"
            ) from error
        if seconds < 1:
            raise ConfigError(f"{where}: timeout={self.timeout!r} is too short; use 1s or more")
        return replace(self, keys=upsert_keys(what, self.mode, self.keys, context), timeout=seconds)

    def stager(self, context: SinkContext) -> Stager:
        """Rows wait in the job's checkpoint folder. Tasks are not told of the database."""
        return ArrowStager.of(context, self.place)

    def target(self, context: SinkContext) -> SinkTarget:
        """Writes the rows of a checkpoint in one transaction."""
        return PostgresTarget(
            context,
            self.place,
            uri=self.read_uri,
            schema=self.schema,
            table=self.table,
            keys=tuple(self.keys),
            patience=parse_duration(self.timeout),
        )


def _server(uri: str) -> str:
    """Host, port and database of a URI, and nothing else of it."""
    psycopg = required("psycopg", "postgres", "PostgresSink")
    conninfo = required("psycopg.conninfo", "postgres", "PostgresSink")
    try:
        given = conninfo.conninfo_to_dict(uri)
    except psycopg.ProgrammingError:
        # Its text holds the URI, and with it perhaps the password.
        raise ConfigError(
            "PostgresSink: the URI cannot be read; write postgresql://user:password@host:5432/database, with special "
            "characters of the password as %xx"
        ) from None
    defaults = {
        option.keyword.decode(): option.val.decode()
        for option in psycopg.pq.Conninfo.get_defaults()
        if option.val is not None
    }
    # `service` names a section of a file of libpq, which may change.
    found = {**({} if "service" in given else defaults), **given}
    missing = [name for name in ("host", "dbname") if not found.get(name)]
    if missing:
        raise ConfigError(f"PostgresSink: the URI names no {missing[0]}; write postgresql://user@host:5432/database")
    hosts = str(found["host"]).split(",")
    ports = str(found.get("port", "")).split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    return f"{','.join(f'{host}:{port or 5432}' for host, port in zip(hosts, ports, strict=False))}/{found['dbname']}"
