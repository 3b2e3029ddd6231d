"""A second reader of Delta tables: it reads the log's JSON and the Parquet files, without delta-rs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq


def actions(table: Path) -> list[dict[str, Any]]:
    """All actions of the log, in order."""
    log = sorted((table / "_delta_log").glob("*.json"))
    return [json.loads(line) for file in log for line in file.read_text().splitlines()]


def files(table: Path) -> dict[str, dict[str, Any]]:
    """The files of the newest version, with what the log says about them."""
    found: dict[str, dict[str, Any]] = {}
    for action in actions(table):
        if "add" in action:
            found[action["add"]["path"]] = action["add"]
        if "remove" in action:
            found.pop(action["remove"]["path"], None)
    return found


def read(table: Path) -> pa.Table:
    """The rows of the newest version, with partition columns as strings at the end."""
    parts = []
    for path, add in files(table).items():
        rows = pq.ParquetFile(table / unquote(path)).read()
        assert rows.num_rows == json.loads(add["stats"])["numRecords"]
        assert (table / unquote(path)).stat().st_size == add["size"]
        for name, value in add["partitionValues"].items():
            rows = rows.append_column(name, pa.array([value] * rows.num_rows, pa.string()))
        parts.append(rows)
    return pa.concat_tables(parts) if parts else pa.table({})


def transactions(table: Path) -> dict[str, int]:
    """The newest version of every application."""
    return {one["txn"]["appId"]: one["txn"]["version"] for one in actions(table) if "txn" in one}
