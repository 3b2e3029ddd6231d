"""An exchange of rows between a relay and a slot: what goes over the wire, and in which order.

1. The relay opens the exchange with an `ExchangeHeader`, and tells its schema.
2. The slot answers `SEND_INPUT`, if the subtask is not prepared yet. Then the relay sends all rows, and at the end how
   many they were.
3. The slot answers `OUTPUT_FOLLOWS` once the subtask is prepared, and then its output rows.
"""

from __future__ import annotations

import msgspec

from strandline.runtime.protocol.messages import BatchTime

SEND_INPUT = b"send input"
OUTPUT_FOLLOWS = b"output follows"


class ExchangeHeader(msgspec.Struct, frozen=True):
    """Says to which attempt of which batch an exchange belongs; the slot refuses a stale one."""

    generation: int
    batch: int
    round: int
    operator: str
    subtask: int
    attempt: int
    time: BatchTime
    initial: bool = False
    """Whether the rows are initial state, before the first batch of a job that begins."""
    exchange: str = ""
    """Names the exchange. The relay gives signs of life under this name until the exchange ends."""
