"""The state of one key can be read from a committed backend without an operator."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from strandline.errors import SchemaError, StrandlineError
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.state.backends.heap import HeapBackend
from strandline.state.coding.ddl import parse_schema
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.query import encode_key, read_state, read_timers
from strandline.testing import ProcessorHarness


class Everything(KeyedProcessor):
    """One state of each kind, with and without an end."""

    def open(self, context: Any) -> None:
        self.values = [context.value_state(name, "n long, s string", ttl) for name, ttl in (("v", None), ("vt", "10s"))]
        self.lists = [context.list_state(name, "long", ttl) for name, ttl in (("l", None), ("lt", "10s"))]
        self.maps = [context.map_state(name, "a array<int>", "long", ttl) for name, ttl in (("m", None), ("mt", "10s"))]
        self.most = context.reducing_state("r", "long", max)
        self.many = context.aggregating_state("a", "long", create=lambda: 0, add=lambda n, _: n + 1, result=str)

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
        for row in rows:
            for value in self.values:
                value.update((row.x, "y"))
            for values in self.lists:
                values.append_value(row.x)
            for entries in self.maps:
                entries.put([row.x], row.x)
            self.most.add(row.x)
            self.many.add(row.x)
            context.register_timer(10**9 + row.x)


def test_every_kind_of_state_is_read_and_what_is_expired_is_not() -> None:
    with ProcessorHarness(
        Everything(), input_schema="k string, j int, x long", key=["k", "j"], output_schema="x long",
        time_mode="processing",
    ) as h:  # fmt: skip
        h.process([("a", None, 1), ("a", None, 3), ("a", 1, 2)])
        h.processing_time_ms = 9_000
        h.process([("a", 1, 5)])
        names = ("v", "vt", "l", "lt", "m", "mt", "r", "a")
        first = (3, "y"), (3, "y"), [1, 3], [1, 3], {(1,): 1, (3,): 3}, {(1,): 1, (3,): 3}, 3, 2
        assert tuple(h.state(name, ("a", None)) for name in names) == first
        assert h.timers(("a", None)) == [10**9 + 1, 10**9 + 3]
        h.processing_time_ms = 10_000
        later: tuple[Any, ...] = (3, "y"), None, [1, 3], [], {(1,): 1, (3,): 3}, {}, 3, 2
        assert tuple(h.state(name, ("a", None)) for name in names) == later
        assert [h.state(name, ("a", 1)) for name in ("vt", "lt", "mt")] == [(5, "y"), [5], {(5,): 5}]
        nothing: tuple[Any, ...] = None, None, [], [], {}, {}, None, None
        assert tuple(h.state(name, ("b", 1)) for name in names) == nothing
        assert h.timers(("b", 1)) == []


def test_a_key_is_encoded_as_rows_are() -> None:
    schema = parse_schema("a long, b string, c timestamp, d decimal(5,2), e double")
    at = datetime(2024, 1, 2, tzinfo=UTC)
    one = encode_key(schema, (1, "x", at, Decimal("1.50"), 0.0), 300)
    assert one[:2] == (300).to_bytes(2, "big")
    assert one == encode_key(schema, [1, "x", at, Decimal("1.5"), -0.0], 300)
    assert one != encode_key(schema, (1, "x", at, Decimal("1.5"), None), 300)


@pytest.mark.parametrize("key", [(), (1, 2), ("x",), (1 << 70,), ({},)])
def test_a_key_that_does_not_fit_is_refused(key: Any) -> None:
    with pytest.raises(SchemaError, match="key"):
        encode_key(parse_schema("a long"), key, 0)


def test_a_state_that_has_no_keys_of_its_own_is_refused() -> None:
    backend = HeapBackend()
    key = encode_key(parse_schema("a long"), (1,), 0)
    with pytest.raises(StrandlineError, match="of kind timers, which cannot be read for one key"):
        read_state(backend, StateDescriptor("__sl_timers", "timers", "a long"), key, 0)
    assert read_timers(backend, key) == []
