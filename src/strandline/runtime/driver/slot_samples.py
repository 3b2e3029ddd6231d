"""What the driver knows about each slot: the figures that it gave last, and where it runs."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.runtime.protocol.slot_calls import SlotFigures


@dataclass(frozen=True, slots=True)
class SlotSample:
    """The figures of a slot at one moment."""

    index: int
    task_manager: str
    host: str
    figures: SlotFigures
    durability_wait_ns: int = 0
    """How long batches have waited in the task manager until their segments were durable, since it started."""
