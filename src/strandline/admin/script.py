"""Runs a Python file as `python FILE` does: as `__main__`, with its own arguments and its folder on the path."""

from __future__ import annotations

import builtins
import io
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

from strandline.admin.problems import UsageError


def run_script(path: str, arguments: list[str]) -> int:
    """Run the file, and return its exit code.

    An exception of the script is printed with its traceback, and the exit code is 1. `SystemExit` counts as in Python.
    The module stays `__main__` afterwards: threads and functions of the script may outlive its last line.

    Raises `UsageError` if the file cannot be read.
    """
    code = _compiled(path)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __loader__=SourceFileLoader("__main__", path))
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        return _code_of(end)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises ends it, as in Python
        # The first frame is the one of this function.
        own = error.__traceback__
        traceback.print_exception(type(error), error, own.tb_next if own is not None else None)
        return 1
    return 0


def _compiled(path: str) -> CodeType:
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the script {path}: {error.strerror or error}") from None
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        told = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"{path} is no Python script:\n{told}") from None


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    sys.stderr.write(f"{end.code}\n")
    return 1
