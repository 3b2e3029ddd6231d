"""Values that are past their time are never seen again, and are gone in the end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.state.handles.ttl import DEFAULT_SWEEP, SweepBudget, parse_ttl
from strandline.testing.harness import ProcessorHarness
from tests.examples import examples

TTL_MS = 10
READS = ("get", "value?", "list", "list?", "map", "map-get", "map?", "map-keys", "map-values", "map-contains")


class Steps(KeyedProcessor):
    """Does to its states what its rows say, and yields what it reads."""

    def __init__(self, update: str) -> None:
        self.update = update

    def open(self, context: Any) -> None:
        options = {"ttl": timedelta(milliseconds=TTL_MS), "ttl_update": self.update}
        self.value = context.value_state("v", "long", **options)
        self.list = context.list_state("l", "long", **options)
        self.map = context.map_state("m", "long", "long", **options)

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        for row in rows:
            result = self.step(row.op, row.x)
            if row.op in READS:
                yield (*key, str(result))

    def step(self, op: str, x: int) -> Any:
        match op:
            case "get":
                return self.value.get()
            case "value?":
                return self.value.exists()
            case "list":
                return list(self.list.get())
            case "list?":
                return self.list.exists()
            case "map":
                return dict(self.map.items())
            case "map-keys":
                return sorted(self.map.keys())
            case "map-values":
                return sorted(self.map.values())
            case "map-get":
                return self.map.get(x % 3, -1)
            case "map-contains":
                return self.map.contains(x % 3)
            case "map?":
                return self.map.exists()
            case "update":
                return self.value.update(x)
            case "clear":
                return self.value.clear()
            case "append":
                return self.list.append_value(x)
            case "put-list":
                return self.list.put([x, x + 1])
            case "clear-list":
                return self.list.clear()
            case "put":
                return self.map.put(x % 3, x)
            case "remove":
                return self.map.remove(x % 3)
            case _:
                return self.map.clear()


WRITES = ("update", "clear", "append", "append", "put-list", "clear-list", "put", "put", "remove", "clear-map")


class Model:
    """The states of one key as plain values, each with its expiry."""

    def __init__(self, on_read: bool) -> None:
        self.on_read = on_read
        self.now = 0
        self.value: list[list[int]] = []
        self.list: list[list[int]] = []
        self.map: dict[int, list[int]] = {}

    def copy(self) -> Model:
        other = Model(self.on_read)
        other.value = [list(item) for item in self.value]
        other.list = [list(item) for item in self.list]
        other.map = {key: list(item) for key, item in self.map.items()}
        return other

    def at(self, now: int) -> Model:
        self.now = now
        self.value = [item for item in self.value if item[1] > now]
        self.list = [item for item in self.list if item[1] > now]
        self.map = {key: item for key, item in self.map.items() if item[1] > now}
        return self

    def read(self, items: Any) -> list[int]:
        for item in items:
            if self.on_read:
                item[1] = self.now + TTL_MS
        return [item[0] for item in items]

    def step(self, op: str, x: int) -> Any:
        new = [x, self.now + TTL_MS]
        match op:
            case "get":
                return next(iter(self.read(self.value)), None)
            case "value?":
                return bool(self.value)
            case "list":
                return self.read(self.list)
            case "list?":
                return bool(self.list)
            case "map":
                self.read(self.map.values())
                return {key: self.map[key][0] for key in sorted(self.map)}
            case "map-keys":
                self.read(self.map.values())
                return sorted(self.map)
            case "map-values":
                return sorted(self.read(self.map.values()))
            case "map-get":
                return next(iter(self.read([self.map[x % 3]])), None) if x % 3 in self.map else -1
            case "map-contains":
                return bool(self.read([self.map[x % 3]])) if x % 3 in self.map else False
            case "map?":
                return bool(self.map)
            case "update":
                self.value = [new]
            case "clear":
                self.value = []
            case "append":
                self.list.append(new)
            case "put-list":
                self.list = [new, [x + 1, new[1]]]
            case "clear-list":
                self.list = []
            case "put":
                self.map[x % 3] = new
            case "remove":
                self.map.pop(x % 3, None)
            case _:
                self.map = {}
        return None


rows = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(READS) | st.sampled_from(WRITES), st.integers(0, 5)), max_size=12
)
batch = st.tuples(rows, st.integers(0, 12), st.sampled_from(["commit", "commit", "lost", "restart"]))


@pytest.mark.parametrize("update", ["write", "read_and_write"])
@settings(max_examples=examples(100), deadline=None)
@given(batches=st.lists(batch, max_size=6), swept=st.sampled_from([0, 1, 512]))
def test_states_with_a_ttl_follow_a_plain_model(update: str, batches: Any, swept: int) -> None:
    models = {key: Model(update == "read_and_write") for key in "ab"}
    with harness(Steps(update), SweepBudget(swept)) as h:
        for steps, passed, how in batches:
            h.processing_time_ms += passed
            now = {key: model.copy().at(h.processing_time_ms) for key, model in models.items()}
            steps = sorted(steps, key=lambda step: step[0])
            expected = [(key, str(now[key].step(op, x))) for key, op, x in steps if op in READS or now[key].step(op, x)]
            assert h.process(steps, commit=how != "lost") == expected
            if how == "restart":
                h.restart()
            if how != "lost":
                models = now
            for key, model in models.items():
                seen = model.copy().at(h.processing_time_ms)
                assert h.state("v", key) == (seen.value[0][0] if seen.value else None)
                assert h.state("l", key) == [item[0] for item in seen.list]
                assert h.state("m", key) == {at: item[0] for at, item in seen.map.items()}


def harness(processor: KeyedProcessor, sweep_budget: SweepBudget = DEFAULT_SWEEP) -> ProcessorHarness:
    return ProcessorHarness(
        processor,
        input_schema="k string, op string, x long",
        key="k",
        output_schema="k string, seen string",
        sweep_budget=sweep_budget,
    )


def test_a_value_lives_up_to_its_time_and_no_longer() -> None:
    with harness(Steps("write")) as h:
        h.process([("a", "update", 1)])
        h.processing_time_ms = TTL_MS - 1
        assert h.process([("a", "get", 0)]) == [("a", "1")]
        h.processing_time_ms = TTL_MS
        assert h.process([("a", "get", 0), ("a", "value?", 0)]) == [("a", "None"), ("a", "False")]


def test_state_of_keys_that_never_come_back_goes_a_bounded_part_at_a_time() -> None:
    with harness(Steps("write"), SweepBudget(entries=100, per_write=0)) as h:
        h.process([(f"k{at}", op, 1) for at in range(400) for op in ("update", "append", "put")])
        h.processing_time_ms += TTL_MS
        sizes = [len(list(h._backend.scan(b"")))]
        for _ in range(40):
            h.process([])
            sizes.append(len(list(h._backend.scan(b""))))
    assert sizes[0] == 1200
    assert sizes[-1] == 0
    assert max(before - after for before, after in pairwise(sizes)) <= 100


def test_a_sweep_keeps_up_with_what_is_written() -> None:
    with harness(Steps("write")) as h:
        for at in range(60):
            h.process([(f"k{at}-{key}", "update", 1) for key in range(200)])
            h.processing_time_ms += 1
            living = 200 * min(at + 1, TTL_MS)
            assert len(list(h._backend.scan(b""))) <= 3 * living + 1024


def test_the_sweep_leaves_the_living_and_other_states_alone() -> None:
    class Mixed(KeyedProcessor):
        def open(self, context: Any) -> None:
            self.short = context.value_state("short", "long", ttl=0.01)
            self.long = context.value_state("long", "long", ttl="1h")
            self.ever = context.list_state("ever", "long")

        def process(self, key: Any, rows: Iterator[Any], context: Any) -> None:
            self.short.update(1)
            self.long.update(2)
            self.ever.append_value(3)

    with harness(Mixed()) as h:
        h.process([(f"k{at}", "", 0) for at in range(20)])
        for _ in range(3):
            h.advance_processing_time("1 min")
        assert len(list(h._backend.scan(b""))) == 40
        assert [h.state(name, "k7") for name in ("short", "long", "ever")] == [None, 2, [3]]
        assert [state.ttl_ms for state in h.operator.states()] == [10, 3_600_000, None]


@pytest.mark.parametrize(
    ("given_ttl", "expected"), [("1h", 3_600_000), (1.5, 1500), (2, 2000), (timedelta(days=1), 86_400_000)]
)
def test_a_ttl_is_a_duration(given_ttl: Any, expected: int) -> None:
    assert parse_ttl(given_ttl, "here") == expected


@pytest.mark.parametrize("wrong", ["", "1 fortnight", "-1s", -1, 0, "0s", True, float("nan"), None, "1us"])
def test_a_wrong_ttl_is_refused_with_its_place(wrong: Any) -> None:
    with pytest.raises(JobDefinitionError, match=r"here: ttl=.* is not valid"):
        parse_ttl(wrong, "here")
