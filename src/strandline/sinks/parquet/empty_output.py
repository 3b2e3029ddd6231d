"""A Parquet file without rows in the folder of every `ParquetSink`: the output can be read before it has rows.

Readers need a file to learn the columns from. The file holds no rows, so it may be visible at any time, be written
again, and outlive every checkpoint. It has one name per job, which sorts before all other files: readers that look at
the first file alone see the columns that the job writes now. A changed job learns from it what its earlier files hold.
"""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.errors import IncompatibleCheckpointError, NotFoundError
from strandline.sinks.names import FINAL_NAME, empty_name
from strandline.storage import Storage

_WIDTHS = [
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.int8(), pa.int16(), pa.int32(), pa.float64()),
    (pa.float32(), pa.float64()),
]
"""Types whose values all readers can show in every later type of the row. Spark cannot read int64 as float64."""


def check_readable_together(storage: Storage, job: str, schema: pa.Schema) -> None:
    """Raise `IncompatibleCheckpointError` if readers could not read earlier output together with rows of `schema`.

    New columns, missing ones and wider numbers are fine: readers take the columns from the file without rows.
    """
    try:
        before = dict(_columns(storage.read(empty_name(job))) or ())
    except NotFoundError:
        return
    changed = [field for field in schema if field.name in before and not _reads(before[field.name], field.type)]
    if changed and any(FINAL_NAME.fullmatch(file.path) for file in storage.list()):
        field = changed[0]
        raise IncompatibleCheckpointError(
            f"{storage.url} holds rows in which the column {field.name!r} is of type {before[field.name]}, but job "
            f"{job!r} would write {field.type} there, and nobody could read both together. Give the column another "
            "name, or the sink another folder."
        )


def _reads(before: pa.DataType, now: pa.DataType) -> bool:
    """Whether a reader that expects the type `now` can read stored values of the type `before`."""
    if str(before).replace(" not null", "") == str(now).replace(" not null", ""):
        return True
    if pa.types.is_decimal128(before) and pa.types.is_decimal128(now):
        return bool(now.scale >= before.scale and now.precision - now.scale >= before.precision - before.scale)
    return any(before in row and now in row[row.index(before) :] for row in _WIDTHS)


def make_readable(storage: Storage, job: str, schema: pa.Schema) -> None:
    """Write the file, unless it is there with the columns of `schema`. A reader never finds half a file."""
    name = empty_name(job)
    try:
        if _columns(storage.read(name)) == _kinds(schema):
            return
    except NotFoundError:
        pass
    content = io.BytesIO()
    pq.write_table(schema.empty_table(), content)
    storage.write(name, content.getvalue())


def _columns(content: bytes) -> list[tuple[str, pa.DataType]] | None:
    try:
        return _kinds(pq.read_schema(io.BytesIO(content)))
    except (pa.ArrowException, OSError):
        return None


def _kinds(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in schema]
