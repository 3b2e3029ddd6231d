"""Which failures of a sink's code pass, and which end the run."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from strandline.errors import SinkError, StorageRefusedError, StrandlineError, UserCodeError
from strandline.runtime.driver.sink_failures import function_failure, lasting_failure_in_task


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("database down"), SinkError),
        (ConnectionResetError(), SinkError),
        (TimeoutError(), SinkError),
        (OSError("no route"), SinkError),
        (ValueError("no JSON: <html>"), SinkError),
        (sqlite3.OperationalError("locked"), SinkError),
        (AssertionError(), UserCodeError),
        (TypeError(), UserCodeError),
        (UnboundLocalError(), UserCodeError),
        (KeyError("x"), UserCodeError),
        (ModuleNotFoundError(), UserCodeError),
        (SystemExit(1), UserCodeError),
        (KeyboardInterrupt(), UserCodeError),
        (pytest.fail.Exception("no rows"), UserCodeError),
        (asyncio.CancelledError(), SinkError),
        (PermissionError(13, "denied"), StorageRefusedError),
    ],
)
def test_what_the_failure_of_a_function_means(error: BaseException, kind: type[StrandlineError]) -> None:
    failure = function_failure("job visits, batch 7", error)
    assert type(failure) is kind
    assert str(failure).startswith("job visits, batch 7: the function of a sink ")
    assert type(error).__name__ in str(failure)


TEXT = """Job aborted due to stage failure: Task 0 failed 1 times: org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "/opt/job.py", line 7, in send
    deeper(row)
  File "/opt/job.py", line 9, in deeper
    {code}
    ^^^^^
{error}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
"""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("AssertionError", UserCodeError),
        ("NameError: name 'x' is not defined", UserCodeError),
        ("KeyError: 'x'", UserCodeError),
        ("PermissionError: [Errno 13] Permission denied: '/data'", StorageRefusedError),
        ("ConnectionError: database down", None),
        ("psycopg2.OperationalError: could not connect", None),
        ("psycopg2.errors.NameError: not Python's", None),
    ],
)
def test_what_the_failure_of_a_task_means(error: str, kind: type[StrandlineError] | None) -> None:
    failure = lasting_failure_in_task("job visits, batch 7", TEXT.format(code="x", error=error))
    assert (type(failure) if failure else None) is kind
    assert failure is None or ("line 9, in deeper" in str(failure) and "handlePythonException" not in str(failure))


@pytest.mark.parametrize(
    "line",
    [
        "org.apache.hadoop.security.AccessControlException: Permission denied: user=job, access=WRITE, inode=/out",
        "Caused by: java.nio.file.AccessDeniedException: s3a://bucket/out: PUT 0-byte object: 403",
        "java.io.FileNotFoundException: /out/part-0 (Permission denied)",
    ],
)
def test_a_writer_of_sparks_that_is_refused_is_reported_in_one_line(line: str) -> None:
    failure = lasting_failure_in_task("job visits, batch 7", f"Job aborted.\n{line}\n\tat org.apache.X.y(X.scala:1)\n")
    assert isinstance(failure, StorageRefusedError)
    assert line in str(failure)
    assert "\n" not in str(failure)


def test_a_failure_of_spark_alone_is_neither() -> None:
    assert lasting_failure_in_task("", "Python worker exited unexpectedly (crashed)\n\tat org.apache.X.y") is None
