"""`ArrowProcessor`: the base class of user code that gets Arrow tables of many keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pyarrow as pa

from strandline.operators.process.arrow_context import ArrowContext, Rows

ArrowFunction: TypeAlias = Callable[[pa.Table, ArrowContext], Any]


class ArrowProcessor:
    """Base class of user code on Arrow tables. A subtask has one instance for the whole run."""

    def open(self, context: ArrowContext) -> None:
        """Called once per subtask. Declare every state here."""

    def process(self, table: pa.Table, context: ArrowContext) -> Rows | Iterable[Rows] | None:
        """Called with all rows of many keys. The rows of a key are next to each other; a key comes once per batch.

        Return or yield tables or record batches with the columns of the output schema, or return None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no process() method")

    def close(self) -> None:
        """Called when the subtask stops without an error."""
