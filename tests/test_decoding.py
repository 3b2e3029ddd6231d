from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strandline.decoding import json_decoder, msgpack_decoder

SOURCE = Path(__file__).parents[1] / "src" / "strandline"


@pytest.fixture
def hasty() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_decode_a_struct_for_the_first_time_do_not_disturb_each_other(hasty: None) -> None:
    """Without the lock, the process crashes after some of the structs."""
    for number in range(300):
        inner: Any = msgspec.defstruct(f"Inner{number}", [("a", int), ("b", dict[str, int])], array_like=True)
        outer: Any = msgspec.defstruct(
            f"Outer{number}", [("one", inner), ("many", list[inner]), ("none", inner | None)], array_like=True
        )
        data = msgspec.msgpack.encode([[1, {"k": 1}], [[2, {}]], None])
        start = threading.Barrier(2)
        found: list[Any] = []

        def decode(kind: Any, start: threading.Barrier, data: bytes, found: list[Any]) -> None:
            start.wait()
            found.append(msgpack_decoder(kind).decode(data))

        threads = [threading.Thread(target=decode, args=(outer, start, data, found)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.many[0].a for one in found] == [2, 2]


def test_a_type_has_one_decoder() -> None:
    assert msgpack_decoder(list[int]) is msgpack_decoder(list[int])
    assert json_decoder(list[int]).decode(b"[1]") == [1]


def test_nobody_else_makes_decoders_when_they_are_needed() -> None:
    """A decoder that a module makes while it is imported is made by one thread."""
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"msgspec\.(json|msgpack)\.decode\(.*type=", line)
    ]
    assert found == []
