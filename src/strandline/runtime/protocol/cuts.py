"""What relays and driver say to each other in real time, where a relay runs for long and its rows are cut into epochs.

A relay that has rows asks the driver for its next cut. The driver answers when it is ready for the next epoch. The
relay then sends all rows that it has, and reports them: what it sent, and how far it has read its source.
"""

from __future__ import annotations

import msgspec

from strandline.runtime.protocol.exchange import Delivery
from strandline.runtime.protocol.failures import Failure


class ReadPart(msgspec.Struct, frozen=True, array_like=True):
    """What a relay has read of one partition of a topic since its last cut."""

    stream: int
    """The number of the stream of Spark; see `Graph.source_places`."""
    topic: str
    partition: int
    first_offset: int
    next_offset: int
    """The offset after that of the last row."""
    rows: int
    latest_ms: int | None
    """The latest event time among the rows; None if the source has no event time, or no row has one."""


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """One relay's part of an epoch."""

    batch: int
    """The id of the epoch, which is a batch."""
    deliveries: list[Delivery]
    read: list[ReadPart]


class RelayNews(msgspec.Struct, frozen=True, array_like=True):
    """What a relay says when it asks for its next cut."""

    relay: str
    cut: Cut | None
    """The last cut, which the driver waits for; None before the first."""
    has_rows: bool
    """Whether the relay has rows for another cut. The answer waits for its time."""
    failure: Failure | None = None
    """Why the relay ends. Spark would only say that its worker is gone."""


class CutOrder(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a relay."""

    batch: int | None
    """The epoch for which the relay delivers its rows now; None if it should ask again when it has rows."""
    decided: int | None = None
    """The epoch before, if slots may not have heard that it is decided. The relay tells those that get rows."""


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Ends the rows of one cut in an exchange that goes on."""

    batch: int
    rows: int
    decided: int | None = None
    """See `CutOrder`."""

    def delivery_of(self, exchange: str) -> str:
        """What `Delivery.exchange` calls the section of an exchange."""
        return f"{exchange}.{self.batch}"


def exchange_of(delivery: str) -> str:
    """The exchange that brings a section; see `Section.delivery_of`."""
    return delivery.partition(".")[0]
