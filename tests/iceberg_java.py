"""Iceberg's own Java library on loopback: a REST catalogue server, and a reader that shares no code with PyIceberg.

A process of its own starts the JVM and, in it, the server. Python drives the JVM through Py4J.
"""

from __future__ import annotations

import glob
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pyspark
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway

from strandline_bench.servers.server import Server

ROOT = Path(__file__).resolve().parents[1]
JARS = ROOT / ".tools" / "iceberg-java"
"""Where scripts/get_kafka.sh puts the jars."""


class IcebergJava(Server):
    """A catalogue with tables in local files. Each test uses a namespace of its own."""

    def command(self) -> list[str]:
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]); from tests.iceberg_java import serve; serve(*sys.argv[2:])"
        )
        return [sys.executable, "-c", program, str(ROOT), str(self.port), str(self.folder)]

    def answers(self) -> bool:
        try:
            with urlopen(f"{self.uri}/v1/config", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, TimeoutError):
            return False

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def catalogue(self) -> dict[str, str]:
        """The properties of the REST catalogue."""
        return {"type": "rest", "uri": self.uri, "name": "rest"}

    @contextmanager
    def jvm(self) -> Iterator[Any]:
        port = int((self.folder / "gateway").read_text())
        gateway = JavaGateway(gateway_parameters=_parameters(port))
        try:
            yield gateway.jvm
        finally:
            gateway.close()

    def rows(self, metadata_location: str, *columns: str) -> list[tuple[Any, ...]]:
        """The rows that Java reads from a table, given its newest metadata file; other values than numbers as text."""
        with self.jvm() as jvm:
            table = _static_table(jvm, metadata_location)
            found = jvm.org.apache.iceberg.data.IcebergGenerics.read(table).build()
            records, rows = found.iterator(), []
            while records.hasNext():  # Py4J's own loop would take an error for the end
                record = records.next()
                rows.append(tuple(_plain(record.getField(name)) for name in columns))
            found.close()
            return rows

    def keep_one_snapshot(self, namespace: str, table: str) -> None:
        """Expire all snapshots of a table in the catalogue but the newest, with their files."""
        with self.jvm() as jvm:
            properties = {"uri": self.uri, "catalog-impl": "org.apache.iceberg.rest.RESTCatalog"}
            configuration = jvm.org.apache.hadoop.conf.Configuration()
            catalogue = jvm.org.apache.iceberg.CatalogUtil.buildIcebergCatalog("rest", properties, configuration)
            name = jvm.org.apache.iceberg.catalog.TableIdentifier.parse(f"{namespace}.{table}")
            expire = catalogue.loadTable(name).expireSnapshots()
            expire.expireOlderThan(jvm.java.lang.System.currentTimeMillis() + 1000).retainLast(1).commit()


def _parameters(port: int) -> GatewayParameters:
    # Objects are forgotten with the JVM: Py4J would tell it of each that Python has dropped, also when it is gone.
    return GatewayParameters(port=port, auto_convert=True, enable_memory_management=False)


def _static_table(jvm: Any, metadata_location: str) -> Any:
    files = jvm.org.apache.iceberg.hadoop.HadoopFileIO(jvm.org.apache.hadoop.conf.Configuration())
    operations = jvm.org.apache.iceberg.StaticTableOperations(metadata_location, files)
    return jvm.org.apache.iceberg.BaseTable(operations, "table")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, Decimal):
        return str(value)
    return bytes(value.array()).hex() if "ByteBuffer" in value.getClass().getName() else value.toString()


@contextmanager
def iceberg_java() -> Iterator[IcebergJava]:
    """Starts the server. Skips the test without its jars."""
    if not JARS.exists():
        pytest.skip("Iceberg's Java library is not there: run scripts/get_kafka.sh (needs Maven)")
    folder = Path(tempfile.mkdtemp(prefix="strandline-iceberg-"))
    server = IcebergJava(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def serve(port: str, folder: str) -> None:
    """The server's process: runs until the JVM ends."""
    spark = Path(pyspark.__file__).parent / "jars"
    needed = ("hadoop-client", "py4j", "commons-logging", "zstd-jni", "snappy-java")
    jars = [f"{JARS}/*", *(jar for name in needed for jar in glob.glob(f"{spark}/{name}*.jar"))]
    options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx512m"]
    options.append("-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
    java = subprocess.Popen(
        ["java", *options, "-cp", ":".join(jars), "py4j.GatewayServer", "0"], stdout=subprocess.PIPE, text=True
    )
    assert java.stdout is not None
    gateway_port = int(java.stdout.readline())
    gateway = JavaGateway(gateway_parameters=_parameters(gateway_port))
    jvm: Any = gateway.jvm
    properties = {
        "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        "uri": f"jdbc:sqlite:{folder}/catalogue.db",
        "warehouse": f"{folder}/warehouse",
        "jdbc.schema-version": "V1",
    }
    iceberg, jetty = jvm.org.apache.iceberg, jvm.org.eclipse.jetty
    configuration = jvm.org.apache.hadoop.conf.Configuration()
    catalogue = iceberg.CatalogUtil.buildIcebergCatalog("rest_backend", properties, configuration)
    servlet = iceberg.rest.RESTCatalogServlet(iceberg.rest.RESTCatalogAdapter(catalogue))
    handler = jetty.ee10.servlet.ServletContextHandler()
    handler.addServlet(jetty.ee10.servlet.ServletHolder(servlet), "/*")
    server = jetty.server.Server(jvm.java.net.InetSocketAddress("127.0.0.1", int(port)))
    server.setHandler(handler)
    Path(folder, "gateway").write_text(str(gateway_port))
    server.start()
    java.wait()
