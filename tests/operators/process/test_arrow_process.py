"""User code on Arrow tables sees whole keys, with state that follows a plain model; what it returns is checked."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.errors import JobDefinitionError, SchemaError, StrandlineError, UserCodeError
from strandline.operators.base import Operator
from strandline.operators.process.arrow_context import ArrowContext
from strandline.operators.process.arrow_operator import ArrowLimits, ArrowProcessOperator
from strandline.operators.process.arrow_processor import ArrowProcessor
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples
from tests.operators.clocked import ClockedSlot

Make = Callable[[Operator], ClockedSlot]
INPUT = parse_schema("k string, j long, x long")
OUTPUT = parse_schema("k string, j long, n long, last string")


@pytest.fixture
def slot(tmp_path: Path) -> Make:
    return lambda operator: ClockedSlot(operator, tmp_path)


class Totals(ArrowProcessor):
    """Counts rows per key, forgets a key whose count is a multiple of 5, and checks that no key comes twice a batch."""

    def open(self, context: ArrowContext) -> None:
        self.total = context.value_state("total", "n long not null, last string, seen array<long>")
        self.batch = -1
        self.seen: set[Any] = set()

    def process(self, table: pa.Table, context: ArrowContext) -> Iterator[pa.Table]:
        if self.seen and context.batch_id != self.batch:
            self.seen = set()
        self.batch = context.batch_id
        keys = context.keys()
        distinct = {tuple(key.values()) for key in keys.to_pylist()}
        assert len(distinct) == keys.num_rows
        assert not distinct & self.seen
        self.seen |= distinct
        assert context.keys(table).equals(keys)
        grouped = table.group_by(["k", "j"], use_threads=False).aggregate([("x", "sum"), ([], "count_all")])
        old = self.total.get_many(grouped, present="known")
        assert old.column("known").to_pylist() == [n is not None for n in old.column("n").to_pylist()]
        n = pc.add(pc.fill_null(old.column("n"), 0), grouped.column("count_all"))
        text = n.cast(pa.string())
        lists = pa.array(
            [[*(seen or []), new] for seen, new in zip(old["seen"].to_pylist(), n.to_pylist(), strict=True)]
        )
        self.total.put_many(grouped, pa.table({"last": text, "n": n, "seen": lists}))
        gone = pc.equal(pc.subtract(n, pc.multiply(pc.divide(n, 5), 5)), 0)
        self.total.remove_many(grouped.filter(gone))
        now = self.total.get_many()
        assert now.num_rows == keys.num_rows
        made = pa.table({"k": keys["k"], "j": keys["j"], "n": now["n"], "last": now["last"]})
        yield made.slice(0, 1)
        yield made.slice(1)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_state_and_output_follow_a_plain_model(slot: Make, data: st.DataObject) -> None:
    limits = DEFAULT
    if data.draw(st.booleans(), "small chunks"):
        limits = ArrowLimits(chunk_rows=data.draw(st.integers(1, 4)), output_rows=2)
    mini = slot(ArrowProcessOperator("p", Totals(), ["k", "j"], INPUT, OUTPUT, limits))
    keys = st.tuples(st.none() | st.sampled_from(["a", "b", ""]), st.none() | st.integers(0, 1))
    model: dict[Any, int] = {}
    for _ in range(data.draw(st.integers(1, 5))):
        rows = sorted(data.draw(st.lists(keys, max_size=20)), key=str)
        counts = {key: model.get(key, 0) + n for key, n in Counter(rows).items()}
        left = {key: n for key, n in counts.items() if n % 5}
        expected = [(*key, left.get(key), str(left[key]) if key in left else None) for key in counts]
        commit = data.draw(st.booleans())
        mini.operator.processor.seen = set()  # type: ignore[attr-defined]
        made = mini.at([(*key, 1) for key in rows], commit=commit, cuts=data.draw(st.lists(st.integers(0, 20))))
        assert made == expected
        if commit:
            model = {key: n for key, n in model.items() if key not in counts} | left
        if data.draw(st.booleans(), "restart"):
            mini.reopen()


DEFAULT = ArrowLimits()


def running(function: Any, slot: Make, schema: str = "k string, n long", limits: ArrowLimits = DEFAULT) -> ClockedSlot:
    return slot(ArrowProcessOperator("p", function, ["k"], INPUT, parse_schema(schema), limits))


def counted(table: pa.Table, context: ArrowContext) -> pa.Table:
    return table.group_by("k", use_threads=False).aggregate([([], "count_all")]).rename_columns(["k", "n"])


def test_a_function_is_enough_and_a_long_key_comes_in_one_piece(slot: Make) -> None:
    mini = running(counted, slot, limits=ArrowLimits(chunk_rows=10))
    rows = [("a", 1, 1)] * 3 + [("b", 1, 1)] * 95 + [("c", 1, 1)]
    assert mini.at(rows, cuts=range(0, 99, 4)) == [("a", 3), ("b", 95), ("c", 1)]
    assert mini.at([]) == []


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (pa.table({"k": ["a"]}), "output: missing column 'n'; the columns are k, n"),
        (pa.table({"k": ["a"], "n": [1], "z": [1]}), "output: unexpected column 'z'"),
        (pa.table({"k": ["a"], "n": ["x"]}), "output: column 'n' is string, expected int64"),
        (pa.table({"k": ["a"], "n": pa.array([None], pa.int64())}), "column 'n' has 1 nulls, but is declared not null"),
        ([{"k": 1}], "output: expected a pyarrow Table or RecordBatch, got dict"),
        (5, "output: expected a pyarrow Table or RecordBatch, got int"),
    ],
)
def test_output_that_does_not_fit_names_the_column(slot: Make, made: Any, told: str) -> None:
    mini = running(_Returns(made), slot, "k string, n long not null")
    with pytest.raises(SchemaError, match=told) as caught:
        mini.at([("a", 1, 1)])
    assert "operator 'step', subtask 0, batch 0" in str(caught.value)


class _Returns(ArrowProcessor):
    def __init__(self, made: Any) -> None:
        self.made = made

    def process(self, table: pa.Table, context: ArrowContext) -> Any:
        return self.made


def test_narrower_types_and_other_column_orders_fit(slot: Make) -> None:
    made = pa.table({"n": pa.array([1], pa.int8()), "k": ["a"]})
    assert running(_Returns(made), slot).at([("a", 1, 1)]) == [("a", 1)]


class _Misuses(ArrowProcessor):
    def __init__(self, how: str) -> None:
        self.how = how

    def open(self, context: ArrowContext) -> None:
        self.total = context.value_state("total", "n long not null")
        if self.how == "early":
            self.total.get_many()
        if self.how == "twice":
            context.value_state("total", "n long")
        if self.how == "open":
            raise ValueError("not today")

    def process(self, table: pa.Table, context: ArrowContext) -> Any:
        match self.how:
            case "late":
                context.value_state("other", "n long")
            case "foreign":
                self.total.get_many(pa.table({"k": ["a", "zz"]}))
            case "keyless":
                self.total.remove_many(pa.table({"q": ["a"]}))
            case "count":
                self.total.put_many(None, pa.table({"n": [1, 2, 3]}))
            case "null":
                self.total.put_many(None, pa.table({"n": pa.array([None], pa.int64())}))
            case "column":
                self.total.put_many(None, pa.table({"m": [1]}))
            case "exit":
                sys.exit("enough")
            case "clash":
                self.total.get_many(present="n")
            case _:
                return [1 // 0]
        return None


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("early", StrandlineError, "use state and keys in process"),
        ("twice", UserCodeError, "declares the state 'total' twice"),
        ("open", UserCodeError, r"open\(\) failed(.|\n)*ValueError: not today"),
        ("late", StrandlineError, "declare every state there"),
        ("foreign", SchemaError, r"key \('zz',\) has no rows in this call"),
        ("keyless", SchemaError, "the table of keys has no column 'k'"),
        ("count", SchemaError, "state 'total' of operator 'step': 3 values for 1 keys"),
        ("null", SchemaError, "state 'total' of operator 'step': column 'n' has 1 nulls"),
        ("column", SchemaError, "unexpected column 'm'"),
        ("clash", SchemaError, "has a column 'n'"),
        ("exit", UserCodeError, r"batch 0: process\(\) failed(.|\n)*SystemExit: enough"),
        ("raise", UserCodeError, r"batch 0: process\(\) failed(.|\n)*ZeroDivisionError"),
    ],
)
def test_misuse_is_told_where_it_happens(slot: Make, how: str, kind: Any, told: str) -> None:
    with pytest.raises(kind, match=told) as caught:
        running(_Misuses(how), slot).at([("a", 1, 1)])
    assert "arrow_process.py" not in str(caught.value).replace("test_arrow_process.py", "")


def test_a_failed_batch_leaves_nothing_behind_and_the_operator_usable(slot: Make) -> None:
    processor = _Misuses("raise")
    mini = running(processor, slot)
    with pytest.raises(UserCodeError):
        mini.at([("a", 1, 1)])
    assert mini.entries() == 0
    with pytest.raises(UserCodeError):
        mini.at([("a", 1, 1)])


@pytest.mark.parametrize(
    ("processor", "keys", "told"),
    [
        (Totals, ["k"], r"Totals is a class; pass an instance of it"),
        (5, ["k"], "takes an sl.ArrowProcessor or a function"),
        (counted, ["kk"], "no column 'kk'; did you mean 'k'"),
    ],
)
def test_wrong_arguments_are_refused_when_the_job_is_built(processor: Any, keys: Any, told: str) -> None:
    with pytest.raises(JobDefinitionError, match=told):
        ArrowProcessOperator("p", processor, keys, INPUT, OUTPUT)


def test_the_operator_travels_and_describes_its_state(slot: Make) -> None:
    operator = ArrowProcessOperator("p", Totals(), ["k", "j"], INPUT, OUTPUT)
    mini = slot(pickle.loads(pickle.dumps(operator)))
    (state,) = mini.operator.states()
    assert (state.name, state.kind) == ("total", "columns")
    mini.operator.close()
