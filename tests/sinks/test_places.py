"""A place where a sink cannot write is refused before the takeover: the error names it, and says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from strandline.errors import ConfigError, StorageRefusedError
from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.delta.sink import DeltaSink
from strandline.sinks.iceberg.catalogues import translated
from strandline.sinks.iceberg.sink import IcebergSink
from strandline.sinks.local_folders import check_folder
from strandline.sinks.parquet.sink import ParquetSink
from strandline.sinks.sqlite import SQLiteSink
from strandline.testing.sink import SinkJob, a_context

MakeSink = Callable[[Path], ExactlyOnceSink]


def iceberg(folder: Path, mode: str = "append") -> IcebergSink:
    """A table whose files go into `folder`."""
    catalogue = {"type": "sql", "uri": "sqlite:///:memory:", "warehouse": f"file://{folder}"}
    return IcebergSink("sales.visits", catalogue, mode=mode)  # type: ignore[arg-type]


SINKS: dict[str, MakeSink] = {
    "parquet": lambda folder: ParquetSink(str(folder)),
    "delta": lambda folder: DeltaSink(str(folder)),
    "delta, upsert": lambda folder: DeltaSink(str(folder), mode="upsert"),
    "iceberg": iceberg,
    "iceberg, upsert": lambda folder: iceberg(folder, "upsert"),
    "sqlite": lambda folder: SQLiteSink(folder / "visits.db", "visits"),
}


@pytest.fixture(params=SINKS)
def make_sink(request: pytest.FixtureRequest) -> MakeSink:
    return SINKS[request.param]


def refused(sink: ExactlyOnceSink, tmp_path: Path, match: str) -> None:
    context = a_context(tmp_path / "checkpoints")
    job = SinkJob(sink.bound(context), context)
    with pytest.raises(StorageRefusedError, match=match):
        job.start()
    assert job.log.generation == 0


@contextmanager
def as_a_user_without_rights() -> Iterator[None]:
    """Root may write anywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_file_where_the_folder_should_be(make_sink: MakeSink, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    for folder in (file, file / "below"):
        refused(
            make_sink(folder), tmp_path, rf"job 'visits' cannot write.*because {file} is no folder\. Move it away, or"
        )
    assert file.read_text() == "content"


def test_a_link_that_leads_nowhere(make_sink: MakeSink, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused(make_sink(tmp_path / "link"), tmp_path, "link is a link that leads nowhere. Move it away, or")


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    with as_a_user_without_rights():
        match = (
            rf"delta:/t: the user that runs job 'visits' \(uid {os.geteuid()}\) may not write into /.* Give it write"
        )
        with pytest.raises(StorageRefusedError, match=match):
            check_folder("delta:/t", "visits", str(folder / "table"))


def test_a_folder_in_place_of_a_database(tmp_path: Path) -> None:
    refused(SQLiteSink(tmp_path, "visits"), tmp_path, f"{tmp_path} is no file, and SQLite keeps a database in one")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            PermissionError(13, "Permission denied", "/warehouse"),
            "lacks a right.*the right to read and write the table",
        ),
        (OSError(30, "Read-only file system", "/warehouse"), "lacks a right"),
        (NotADirectoryError(20, "Not a directory", "/warehouse"), "a file is where the table needs a folder"),
    ],
)
def test_what_the_file_system_tells_iceberg_says_what_to_do(error: OSError, says: str) -> None:
    with pytest.raises(StorageRefusedError, match=f"iceberg:c/t.*{says}"), translated("iceberg:c/t", "visits", {}):
        raise error


def test_a_warehouse_that_is_no_path_names_its_sink(tmp_path: Path) -> None:
    catalogue = {"type": "sql", "uri": "sqlite:///:memory:", "warehouse": "file://out/warehouse"}
    context = a_context(tmp_path / "checkpoints")
    job = SinkJob(IcebergSink("sales.visits", catalogue).bound(context), context)
    with pytest.raises(
        ConfigError, match=r"^iceberg:default/sales\.visits: .*names a host; write file:///absolute/path"
    ):
        job.start()
