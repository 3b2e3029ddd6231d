"""A Parquet file without rows in the folder of every `ParquetSink`: the output can be read before it has rows.

Readers need a file to learn the columns from. The file holds no rows, so it may be visible at any time, be written
again, and outlive every checkpoint. It has one name per job, which sorts before all other files: readers that look at
the first file alone see the columns that the job writes now.
"""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.errors import NotFoundError
from strandline.runtime.protocol.sink_names import empty_name
from strandline.storage import Storage


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
