"""Secrets of a run appear in no repr of a value of the runtime or of a sink."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import strandline.runtime
import strandline.sinks
from strandline.runtime.delivery.slot_connections import SlotConnections
from strandline.runtime.protocol.address import NOWHERE
from strandline.runtime.protocol.messages import RunInfo, StorageSettings, UploadSettings
from strandline.runtime.task.relay import Relay

SECRET_FIELDS = {"secret", "options", "storage_options", "tls_key", "tls", "uri", "catalog"}
STORAGE = StorageSettings("s3://user:hunter2@bucket/x", {"secret_access_key": "hunter2"})
RUN = RunInfo("job", "run", "hunter2", NOWHERE, "/x", "127.0.0.1", 8.0, STORAGE, [], UploadSettings(1, 1, 2.0))


def value_types() -> Iterator[type]:
    """All structs and dataclasses of the runtime, and of the sinks."""
    for room in (strandline.runtime, strandline.sinks):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            for found in vars(importlib.import_module(module.name)).values():
                here = isinstance(found, type) and found.__module__ == module.name
                if here and (issubclass(found, msgspec.Struct) or dataclasses.is_dataclass(found)):
                    yield found


def shows_all_fields(kind: Any) -> bool:
    """Whether the repr is the generated one, with every field."""
    if issubclass(kind, msgspec.Struct):
        return "__repr__" not in vars(kind)
    return any(field.repr for field in dataclasses.fields(kind) if field.name in SECRET_FIELDS)


def fields_of(kind: Any) -> set[str]:
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_fields__)
    return {field.name for field in dataclasses.fields(kind)}


def test_every_client_of_the_runtime_is_told_of_tls() -> None:
    """A client that is not told would find no server that takes it, and only in a run with TLS."""
    made = [
        call
        for source in Path(strandline.runtime.__path__[0]).rglob("*.py")
        for call in ast.walk(ast.parse(source.read_text()))
        if isinstance(call, ast.Call)
        and any(getattr(one, "id", "").endswith("Client") for one in (call.func, *call.args[:1]))
    ]
    assert len(made) >= 7
    assert [ast.unparse(call) for call in made if not any(keyword.arg == "tls" for keyword in call.keywords)] == []


def test_no_value_of_the_runtime_or_of_a_sink_shows_a_secret_in_its_repr() -> None:
    found = [kind for kind in value_types() if fields_of(kind) & SECRET_FIELDS]
    assert {"RunInfo", "StorageSettings", "SlotConnections", "ParquetStager", "Wiring"} <= {
        kind.__name__ for kind in found
    }
    assert [kind for kind in found if shows_all_fields(kind)] == []


@pytest.mark.parametrize(
    "value", [STORAGE, RUN, Relay("count", SlotConnections(NOWHERE, "hunter2", "run"), marked=False)]
)
def test_the_repr_names_the_thing_without_its_secret(value: object) -> None:
    assert "hunter2" not in repr(value)
    assert type(value).__name__ in repr(value)
