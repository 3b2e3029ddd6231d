"""`KeyedProcessor`: the base class of user code that runs key by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from strandline.operators.process.key_chunks import Key
from strandline.operators.process.process_context import ProcessContext


class KeyedProcessor:
    """Base class of per-key user code. A subtask has one instance for the whole run."""

    def open(self, context: ProcessContext) -> None:
        """Called once per subtask. Declare every state here."""

    def process(self, key: Key, rows: Iterator[Any], context: ProcessContext) -> Iterable[Any] | None:
        """Called once per key and batch, with all rows of the key. Yield or return output rows, or return None."""
        raise NotImplementedError(f"{type(self).__name__} has no process() method")

    def on_timer(self, key: Key, timestamp: int, context: ProcessContext) -> Iterable[Any] | None:
        """Called for each due timer of a key, after the rows of the batch and in the order of time.

        It may do everything that `process` may do. The timer is deleted after the call.
        """
        return None

    def close(self) -> None:
        """Called when the subtask stops without an error."""
