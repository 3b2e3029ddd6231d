"""The targets of exactly-once sinks, as `strandline bench sinks` and `strandline chaos sinks` use them.

Each says how a job writes into it, what a plain reader finds in it, and what is left in it that nobody will ever read.
"""

from __future__ import annotations

import io
import json
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import json as arrow_json

import strandline as sl
from strandline.errors import StrandlineError
from strandline.sinks import ExactlyOnceSink
from strandline.sinks.names import FINAL_NAME, STAGING_FOLDER
from strandline.sinks.parquet.owner import OWNER
from strandline_bench.servers.kafka import kafka_broker, transactions
from strandline_bench.servers.postgres import postgres
from strandline_bench.servers.server import Server

Mode = Literal["append", "upsert"]
PARTITIONS: Final = 2
"""The partitions of a topic."""
PATIENCE: Final = 60.0
"""Seconds for a reader to reach the end of a topic, and for sessions and transactions to end."""
CHUNK: Final = 10_000


class UnreadableError(StrandlineError):
    """A reader does not reach the end of a target."""


class Target(ABC):
    """Some tables, folders or topics in one place. Their names need no quotes."""

    ordered: ClassVar[bool] = False
    """Whether `read` gives appended rows in the order of their writes: all of them, or those of each key."""
    upserts: ClassVar[bool] = True

    def __init__(self, home: Path, address: str = "") -> None:
        """`home` is a folder of the target's own; `address` says where its server is, if it has one."""
        self.home = home
        self.address = address

    def make(self, table: str) -> None:  # noqa: B027 - most sinks make what they write into
        """Make what the sink does not make itself."""

    @abstractmethod
    def sink(self, table: str, mode: Mode = "append", keys: Sequence[str] = ()) -> ExactlyOnceSink:
        """A sink into one of the tables. `keys` are the columns of an upsert, by default the key of the step before."""

    @abstractmethod
    def read(self, table: str) -> pa.Table:
        """All rows that a plain reader sees. Raises `UnreadableError` if it does not reach the end."""

    @abstractmethod
    def leftovers(self) -> Iterator[str]:
        """What is there that no reader will ever see. Call it when the job has ended."""


class _Files(Target):
    """Tables in folders below `home`."""

    def leftovers(self) -> Iterator[str]:
        for path in self.home.rglob("*"):
            relative = path.relative_to(self.home).parts
            if path.is_file() and STAGING_FOLDER in relative and "/".join(relative[-2:]) != OWNER:
                yield f"staged file {path.relative_to(self.home)}"


class ParquetTarget(_Files):
    """Folders of Parquet files."""

    upserts = False

    def sink(self, table: str, mode: Mode = "append", keys: Sequence[str] = ()) -> ExactlyOnceSink:
        return sl.ParquetSink(str(self.home / table))

    def read(self, table: str) -> pa.Table:
        return ds.dataset([str(path) for path in (self.home / table).glob("[!._]*.parquet")]).to_table()


class DeltaTarget(_Files):
    """Delta tables in local folders."""

    def sink(self, table: str, mode: Mode = "append", keys: Sequence[str] = ()) -> ExactlyOnceSink:
        return sl.DeltaSink(str(self.home / table), mode=mode, keys=keys)

    def read(self, table: str) -> pa.Table:
        return pa.table(self._table(table).to_pyarrow_table())

    def leftovers(self) -> Iterator[str]:
        """Staged files, and those of appends. delta-rs names the files that an upsert rewrites: VACUUM is for them."""
        yield from super().leftovers()
        for folder in sorted(path.parent for path in self.home.glob("*/_delta_log")):
            known = self._known(folder)
            for path in folder.glob("*.parquet"):
                if FINAL_NAME.fullmatch(path.name) and path.name not in known:
                    yield f"file {path.relative_to(self.home)}, which is no part of the table"

    @staticmethod
    def _known(folder: Path) -> set[str]:
        """The names of the data files that belong to a table, or did before an upsert rewrote them."""
        entries = [
            json.loads(line)
            for version in folder.glob("_delta_log/*.json")
            for line in version.read_text().splitlines()
        ]
        return {Path(entry["add"]["path"]).name for entry in entries if "add" in entry}

    def _table(self, table: str) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(str(self.home / table))


