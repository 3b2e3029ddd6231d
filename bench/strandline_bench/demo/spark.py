"""A local Spark session whose whole output goes to a file, and whose JVM is gone when it is closed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from strandline.errors import StrandlineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {
    "spark.master": "local[2]",
    "spark.app.name": "strandline demo",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
}


@contextlib.contextmanager
def quiet_spark(scratch: Path, log_path: Path) -> Iterator[tuple[SparkSession, int]]:
    """A session and the process id of its JVM.

    The JVM prints warnings before any setting of the log is read, and errors for each task that a killed slot fails, so
    its output is redirected when it is started. Raises `StrandlineError` if it cannot be started.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        raise StrandlineError("the demo starts a Spark session of its own; stop the one that runs in this process")
    settings = {
        **_SETTINGS,
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
    }
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with log_path.open("ab") as output:
        try:
            gateway = launch_gateway(conf, {"stdout": output, "stderr": output})  # type: ignore[no-untyped-call]
        except (PySparkRuntimeError, OSError) as error:
            raise StrandlineError(_did_not_start(log_path)) from error
    process: subprocess.Popen[bytes] = gateway.proc
    try:
        context = SparkContext(conf=conf, gateway=gateway)
        try:
            yield SparkSession(context), process.pid
        finally:
            context.stop()
    finally:
        gateway.shutdown()
        # PySpark keeps the gateway for a next session of this process; this one is gone.
        SparkContext._gateway = SparkContext._jvm = None
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The JVM ends when its standard input closes; if it does not, it is killed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _did_not_start(log_path: Path) -> str:
    with contextlib.suppress(OSError):
        tail = log_path.read_text(errors="replace").strip()[-2000:]
        return f"Spark did not start. It needs Java 17 or newer (JAVA_HOME, or java on the PATH). It said:\n{tail}"
    return "Spark did not start. It needs Java 17 or newer (JAVA_HOME, or java on the PATH)."
