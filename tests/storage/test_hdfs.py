"""HDFS keeps the contract of `Storage`, on Hadoop's own mini cluster; and what is special to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hdfs_native import Client, WriteOptions

from strandline.errors import StorageError, UnknownOutcomeError
from strandline.storage import Storage, open_storage
from strandline.storage.base import TEMPORARY
from strandline.storage.hdfs import HdfsStorage
from strandline.testing.storage import StorageContract
from tests.hdfs import mini_hdfs

pytestmark = pytest.mark.slow

_roots = count()


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mini_hdfs(tmp_path_factory.mktemp("hdfs")) as url:
        yield url


class TestHdfs(StorageContract):
    @pytest.fixture
    def storage(self, hdfs: str) -> Storage:
        return open_storage(f"{hdfs}/root-{next(_roots)}/nested/")


class LosesAnswers:
    """A real client. Its renames or deletions fail before or after they happen."""

    def __init__(self, client: Client, *, rename: str = "", delete: str = "") -> None:
        self._client = client
        self._fails = {"rename": rename, "delete": delete}

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if self._fails.get(name) else getattr(self._client, name)

    def _call(self, name: str, *args: Any, **more: Any) -> None:
        if self._fails[name] == "after":
            getattr(self._client, name)(*args, **more)
        raise RuntimeError("the connection broke")


@pytest.fixture
def storage(hdfs: str) -> HdfsStorage:
    opened = open_storage(f"{hdfs}/root-{next(_roots)}")
    assert isinstance(opened, HdfsStorage)
    return opened


def losing(storage: HdfsStorage, **fails: str) -> HdfsStorage:
    lossy = HdfsStorage(storage.url)
    lossy._client = LosesAnswers(lossy._client, **fails)  # type: ignore[assignment]
    return lossy


def temporary_files(storage: HdfsStorage) -> list[str]:
    names = [status.path for status in storage._client.list_status("/", recursive=True)]
    return [name for name in names if name.startswith(storage._root) and TEMPORARY in name]


def test_a_write_whose_answer_was_lost_is_never_reported_as_done(storage: HdfsStorage) -> None:
    with pytest.raises(UnknownOutcomeError, match="read it back"):
        losing(storage, rename="after").create("log/1", b"mine")
    assert storage.read("log/1") == b"mine"
    with pytest.raises(StorageError, match="the connection broke") as raised:
        losing(storage, rename="before").create("log/2", b"mine")
    assert raised.type is StorageError
    assert not storage.exists("log/2")
    with pytest.raises(UnknownOutcomeError, match="read it back"):
        losing(storage, rename="after").write("log/1", b"replaced")
    assert storage.read("log/1") == b"replaced"
    assert temporary_files(storage) == []


class Panic(BaseException):
    """As a bug of the client shows."""


Panic.__name__ = "PanicException"


class Overtaken:
    """A real client, whose process stands still before each rename: meanwhile `gc` deletes its temporary files."""

    def __init__(self, client: Client, error: BaseException | None) -> None:
        self._client = client
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def rename(self, old: str, new: str, *, overwrite: bool) -> None:
        self._client.delete(old)
        if self._error is not None:
            raise self._error
        self._client.rename(old, new, overwrite=overwrite)


@pytest.mark.parametrize("error", [None, RuntimeError("the connection broke"), Panic("a bug")])
def test_a_writer_that_was_overtaken_does_not_take_the_file_of_another_for_its_own(
    storage: HdfsStorage, error: BaseException | None
) -> None:
    storage.create("log/1", b"another driver's")
    sleeper = HdfsStorage(storage.url)
    sleeper._client = Overtaken(sleeper._client, error)  # type: ignore[assignment]
    with pytest.raises(UnknownOutcomeError, match="read it back"):
        sleeper.create("log/1", b"mine")
    assert storage.read("log/1") == b"another driver's"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_if_the_name_node_is_gone_the_outcome_is_unknown(storage: HdfsStorage, moment: str) -> None:
    with pytest.raises(UnknownOutcomeError, match="read it back"):
        losing(storage, rename=moment, delete="before").create("log/1", b"mine")
    assert storage.exists("log/1") == (moment == "after")
    storage.write("a", b"1")
    with pytest.raises(UnknownOutcomeError, match="read it back"):
        losing(storage, rename=moment).rename("a", "b/c")
    assert storage.exists("b/c") == (moment == "after")


def test_a_writer_that_breaks_down_leaves_nothing(storage: HdfsStorage, tmp_path: Path) -> None:
    def break_down(writer: object) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(StorageError, match="the disk is gone"):
        storage._put("dir/file", break_down, overwrite=True)
    assert not storage.exists("dir/file")
    assert temporary_files(storage) == []


def test_a_name_node_that_is_not_there_is_an_error_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    storage = open_storage(f"hdfs://127.0.0.1:{port}/x", {"dfs.client.failover.max.attempts": "1"})
    with pytest.raises(StorageError, match=f"127.0.0.1:{port}/x/a"):
        storage.read("a")
    with pytest.raises(StorageError):
        storage.create("a", b"1")


def test_what_a_killed_writer_leaves_is_known_and_can_be_deleted(storage: HdfsStorage) -> None:
    storage.write("dir/a:b/file", b"1")
    storage._client.create(f"{storage._root}/dir/a%3Ab/{TEMPORARY}1", WriteOptions(create_parent=True)).write(b"half")
    storage._client.create(f"{storage._root}/other/{TEMPORARY}2", WriteOptions(create_parent=True)).close()
    assert [file.path for file in storage.list()] == ["dir/a:b/file"]
    assert [file.path for file in storage.unfinished("dir")] == [f"dir/a:b/{TEMPORARY}1"]
    storage.delete_unfinished([file.path for file in storage.unfinished()])
    storage.delete_unfinished(["gone/.tmp-3"])
    assert list(storage.unfinished()) == []
    names = {status.path.removeprefix(storage._root) for status in storage._client.list_status(storage._root, True)}
    assert names == {"/dir", "/dir/a%3Ab", "/dir/a%3Ab/file"}
