"""Per-key user code sees each key once a batch with all its rows, and its mistakes are told with their place."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import groupby
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError
from strandline.operators.base import BatchInfo, Operator, SubtaskInfo
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.limits import DEFAULT_LIMITS, ProcessLimits
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples

INPUT = parse_schema("k string, x long")
Make = Callable[[Operator], Any]


class Totals(KeyedProcessor):
    """Counts and sums in a value state, and keeps the last values in a list state."""

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "n long, s long")
        self.seen = context.list_state("seen", "x long")

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        n, s = self.total.get() or (0, 0)
        for row in rows:
            assert (row.k,) == key
            n, s = n + 1, s + (row.x or 0)
            self.seen.append_value(row.x)
        self.total.update((n, s))
        yield (*key, n, s, len(list(self.seen.get())))


class Simple(KeyedProcessor):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any], opened: Callable[[Any, Any], None] | None = None) -> None:
        self.function = function
        self.opened = opened

    def open(self, context: Any) -> None:
        if self.opened:
            self.opened(self, context)

    def process(self, key: Any, rows: Iterator[Any], context: Any) -> Any:
        return self.function(self, key, rows, context)


def operator_of(
    function: Callable[..., Any],
    opened: Any = None,
    output: str = "k string, n long",
    limits: ProcessLimits = DEFAULT_LIMITS,
) -> ProcessOperator:
    return ProcessOperator("visits", Simple(function, opened), ["k"], INPUT, parse_schema(output), limits=limits)


def in_order(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: (row[0] is not None, row[0] or ""))


rows_of_a_batch = st.lists(
    st.tuples(st.none() | st.text("ab\0", max_size=2), st.none() | st.integers(-9, 9)), max_size=20
).map(in_order)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(st.tuples(rows_of_a_batch, st.lists(st.integers(0, 20)), st.booleans()), max_size=4),
    limit=st.sampled_from([1, 2, 3, 1000]),
)
def test_running_totals_follow_a_plain_model(slot: Make, batches: Any, limit: int) -> None:
    output = parse_schema("k string, n long, s long, m long")
    limits = ProcessLimits(first_chunk=limit, largest_chunk=limit)
    mini = slot(ProcessOperator("t", Totals(), ["k"], INPUT, output, limits=limits))
    model: dict[Any, tuple[int, int]] = {}
    for rows, cuts, commit in batches:
        now = dict(model)
        expected = []
        for key, group in groupby(rows, key=lambda row: row[0]):
            values = [row[1] for row in group]
            n, s = now.get(key, (0, 0))
            now[key] = n + len(values), s + sum(value or 0 for value in values)
            expected.append((key, *now[key], now[key][0]))
        assert mini.run(rows, cuts, commit) == expected
        model = now if commit else model


def test_a_key_that_spans_record_batches_is_processed_once(slot: Make) -> None:
    calls = []

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        values = [row.x for row in rows]
        calls.append((key, values))
        yield (*key, len(values))

    rows = [("a", at) for at in range(7)] + [("b", 0), ("c", 1), ("c", 2)]
    assert slot(operator_of(function)).run(rows, cuts=[0, 2, 3, 5, 9]) == [("a", 7), ("b", 1), ("c", 2)]
    assert calls == [(("a",), list(range(7))), (("b",), [0]), (("c",), [1, 2])]


def test_a_large_key_is_not_gathered_in_memory(slot: Make) -> None:
    read: list[int] = []
    mini = slot(operator_of(lambda self, key, rows, context: ((*key, row.x) for row in rows)))

    def incoming() -> Iterator[pa.RecordBatch]:
        for at in range(50):
            read.append(at)
            yield from mini.batches([("a", at)] * 1000)

    out = mini.operator.run(incoming(), _no_changes(mini), BatchInfo(1, 0))
    first = next(out)
    assert first.num_rows == 8192
    assert len(read) < 12
    assert sum(part.num_rows for part in out) == 50_000 - 8192


def _no_changes(mini: Any) -> Any:
    from strandline.state.batch.changes import ChangeSet

    return ChangeSet(mini.backend, 1 << 20, mini._spill)


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (1, 2, 3, 4, 5)])
def test_rows_that_are_not_read_do_not_reach_the_next_key(slot: Make, cuts: Any) -> None:
    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        return [(*key, next(rows).x)]

    rows = [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 6)]
    assert slot(operator_of(function)).run(rows, cuts) == [("a", 1), ("b", 4), ("c", 6)]
    assert slot(operator_of(lambda self, key, rows, context: None)).run(rows, cuts) == []


def test_rows_kept_beyond_their_key_are_empty(slot: Make) -> None:
    kept: list[Iterator[Any]] = []

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        assert not any(list(old) for old in kept)
        kept.append(rows)

    slot(operator_of(function)).run([("a", 1), ("a", 2), ("b", 3), ("c", 4)], [3])
    assert len(kept) == 3


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 9)), max_size=12), st.sampled_from([1, 3, 99])
)
def test_state_stays_right_even_where_a_keys_rows_are_apart(slot: Make, rows: Any, limit: int) -> None:
    mini = slot(ProcessOperator("t", Totals(), ["k"], INPUT, parse_schema("k string, n long, s long, m long")))
    mini.operator._subtask._reader.limit = limit
    last = {row[0]: row[1:] for row in mini.run(rows)}
    for key, (n, s, m) in last.items():
        values = [x for k, x in rows if k == key]
        assert (n, s, m) == (len(values), sum(values), len(values))


def test_nan_and_zero_are_one_key_each(slot: Make) -> None:
    schema = parse_schema("k double, x long")

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        self.n.update((self.n.get() or 0) + sum(1 for _ in rows))
        return [(str(key[0] + 0.0), self.n.get())]

    def opened(self: Any, context: Any) -> None:
        self.n = context.value_state("n", "long")

    mini = slot(ProcessOperator("f", Simple(function, opened), ["k"], schema, parse_schema("k string, n long")))
    rows = [(-0.0, 1), (0.0, 1), (math.nan, 1), (-math.nan, 1)]
    assert mini.run(rows) == [("0.0", 2), ("nan", 2)]
    assert mini.run(rows[1:]) == [("0.0", 3), ("nan", 4)]


def test_every_type_reaches_user_code_as_sparks_python_value(slot: Make) -> None:
    schema = parse_schema(
        "k string, i int, d double, b boolean, y binary, dt date, ts timestamp, tn timestamp_ntz, de decimal(5,2), "
        "a array<timestamp>, m map<string,date>, s struct<p:int,q:struct<r:string>>, iv interval day to second"
    )
    seen: list[Any] = []

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        for row in rows:
            seen.append(row)
            yield tuple(row)

    at = datetime(2024, 2, 29, 23, 59, 59, 123456)
    zoned = at.replace(tzinfo=UTC)
    full = (
        "k", 1, 1.5, True, b"\0", date(1960, 1, 2), zoned, at, Decimal("1.25"), [zoned, None], {"x": date(2020, 1, 1)},
        {"p": 1, "q": {"r": "z"}}, timedelta(days=-1, microseconds=3),
    )  # fmt: skip
    empty = ("k", *[None] * 12)
    mini = slot(ProcessOperator("types", Simple(function), ["k"], schema, schema))
    sent = list(mini.batches([full, empty]))
    # Spark sends the session's time zone.
    place = sent[0].schema.get_field_index("ts")
    sent[0] = sent[0].set_column(place, "ts", sent[0].column(place).cast(pa.timestamp("us", "America/New_York")))
    out = mini.run(iter(sent))
    first, second = seen
    assert isinstance(first, Row)
    assert first.asDict()["i"] == first["i"] == first.i == first[1] == 1
    assert tuple(first[:9]) == full[:9]
    assert (first.a, first.m, first.iv) == (full[9], full[10], full[12])
    assert first.s.q.r == "z"
    assert tuple(second) == empty
    assert pickle.loads(pickle.dumps(first)) == first
    shown: list[Any] = [*full]
    shown[10] = list(shown[10].items())  # Arrow shows a map as pairs
    assert out == [tuple(shown), empty]


def test_rows_with_awkward_column_names_can_be_read(slot: Make) -> None:
    schema = parse_schema("k string, count long, `odd name` long, index long, _x long")

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        for row in rows:
            yield row["k"], row["count"] + row["odd name"] + row["index"] + row._x

    mini = slot(ProcessOperator("n", Simple(function), ["k"], schema, parse_schema("k string, n long")))
    assert mini.run([("a", 1, 10, 100, 1000)]) == [("a", 1111)]


def test_output_rows_may_be_tuples_rows_lists_or_dicts(slot: Make) -> None:
    made = [("a", 1), Row(k="b", n=2), ["c", 3], {"n": 4, "k": "d"}, {"k": "e"}]
    rows = slot(operator_of(lambda *_: iter(made))).run([("a", 1)])
    assert rows == [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", None)]


def test_the_names_of_a_row_count_and_not_its_order(slot: Make) -> None:
    made = [Row(n=1, k="a"), cast(Any, Row)("b", 2), Row("n", "k")(3, "c"), Row(k="d", n=4)]
    rows = slot(operator_of(lambda *_: iter(made))).run([("a", 1)])
    assert rows == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (("b",), r"an output row has 1 values, expected 2 \(k, n\)"),
        (("b", 1, 2), "an output row has 3 values"),
        (("b", "x"), r"output column 'n': expected bigint, got 'x' \(str\)"),
        (("b", 2**63), r"output column 'n': expected bigint \(64 bit\)"),
        ((None, 1), r"output column 'k': expected string \(not null\), got None"),
        ((1, 1), "output column 'k': expected string, got 1"),
        (("b", True), "output column 'n': expected bigint, got True"),
        (("\ud800", 1), "output column 'k' cannot be written as string"),
        ({"k": "b", "m": 1}, "a column 'm', expected k, n"),
        (Row(k="b", m=1), "a column 'm', expected k, n"),
        (Row(k="b"), r"an output row has 1 values, expected 2 \(k, n\)"),
        ("b", "must be a tuple, Row, list or dict with k, n, got 'b'"),
        (7, r"must be a tuple, Row, list or dict with k, n, got 7 \(int\); yield rows, or return a list"),
    ],
)
def test_an_output_row_that_does_not_fit_is_told_with_operator_key_and_column(slot: Make, row: Any, told: str) -> None:
    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        return [row] if key == ("b",) else [("a", 1), ("a", 2)]

    mini = slot(operator_of(function, output="k string not null, n long"))
    with pytest.raises(SchemaError, match=told) as caught:
        mini.run([("a", 1), ("b", 1), ("c", 1)])
    assert "operator 'visits', subtask 3, key" in str(caught.value)
    if "cannot be written" not in told:
        assert "key ('b',)" in str(caught.value)


def test_a_wrong_row_names_the_key_that_yielded_it_wherever_it_is_found(slot: Make) -> None:
    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        return [(*key, "x" if key == ("b",) else 1)]

    with pytest.raises(SchemaError, match=r"^operator 'visits', subtask 3, key \('b',\): output column 'n'"):
        slot(operator_of(function, limits=ProcessLimits(output_rows=4))).run([(key, 1) for key in "abcdefgh"])


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_nested_columns_survive_being_cut_into_chunks(slot: Make, limit: int) -> None:
    schema = parse_schema("k string, a array<struct<p:int>>, m map<string,array<int>>")
    seen: list[Any] = []

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        seen.extend((row.k, row.a and [item.p for item in row.a], row.m) for row in rows)

    rows = [
        ("a", [{"p": 1}, {"p": 2}], {"x": [1], "y": []}),
        ("a", None, None),
        ("b", [], {}),
        ("c", [{"p": 3}], {"z": [2, None]}),
    ]
    limits = ProcessLimits(first_chunk=limit, largest_chunk=limit)
    mini = slot(ProcessOperator("n", Simple(function), ["k"], schema, INPUT, limits=limits))
    mini.run(rows, [3])
    assert seen == [("a", [1, 2], rows[0][2]), ("a", None, None), ("b", [], {}), ("c", [3], {"z": [2, None]})]


def broken(key: Any) -> Any:
    return {}[key]


def test_an_error_of_user_code_carries_its_place_and_only_its_own_traceback(slot: Make) -> None:
    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        yield "a", 1
        list(rows)
        broken(key)

    with pytest.raises(UserCodeError) as caught:
        slot(operator_of(function)).run([("a", 1)])
    told = str(caught.value)
    first = "operator 'visits', subtask 3, key ('a',), batch 1: process() failed: KeyError: ('a',)"
    assert told.splitlines()[0] == first  # status, page and REST show one line
    assert "in broken" in told
    assert told.count('File "') == 2  # the two functions of this module, and no frame of the package
    assert "strandline/operators" not in told


class Cancelled(BaseException):
    """As asyncio, trio and extension modules in Rust raise it: no `Exception`."""


@pytest.mark.parametrize("kind", [SystemExit, Cancelled])
def test_user_code_that_wants_to_end_the_process_has_failed(slot: Make, kind: type[BaseException]) -> None:
    def leave(*_: Any) -> None:
        raise kind("enough")

    with pytest.raises(UserCodeError, match=r"(?s)key \('a',\), batch 1: process\(\) failed.*enough"):
        slot(operator_of(leave)).run([("a", 1)])
    with pytest.raises(UserCodeError, match=r"(?s)open\(\) failed.*enough"):
        slot(operator_of(lambda *_: None, opened=leave))
    processor = Simple(lambda *_: None)
    processor.close = leave  # type: ignore[method-assign]
    mini = slot(ProcessOperator("visits", processor, ["k"], INPUT, INPUT))
    with pytest.raises(UserCodeError, match=r"(?s)close\(\) failed.*enough"):
        mini.operator.close()


def test_an_interrupt_by_the_user_is_no_failure_of_user_code(slot: Make) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slot(operator_of(interrupted)).run([("a", 1)])


def test_errors_in_open_and_close_are_told(slot: Make) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no luck")

    with pytest.raises(UserCodeError, match=r"(?s)operator 'visits', subtask 3: open\(\) failed.*no luck"):
        slot(operator_of(lambda *_: None, opened=fail))
    processor = Simple(lambda *_: None)
    processor.close = fail  # type: ignore[method-assign]
    mini = slot(ProcessOperator("visits", processor, ["k"], INPUT, INPUT))
    with pytest.raises(UserCodeError, match=r"(?s)close\(\) failed.*no luck"):
        mini.operator.close()
    mini.operator.close()


def test_an_input_that_fails_is_not_blamed_on_user_code_even_if_it_swallows_the_error(slot: Make) -> None:
    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        try:
            return [(*key, sum(row.x for row in rows))]
        except ConnectionError:
            return [(*key, -1)]

    mini = slot(operator_of(function))

    def incoming() -> Iterator[pa.RecordBatch]:
        yield from mini.batches([("a", 1)])
        raise ConnectionError("relay lost")

    with pytest.raises(ConnectionError, match="relay lost"):
        mini.run(incoming())


def test_a_state_error_in_user_code_names_state_key_and_batch(slot: Make) -> None:
    def opened(self: Any, context: Any) -> None:
        self.state = context.value_state("total", "n long, s long")

    mini = slot(operator_of(lambda self, *_: self.state.update((1, "x")), opened))
    with pytest.raises(SchemaError, match=r"key \('a',\), batch 1: state 'total' of operator 'visits': column 's'"):
        mini.run([("a", 1)])


def test_states_are_declared_in_open_only_and_used_in_process_only(slot: Make) -> None:
    late = slot(operator_of(lambda self, key, rows, context: context.value_state("x", "long")))
    with pytest.raises(StrandlineError, match=r"declared outside of open\(\)"):
        late.run([("a", 1)])

    def early(self: Any, context: Any) -> None:
        context.value_state("x", "long").get()

    with pytest.raises(StrandlineError, match=r"outside of process\(\)"):
        slot(operator_of(lambda *_: None, early))

    def keep(self: Any, context: Any) -> None:
        self.state = context.value_state("x", "long")

    mini = slot(operator_of(lambda *_: None, keep))
    mini.run([("a", 1)])
    with pytest.raises(StrandlineError, match=r"outside of process\(\)"):
        mini.operator.processor.state.get()


def test_a_state_name_is_used_once_and_must_be_plain(slot: Make) -> None:
    def twice(self: Any, context: Any) -> None:
        context.value_state("x", "long")
        context.list_state("x", "long")

    with pytest.raises(JobDefinitionError, match="declares the state 'x' twice"):
        slot(operator_of(lambda *_: None, twice))
    with pytest.raises(JobDefinitionError, match="cannot be the name of a state"):
        slot(operator_of(lambda *_: None, lambda self, context: context.value_state("a b", "long")))


@pytest.mark.parametrize(
    "use",
    [
        lambda context: context.register_timer(5),
        lambda context: context.delete_timer(5),
        lambda context: context.list_timers(),
    ],
)
def test_timers_without_a_clock_say_what_to_pass(slot: Make, use: Any) -> None:
    mini = slot(operator_of(lambda self, key, rows, context: use(context)))
    with pytest.raises(StrandlineError, match=r"operator 'visits' has no clock for timers; pass time_mode="):
        mini.run([("a", 1)])


def test_the_context_knows_batch_and_time_and_only_within_a_batch(slot: Make) -> None:
    kept: list[Any] = []

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Any:
        kept.append((context, context.batch_id, context.processing_time, context.watermark, context.subtask))

    slot(operator_of(function)).run([("a", 1)])
    context, *facts = kept[0]
    assert facts == [1, 1234, 99, 3]
    with pytest.raises(StrandlineError, match="no batch"):
        _ = context.batch_id


def test_declared_states_are_known_after_open(slot: Make) -> None:
    def opened(self: Any, context: Any) -> None:
        context.value_state("v", "n long")
        context.map_state("m", "k string", "n long")

    states = slot(operator_of(lambda *_: None, opened)).operator.states()
    assert [(state.name, state.kind) for state in states] == [("v", "value"), ("m", "map")]
    assert parse_schema(states[1].key_schema or "").simpleString() == "struct<k:string>"


def test_an_operator_travels_and_refuses_to_run_unopened() -> None:
    operator = pickle.loads(pickle.dumps(ProcessOperator("t", Totals(), ["k"], INPUT, INPUT)))
    with pytest.raises(StrandlineError, match="before it was opened"):
        operator.run(iter(()), None, BatchInfo(1, 0))
    operator.open(SubtaskInfo("j", "t", 0, 1, 128))
    assert [state.name for state in operator.states()] == ["total", "seen"]


def test_wrong_columns_are_found_when_the_job_is_built_or_when_rows_come(slot: Make) -> None:
    with pytest.raises(SchemaError, match="no key column user"):
        ProcessOperator("t", Totals(), ["user"], INPUT, INPUT)
    mini = slot(operator_of(lambda *_: None))
    with pytest.raises(SchemaError, match="no input column 'x'"):
        mini.run(part.drop_columns(["x"]) for part in mini.batches([("a", 1)]))


def test_leaving_a_batch_halfway_closes_user_code(slot: Make) -> None:
    closed = []

    def function(self: Any, key: Any, rows: Iterator[Any], context: Any) -> Iterator[Any]:
        try:
            while True:
                yield "a", 1
        finally:
            closed.append(key)

    mini = slot(operator_of(function))
    out = mini.operator.run(mini.batches([("a", 1)]), _no_changes(mini), BatchInfo(1, 0))
    next(out)
    out.close()
    assert closed == [("a",)]


@pytest.mark.parametrize("kind", ["map<string,int>", "array<struct<m:map<int,int>>>"])
def test_a_map_is_no_key_of_a_map_state(kind: str) -> None:
    class Maps(KeyedProcessor):
        def open(self, context: Any) -> None:
            context.map_state("seen", f"k {kind}", "n long")

        def process(self, key: Any, rows: Any, context: Any) -> None:
            pass

    schema = parse_schema("k string")
    with pytest.raises(JobDefinitionError, match=r"state 'seen'.*'k' of type .* cannot be a key: the entries of a map"):
        ProcessOperator("step", Maps(), ["k"], schema, schema).check()
