"""What all tests share: how they are spread over processes, the JVM's options, a Spark session and servers."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from strandline_bench.servers.kafka import KafkaBroker
    from strandline_bench.servers.postgres import Postgres, Schema
    from tests.iceberg_java import IcebergJava

T = TypeVar("T")

# A busy machine is no reason to fail.
settings.register_profile("strandline", deadline=None)
settings.load_profile("strandline")

# Runs of tests are no runs of the user's: a folder of their own holds their entries.
RUNS = tempfile.mkdtemp(prefix="strandline-runs-")
os.environ["STRANDLINE_RUNS_DIR"] = RUNS
atexit.register(shutil.rmtree, RUNS, ignore_errors=True)

# Jobs flush their files to the disk all the time: their folders are in memory where there is room.
MEMORY = "/dev/shm"
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# A shell starts a program in the background so that it ignores Ctrl-C. Processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["PYSPARK_PYTHON"] = str(Path(__file__).with_name("spark_python.sh"))
os.environ["STRANDLINE_TESTS_PYTHON"] = sys.executable
# Every JVM that a test starts, in whatever process, lives for seconds: it is not worth its while to optimise much.
os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class OneByOne(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Each process takes the next test when it is through with one. The tests of a class stay in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file, *names = nodeid.split("[", 1)[0].split("::")
        return f"{file}::{names[0]}" if len(names) > 1 else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneByOne:
    return OneByOne(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with Spark first: where two processes share the tests, short ones are left to fill the end of either."""
    unmarked = [
        item.nodeid
        for item in items
        if "spark" in getattr(item, "fixturenames", ()) and item.get_closest_marker("spark") is None
    ]
    if unmarked:
        raise pytest.UsageError(f"tests that use the fixture `spark` are to be marked `spark`: {', '.join(unmarked)}")
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("spark") for item in session.items):
        from tests.spark_classes import use_archive  # here, so that tests without Spark need no Java

        use_archive(session.config.cache.mkdir("spark-classes"))


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server with the bucket `tests.s3.BUCKET`, which all tests share: each uses a prefix of its own."""
    from tests.s3 import s3_server  # here, because it takes half a second

    with s3_server() as endpoint:
        yield endpoint


@contextmanager
def started(server: AbstractContextManager[T]) -> Iterator[T]:
    """Skips the test where the server's programs are missing."""
    from strandline_bench.servers.server import ServerMissingError

    with ExitStack() as stack:
        try:
            entered = stack.enter_context(server)
        except ServerMissingError as error:
            pytest.skip(str(error))
        yield entered


@pytest.fixture(scope="session")
def kafka_of_process() -> Iterator[KafkaBroker]:
    from strandline_bench.servers.kafka import kafka_broker  # here, so that tests without Kafka do not load its client

    with started(kafka_broker()) as broker:
        yield broker


@pytest.fixture
def kafka(kafka_of_process: KafkaBroker) -> Iterator[KafkaBroker]:
    """One broker for all tests of a process: each uses topics of its own, and may kill, freeze or stop the broker."""
    yield kafka_of_process
    kafka_of_process.ensure_running()


@pytest.fixture(scope="session")
def postgres_of_process() -> Iterator[Postgres]:
    # here, so that tests without PostgreSQL do not load its client
    from strandline_bench.servers.postgres import postgres

    with started(postgres()) as server:
        yield server


@pytest.fixture
def postgres(postgres_of_process: Postgres) -> Iterator[Postgres]:
    """One cluster for all tests of a process: each uses databases of its own, and may kill, freeze or stop it."""
    yield postgres_of_process
    postgres_of_process.ensure_running()


@pytest.fixture
def postgres_schema(postgres: Postgres) -> Schema:
    """An empty schema in that cluster."""
    return postgres.create_schema()


@pytest.fixture(scope="session")
def iceberg_java_of_process() -> Iterator[IcebergJava]:
    from tests.iceberg_java import iceberg_java  # here, so that tests without Iceberg do not load it

    with iceberg_java() as server:
        yield server


@pytest.fixture
def iceberg_java(iceberg_java_of_process: IcebergJava) -> Iterator[IcebergJava]:
    """One catalogue server for all tests of a process: each uses a namespace of its own."""
    yield iceberg_java_of_process
    iceberg_java_of_process.ensure_running()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests of a process."""
    from tests.jobs.place import start_spark  # here, so that tests without Spark do not load it

    session = start_spark()
    yield session
    session.stop()
