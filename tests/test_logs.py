"""How log lines look: text or JSON, with what is known, without secrets."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

import strandline as sl
from strandline.errors import ConfigError
from strandline.logs import FORMAT_VARIABLE, LOGGER, JsonFormatter, TextFormatter, environment_format, log_context


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("strandline.x", logging.WARNING, "x.py", 1, message, args, more.get("exc_info"))


def as_json(formatter: JsonFormatter, given: logging.LogRecord) -> dict[str, Any]:
    text = formatter.format(given)
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text)
    return line


def test_a_json_line_has_time_level_logger_and_message() -> None:
    line = as_json(JsonFormatter(), record("slow: %d ms", 12))
    assert line["time"].endswith("Z")
    assert {name: line[name] for name in ("level", "logger", "message")} == {
        "level": "WARNING",
        "logger": "strandline.x",
        "message": "slow: 12 ms",
    }
    assert line.keys() == {"time", "level", "logger", "message"}


def test_a_json_line_has_what_the_process_and_the_thread_know() -> None:
    formatter = JsonFormatter({"job": "visits", "run": "r1", "subtask": 3})
    with log_context(step="totals", checkpoint=7):
        line = as_json(formatter, record("written"))
    known = {name: line[name] for name in ("job", "run", "step", "subtask", "checkpoint")}
    assert known == {"job": "visits", "run": "r1", "step": "totals", "subtask": 3, "checkpoint": 7}
    assert "step" not in as_json(formatter, record("written"))


def test_a_json_line_of_the_driver_finds_job_checkpoint_and_subtask_in_the_message() -> None:
    line = as_json(JsonFormatter(), record("job %s: checkpoint %d, slot %d: lost", "visits", 12, 3))
    assert {name: line[name] for name in ("job", "checkpoint", "subtask")} == {
        "job": "visits",
        "checkpoint": 12,
        "subtask": 3,
    }


def test_an_error_is_a_field_of_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = as_json(JsonFormatter(), record("failed", exc_info=(type(error), error, error.__traceback__)))
    assert "ValueError: two" in line["error"]


def test_no_line_shows_a_secret() -> None:
    given = record("GET s3://user:word@bucket/x with hunter22")
    for formatter in (JsonFormatter({}, ["hunter22"]), TextFormatter("slot", ["hunter22"])):
        text = formatter.format(given)
        assert "hunter22" not in text
        assert "word" not in text


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Brings the logger back to what it was before."""
    logger = logging.getLogger(LOGGER)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    monkeypatch.setenv(FORMAT_VARIABLE, "text")
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.mark.usefixtures("own_logging")
def test_configure_logging_writes_json_once_and_leaves_the_root_logger_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = list(logging.getLogger().handlers)
    sl.configure_logging("text")
    sl.configure_logging(format="json")
    logging.getLogger("strandline.test").info("job %s: begins", "visits")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["job"] == "visits"
    assert logging.getLogger().handlers == root
    assert os.environ[FORMAT_VARIABLE] == "json"


@pytest.mark.usefixtures("own_logging")
def test_an_unknown_format_or_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="allowed: text, json"):
        sl.configure_logging("xml")  # type: ignore[arg-type]  # what a user may write
    with pytest.raises(ConfigError, match="'LOUD' is not known"):
        sl.configure_logging(level="LOUD")
    monkeypatch.setenv(FORMAT_VARIABLE, "xml")
    with pytest.raises(ConfigError, match=FORMAT_VARIABLE):
        environment_format()
