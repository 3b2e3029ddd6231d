"""What cannot work is refused before the job is taken over, in words that help, and without the password."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest

from strandline.errors import (
    ConfigError,
    IncompatibleCheckpointError,
    JobDefinitionError,
    SinkError,
    SinkFilesMissingError,
    StorageRefusedError,
    StrandlineError,
)
from strandline.sinks.base import SinkStart
from strandline.sinks.postgres.sink import PostgresSink
from strandline.storage.retries import Retries
from strandline.testing.sink import SinkJob, a_context
from strandline_bench.servers.postgres import Postgres, Schema

PASSWORD = "hunter2-secret"


def a_job(place: Schema, folder: Path, **options: Any) -> SinkJob:
    context = a_context(folder / "checkpoints")
    options = {"uri": place.uri, "table": "visits", "schema": place.name, **options}
    return SinkJob(PostgresSink(**options).bound(context), context)


def refused(place: Schema, folder: Path, error: type[StrandlineError], match: str, **options: Any) -> None:
    before = tables(place)
    job = a_job(place, folder, **options)
    with pytest.raises(error, match=match):
        job.start()
    assert job.log.generation == 0
    assert tables(place) == before


def tables(schema: Schema) -> list[Any]:
    return schema.query(f"SELECT relname FROM pg_class WHERE relnamespace = '{schema.name}'::regnamespace ORDER BY 1")


def a_role(schema: Schema, *statements: str) -> str:
    """The URI of a new user, who may use the schema and what the statements grant."""
    name = f"role_{uuid4().hex[:12]}"
    role = f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'; GRANT USAGE ON SCHEMA {schema.name} TO {name};"
    schema.query(role + ";".join(statement.format(role=name) for statement in statements))
    given = psycopg.conninfo.conninfo_to_dict(schema.uri)
    return psycopg.conninfo.make_conninfo("", **{**given, "user": name, "password": PASSWORD})


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ('CREATE TABLE visits ("user" text)', "no column 'n'.*ADD COLUMN \"n\" bigint"),
        ('CREATE TABLE visits ("USER" text, n bigint)', "no column 'user'"),
        ('CREATE TABLE visits ("user" text, n integer)', "'n' is of type integer, and job 'visits' writes bigint"),
        ('CREATE TABLE visits ("user" text, n numeric(18))', r"'n' is of type numeric\(18,0\)"),
        ('CREATE TABLE visits ("user" text[], n bigint)', r"'user' is of type text\[\]"),
        ('CREATE TABLE visits ("user" bytea, n bigint)', "'user' is of type bytea"),
        ('CREATE TABLE visits ("user" date, n bigint)', "'user' is of type date"),
        ('CREATE TABLE visits ("user" text, n bigint, at date NOT NULL)', "'at' must not be null and has no default"),
        ('CREATE TABLE visits ("user" name, n bigint)', "'user' is of type name"),
        ("CREATE VIEW visits AS SELECT 'a' AS \"user\", 1::bigint AS n", "is no table"),
        ('CREATE UNLOGGED TABLE visits ("user" text, n bigint)', "unlogged: a crash .* SET LOGGED"),
    ],
)
def test_a_table_that_does_not_fit(postgres_schema: Schema, tmp_path: Path, statement: str, match: str) -> None:
    postgres_schema.query(statement)
    refused(postgres_schema, tmp_path, IncompatibleCheckpointError, match)


def test_a_column_that_the_database_computes(postgres_schema: Schema, tmp_path: Path) -> None:
    postgres_schema.query('CREATE TABLE visits ("user" text, n bigint GENERATED ALWAYS AS (1) STORED)')
    refused(postgres_schema, tmp_path, StorageRefusedError, "generated column")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("INDEX ON visits (n)", "no unique index"),
        ("UNIQUE INDEX ON visits (n, at)", "no unique index"),
        ("UNIQUE INDEX ON visits (n) WHERE n > 0", "no unique index"),
        ('UNIQUE INDEX ON visits (n, lower("user"))', "no unique index"),
        ('UNIQUE INDEX ON visits (n) INCLUDE ("user")', None),
        ("UNIQUE INDEX ON visits (at)", "no unique index"),
    ],
)
def test_an_upsert_needs_a_unique_index(postgres_schema: Schema, tmp_path: Path, index: str, match: str | None) -> None:
    postgres_schema.query(f'CREATE TABLE visits ("user" text, n bigint NOT NULL, at date); CREATE {index}')
    options: dict[str, Any] = {"mode": "upsert", "keys": ["user", "n"]}
    refused(postgres_schema, tmp_path, IncompatibleCheckpointError, "no unique index", **options)
    context = replace(a_context(tmp_path / "checkpoints"), keys=())
    sink = PostgresSink(postgres_schema.uri, "visits", mode="upsert", keys=["n"], schema=postgres_schema.name)
    job = SinkJob(sink.bound(context), context)
    if match is None:
        job.start().checkpoint([("a", 1), ("b", 1)])
        assert postgres_schema.query("SELECT * FROM visits") == [("b", 1, None)]
    else:
        with pytest.raises(IncompatibleCheckpointError, match=match):
            job.start()


def test_a_unique_index_under_which_null_is_never_the_same(postgres_schema: Schema, tmp_path: Path) -> None:
    postgres_schema.query('CREATE TABLE visits ("user" text UNIQUE, n bigint)')
    refused(postgres_schema, tmp_path, IncompatibleCheckpointError, "NULLS NOT DISTINCT", mode="upsert")
    postgres_schema.query('ALTER TABLE visits ALTER COLUMN "user" SET NOT NULL')
    a_job(postgres_schema, tmp_path, mode="upsert").start()


@pytest.mark.parametrize("null", ["", "NOT NULL"])
def test_the_index_that_an_error_proposes_is_the_one_that_an_upsert_takes(
    postgres_schema: Schema, tmp_path: Path, null: str
) -> None:
    postgres_schema.query(f'CREATE TABLE visits ("user" text {null}, n bigint)')
    job = a_job(postgres_schema, tmp_path, mode="upsert")
    with pytest.raises(IncompatibleCheckpointError) as raised:
        job.start()
    postgres_schema.query(str(raised.value).partition("make one: ")[2])
    job.start()


def test_a_constraint_that_is_checked_late_is_no_key(postgres_schema: Schema, tmp_path: Path) -> None:
    postgres_schema.query('CREATE TABLE visits ("user" text PRIMARY KEY DEFERRABLE, n bigint)')
    refused(postgres_schema, tmp_path, IncompatibleCheckpointError, "no unique index", mode="upsert")


@pytest.mark.parametrize(
    ("kind", "column", "rounds"),
    [
        (pa.timestamp("us", "UTC"), "timestamptz(3)", True),
        (pa.timestamp("us"), "timestamp(0)", True),
        (pa.timestamp("us"), "timestamp(6)", False),
        (pa.timestamp("us"), "timestamp", False),
        (pa.duration("us"), "interval(5)", True),
    ],
)
def test_a_key_column_that_rounds_times_is_refused(
    postgres_schema: Schema, tmp_path: Path, kind: pa.DataType, column: str, rounds: bool
) -> None:
    """It would make one row of several keys."""
    postgres_schema.query(f"CREATE TABLE visits (at {column} PRIMARY KEY, n {column})")
    schema = pa.schema([("at", kind), ("n", kind)])
    for mode in ("append", "upsert"):
        context = replace(a_context(tmp_path / mode, job=mode), schema=schema, keys=("at",))
        sink = PostgresSink(postgres_schema.uri, "visits", mode=mode, schema=postgres_schema.name)
        job = SinkJob(sink.bound(context), context)
        if rounds and mode == "upsert":
            with pytest.raises(IncompatibleCheckpointError, match=r"key column 'at' is of type .* rounds times"):
                job.start()
        else:
            job.start()


def test_a_partitioned_table_is_taken(postgres_schema: Schema, tmp_path: Path) -> None:
    postgres_schema.query(
        'CREATE TABLE visits ("user" text PRIMARY KEY, n bigint) PARTITION BY HASH ("user");'
        "CREATE TABLE part_0 PARTITION OF visits FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE part_1 PARTITION OF visits FOR VALUES WITH (MODULUS 2, REMAINDER 1);"
    )
    driver = a_job(postgres_schema, tmp_path, mode="upsert").start()
    driver.checkpoint([("a", 1), ("b", 2), ("a", 3)])
    assert sorted(postgres_schema.query("SELECT * FROM visits")) == [("a", 3), ("b", 2)]


def test_a_table_that_somebody_dropped_is_missed(postgres_schema: Schema, tmp_path: Path) -> None:
    job = a_job(postgres_schema, tmp_path)
    job.start().checkpoint([("a", 1)])
    postgres_schema.query("DROP TABLE visits")
    with pytest.raises(SinkFilesMissingError, match="table is gone"):
        job.start()


# --- rights --------------------------------------------------------------------------------------

MARKERS = (
    "CREATE TABLE strandline_markers (job text, target text, marker text NOT NULL, PRIMARY KEY (job, target));"
    "GRANT SELECT, INSERT, UPDATE ON strandline_markers TO {role}"
)
VISITS = 'CREATE TABLE visits ("user" text PRIMARY KEY, n bigint)'


def test_a_user_who_may_not_create_tables(postgres_schema: Schema, tmp_path: Path) -> None:
    uri = a_role(postgres_schema)
    refused(postgres_schema, tmp_path, StorageRefusedError, "may not create tables", uri=uri)
    uri = a_role(postgres_schema, VISITS, "GRANT INSERT ON visits TO {role}")
    refused(postgres_schema, tmp_path, StorageRefusedError, "may not create tables", uri=uri)


def test_a_user_who_may_write_only_into_tables_that_others_made(postgres_schema: Schema, tmp_path: Path) -> None:
    uri = a_role(postgres_schema, MARKERS, VISITS)
    refused(postgres_schema, tmp_path, StorageRefusedError, "permission denied for table visits", uri=uri)
    role = psycopg.conninfo.conninfo_to_dict(uri)["user"]
    postgres_schema.query(f"GRANT INSERT ON visits TO {role}")
    refused(postgres_schema, tmp_path, StorageRefusedError, "permission denied", uri=uri, mode="upsert")
    driver = a_job(postgres_schema, tmp_path, uri=uri).start()
    driver.checkpoint([("a", 1)])
    # Who does not own a table is not told its defaults by information_schema.
    postgres_schema.query("ALTER TABLE visits ADD COLUMN at date NOT NULL DEFAULT now()")
    postgres_schema.query("DELETE FROM strandline_markers")
    postgres_schema.query(f"GRANT SELECT, UPDATE ON visits TO {role}")
    a_job(postgres_schema, tmp_path / "2", uri=uri, mode="upsert").start()
    postgres_schema.query("ALTER TABLE visits ENABLE ROW LEVEL SECURITY")
    refused(postgres_schema, tmp_path / "3", IncompatibleCheckpointError, "policies for rows", uri=uri)
    postgres_schema.query(f"REVOKE SELECT ON strandline_markers FROM {role}")
    refused(postgres_schema, tmp_path / "4", StorageRefusedError, "permission denied for table strandline", uri=uri)


@pytest.mark.parametrize("existing", [True, False])
def test_a_user_who_may_not_make_temporary_tables_is_refused_before_anything_is_made(
    postgres: Postgres, tmp_path: Path, existing: bool
) -> None:
    place = postgres_database(postgres)
    place.query(f"REVOKE TEMPORARY ON DATABASE {database_of(place)} FROM PUBLIC")
    statements = [MARKERS, VISITS, "GRANT SELECT, INSERT, UPDATE ON visits TO {role}"]
    uri = a_role(place, "GRANT CREATE ON SCHEMA public TO {role}", *(statements if existing else []))
    role = psycopg.conninfo.conninfo_to_dict(uri)["user"]
    grant = f'GRANT TEMPORARY ON DATABASE "{database_of(place)}" TO "{role}"'
    refused(place, tmp_path, StorageRefusedError, grant, uri=uri, mode="upsert")
    a_job(place, tmp_path / "append", uri=uri, table="appended").start().checkpoint([("a", 1)])
    place.query(grant)
    a_job(place, tmp_path, uri=uri, mode="upsert").start().checkpoint([("a", 1), ("a", 2)])
    assert place.query("SELECT * FROM visits") == [("a", 2)]


def postgres_database(server: Postgres) -> Schema:
    return Schema("public", server.create_database())


def database_of(place: Schema) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(place.uri)["dbname"])


def test_a_missing_right_is_named_with_the_statement_that_grants_it(postgres_schema: Schema, tmp_path: Path) -> None:
    uri = a_role(postgres_schema, MARKERS, VISITS)
    table = f'"{postgres_schema.name}"."visits" TO "role_'
    refused(postgres_schema, tmp_path, StorageRefusedError, f"GRANT INSERT ON {table}", uri=uri)
    refused(
        postgres_schema,
        tmp_path,
        StorageRefusedError,
        f"GRANT SELECT, INSERT, UPDATE ON {table}",
        uri=uri,
        mode="upsert",
    )
    role = psycopg.conninfo.conninfo_to_dict(uri)["user"]
    postgres_schema.query(f"GRANT INSERT ON visits TO {role}")
    driver = a_job(postgres_schema, tmp_path, uri=uri).start()
    postgres_schema.query(f"REVOKE INSERT ON visits FROM {role}")
    driver.stage([("a", 1)])
    metadata = driver.complete()
    with pytest.raises(StorageRefusedError, match=f"user '{role}' of job 'visits' write.* stay staged; GRANT"):
        driver.publish(metadata)
    postgres_schema.query(f"GRANT INSERT ON visits TO {role}")
    driver.publish(metadata)
    assert postgres_schema.query("SELECT * FROM visits") == [("a", 1)]


def test_a_password_that_is_changed_ends_no_run_that_was_let_in_before(postgres_schema: Schema, tmp_path: Path) -> None:
    uri = a_role(postgres_schema, MARKERS, VISITS, "GRANT INSERT ON visits TO {role}")
    role = psycopg.conninfo.conninfo_to_dict(uri)["user"]
    uris = [uri]
    job = a_job(postgres_schema, tmp_path, uri=lambda: uris[-1])
    driver = job.start()
    driver.stage([("a", 1)])
    metadata = driver.complete()
    postgres_schema.query(f"ALTER ROLE {role} PASSWORD 'rotated'")
    with pytest.raises(SinkError, match=r"let job 'visits' in before, and refuses it now.*the new one") as raised:
        driver.publish(metadata)
    assert PASSWORD not in str(raised.value)
    # The generation after a restart has a target of its own, and the run was let in all the same.
    start = SinkStart(job.newest, job.log, Retries(1))
    with pytest.raises(SinkError, match="refuses it now"):
        job.sink.target(job.context).check(replace(start, reached=True))
    with pytest.raises(StorageRefusedError, match="Check the user, password and database"):
        job.sink.target(job.context).check(start)
    uris.append(uri.replace(PASSWORD, "rotated"))
    driver.publish(metadata)
    assert postgres_schema.query("SELECT * FROM visits") == [("a", 1)]


def test_a_schema_and_a_database_that_do_not_exist(postgres_schema: Schema, tmp_path: Path) -> None:
    refused(postgres_schema, tmp_path, StorageRefusedError, "no schema 'nowhere'", schema="nowhere")
    uri = postgres_schema.uri.replace("/postgres?", "/nowhere?")
    refused(postgres_schema, tmp_path, StorageRefusedError, 'database "nowhere" does not exist', uri=uri)


# --- the URI and its secrets ---------------------------------------------------------------------


def test_the_password_is_shown_nowhere(
    postgres: Postgres, postgres_schema: Schema, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    uri = a_role(postgres_schema, f"GRANT CREATE ON SCHEMA {postgres_schema.name} TO {{role}}")
    job = a_job(postgres_schema, tmp_path, uri=uri)
    driver = job.start()
    driver.checkpoint([("a", 1)])
    metadata = driver.complete()
    shown = [repr(job.sink), job.sink.place, repr(driver.target), repr(metadata)]
    shown.append(str(pickle.dumps(job.sink.stager(job.context))))
    for wrong in (uri.replace(PASSWORD, f"{PASSWORD}-wrong"), uri.replace("user=role", f"user={PASSWORD}")):
        with pytest.raises(StorageRefusedError, match="password authentication failed") as raised:
            a_job(postgres_schema, tmp_path, uri=wrong).start()
        shown += [str(raised.value).replace(f"{PASSWORD}_", "")]
    for broken in (f"postgresql://me:{PASSWORD}%zz@host/db", f"postgresql+psycopg://me:{PASSWORD}@host/db"):
        with pytest.raises(ConfigError, match="cannot be read") as unread:
            a_job(postgres_schema, tmp_path, uri=broken)
        shown.append(str(unread.value))
        assert unread.value.__suppress_context__
    postgres.stop()
    with pytest.raises(StrandlineError) as down:
        job.start()
    shown.append(str(down.value))
    assert [text for text in [*shown, caplog.text] if PASSWORD in text] == []


def test_the_uri_comes_from_the_environment_or_a_function(
    postgres_schema: Schema, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="'PG_URI_OF_TEST' is not set"):
        a_job(postgres_schema, tmp_path, uri="env:PG_URI_OF_TEST")
    monkeypatch.setenv("PG_URI_OF_TEST", postgres_schema.uri)
    one = a_job(postgres_schema, tmp_path, uri="env:PG_URI_OF_TEST")
    two = a_job(postgres_schema, tmp_path, uri=lambda: postgres_schema.uri)
    assert one.sink.place == two.sink.place == a_job(postgres_schema, tmp_path).sink.place
    one.start().checkpoint([("a", 1)])
    assert postgres_schema.query("SELECT * FROM visits") == [("a", 1)]


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("postgresql://me:x@db.example/shop", "postgresql:db.example:5432/shop#public.t"),
        ("postgres://me@db:6543/shop?sslmode=require", "postgresql:db:6543/shop#public.t"),
        ("postgresql://a,b:7/shop", "postgresql:a:5432,b:7/shop#public.t"),
        ("host=a,b port=7 dbname=shop", "postgresql:a:7,b:7/shop#public.t"),
        ("host=/run/postgresql dbname=shop", "postgresql:/run/postgresql:5432/shop#public.t"),
        ("postgresql://[::1]/shop", "postgresql:::1:5432/shop#public.t"),
    ],
)
def test_the_place_names_server_database_and_table(monkeypatch: pytest.MonkeyPatch, uri: str, place: str) -> None:
    for name in ("PGHOST", "PGPORT", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    assert PostgresSink(uri, "t").place == place


@pytest.mark.parametrize("uri", ["postgresql:///shop", "postgresql://host", "service=shop", "service=shop host=a"])
def test_a_uri_must_name_host_and_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str) -> None:
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="the URI names no"):
        PostgresSink(uri, "t").bound(a_context(tmp_path))


@pytest.mark.parametrize(
    ("options", "columns", "match"),
    [
        ({"table": "t" * 64}, ["a"], "1 to 63 bytes"),
        ({"table": ""}, ["a"], "1 to 63 bytes"),
        ({"schema": "a\0"}, ["a"], "1 to 63 bytes"),
        ({}, ["ü" * 32], "1 to 63 bytes"),
        ({}, ["ctid"], "'ctid' of its own"),
        ({"table": "strandline_markers"}, ["a"], "Strandline's own"),
        ({"mode": "merge"}, ["a"], "use 'append' or 'upsert'"),
        ({"mode": "upsert"}, ["a"], "needs the columns"),
        ({"timeout": "soon"}, ["a"], "no duration"),
        ({"timeout": 0.5}, ["a"], "too short"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], columns: list[str], match: str) -> None:
    context = replace(a_context(tmp_path), schema=pa.schema([(name, pa.int64()) for name in columns]), keys=())
    with pytest.raises((ConfigError, JobDefinitionError), match=match):
        PostgresSink(**{"uri": "postgresql://host/db", "table": "t", **options}).bound(context)
