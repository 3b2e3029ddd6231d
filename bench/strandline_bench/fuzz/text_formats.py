"""Stored values, schemas and config files, as formats that are fuzzed. None of them has a checksum of its own."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa

from strandline.config import Config
from strandline.operators.columns.row_codec import RowCodec
from strandline.operators.schema_evolution import read_states, state_changes
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.ddl import parse_schema
from strandline_bench.fuzz.format import STATES, Format, sealed_tree
from strandline_bench.fuzz.mutation import mutated_tree

SCHEMA = "n long, s string, b binary, d decimal(10,2), t timestamp, a array<string>, m map<string, long>, x double"
ROW: tuple[Any, ...] = (
    7,
    "é",
    b"x",
    Decimal("1.25"),
    datetime(2026, 1, 2, tzinfo=UTC),
    ["a", None],
    {"k": 1},
    0.5,
)


class Values(Format):
    """Stored values of a state: one row, and a list of rows."""

    name = "stored values"
    weight = 4

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._codec = ValueCodec(parse_schema(SCHEMA), "state 'x'")
        one = self._codec.encode(ROW)
        self.samples = (one, self._codec.join([one, one]), self._codec.encode((None,) * len(ROW)))

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        return sealed_tree(random, data, bytes)

    def read(self, data: bytes) -> None:
        try:
            self._codec.decode(data)
        finally:
            self._codec.decode_list(data)


class Columns(Format):
    """Stored rows that are decoded a column at a time."""

    name = "stored columns"
    weight = 3

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        struct = parse_schema("n long, s string, b binary, f boolean, d decimal(10,2), t timestamp, a array<string>")
        self._codec = RowCodec(struct, "state 'x'")
        names = [field.name for field in struct.fields]
        rows = [(1, "é", b"x", True, Decimal("1.25"), datetime(2026, 1, 2, tzinfo=UTC), ["a"]), (None,) * 7]
        columns = [pa.array([row[at] for row in rows], self._codec.schema.field(at).type) for at in range(len(names))]
        self._good = self._codec.encode(pa.RecordBatch.from_arrays(columns, names=names))
        self.samples = tuple(self._good)

    def read(self, data: bytes) -> None:
        for values in ([data], [self._good[0], data, self._good[1]]):
            rows = self._codec.decode(values)
            rows.validate()
            for name in ("s", "b", "f", "a"):
                rows.column(name).to_pylist()


class Schemas(Format):
    """The schema of a state in a checkpoint, and its comparison with what a job declares."""

    name = "schemas"
    weight = 3

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        texts = [SCHEMA, parse_schema(SCHEMA).json(), "long", "a struct<b: array<map<string, decimal(3,1)>>> not null"]
        self.samples = tuple(text.encode() for text in texts)

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        tree = mutated_tree(random, json.loads(parse_schema(SCHEMA).json()))
        try:
            return json.dumps(tree, default=str).encode(errors="surrogatepass")
        except RecursionError:
            return None

    def read(self, data: bytes) -> None:
        described = {**msgspec.to_builtins(STATES[0]), "schema": data.decode(errors="replace")}
        state_changes("count", read_states("count", [described]), STATES, lambda _name: True)


class ConfigFiles(Format):
    """A config file in YAML."""

    name = "config files"
    weight = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = folder / "config.yaml"
        self.samples = (
            b"checkpoint_dir: /c\ncheckpoint_interval: 10s\nstate_memory: 512mb\nrocksdb:\n  compression: lz4\n"
            b"storage_options: {endpoint: 'http://x', region: y}\ntrusted_dirs: [/a, /b]\n",
            b"state:\n  checkpoints.dir: &d s3://b/c\n  backend: {type: rocksdb, incremental: true}\n"
            b"dstl: {dfs: {base-path: *d}}\nparallelism: 4\nrestart-strategy.type: fixed-delay\nx: 2026-01-02\n",
        )

    def sealed_values(self, random: Random, data: bytes) -> bytes | None:
        known = Config(checkpoint_dir="/c").to_mapping()
        tree = mutated_tree(random, {name: known[name] for name in random.sample(list(known), 4)})
        try:
            return json.dumps(tree, default=str).encode(errors="surrogatepass")
        except RecursionError:
            return None

    def read(self, data: bytes) -> None:
        self._path.write_bytes(data)
        Config.load(self._path)
