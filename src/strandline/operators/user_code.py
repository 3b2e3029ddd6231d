"""Calls of user code: errors with the user's own traceback, and a check of the user's object in the driver."""

from __future__ import annotations

import os
import traceback
from typing import Any, Final

from pyspark.errors import PySparkException

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

NOT_BY_USER_CODE: Final = (GeneratorExit, KeyboardInterrupt)
"""What may come out of a call of user code and is no failure of it. All else is one, also `sys.exit()`, which would end
the thread that called, and nobody would learn of it."""


def explained(error: BaseException, where: str, method: str) -> Exception:
    """The error to raise for an error that came out of a call of user code.

    A wrong call of ours by user code becomes a `UserCodeError` with `where` in front: it would fail again for the same
    rows, so the run ends. A `SchemaError` stays one. Other errors of our own stay as they are. Errors of the user's own
    code become a `UserCodeError` with their traceback.
    """
    if isinstance(error, SchemaError):
        return SchemaError(f"{where}: {error}")
    # The errors of Spark's interface are of our classes and of PySpark's.
    if type(error) in (StrandlineError, JobDefinitionError) or (
        isinstance(error, StrandlineError) and isinstance(error, PySparkException)
    ):
        return UserCodeError(f"{where}: {error}")
    if isinstance(error, StrandlineError):
        return error
    return call_failed(where, f"{method}()", error)


def call_failed(where: str, what: str, error: BaseException) -> UserCodeError:
    """The error for user code that raised `error`: the cause is in the first line, the traceback follows.

    `what` names the code, such as `open()`. Only the first line is shown where there is room for one.
    """
    return UserCodeError(f"{where}: {what} failed: {cause_line(error)}\n{user_traceback(error)}")


def cause_line(error: BaseException) -> str:
    """The class and the first line of the words of an error, as a traceback ends: `TypeError: …`."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((line for line in lines if not line.startswith(" ")), type(error).__name__)  # a SyntaxError shows code


def user_traceback(error: BaseException) -> str:
    """The traceback of an error in user code, without the frames of this package."""
    report = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    todo: list[traceback.TracebackException | None] = [report]
    while todo:
        part = todo.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        own = [frame for frame in part.stack if not os.path.abspath(frame.filename).startswith(_PACKAGE)]
        part.stack = traceback.StackSummary.from_list(own)
        todo += [part.__cause__, part.__context__]
    return "".join(report.format()).rstrip()


def opened_copy(processor: Any, context: Any, uid: str, name: str, method: str = "open") -> Any:
    """Open a copy of the user's object in the driver, to learn which states it declares; returns the copy.

    The copy is made by pickling, as it is for the slots. Raises `JobDefinitionError` if the object cannot be pickled or
    declares something wrong, and `UserCodeError` if its `open` fails.
    """
    from pyspark import cloudpickle  # private Spark API: see design note 009

    try:
        copy = cloudpickle.loads(cloudpickle.dumps(processor))  # type: ignore[no-untyped-call]  # PySpark's own
    except NOT_BY_USER_CODE:
        raise
    except BaseException as error:  # pickling runs user code
        raise JobDefinitionError(
            f"operator {uid!r}: {name} cannot be sent to the slots: {error}; "
            f"create what cannot be pickled (connections, locks, ...) in {method}()"
        ) from error
    try:
        if hasattr(copy, "open"):
            copy.open(context)
    except StrandlineError as error:
        raise JobDefinitionError(f"operator {uid!r}: {method}(): {error}") from error
    except NOT_BY_USER_CODE:
        raise
    except BaseException as error:  # noqa: BLE001  # user code may raise anything
        raise UserCodeError(
            f"operator {uid!r}: {method}() failed in the driver, where a copy of the processor is "
            f"opened to check its states (context.subtask is -1 there): {cause_line(error)}\n{user_traceback(error)}"
        ) from None
    return copy
