"""The file without rows: any reader can read the folder of a sink that has none yet."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strandline.errors import DirectoryNotOursError, IncompatibleCheckpointError
from strandline.sinks.names import new_final_name
from strandline.sinks.parquet.empty_output import check_readable_together, make_readable
from strandline.sinks.parquet.files import check_sink, recover_sink
from strandline.storage import Storage, open_storage

COLUMNS = pa.schema([("user", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path), private=False)


def test_readers_find_the_columns_and_no_rows(storage: Storage, tmp_path: Path) -> None:
    make_readable(storage, "visits", COLUMNS)
    table = pq.read_table(tmp_path)
    assert table.schema.equals(COLUMNS)
    assert table.num_rows == 0
    with duckdb.connect() as database:
        found = database.execute(f"select * from read_parquet('{tmp_path}/*.parquet')")
        assert found.fetchall() == []


def test_it_changes_with_the_columns_and_else_not_at_all(storage: Storage, tmp_path: Path) -> None:
    make_readable(storage, "visits", COLUMNS)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_ino
    make_readable(storage, "visits", COLUMNS)
    assert file.stat().st_ino == before
    wider = COLUMNS.append(pa.field("s", pa.float64()))
    make_readable(storage, "visits", wider)
    assert pq.read_schema(file).equals(wider)
    file.write_bytes(b"damaged")
    make_readable(storage, "visits", wider)
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert pq.read_schema(file).equals(wider)


def test_it_is_neither_output_nor_foreign_and_comes_before_all_files(storage: Storage, tmp_path: Path) -> None:
    make_readable(storage, "visits", COLUMNS)
    (file,) = tmp_path.iterdir()
    sink = str(tmp_path)
    # The job died before its first checkpoint, and starts again.
    assert check_sink(storage, sink, "visits", None) == 0
    recover_sink(storage, sink, "visits", None, 2, lambda: None)
    assert file.exists()
    assert file.name < new_final_name("visits", 0)
    with pytest.raises(DirectoryNotOursError, match="holds the output of job 'visits'"):
        check_sink(storage, sink, "orders", None)


@pytest.mark.parametrize(
    ("before", "now", "value"),
    [
        (pa.int8(), pa.int64(), 3),
        (pa.int32(), pa.float64(), 3),
        (pa.float32(), pa.float64(), 1.5),
        (pa.decimal128(10, 2), pa.decimal128(20, 4), Decimal("1.50")),
        (pa.struct([pa.field("a", pa.int64(), nullable=False)]), pa.struct([("a", pa.int64())]), {"a": 1}),
    ],
)
def test_readers_can_read_old_rows_in_a_wider_type(
    storage: Storage, tmp_path: Path, before: pa.DataType, now: pa.DataType, value: object
) -> None:
    make_readable(storage, "visits", pa.schema([("user", pa.string()), ("x", before)]))
    rows = pa.table({"user": ["a"], "x": pa.array([value], before)})
    pq.write_table(rows, tmp_path / new_final_name("visits", 0))
    changed = pa.schema([("x", now), ("more", pa.string())])
    check_readable_together(storage, "visits", changed)
    make_readable(storage, "visits", changed)
    assert pq.read_table(tmp_path).to_pylist() == [{"x": value, "more": None}]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (pa.int64(), pa.string()),
        (pa.int64(), pa.int32()),
        (pa.int64(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(10, 4)),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.list_(pa.int64()), pa.list_(pa.string())),
    ],
)
def test_a_type_that_cannot_be_read_with_the_old_rows_is_refused(
    storage: Storage, tmp_path: Path, before: pa.DataType, now: pa.DataType
) -> None:
    make_readable(storage, "visits", pa.schema([("x", before)]))
    changed = pa.schema([("x", now)])
    check_readable_together(storage, "visits", changed)  # there are no rows yet
    pq.write_table(pa.schema([("x", before)]).empty_table(), tmp_path / new_final_name("visits", 0))
    with pytest.raises(IncompatibleCheckpointError, match=r"the column 'x' is of type .*another name, or the sink"):
        check_readable_together(storage, "visits", changed)