class IcebergTarget(_Files):
    """Iceberg tables in local folders, with a catalogue in SQLite."""

    @property
    def catalogue(self) -> dict[str, str]:
        """The properties of the catalogue."""
        return {"type": "sql", "uri": f"sqlite:///{self.home}/catalogue.db", "warehouse": f"file://{self.home}/tables"}

    def sink(self, table: str, mode: Mode = "append", keys: Sequence[str] = ()) -> ExactlyOnceSink:
        self.home.mkdir(parents=True, exist_ok=True)
        return sl.IcebergSink(f"bench.{table}", self.catalogue, mode=mode, keys=keys)

    def read(self, table: str) -> pa.Table:
        return self._table(table).scan().to_arrow()

    def leftovers(self) -> Iterator[str]:
        for _namespace, table in sorted(self._opened().list_tables("bench")):
            yield from (f"table {table}: {one}" for one in unreferenced_files(self._table(table)))

    def _opened(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog("default", **self.catalogue)

    def _table(self, table: str) -> Any:
        return self._opened().load_table(f"bench.{table}")


def unreferenced_files(table: Any) -> Iterator[str]:
    """The files in the local folder of an Iceberg table that none of its snapshots refers to, staged ones included.

    Metadata files that were the table's before the oldest one that it keeps do not count, nor does the first one: a
    driver that is killed may leave these.
    """
    snapshots = table.snapshots()
    manifests = {one.manifest_path: one for snapshot in snapshots for one in snapshot.manifests(table.io)}
    known = {*manifests, *(one.manifest_list for one in snapshots), table.metadata_location}
    for one in manifests.values():
        known |= {entry.data_file.file_path for entry in one.fetch_manifest_entry(table.io, discard_deleted=False)}
    kept = [one.metadata_file for one in table.metadata.metadata_log]
    names = {Path(location).name for location in (*known, *kept)}
    oldest = min(Path(one).name for one in (*kept, table.metadata_location))
    for path in Path(table.location().removeprefix("file://")).rglob("*"):
        is_old = path.name.endswith(".metadata.json") and path.name[:5] <= oldest[:5]
        if path.is_file() and path.name not in names and not is_old and path.suffix != ".crc":
            yield f"file {path.name}, which no snapshot refers to"


class SQLiteTarget(Target):
    """Tables of a database file."""

    ordered = True

    @property
    def database(self) -> Path:
        """The file."""
        return self.home / "tables.db"

    def sink(self, table: str, mode: Mode = "append", keys: Sequence[str] = ()) -> ExactlyOnceSink:
        self.home.mkdir(parents=True, exist_ok=True)
        return sl.SQLiteSink(self.database, table, mode=mode, keys=keys)

    def read(self, table: str) -> pa.Table:
        with closing(sqlite3.connect(self.database)) as connection:
            found = connection.execute(f"SELECT * FROM {table} ORDER BY rowid")
            return _columns([column[0] for column in found.description], found.fetchall())

    def leftovers(self) -> Iterator[str]:
        for path in self.home.glob("tables.db-*"):
            if path.stat().st_size:
                yield f"{path.name} of a transaction that was never ended"


class PostgresTarget(Target):
    """Tables of a database of PostgreSQL, whose URI is the address."""

    ordered = True

    def sink(self, table: str, mode: Mode = "append", keys: Sequence[str] = ()) -> ExactlyOnceSink:
        return sl.PostgresSink(self.address, table, mode=mode, keys=keys)

    def read(self, table: str) -> pa.Table:
        import psycopg

        # No row of an appended table is ever changed or deleted, so rows lie in the order of their writes.
        with psycopg.connect(self.address) as connection:
            found = connection.execute(f"SELECT * FROM {table} ORDER BY ctid".encode())
            return _columns([column.name for column in found.description or ()], found.fetchall())

    def leftovers(self) -> Iterator[str]:
        import psycopg

        deadline = time.monotonic() + PATIENCE
        with psycopg.connect(self.address, autocommit=True) as connection:
            while (left := self._sessions(connection)) and time.monotonic() < deadline:
                time.sleep(0.2)
        yield from left

    @staticmethod
    def _sessions(connection: Any) -> list[str]:
        sessions = connection.execute(
            "SELECT pid, state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
        left = [f"session {pid}, {state}" for pid, state in sessions.fetchall()]
        prepared = connection.execute("SELECT gid FROM pg_prepared_xacts")
        return [*left, *(f"prepared transaction {gid}" for (gid,) in prepared.fetchall())]


class KafkaTarget(Target):
    """Topics of a broker, whose `bootstrap.servers` are the address. A value is a JSON object."""

    ordered = True
    upserts = False

    def make(self, table: str) -> None:
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        admin = AdminClient({"bootstrap.servers": self.address})
        admin.create_topics([NewTopic(self.topic(table), PARTITIONS, replication_factor=1)])[self.topic(table)].result(
            30
        )

    def topic(self, table: str) -> str:
        """The topic. Other runs use the same broker."""
        return f"{self.home.parent.name}-{table}"

    def sink(self, table: str, mode: Mode = "append", keys: Sequence[str] = ()) -> ExactlyOnceSink:
        return sl.KafkaSink(self.address, self.topic(table), key="key")

    def read(self, table: str) -> pa.Table:
        values = b"\n".join(self._values(self.topic(table)))
        return arrow_json.read_json(io.BytesIO(values)) if values else pa.table({})

    def _values(self, topic: str) -> list[bytes]:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": uuid4().hex,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        found: list[bytes] = []
        for number in range(PARTITIONS):
            # The end behind which nobody reads while a transaction is open is not the end of the topic.
            _low, high = _uncommitted_ends(self.address, topic, number)
            consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING)])
            reached, deadline = 0, time.monotonic() + PATIENCE
            while reached < high:
                if time.monotonic() > deadline:
                    raise UnreadableError(f"topic {topic}, partition {number}: read to {reached} of {high}")
                for message in consumer.consume(CHUNK, 0.2):
                    offset = message.offset()
                    if message.error() is None:
                        found.append(message.value() or b"")
                        reached = (offset or 0) + 1
                    else:
                        reached = max(reached, offset or 0)
        consumer.close()
        return found

    def leftovers(self) -> Iterator[str]:
        deadline = time.monotonic() + PATIENCE
        with transactions(self.address) as listed:
            mine = self.home.parent.name
            while (left := [one for one in listed().items() if mine in one[0]]) and time.monotonic() < deadline:
                time.sleep(0.5)
        for name, state in left:
            yield f"transaction {name}, {state}"


