"""What all tests share: how they are spread over processes, the JVM's options, a Spark session and an S3 server."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A busy machine is no reason to fail.
settings.register_profile("strandline", deadline=None)
settings.load_profile("strandline")

# Runs of tests are no runs of the user's: a folder of their own holds their entries.
RUNS = tempfile.mkdtemp(prefix="strandline-runs-")
os.environ["STRANDLINE_RUNS_DIR"] = RUNS
atexit.register(shutil.rmtree, RUNS, ignore_errors=True)

os.environ["PYSPARK_PYTHON"] = sys.executable
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


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server with the bucket `tests.s3.BUCKET`, which all tests share: each uses a prefix of its own."""
    from tests.s3 import s3_server  # here, because it takes half a second

    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests of a process."""
    from tests.jobs.place import start_spark  # here, so that tests without Spark do not load it

    session = start_spark()
    yield session
    session.stop()
