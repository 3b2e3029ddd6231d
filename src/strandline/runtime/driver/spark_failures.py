"""What Spark's text of an error says: the error that our own code raised in a task, or why a batch failed."""

from __future__ import annotations

import re

from strandline.errors import StrandlineError, UserCodeError
from strandline.runtime.driver.sink_failures import lasting_failure_in_task
from strandline.runtime.driver.source_failures import failure_in_batch
from strandline.runtime.protocol.failures import Failure

_BAD_VALUE = re.compile(r"\[\w+(?:\.\w+)*\] .*SQLSTATE: 22\w{3}")
"""An error of Spark's about a value, such as a text that is no number. SQL calls these states data exceptions."""
_CANCELLED = re.compile(r"\[SPARK_JOB_CANCELLED\].*")
_RAISED = re.compile(r"^strandline\.errors\.(\w+): (.*?)(?=^\S*\n?\tat |\Z)", re.MULTILINE | re.DOTALL)


def bad_value(where: str, text: str) -> UserCodeError | None:
    """The error for an expression in front of a step that cannot compute a value of some row; None if it is none."""
    found = _BAD_VALUE.search(text)
    if found is None:
        return None
    return UserCodeError(
        f"{where}: an expression of Spark's failed for a value, and a restart would meet it again: {found[0]} -- use "
        "an expression that gives null, such as try_cast, and filter such rows"
    )


def failure_of_batch(where: str, text: str) -> StrandlineError:
    """The error for a batch whose Spark job failed."""
    known = error_in_task(text) or failure_in_batch(where, text) or lasting_failure_in_task(where, text)
    known = known or bad_value(where, text)
    if known is not None:
        return known
    cancelled = _CANCELLED.search(text)  # for instance by Ctrl-C: its stack trace says nothing
    return StrandlineError(f"{where}: {cancelled[0] if cancelled is not None else text}")


def error_in_task(text: str) -> StrandlineError | None:
    """The Strandline error that a Python worker raised, parsed from Spark's error text; None if there is none."""
    found = _RAISED.search(text)
    if found is None:
        return None
    return Failure(found[1], found[2].strip()).error()
