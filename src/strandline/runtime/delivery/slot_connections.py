"""Connections to slots, kept while the process lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from strandline.errors import SlotLostError
from strandline.runtime.delivery.deliveries import DeliveryExchange
from strandline.runtime.delivery.relay_pulse import RelayPulse
from strandline.runtime.protocol.address import Address
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.coordinator_calls import CoordinatorClient
from strandline.runtime.protocol.exchange import ExchangeHeader
from strandline.runtime.protocol.slot_calls import SlotClient
from strandline.runtime.protocol.tls import Tls

SLOT_PATIENCE = 10
"""After how many times the heartbeat timeout a relay gives up a slot that does not answer. The slot's task manager and
the driver are quicker, and they can tell a frozen slot from a busy one."""

_clients: dict[tuple[str, int], SlotClient] = {}
"""By the name of the addresses, and the slot. Two threads may use one: a call of an older round may still go on."""


@dataclass(frozen=True, slots=True)
class SlotConnections:
    """How the tasks and slots of a run reach its slots; part of the plan."""

    coordinator: Address
    secret: str = field(repr=False)
    run_id: str
    heartbeat_timeout: float = 8.0
    tls: Tls | None = field(default=None, repr=False)

    def slot(self, header: ExchangeHeader, addresses: str) -> SlotClient:
        """A connection to the subtask's slot, kept until slots move: `addresses` changes then."""
        client = _clients.get((addresses, header.subtask))
        if client is None:
            if any(known != addresses for known, _slot in list(_clients)):
                _clients.clear()
            address = self._addresses(header).get(header.subtask)
            if address is None:
                raise SlotLostError(f"slot {header.subtask} is not running")
            client = self._connect(address, header)
            _clients[(addresses, header.subtask)] = client
        return client

    def delivery(self, header: ExchangeHeader, schema: pa.Schema, addresses: str) -> DeliveryExchange:
        """Begins to deliver rows to the subtask's slot."""
        client = self.slot(header, addresses)
        return DeliveryExchange(header, schema, client, partial(self.pulse, header, client.address))

    def forget(self) -> None:
        """Make new connections for the next exchange: one of these has failed."""
        _clients.clear()

    def pulse(self, header: ExchangeHeader, slot: Address, give_up: Callable[[], None]) -> RelayPulse:
        """Signs of life for an exchange. `give_up` is called if the slot does not answer them for very long."""
        connect = partial(self._connect, slot, header)
        return RelayPulse(header.exchange, connect, SLOT_PATIENCE * self.heartbeat_timeout, give_up)

    def _connect(self, slot: Address, header: ExchangeHeader) -> SlotClient:
        return SlotClient(slot, self.secret, self.run_id, lambda: header.generation, tls=self.tls)

    def driver(self, generation: int) -> CoordinatorClient:
        """A connection to the driver, on behalf of a generation."""
        return CoordinatorClient(self.coordinator, self.secret, self.run_id, lambda: generation, tls=self.tls)

    def _addresses(self, header: ExchangeHeader) -> dict[int, Address]:
        driver = self.driver(header.generation)
        try:
            return driver.slot_addresses(NOTHING)
        finally:
            driver.close()
