"""A real PostgreSQL on loopback: a cluster of its own, which does not run as root."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from strandline_bench.servers.server import Server, ServerMissingError

USER = "strandline"

# The kill of a process loses nothing that was written, so tests need no fsync.
OPTIONS = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}


@dataclass(frozen=True)
class Schema:
    """A part of a database for one test."""

    name: str
    uri: str
    """Its connections find the tables of the schema by their names alone."""

    def query(self, statement: str) -> list[Any]:
        """The rows of a statement, or of the first of several."""
        with psycopg.connect(self.uri, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []


class Postgres(Server):
    ORDERLY_END = signal.SIGINT  # ends connections, too; SIGTERM would wait for them

    def __init__(self, folder: Path, programs: Path, user: str | None, *, durable: bool = False) -> None:
        super().__init__(folder, user)
        self._durable = durable
        self._programs = programs
        self._password = secrets.token_hex(8)
        words = folder / "password"
        words.write_text(self._password)
        if user is not None:
            for path in (folder, words):
                shutil.chown(path, user)
        options = ("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", f"--pwfile={words}")
        made = self._run([str(programs / "initdb"), "-D", str(folder / "data"), "-U", USER, *options])
        assert made.wait(60) == 0, self.log()

    def uri(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Makes an empty database with a name of its own, and gives its URI."""
        name = f"database_{uuid4().hex[:12]}"
        with psycopg.connect(self.uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.uri(name)

    def create_schema(self) -> Schema:
        """Makes an empty schema with a name of its own: quicker than a database."""
        name = f"schema_{uuid4().hex[:12]}"
        with psycopg.connect(self.uri(), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return Schema(name, f"{self.uri()}?options=-csearch_path%3D{name}")

    def command(self) -> list[str]:
        options = [
            f"-c{name}={value}"
            for name, value in {**OPTIONS, "fsync": "on" if self._durable else "off", "port": str(self.port)}.items()
        ]
        return [str(self._programs / "postgres"), "-D", str(self.folder / "data"), *options]

    def answers(self) -> bool:
        try:
            psycopg.connect(self.uri(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def postgres(*, durable: bool = False) -> Iterator[Postgres]:
    """Gives a cluster that runs. Raises `ServerMissingError` without PostgreSQL.

    `durable` is for benchmarks: commits wait for the disk.
    """
    programs = _programs()
    if programs is None:
        raise ServerMissingError("PostgreSQL is not installed: run `sudo bash scripts/get_postgres.sh`")
    folder = Path(tempfile.mkdtemp(prefix="strandline-postgres-"))
    try:
        server = Postgres(folder, programs, _user(), durable=durable)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder)


def _programs() -> Path | None:
    """The folder of `postgres` and `initdb`. Debian's are not on the path."""
    on_path = shutil.which("postgres")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    found = [Path(on_path).resolve().parent] if on_path else folders[-1:]
    return next((folder for folder in found if (folder / "initdb").exists()), None)


def _user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    return "postgres" if "postgres" in {user.pw_name for user in pwd.getpwall()} else "nobody"
