"""Whatever happens to the server, the connection or another driver: each row is there once, and no call hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.errors import FencedError, MarkerMovedError, SinkError, StorageFullError, StorageRefusedError
from strandline.sinks.postgres import session
from strandline.sinks.postgres.sink import PostgresSink
from strandline.testing.sink import Row, SinkDriver, SinkJob, a_context
from strandline_bench.servers.postgres import Postgres, Schema
from tests.sinks.postgres.cable import Cable, Fault, cable
from tests.sinks.values import check_staged, stage_table
from tests.waiting import wait_until

ROWS = [(f"u{n % 7}", n) for n in range(20)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer is given up soon."""
    monkeypatch.setattr(session, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(session, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(session, "CONNECT_SECONDS", 2)


@pytest.fixture
def line(postgres: Postgres) -> Iterator[Cable]:
    with cable(postgres.port) as made:
        yield made


def a_job(schema: Schema, folder: Path, port: int | None = None, **options: Any) -> SinkJob:
    context = a_context(folder / "checkpoints")
    sink = PostgresSink(uri_at(schema, port), "visits", schema=schema.name, **{"timeout": "2s", **options})
    return SinkJob(sink.bound(context), context)


def uri_at(schema: Schema, port: int | None) -> str:
    given = psycopg.conninfo.conninfo_to_dict(schema.uri)
    return psycopg.conninfo.make_conninfo("", **{**given, "port": port or given["port"]})


def found(schema: Schema) -> list[Row]:
    return sorted(schema.query('SELECT "user", n FROM visits'))


def ready(job: SinkJob) -> tuple[SinkDriver, CheckpointMetadata]:
    """A driver with a complete checkpoint that is not published."""
    driver = job.start()
    driver.checkpoint([("first", 0)])
    driver.stage(ROWS[:10])
    driver.stage(ROWS[10:])
    return driver, driver.complete()


def in_background(act: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Runs `act` in a thread. The result waits for it, and gives its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> BaseException | None:
        thread.join(60)
        assert not thread.is_alive()
        return errors[0] if errors else None

    return result


# --- the connection ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("fault", ["cut before", "cut after", "silent"])
def test_rows_are_there_once_wherever_the_connection_is_lost(
    postgres_schema: Schema, tmp_path: Path, line: Cable, impatient: None, fault: Fault, mode: str
) -> None:
    """At every message of a publication. The answer to COMMIT may be lost, whether or not it took effect."""
    job = a_job(postgres_schema, tmp_path, line.port, mode=mode, timeout="1s")
    driver = job.start()
    driver.checkpoint([("first", 0)])
    line.plan(None, 0)
    driver.checkpoint(ROWS)
    messages = line.seen
    assert messages > 10
    rows = [("first", 0), *ROWS]
    steps = range(messages) if fault != "silent" else range(1, messages, 4)
    outcomes = set()
    for message in steps:
        more = [(f"u{n}", 1000 * (message + 1) + n) for n in range(5)]
        rows += more
        driver.stage(more)
        metadata = driver.complete()
        line.plan(fault, message)
        try:
            driver.publish(metadata)
        except SinkError as error:
            outcomes.add(type(error))
        line.plan(None, 0)
        driver.publish(metadata)
        assert found(postgres_schema) == sorted(dict(rows).items() if mode == "upsert" else rows)
    assert outcomes == {SinkError}


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_driver_that_stands_still_in_its_transaction_is_ended_by_its_successor(
    postgres_schema: Schema, tmp_path: Path, line: Cable, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Wherever in its commit it stands still: the successor gets in, and nothing of the other transaction remains."""
    monkeypatch.setattr(session, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(session, "ANSWER_SECONDS", 3.0)
    job = a_job(postgres_schema, tmp_path, line.port, mode=mode, timeout="10s")
    driver = job.start()
    driver.checkpoint(ROWS)
    line.plan(None, 0)
    driver.checkpoint(ROWS)
    rows, messages = [*ROWS, *ROWS], line.seen
    outcomes, held = [], 0
    for message in range(messages // 2, messages):
        old = job.start()
        old.stage([("c", message)])
        metadata = old.complete()
        rows.append(("c", message))
        line.plan("silent", message)
        outcomes.append((old, metadata, in_background(partial(old.publish, metadata))))
        assert line.met.wait(30)
        holders = postgres_schema.query("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted")
        held += len(holders)
        new = job.start()
        assert found(postgres_schema) == sorted(dict(rows).items() if mode == "upsert" else rows)
        alive = postgres_schema.query("SELECT pid FROM pg_stat_activity")
        assert not {*holders} & {*alive}
        new.checkpoint([("d", message)])
        rows.append(("d", message))
    assert held > 3
    for old, metadata, outcome in outcomes:
        assert isinstance(outcome(), SinkError | None)
        with pytest.raises(FencedError):
            old.publish(metadata)
    assert found(postgres_schema) == sorted(dict(rows).items() if mode == "upsert" else rows)


def test_a_driver_that_comes_back_does_not_end_the_session_of_its_successor(
    postgres_schema: Schema, tmp_path: Path, impatient: None
) -> None:
    job = a_job(postgres_schema, tmp_path, timeout="60s")
    old, metadata = ready(job)
    seen = old.target.committed()  # type: ignore[attr-defined]
    new = job.start()
    new.stage([("slow", 1)])
    with psycopg.connect(postgres_schema.uri) as other:
        other.execute("LOCK TABLE visits")
        session_of_new = in_background(lambda: new.publish(new.complete()))
        with pytest.raises((MarkerMovedError, FencedError)):
            old.target.commit((), seen, seen)  # type: ignore[attr-defined]
        other.rollback()
    error = session_of_new()
    assert error is None or "holds a lock" in str(error)
    assert metadata.checkpoint_id == 2


# --- the server ----------------------------------------------------------------------------------

SLOW = """
CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON visits DEFERRABLE INITIALLY {when} FOR EACH ROW
    WHEN (NEW.n = 19) EXECUTE FUNCTION {name}();
"""


@pytest.mark.parametrize("when", ["IMMEDIATE", "DEFERRED"])
@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_server_that_ends_during_a_commit_has_all_rows_or_none(
    postgres: Postgres, postgres_schema: Schema, tmp_path: Path, when: str, what: str
) -> None:
    driver, metadata = ready(a_job(postgres_schema, tmp_path, timeout="60s"))
    postgres_schema.query(SLOW.format(name="slow", seconds=30, when=when))
    outcome = in_background(lambda: driver.publish(metadata))
    wait_until(lambda: _sleeps(postgres_schema), what="a commit that takes its time")
    getattr(postgres, what)()
    assert isinstance(outcome(), SinkError)
    with pytest.raises(SinkError):
        driver.publish(metadata)
    check_staged(driver, metadata)
    postgres.start()
    postgres_schema.query("DROP TRIGGER slow ON visits")
    driver.publish(metadata)
    assert found(postgres_schema) == sorted([("first", 0), *ROWS])


def _sleeps(schema: Schema) -> bool:
    return bool(schema.query("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"))


def test_a_server_that_stands_still_is_given_up_and_found_again(
    postgres: Postgres, postgres_schema: Schema, tmp_path: Path, impatient: None
) -> None:
    driver, metadata = ready(a_job(postgres_schema, tmp_path))
    postgres_schema.query(SLOW.format(name="slow", seconds=1, when="DEFERRED"))
    outcome = in_background(lambda: driver.publish(metadata))
    wait_until(lambda: _sleeps(postgres_schema), what="a commit that takes its time")
    postgres.freeze()
    error = outcome()
    assert isinstance(error, SinkError)
    assert "stopped answering" in str(error)
    with pytest.raises(SinkError, match="timeout"):
        driver.publish(metadata)
    postgres.thaw()
    driver.publish(metadata)
    driver.publish(metadata)
    assert found(postgres_schema) == sorted([("first", 0), *ROWS])


def test_a_statement_that_takes_too_long_is_ended_by_the_server(postgres_schema: Schema, tmp_path: Path) -> None:
    driver, metadata = ready(a_job(postgres_schema, tmp_path, timeout="1s"))
    postgres_schema.query(SLOW.format(name="slow", seconds=30, when="IMMEDIATE"))
    with pytest.raises(SinkError, match=r"longer than 1 s.*raise timeout="):
        driver.publish(metadata)
    check_staged(driver, metadata)
    assert found(postgres_schema) == [("first", 0)]


def test_a_server_that_stores_rows_slowly_gets_the_time_of_a_statement(
    postgres_schema: Schema, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes no more of a COPY while its buffers are full."""
    monkeypatch.setattr(session, "ANSWER_SECONDS", 1.0)
    driver = a_job(postgres_schema, tmp_path, timeout="60s").start()
    postgres_schema.query(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END $$;"
        "CREATE TRIGGER slow BEFORE INSERT ON visits FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    rows = pa.table({"user": ["x" * 500_000] * 60, "n": range(60)})  # more than all buffers on the way hold
    stage_table(driver, rows)
    driver.publish(driver.complete())
    assert postgres_schema.query("SELECT count(*) FROM visits") == [(60,)]


@pytest.mark.parametrize("table", ["visits", "strandline_markers"])
def test_a_lock_of_another_session_is_an_error_that_may_pass(
    postgres_schema: Schema, tmp_path: Path, impatient: None, table: str
) -> None:
    driver, metadata = ready(a_job(postgres_schema, tmp_path))
    with psycopg.connect(postgres_schema.uri) as other:
        other.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE".encode())
        with pytest.raises(SinkError, match=r"another session holds a lock.*pg_blocking_pids"):
            driver.publish(metadata)
    check_staged(driver, metadata)
    driver.publish(metadata)
    assert found(postgres_schema) == sorted([("first", 0), *ROWS])


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("53100", StorageFullError),
        ("40001", SinkError),
        ("40P01", SinkError),
        ("57P01", SinkError),
        ("53300", SinkError),
    ],
)
def test_what_the_server_reports_is_told_apart(
    postgres_schema: Schema, tmp_path: Path, state: str, kind: type[Exception]
) -> None:
    driver, metadata = ready(a_job(postgres_schema, tmp_path))
    postgres_schema.query(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'no more' USING ERRCODE = '{state}'; END $$;"
        "CREATE TRIGGER fail BEFORE INSERT ON visits FOR EACH ROW EXECUTE FUNCTION fail()"
    )
    with pytest.raises(kind, match="no more") as raised:
        driver.publish(metadata)
    assert type(raised.value) is kind
    check_staged(driver, metadata)
    postgres_schema.query("DROP TRIGGER fail ON visits")
    driver.publish(metadata)
    assert found(postgres_schema) == sorted([("first", 0), *ROWS])


def test_a_commit_that_the_database_may_forget_is_not_accepted(postgres_schema: Schema, tmp_path: Path) -> None:
    """With `synchronous_commit = off` a crash would undo the last transactions, whose staged rows are deleted."""
    postgres_schema.query(
        'CREATE TABLE seen (setting text); CREATE TABLE visits ("user" text, n bigint);'
        "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;"
        "CREATE TRIGGER look AFTER INSERT ON visits EXECUTE FUNCTION look()"
    )
    risky = replace(postgres_schema, uri=postgres_schema.uri + "%20-csynchronous_commit%3Doff")
    assert risky.query("SHOW synchronous_commit") == [("off",)]
    a_job(risky, tmp_path).start().checkpoint(ROWS)
    assert postgres_schema.query("SELECT DISTINCT setting FROM seen") == [("on",)]


def test_jobs_that_start_at_the_same_time_share_the_table_of_markers(postgres_schema: Schema, tmp_path: Path) -> None:
    def run(number: int) -> None:
        context = a_context(tmp_path / str(number), job=f"job-{number}")
        sink = PostgresSink(postgres_schema.uri, "visits", schema=postgres_schema.name).bound(context)
        SinkJob(sink, context).start().checkpoint([(f"u{number}", number)])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))
    assert found(postgres_schema) == [(f"u{number}", number) for number in range(6)]
    assert postgres_schema.query("SELECT count(*) FROM strandline_markers") == [(6,)]


def test_a_server_that_is_down_at_the_start_is_named(
    postgres: Postgres, postgres_schema: Schema, tmp_path: Path
) -> None:
    job = a_job(postgres_schema, tmp_path)
    postgres.stop()
    with pytest.raises(SinkError, match=rf"postgresql:127.0.0.1:{postgres.port}/postgres#.*refused") as raised:
        job.start()
    assert not isinstance(raised.value, StorageRefusedError)
    postgres.start()
    job.start().checkpoint(ROWS)
    assert found(postgres_schema) == sorted(ROWS)
