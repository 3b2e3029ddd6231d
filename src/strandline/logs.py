"""How Strandline's log lines look: as text, or as one JSON object a line, without secrets."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final, Literal, cast, get_args

from strandline.errors import ConfigError
from strandline.redaction import without_values

LogFormat = Literal["text", "json"]

FORMAT_VARIABLE: Final = "STRANDLINE_LOG_FORMAT"
"""The environment variable that names the format: `text` or `json`."""
LOGGER: Final = "strandline"
"""The logger above all loggers of this package."""

_FIELDS: Final = ("job", "run", "step", "subtask", "checkpoint")
"""What a JSON line says beside time, level, logger and message, where it is known."""
_IN_MESSAGE: Final = {
    "job": re.compile(r"^job '?([A-Za-z0-9._-]+?)'?[:, ]"),
    "step": re.compile(r"\b(?:operator|step) '?([^\s':,]+)"),
    "subtask": re.compile(r"\b(?:slot|subtask) (\d+)\b"),
    "checkpoint": re.compile(r"\bcheckpoint (\d+)\b"),
}
"""How messages name these things, for lines of threads that did not say what they work on."""
_NUMBERS: Final = frozenset({"subtask", "checkpoint"})

_context: ContextVar[Mapping[str, str | int]] = ContextVar("strandline_log_context", default=MappingProxyType({}))


@contextmanager
def log_context(**fields: str | int) -> Iterator[None]:
    """JSON lines of this thread carry `fields`, such as `step` and `checkpoint`, in the meantime."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


class TextFormatter(logging.Formatter):
    """One event as text, without secrets. A traceback follows in lines of its own."""

    def __init__(self, process: str = "", secrets: Sequence[str] = ()) -> None:
        """`process` says which kind of process writes: `slot`, `task manager`."""
        super().__init__(f"%(asctime)s %(levelname)s {process + ' ' if process else ''}%(name)s: %(message)s")
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return without_values(super().format(record), self._secrets)


class JsonFormatter(logging.Formatter):
    """One event as one line of JSON, without secrets.

    The line has `time` (UTC), `level`, `logger`, `message`; where they are known `job`, `run`, `step`, `subtask` and
    `checkpoint`; and `error`, the traceback, if there is one.
    """

    def __init__(self, fields: Mapping[str, str | int] | None = None, secrets: Sequence[str] = ()) -> None:
        """`fields` are the same for all lines of the process."""
        super().__init__()
        self._fields = dict(fields or {})
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, str | int] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._known(record, message),
            "message": self._shown(message),
        }
        if record.exc_info:
            line["error"] = self._shown(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)

    def _known(self, record: logging.LogRecord, message: str) -> dict[str, str | int]:
        known: dict[str, str | int] = {}
        context = _context.get()
        for name in _FIELDS:
            value = getattr(record, name, None) or context.get(name, self._fields.get(name))
            if value is None and name in _IN_MESSAGE and (found := _IN_MESSAGE[name].search(message)):
                value = int(found[1]) if name in _NUMBERS else found[1]
            if value is not None:
                known[name] = value if isinstance(value, int) else self._shown(str(value))
        return known

    def _shown(self, text: str) -> str:
        return without_values(text, self._secrets)


def formatter(
    format: LogFormat, process: str = "", fields: Mapping[str, str | int] | None = None, secrets: Sequence[str] = ()
) -> logging.Formatter:
    """The formatter of a process that writes its own log file."""
    return JsonFormatter(fields, secrets) if format == "json" else TextFormatter(process, secrets)


def environment_format() -> LogFormat:
    """The format that the environment asks for. Raises `ConfigError` for an unknown one."""
    return _checked(os.environ.get(FORMAT_VARIABLE) or "text", FORMAT_VARIABLE)


def configure_logging(format: LogFormat = "text", level: int | str = "INFO") -> None:
    """Write Strandline's log lines of this process to its standard error, as text or as one JSON object a line.

    Nothing is changed unless this is called: Strandline logs through Python's `logging`, and the user's own handlers
    get its lines. After this call they do not, so that no line appears twice. Task managers and slots of runs that
    start later write their log files in the same format. May be called again.

    Args:
        format: `text` or `json`.
        level: The least level of lines that are written.

    Raises:
        ConfigError: The format or the level is not known.
    """
    chosen = _checked(format, "format")
    logger = logging.getLogger(LOGGER)
    try:
        logger.setLevel(level)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"configure_logging: level {level!r} is not known; allowed: 'DEBUG', 'INFO', …") from error
    for handler in [one for one in logger.handlers if isinstance(one, _OwnHandler)]:
        logger.removeHandler(handler)
    handler = _OwnHandler(sys.stderr)
    handler.setFormatter(formatter(chosen))
    logger.addHandler(handler)
    logger.propagate = False
    os.environ[FORMAT_VARIABLE] = chosen


def configure_from_environment() -> LogFormat:
    """What `STRANDLINE_LOG_FORMAT` asks for: `configure_logging` with that format, unless it was called before."""
    chosen = environment_format()
    if os.environ.get(FORMAT_VARIABLE):
        logger = logging.getLogger(LOGGER)
        if not any(isinstance(handler, _OwnHandler) for handler in logger.handlers):
            configure_logging(chosen)
    return chosen


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """The handler that `configure_logging` adds, so that a second call can replace it."""


def _checked(format: str, where: str) -> LogFormat:
    if format not in get_args(LogFormat):
        raise ConfigError(f"{where}: the log format {format!r} is not known; allowed: {', '.join(get_args(LogFormat))}")
    return cast("LogFormat", format)