def _uncommitted_ends(servers: str, topic: str, partition: int) -> tuple[int, int]:
    from confluent_kafka import Consumer, TopicPartition

    reader = Consumer({"bootstrap.servers": servers, "group.id": uuid4().hex, "isolation.level": "read_uncommitted"})
    try:
        low, high = reader.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)
    finally:
        reader.close()
    return low, high


def _columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {})


TARGETS: Final[dict[str, type[Target]]] = {
    "parquet": ParquetTarget,
    "delta": DeltaTarget,
    "iceberg": IcebergTarget,
    "sqlite": SQLiteTarget,
    "postgres": PostgresTarget,
    "kafka": KafkaTarget,
}


@contextmanager
def servers(names: Sequence[str], *, durable: bool = False) -> Iterator[dict[str, Server]]:
    """Starts the servers that these targets need. With `durable`, PostgreSQL waits for the disk.

    Raises `ServerMissingError` if the programs of one are missing.
    """
    made: dict[str, AbstractContextManager[Any]] = {"kafka": kafka_broker(), "postgres": postgres(durable=durable)}
    with ExitStack() as stack:
        yield {name: stack.enter_context(made[name]) for name in names if name in made}


def opened(name: str, home: Path, running: dict[str, Server]) -> Target:
    """A target with a folder, database or prefix of its own, in `home`."""
    server: Any = running.get(name)
    address = {"kafka": lambda: server.servers, "postgres": lambda: server.create_database()}.get(name, str)()
    return TARGETS[name](home / name, address)
