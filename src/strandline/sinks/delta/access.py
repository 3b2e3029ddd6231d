"""Opens Delta tables with delta-rs: its settings of object stores, and its errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deltalake import DeltaTable
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from strandline.errors import SinkError, StorageFullError, StorageRefusedError, StrandlineError
from strandline.redaction import secret_values, without_values
from strandline.storage import is_local

_ENDPOINTS = re.compile(r"(aws_)?endpoint(_url(_s3)?)?", re.IGNORECASE)
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_DEFAULTS = {
    # The caller tries again itself.
    "max_retries": "3",
    "retry_timeout": "30s",
}
_S3_DEFAULTS = {
    # A version of the table is an object that must not exist yet: S3 checks that, and nobody may switch it off by
    # accident with a variable of the environment.
    "aws_conditional_put": "etag",
    "aws_s3_allow_unsafe_rename": "false",
}
_FULL = re.compile(r"no space left|quota exceeded|disk full", re.IGNORECASE)
_NO_RIGHT = re.compile(
    r"permission ?denied|access ?denied|forbidden|unauthori[sz]ed|unauthenticated|read-only file system", re.IGNORECASE
)
_REFUSED = re.compile(r"read-only|failed validation", re.IGNORECASE)


def delta_options(path: str, options: Mapping[str, str]) -> dict[str, str]:
    """The storage options of a job as delta-rs takes them: the names are the same, but not the defaults."""
    if is_local(path):
        return {}
    given = {name.lower(): value for name, value in options.items()}
    endpoints = [value for name, value in given.items() if _ENDPOINTS.fullmatch(name)]
    endpoints += [os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ]
    if endpoints and endpoints[0].lower().startswith("http://"):
        given.setdefault("allow_http", "true")
    defaults = {**_DEFAULTS, **(_S3_DEFAULTS if path.lower().startswith("s3") else {})}
    return {**{name: value for name, value in defaults.items() if name.removeprefix("aws_") not in given}, **given}


def open_table(path: str, options: Mapping[str, str]) -> DeltaTable | None:
    """The newest version of a table; None if there is none."""
    try:
        return DeltaTable(path, storage_options=dict(options))
    except TableNotFoundError:
        return None


@contextmanager
def translated(place: str, options: Mapping[str, str]) -> Iterator[None]:
    """Translates errors of delta-rs into ours, without secrets. A `CommitFailedError` is left to the caller."""
    try:
        yield
    except (StrandlineError, CommitFailedError):
        raise
    except (DeltaError, OSError, ValueError) as error:
        raise translate(place, options, error) from None
    except BaseException as error:
        # delta-rs raises plain exceptions for errors of its libraries, and a class that has no name in Python for bugs.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise translate(place, options, error) from None


def translate(place: str, options: Mapping[str, str], error: BaseException) -> StrandlineError:
    """An error of delta-rs as one of ours."""
    text = without_values(_summary(error), secret_values(options))
    if _FULL.search(text):
        return StorageFullError(f"{place}: no space left for the table: {text}; free space")
    if _NO_RIGHT.search(text) or isinstance(error, PermissionError):
        return StorageRefusedError(
            f"{place}: the job lacks a right: {text}. Rows that are staged stay so; give the user that runs the "
            "driver, or the credentials in storage_options, read and write access to the folder of the table, and "
            "start the job again"
        )
    if _REFUSED.search(text) or isinstance(error, SchemaMismatchError | DeltaProtocolError):
        return StorageRefusedError(
            f"{place} refuses the job's commit: {text}. The rows stay staged; change the table or the rights, and "
            "start the job again"
        )
    return SinkError(f"{place}: {text}")


def _summary(error: BaseException) -> str:
    """delta-rs's message without colours, rows and the frames of its stack."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    plain = plain.partition("Preview of invalid data")[0]  # rows are not for logs
    lines = [line.strip(" ↳") for line in plain.splitlines()]
    kept = [line for line in lines if line and not re.match(r"\d+: |at \./", line)]
    return ": ".join(kept)[:1000] or type(error).__name__
