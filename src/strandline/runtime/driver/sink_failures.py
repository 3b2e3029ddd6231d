"""Decides what the failure of user code in a sink, or in one of Spark's tasks, means for the run.

The code of a sink talks to the world: a database that is down may be up again, so the restart strategy decides. Two
kinds of errors would occur again, and end the run at once: those that say that the code is wrong, and a missing
permission.
"""

from __future__ import annotations

import builtins
import re
from asyncio import CancelledError

from strandline.errors import SinkError, StorageRefusedError, StrandlineError, UserCodeError
from strandline.operators.user_code import cause_line, user_traceback

WRONG_CODE = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    SystemExit,
)
"""Errors that say that the user's code is wrong, not that something is out of order elsewhere."""


def is_spark_failure(error: BaseException) -> bool:
    """Whether a Spark action failed, which may succeed in a new round, and not the user's own code."""
    # Private Spark API: PySpark converts only some exceptions of the JVM. It raises the others as errors of Py4J, its
    # bridge to the JVM.
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    return isinstance(error, (PySparkException, Py4JError)) and not isinstance(error, AnalysisException)


def function_failure(where: str, error: BaseException) -> StrandlineError:
    """The error to raise for an exception that came out of the function of a sink.

    `SinkError` leads to the restart strategy; `UserCodeError` and `StorageRefusedError` end the run.
    """
    from pyspark.errors import AnalysisException

    text = user_traceback(error)
    if isinstance(error, PermissionError):
        return StorageRefusedError(f"{where}: the function of a sink was refused access: {cause_line(error)}\n{text}")
    meant_to_end = not isinstance(error, (Exception, CancelledError))
    if meant_to_end or isinstance(error, (*WRONG_CODE, AnalysisException)):
        return UserCodeError(
            f"{where}: the function of a sink raised {cause_line(error)}; a restart would raise it again\n{text}"
        )
    return SinkError(f"{where}: the function of a sink raised {cause_line(error)}\n{text}")


_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t]+.*\n|\n)+(?P<kind>[\w.]+)(?:: .*)?$", re.M)
_REFUSED = re.compile(
    r"^.*(?:java\.nio\.file\.AccessDeniedException|org\.apache\.hadoop\.security\.AccessControlException"
    r"|java\.io\.FileNotFoundException: .*\(Permission denied\)).*$",
    re.M,
)


def lasting_failure_in_task(where: str, text: str) -> StrandlineError | None:
    """The error for a Spark job whose task failed for a reason that would come again; None for any other reason.

    `text` is Spark's: it holds the traceback of the Python worker, or the exceptions of the JVM. The code may be that
    of a sink's function (`rows.foreachPartition(...)`), of a transform, or a writer of Spark's.
    """
    for found in _TRACEBACK.finditer(text):
        kind = getattr(builtins, found["kind"], None)
        if not isinstance(kind, type):
            continue
        if issubclass(kind, PermissionError):
            return StorageRefusedError(
                f"{where}: a Python function in a Spark task was refused access: {_last_line(found[0])}\n{found[0]}"
            )
        if issubclass(kind, WRONG_CODE):
            return UserCodeError(
                f"{where}: a Python function in a Spark task raised {_last_line(found[0])}; a restart would raise "
                f"it again\n{found[0]}"
            )
    refused = _REFUSED.search(text)
    if refused is not None:
        return StorageRefusedError(
            f"{where}: a Spark task was refused access: {refused[0].strip()}; give the user that runs the job access"
        )
    return None


def _last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]
