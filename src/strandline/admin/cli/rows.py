"""Prints rows of Arrow batches: as a table, as JSON, as CSV, or as a Parquet file."""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Iterator, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from strandline.errors import ConfigError
from strandline.redaction import without_controls


def print_table(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Print rows for a person."""
    from rich.table import Table

    from strandline.admin.cli.console import SafeConsole

    shown = Table(*schema.names)
    for row in _rows(batches):
        shown.add_row(*map(_text, row.values()))
    SafeConsole().print(shown)


def write_json(_schema: pa.Schema, batches: Iterator[pa.RecordBatch], out: TextIO) -> None:
    """Write one JSON object a line. Binary values are in base64; NaN and infinities are texts."""
    for row in _rows(batches):
        out.write(json.dumps(_plain(row)) + "\n")


def write_csv(schema: pa.Schema, batches: Iterator[pa.RecordBatch], out: TextIO) -> None:
    """Write CSV with a header. A null is an empty field; a nested value is JSON."""
    writer = csv.writer(out, lineterminator="\n")
    on_terminal = out.isatty()
    writer.writerow(schema.names)
    for row in _rows(batches):
        texts = ["" if value is None else _text(value) for value in row.values()]
        writer.writerow(map(without_controls, texts) if on_terminal else texts)


def write_parquet(schema: pa.Schema, batches: Iterator[pa.RecordBatch], path: str) -> None:
    """Write a Parquet file; it appears complete or not at all. Raises `ConfigError` if it cannot be written."""
    import pyarrow.parquet as pq

    target = Path(path)
    draft = target.with_name(f".{target.name}.tmp")
    try:
        with pq.ParquetWriter(draft, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_pylist()


def _text(value: Any) -> str:
    if value is None:
        return "null"
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case datetime() | date():
            return value.isoformat()
        case Decimal() | timedelta():
            return str(value)
        case Mapping():
            return {str(name): _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case _:
            return value
