"""State handles behave like plain Python values, lists and dicts per key, over batches and commits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import SchemaError, StrandlineError
from strandline.state.backends.heap import HeapBackend
from strandline.state.batch.changes import ChangeSet
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import EncodedKeys, KeyEncoder
from strandline.state.descriptors import StateDescriptor
from strandline.state.handles.states import LIST_ENTRY_BYTES, KeyScope, ListState, MapState, ValueState
from tests.examples import examples

KEYS = ["", "a", "aa", "b", None]


class World:
    """One value, list and map state over a heap backend."""

    def __init__(self, spill: Path, list_entry_bytes: int = LIST_ENTRY_BYTES) -> None:
        self.scope = KeyScope()
        self.value = ValueState(
            StateDescriptor("v", "value", "n long, s string"), parse_schema("n long, s string"), self.scope, "state 'v'"
        )
        self.list = ListState(
            StateDescriptor("l", "list", "long"),
            parse_schema("long"),
            self.scope,
            "state 'l'",
            entry_bytes=list_entry_bytes,
        )
        self.map = MapState(
            StateDescriptor("m", "map", "n long", "x double"),
            parse_schema("double"),
            parse_schema("long"),
            self.scope,
            "state 'm'",
        )
        self.backend = HeapBackend()
        self.spill = spill

    def begin(self, batch: int, keys: list[Any] = KEYS) -> ChangeSet:
        changes = ChangeSet(self.backend, 1 << 20, self.spill)
        self.scope.begin(changes, batch)
        self.scope.load(encoded(keys))
        return changes

    def commit(self, changes: ChangeSet) -> None:
        self.scope.flush()
        self.scope.end()
        for keys, values in changes.chunks():
            self.backend.apply(keys, values)


def encoded(keys: list[Any]) -> EncodedKeys:
    batch = pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.string()), pa.array([0] * len(keys), pa.int32())], names=["k", "g"]
    )
    return KeyEncoder(batch.schema, ["k"], "g").encode(batch)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.backend.close()


numbers = st.integers(0, 5)
step = st.one_of(
    st.tuples(st.just("update"), numbers),
    st.tuples(st.just("clear"), st.just(0)),
    st.tuples(st.just("append"), numbers),
    st.tuples(st.just("append_all"), st.lists(numbers, max_size=3)),
    st.tuples(st.just("put_list"), st.lists(numbers, max_size=3)),
    st.tuples(st.just("clear_list"), st.just(0)),
    st.tuples(st.just("put"), st.tuples(numbers, numbers)),
    st.tuples(st.just("remove"), numbers),
    st.tuples(st.just("clear_map"), st.just(0)),
)
visits = st.lists(st.tuples(st.integers(0, len(KEYS) - 1), st.lists(step, max_size=6)), max_size=6)


@settings(max_examples=examples(150), deadline=None)
@given(
    batches=st.lists(visits, max_size=4), commits=st.lists(st.booleans(), min_size=4, max_size=4), small=st.booleans()
)
def test_handles_follow_a_plain_python_model(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Any], commits: list[bool], small: bool
) -> None:
    world = World(tmp_path_factory.getbasetemp() / "spill", 4 if small else LIST_ENTRY_BYTES)
    kept: dict[int, tuple[Any, list[int], dict[float, int]]] = {}
    for number, batch in enumerate(batches):
        changes = world.begin(number)
        model = {at: (value, list(items), dict(entries)) for at, (value, items, entries) in kept.items()}
        for at, steps in batch:
            world.scope.index = at
            for name, given_value in steps:
                value, items, entries = model.get(at, (None, [], {}))
                model[at] = apply(world, name, given_value, value, items, entries)
            compare(world, *model.get(at, (None, [], {})))
            world.scope.flush()
        if commits[number]:
            world.commit(changes)
            kept = model
        else:
            changes.discard()
    world.begin(99)
    for at in range(len(KEYS)):
        world.scope.index = at
        compare(world, *kept.get(at, (None, [], {})))


def apply(world: World, name: str, given_value: Any, value: Any, items: list[int], entries: dict[float, int]) -> Any:
    match name:
        case "update":
            world.value.update((given_value, "x"))
            value = (given_value, "x")
        case "clear":
            world.value.clear()
            value = None
        case "append":
            world.list.append_value(given_value)
            items = [*items, given_value]
        case "append_all":
            world.list.append(given_value)
            items = [*items, *given_value]
        case "put_list":
            world.list.put(given_value)
            items = given_value
        case "clear_list":
            world.list.clear()
            items = []
        case "put":
            world.map.put(*given_value)
            entries = {**entries, float(given_value[0]): given_value[1]}
        case "remove":
            world.map.remove(given_value)
            entries = {key: item for key, item in entries.items() if key != given_value}
        case _:
            world.map.clear()
            entries = {}
    return value, items, entries


def compare(world: World, value: Any, items: list[int], entries: dict[float, int]) -> None:
    assert world.value.get() == value
    assert world.value.exists() == (value is not None)
    assert list(world.list.get()) == items
    assert world.list.exists() == bool(items)
    assert dict(world.map.items()) == entries
    assert sorted(world.map.keys()) == sorted(entries)
    assert sorted(world.map.values()) == sorted(entries.values())
    assert world.map.exists() == bool(entries)
    assert [world.map.get(key, -1) for key in range(6)] == [entries.get(key, -1) for key in range(6)]
    assert [world.map.contains(key) for key in range(6)] == [key in entries for key in range(6)]


def test_a_refused_update_leaves_the_state_as_it_was(world: World) -> None:
    world.begin(1)
    world.scope.index = 0
    world.value.update((1, "x"))
    with pytest.raises(SchemaError, match="state 'v': column 's'"):
        world.value.update((2, 3))
    assert world.value.get() == (1, "x")
    world.list.put([1])
    for refused in (world.list.append, world.list.put):
        with pytest.raises(SchemaError, match="state 'l'"):
            refused([2, "x"])
    assert list(world.list.get()) == [1]
    world.map.put(1.0, 1)
    for key, value in ((1.0, "x"), ("k", 1), (None, 1)):
        with pytest.raises(SchemaError, match="state 'm'"):
            world.map.put(key, value)
    assert dict(world.map.items()) == {1.0: 1}


def test_a_value_that_the_user_changes_later_does_not_change_state(world: World) -> None:
    state = ListState(
        StateDescriptor("a", "list", "a array<int>"), parse_schema("a array<int>"), world.scope, "state 'a'"
    )
    world.begin(1)
    world.scope.index = 0
    mine = [1]
    state.append_value(mine)
    mine.append(2)
    assert list(state.get()) == [[1]]


def test_lists_keep_the_order_of_batches_and_of_entries(tmp_path: Path) -> None:
    world = World(tmp_path, list_entry_bytes=50)
    for batch in (1, 300, 70_000):
        changes = world.begin(batch, ["a"])
        world.scope.index = 0
        world.list.append(range(batch, batch + 100))
        world.commit(changes)
    world.begin(70_001, ["a"])
    world.scope.index = 0
    assert list(world.list.get()) == [n for batch in (1, 300, 70_000) for n in range(batch, batch + 100)]


def test_a_map_may_be_changed_while_it_is_walked_through(world: World) -> None:
    world.begin(1)
    world.scope.index = 0
    for key in range(5):
        world.map.put(key, key)
    for key, value in world.map.items():
        world.map.put(key + 10, value)
        world.map.remove(key)
    assert dict(world.map.items()) == {float(key + 10): key for key in range(5)}


def test_update_with_none_clears_and_a_tuple_of_none_stores_a_null(world: World) -> None:
    state = ValueState(StateDescriptor("n", "value", "n long"), parse_schema("n long"), world.scope, "state 'n'")
    world.begin(1)
    world.scope.index = 0
    state.update(5)
    state.update(None)
    assert not state.exists()
    state.update((None,))
    assert state.exists()
    assert state.get() is None


def test_handles_refuse_access_without_a_key(world: World) -> None:
    uses = [
        world.value.get,
        world.value.exists,
        world.value.clear,
        lambda: world.value.update((1, "x")),
        world.list.get,
        world.list.exists,
        world.list.clear,
        lambda: world.list.append_value(1),
        lambda: world.list.append([1]),
        lambda: world.list.put([1]),
        lambda: world.map.get(1),
        lambda: world.map.put(1, 1),
        lambda: world.map.contains(1),
        lambda: world.map.remove(1),
        world.map.items,
        world.map.keys,
        world.map.values,
        world.map.clear,
        world.map.exists,
    ]
    world.commit(world.begin(1))
    for use in uses:
        with pytest.raises(StrandlineError, match=r"outside of process\(\)"):
            use()
