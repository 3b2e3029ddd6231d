"""Faults in calls between processes: wraps the connection of every client of a run.

Two environment variables switch it on, for the driver and for all processes that start below it:
`STRANDLINE_CONNECTION_HOOK=strandline.testing.call_faults:FaultyConnection`, and `STRANDLINE_TRIGGER`, the path of a
control file (see `strandline.testing.triggers`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from strandline.testing.triggers import Control, Trigger

TRIGGER_VARIABLE = "STRANDLINE_TRIGGER"
HOOK = f"{__name__}:FaultyConnection"
"""The value of the environment variable that names the hook."""


class FaultyConnection:
    """A Flight client whose calls and exchanges are operations of a `Trigger`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._trigger = Trigger(Path(os.environ[TRIGGER_VARIABLE]))

    def do_action(self, action: Any, options: Any) -> list[Any]:
        """Flight's own call, whose results are read here: so a failure afterwards means that the answer got lost."""
        with self._trigger.around(f"call {action.type}", _no_answer):
            return list(self._client.do_action(action, options))

    def do_exchange(self, descriptor: Any, options: Any) -> tuple[Any, Any]:
        with self._trigger.around("rows open", _no_answer):
            writer, reader = self._client.do_exchange(descriptor, options)
        return writer, FaultyReader(reader, self._trigger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class FaultyReader:
    """The reader of an exchange. Every chunk that it reads is an operation."""

    def __init__(self, reader: Any, trigger: Trigger) -> None:
        self._reader = reader
        self._trigger = trigger

    def read_chunk(self) -> Any:
        with self._trigger.around("rows chunk", _no_answer):
            return self._reader.read_chunk()

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                chunk = self._reader.read_chunk()
            except StopIteration:
                return
            yield chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def _no_answer(text: str, control: Control) -> Exception:
    error: Exception = flight.FlightTimedOutError(text) if control.seconds else flight.FlightUnavailableError(text)
    return error
