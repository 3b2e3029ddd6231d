"""Whatever a processor puts into its states, under whatever keys, is what the state reader reads."""

from __future__ import annotations

import tempfile
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

import strandline as sl
from strandline.operators.columns.schemas import arrow_schema
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.runtime.taskmanager.changelog.host import MEMORY, PARALLELISM
from tests.state_reader.written import Written

TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
LONG = st.integers(-(1 << 63), (1 << 63) - 1)
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "int": st.integers(-(1 << 31), (1 << 31) - 1),
    "bigint": LONG,
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": TEXT,
    "binary": st.binary(max_size=5),
    "date": st.dates(date(1, 1, 1)),
    "timestamp": st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),
    "timestamp_ntz": st.datetimes(datetime(1, 1, 2)),
    "interval day to second": st.timedeltas(timedelta(days=-9999), timedelta(days=9999)),
    "decimal(10,2)": st.decimals(-9999, 9999, places=2),
}
NESTED: dict[str, st.SearchStrategy[Any]] = {
    "array<string>": st.lists(st.none() | TEXT, max_size=3),
    "struct<a:int,b:array<date>>": st.fixed_dictionaries(
        {"a": st.none() | st.integers(0, 9), "b": st.none() | st.lists(PLAIN["date"], max_size=2)}
    ),
    "struct<d:decimal(10,2),t:timestamp>": st.fixed_dictionaries(
        {"d": PLAIN["decimal(10,2)"], "t": st.none() | PLAIN["timestamp"]}
    ),
}
MAPS: dict[str, st.SearchStrategy[Any]] = {"map<string,bigint>": st.dictionaries(TEXT, st.none() | LONG, max_size=3)}
KEYS = PLAIN | NESTED
VALUES = PLAIN | NESTED | MAPS


class Keeps(sl.KeyedProcessor):
    """Writes what it was made with: `content` has a value, list elements and map entries for each input row."""

    def __init__(self, value: str, map_key: str, ttl: str | None, content: list[Any]) -> None:
        self.schemas = value, map_key
        self.ttl = ttl
        self.content = content

    def open(self, context: Any) -> None:
        value, map_key = self.schemas
        self.value = context.value_state("value", value, ttl=self.ttl)
        self.list = context.list_state("list", value, ttl=self.ttl)
        self.map = context.map_state("map", map_key, value, ttl=self.ttl)

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        for row in rows:
            value, elements, entries = self.content[row.at]
            self.value.update(value)
            self.list.append(elements)
            for name, one in entries:
                self.map.put((name,), one)
            context.register_timer(1000 * row.at + 1)


def struct(prefix: str, kinds: list[str]) -> str:
    return ", ".join(f"{prefix}{at} {kind}" for at, kind in enumerate(kinds))


def arrow(rows: list[tuple[Any, ...]], schema: StructType) -> list[tuple[Any, ...]]:
    """The rows as Arrow gives them back."""
    columns = [pa.array([row[at] for row in rows], one.type) for at, one in enumerate(arrow_schema(schema))]
    return list(zip(*(column.to_pylist() for column in columns), strict=True)) if rows else []


def canonical(value: Any) -> Any:
    """Keys that Spark takes for equal are equal: 0.0 and -0.0 are."""
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, dict):
        return {name: canonical(one) for name, one in value.items()}
    return [canonical(one) for one in value] if isinstance(value, list) else value


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_was_written_is_read(data: st.DataObject) -> None:
    key_kinds = data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=2))
    value_kinds = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3))
    map_kind = data.draw(st.sampled_from(sorted(PLAIN)))
    keys_struct, values_struct = parse_schema(struct("k", key_kinds)), parse_schema(struct("v", value_kinds))
    map_struct = parse_schema(f"m {map_kind}")
    nullable = [st.none() | VALUES[kind] for kind in value_kinds]
    row = st.tuples(*nullable)
    entries = st.lists(st.tuples(PLAIN[map_kind], row), max_size=3)
    key = st.tuples(*(st.none() | KEYS[kind] for kind in key_kinds))
    drawn = data.draw(st.lists(st.tuples(key, row, st.lists(row, max_size=3), entries), min_size=1, max_size=6))
    content = [what for _, *what in drawn]
    ttl = data.draw(st.sampled_from([None, "1h"]))
    processor = Keeps(struct("v", value_kinds), f"m {map_kind}", ttl, content)
    wide = parse_schema(f"{struct('k', key_kinds)}, at int")
    names = keys_struct.fieldNames()
    operator = ProcessOperator("op", processor, names, wide, wide, time_mode="event", event_time=None)

    inputs = [(*key, at) for at, (key, *_) in enumerate(drawn)]
    shown = [repr(canonical(list(key))) for key in arrow([key for key, *_ in drawn], keys_struct)]
    last: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    maps: dict[tuple[str, str], Any] = {}
    timers = []
    for at, (value, elements, pairs) in enumerate(content):
        last[shown[at]] = arrow([value], values_struct)[0]
        lists.setdefault(shown[at], []).extend(arrow(elements, values_struct))
        for name, one in pairs:
            plain = canonical(arrow([(name,)], map_struct)[0][0])
            maps[shown[at], repr(plain)] = arrow([one], values_struct)[0]
        timers.append((shown[at], 1000 * at + 1))

    kind = data.draw(st.sampled_from(["rocksdb", "heap"]))
    changelog = data.draw(st.booleans())
    half = data.draw(st.integers(0, len(inputs)))
    with (
        tempfile.TemporaryDirectory(dir=MEMORY) as folder,
        Written(Path(folder), [operator], kind, changelog=changelog) as job,
    ):
        job.run({"op": inputs[:half]})
        if changelog and data.draw(st.booleans()):
            for index in range(PARALLELISM):
                job.host.changelog.materializer.materialize(index)
        job.run({"op": inputs[half:]})
        path = job.checkpoint() if data.draw(st.booleans()) else job.savepoint(data.draw(st.booleans()))

        def read(state: str) -> list[tuple[str, tuple[Any, ...]]]:
            rows = sl.read_state(path, "op", state).read_all().to_pylist()
            width = len(names)
            without = (list(row.values()) for row in rows)
            return [
                (
                    repr(canonical(row[:width])),
                    tuple(row[width + 1 : -1] if ttl and state != "timers" else row[width + 1 :]),
                )
                for row in without
            ]

        assert {(key, repr(value)) for key, value in read("value")} == {(key, repr(one)) for key, one in last.items()}
        assert [repr(one) for one in sorted(read("list"), key=repr)] == sorted(
            repr((key, (at, *one))) for key, every in lists.items() for at, one in enumerate(every)
        )
        found = {(key, repr(canonical(rest[0]))): rest[1:] for key, rest in read("map")}
        assert repr(sorted(found.items(), key=repr)) == repr(sorted(maps.items(), key=repr))
        times = sorted((key, round(time.timestamp() * 1000)) for key, (time,) in read("timers"))
        assert times == sorted(timers)
