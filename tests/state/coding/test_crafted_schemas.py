"""Schemas come from checkpoints as text: whatever the text, it is a schema or a `SchemaError`, and no code runs."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import SchemaError
from strandline.state.coding.ddl import parse_schema
from tests.examples import examples

WORDS = [
    "a",
    "long",
    "array",
    "map",
    "struct",
    "decimal",
    "<",
    ">",
    "(",
    ")",
    ",",
    ":",
    "not",
    "null",
    "`",
    "9" * 30,
    "²",
]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["long", "struct", "array", "map", "udt", "decimal(10,2)", "decimal(99,99)", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "fields", "name", "nullable", "metadata", "elementType", "pyClass"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(values.map(json.dumps) | st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=30))
@settings(max_examples=examples(300), deadline=None)
def test_any_text_is_a_schema_or_a_schema_error(text: str) -> None:
    with suppress(SchemaError):
        parse_schema(text)


def test_a_user_defined_type_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crafted_module.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    udt = {"type": "udt", "pyClass": "crafted_module.Type", "serializedClass": "", "sqlType": "long"}
    for type_ in (udt, {"type": "array", "elementType": udt, "containsNull": True}):
        field = {"name": "a", "nullable": True, "metadata": {}, "type": type_}
        with pytest.raises(SchemaError, match="user-defined types"):
            parse_schema(json.dumps({"type": "struct", "fields": [field]}))
    assert "crafted_module" not in sys.modules


@pytest.mark.parametrize(
    "text",
    ["array<" * 100_000, '{"type":' * 100_000, "a long, " * 200_000, "{" + "[" * 100_000],
    ids=["DDL", "JSON", "long", "lists"],
)
def test_a_text_without_end_is_an_error_soon(text: str) -> None:
    with pytest.raises(SchemaError):
        parse_schema(text)
