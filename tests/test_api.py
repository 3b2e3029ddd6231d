"""What users import: every public name, and every type in a public signature. Authors of sinks import `sinks`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
from pyspark.sql.types import StructType

import strandline as sl
from strandline import errors, sinks

ONLY_FOR_TYPES = {name: getattr(sl, name) for name in sl.__all__ if name not in ("max", "min", "sum")} | {
    known.__name__: known for known in (Column, DataFrame, GroupedData, SparkSession, StructType)
}
"""Names that modules import for type checking only."""

CONSTRUCTED = (sl.Job, sl.Config, sl.RocksDBOptions, sl.ParquetSink, sl.ForeachBatchSink)
"""Classes of which users make objects; the objects of other classes come from a method."""


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in sl.__all__:
        value = getattr(sl, name)
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for attribute, member in inspect.getmembers_static(value):
                if attribute == "descriptor" and name.endswith("State"):
                    continue  # for the runtime
                if attribute.startswith("_") and not (attribute == "__init__" and value in CONSTRUCTED):
                    continue
                if isinstance(member, property) and member.fget is not None:
                    member = member.fget
                if isinstance(member, classmethod):
                    member = member.__func__
                if inspect.isfunction(member) and member.__module__.startswith("strandline"):
                    yield f"{name}.{attribute}", member


FUNCTIONS = dict(public_functions())
RECORDS = [
    name
    for name in sl.__all__
    if dataclasses.is_dataclass(getattr(sl, name)) or hasattr(getattr(sl, name), "__struct_fields__")
]


def parts(hint: Any) -> Iterator[Any]:
    """A type, and all types inside it."""
    yield hint
    for part in typing.get_args(hint):
        for one in part if isinstance(part, list) else [part]:
            yield from parts(one)


def not_public(hints: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {part.__module__}.{part.__qualname__}"
        for name, hint in hints.items()
        for part in parts(hint)
        if inspect.isclass(part)
        and part.__module__.startswith("strandline")
        and getattr(sl, part.__name__, None) is not part
        and getattr(sinks, part.__name__, None) is not part
    ]


def hints_of(value: Any) -> dict[str, Any]:
    home = sys.modules[value.__module__]
    return typing.get_type_hints(value, vars(home), ONLY_FOR_TYPES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_type_in_a_signature_can_be_imported(name: str) -> None:
    function = FUNCTIONS[name]
    hints = hints_of(function)
    missing = [
        parameter
        for parameter, declared in inspect.signature(function).parameters.items()
        if declared.annotation is inspect.Parameter.empty and parameter not in ("self", "cls")
    ]
    assert missing == [], "every parameter has a type"
    assert "return" in hints
    assert not_public(hints) == []


@pytest.mark.parametrize("name", [name for name in RECORDS if name not in ("Config", "Aggregate")])
def test_every_type_of_a_field_can_be_imported(name: str) -> None:
    fields = {field: hint for field, hint in hints_of(getattr(sl, name)).items() if not field.startswith("_")}
    assert fields
    assert not_public(fields) == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_says_what_it_does(name: str) -> None:
    assert FUNCTIONS[name].__doc__ or name.endswith(".__init__")


@pytest.mark.parametrize("name", sl.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    if name not in ("Sink", "WindowSpec"):
        assert inspect.getdoc(getattr(sl, name))


def test_names_for_type_checkers_and_names_at_run_time_are_the_same() -> None:
    tree = ast.parse(Path(inspect.getfile(sl)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert homes == sl._HOMES
    assert sorted(homes) == sl.__all__
    assert set(sl.__all__) <= set(dir(sl))


def test_every_error_can_be_caught_by_its_name_at_the_top() -> None:
    raised = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert raised <= set(sl.__all__)
    assert sl.CheckpointError is errors.CheckpointError


def test_types_can_be_used_in_annotations() -> None:
    class Count(sl.KeyedProcessor):
        total: sl.ValueState
        seen: sl.MapState

        def open(self, context: sl.ProcessContext) -> None:
            self.total = context.value_state("total", "n long")

    def spec() -> sl.WindowSpec:
        return sl.tumbling("1m")

    def sink() -> sl.Sink:
        return sl.ParquetSink("out")

    assert typing.get_type_hints(Count)["total"] is sl.ValueState
    assert isinstance(spec(), typing.get_type_hints(spec)["return"])
    assert isinstance(sink(), typing.get_type_hints(sink)["return"])
    assert pa.Table in parts(typing.get_type_hints(sl.ArrowProcessor.process, None, ONLY_FOR_TYPES)["table"])


@pytest.mark.parametrize(
    ("use", "absent"),
    [
        ("sl", ("pyspark", "pyarrow", "pandas", "msgspec", "yaml")),
        ("sl.Config", ("pyspark", "pyarrow", "pandas")),
        ("sl.RunStatus", ("pyspark", "pandas")),
        ("sl.CheckpointStats", ("pyspark", "pandas")),
    ],
)
def test_the_package_imports_only_what_is_used(use: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, strandline as sl; {use}; print(*(set(sys.modules) & set({absent!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"strandline.*no attribute 'Jobs'"):
        sl.Jobs  # noqa: B018 - that reading it fails is the point
