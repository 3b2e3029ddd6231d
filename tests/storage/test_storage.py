"""Local files and a real S3 server keep the contract of `Storage`; what is special to each; the paths of a job."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from strandline.errors import (
    AlreadyExistsError,
    ConfigError,
    JobDefinitionError,
    NotFoundError,
    StorageError,
    StorageFullError,
    StorageRefusedError,
    UnknownOutcomeError,
)
from strandline.storage import JobPaths, Storage, open_storage
from strandline.storage.base import intended_name
from strandline.storage.external import delete_files, external_path, list_files
from strandline.storage.local import LocalStorage
from strandline.storage.object_store import ObjectStorage
from strandline.storage.paths import HistoryFile
from strandline.testing.storage import StorageContract
from tests.examples import examples
from tests.s3 import BUCKET, KEYS

_roots = count()


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path_factory: pytest.TempPathFactory) -> Storage:
        return open_storage(str(tmp_path_factory.mktemp("storage") / "not" / "there" / "yet"))


class TestFileUrl(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path_factory: pytest.TempPathFactory) -> Storage:
        return open_storage((tmp_path_factory.mktemp("storage") / "with space").as_uri())


class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, s3_endpoint: str) -> Storage:
        return open_storage(f"s3://{BUCKET}/root-{next(_roots)}/nested/", {"endpoint": s3_endpoint, **KEYS})


# --- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["ftp://host/x", "S4://bucket", "http://h/x"])
def test_an_unsupported_scheme_lists_the_supported_ones(url: str) -> None:
    with pytest.raises(ConfigError, match=r"supported: a local path, file://, s3://.*gs://, az://") as raised:
        open_storage(url)
    assert "faulty+" not in str(raised.value)


def test_a_relative_path_means_the_same_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    storage = open_storage("ckpt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    storage.write("a", b"1")
    assert (tmp_path / "ckpt" / "a").read_bytes() == b"1"
    assert open_storage(storage.url).read("a") == b"1"


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/ckpt").url == str(tmp_path / "ckpt")


@pytest.mark.parametrize("url", ["", "file://host/path", "file://"])
def test_a_url_that_names_no_folder_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(url)


def test_opening_contacts_and_creates_nothing(tmp_path: Path) -> None:
    open_storage(str(tmp_path / "ckpt"))
    assert list(tmp_path.iterdir()) == []
    open_storage("s3://bucket/x", {"endpoint": "http://127.0.0.1:1", **KEYS})


def test_google_and_azure_urls_open() -> None:
    assert isinstance(open_storage("gs://bucket/x"), ObjectStorage)
    azure = {"account_name": "account", "account_key": "a2V5"}
    assert isinstance(open_storage("az://container/x", azure), ObjectStorage)


def test_an_unknown_storage_option_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        open_storage("s3://bucket/x", {"no_such_option": "1"})


def test_s3_settings_come_from_the_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    storage = open_storage(f"s3a://{BUCKET}/environment")
    storage.create("a", b"1")
    assert open_storage(f"s3://{BUCKET}/environment").read("a") == b"1"


# --- local files ---------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "root"))


def files_on_disk(storage: LocalStorage) -> list[str]:
    return sorted(str(file.relative_to(storage.root)) for file in storage.root.rglob("*"))


def test_empty_folders_go_with_their_last_file_but_the_root_stays(local: LocalStorage) -> None:
    local.write("a/b/c/1", b"1")
    local.write("a/2", b"1")
    local.delete(["a/b/c/1"])
    assert files_on_disk(local) == ["a", "a/2"]
    local.rename("a/2", "x/y")
    assert files_on_disk(local) == ["x", "x/y"]
    local.delete(["x/y"])
    assert files_on_disk(local) == []
    assert local.root.is_dir()


def test_a_write_that_was_cut_off_is_never_listed(local: LocalStorage) -> None:
    local.write("dir/file", b"1")
    (local.root / "dir" / ".tmp-half").write_bytes(b"half")
    assert [file.path for file in local.list()] == ["dir/file"]
    for storage in (local, open_storage(f"faulty+file://{local.root}")):
        assert [(file.path, file.size) for file in storage.unfinished()] == [("dir/.tmp-half", 4)]
        assert list(storage.unfinished("elsewhere")) == []
    storage.delete_unfinished(["dir/.tmp-half", "gone/.tmp-1"])
    assert files_on_disk(local) == ["dir", "dir/file"]


@pytest.mark.parametrize(
    ("name", "told"), [("file", "file"), ("n" * 230, "n" * 217), ("é", "é"), ("é" * 120, "é" * 108)]
)
def test_a_file_that_is_being_written_tells_what_it_will_be(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    found: list[str] = []
    replace = LocalStorage._replace

    def look(temporary: Path, target: Path) -> None:
        found.extend(file.path for file in local.unfinished())
        replace(temporary, target)

    monkeypatch.setattr(LocalStorage, "_replace", staticmethod(look))
    local.write(f"dir/{name}", b"1")
    (path,) = found
    assert path.startswith("dir/.tmp-")
    assert intended_name(path) == told
    assert intended_name(f"dir/{name}") == intended_name("dir/.tmp-half") == ""


def test_files_behind_a_link_are_not_listed(local: LocalStorage, tmp_path: Path) -> None:
    """Whoever may make a link in a shared folder must not get files elsewhere deleted as orphans."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis").write_bytes(b"1")
    local.write("job/file", b"1")
    (local.root / "job" / "link").symlink_to(elsewhere)
    assert [file.path for file in local.list()] == ["job/file"]


def test_what_is_no_plain_file_keeps_no_reader_waiting(local: LocalStorage) -> None:
    local.root.mkdir()
    os.mkfifo(local.root / "pipe")
    (local.root / "device").symlink_to("/dev/zero")
    for path in ("pipe", "device"):
        with pytest.raises(NotFoundError):
            local.read(path)
        with pytest.raises(NotFoundError):
            local.read_range(path, 0, 1)


def test_files_of_several_storages_are_listed_and_deleted_together(local: LocalStorage, tmp_path: Path) -> None:
    other = LocalStorage(str(tmp_path / "other"))
    for storage in (local, other):
        storage.write("job/shared/a", b"1")
        storage.write("job/shared/b", b"1")
        (storage.root / "job" / "shared" / ".tmp-half").write_bytes(b"half")
    known = [external_path(other, "job/shared/a")]
    names = ["job/shared/.tmp-half", "job/shared/a", "job/shared/b"]
    found = sorted(file.path for file in list_files(local, "job", known))
    assert found == sorted([*names, *(external_path(other, name) for name in names)])
    delete_files(local, (path for path in found if not path.endswith("/b")))
    assert files_on_disk(local) == files_on_disk(other) == ["job", "job/shared", "job/shared/b"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_where_and_what_to_do(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    local.write("old", b"old")
    source = tmp_path / "source"
    source.write_bytes(b"data")

    def no_space(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", no_space)
    calls: list[Callable[[], None]] = [
        lambda: local.write("new", b"data"),
        lambda: local.create("new", b"data"),
        lambda: local.upload(source, "new"),
    ]
    for call in calls:
        with pytest.raises(StorageFullError, match=r"root/new.*free some space"):
            call()
    with pytest.raises(StorageFullError):
        local.write("old", b"new")
    monkeypatch.undo()
    assert local.read("old") == b"old"
    assert files_on_disk(local) == ["old"]


def test_a_folder_that_cannot_be_synced_leaves_the_outcome_unknown(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.write("log/0", b"")
    real = os.fsync

    def fail_on_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_on_folders)
    with pytest.raises(UnknownOutcomeError, match=r"log/1.*read it back"):
        local.create("log/1", b"mine")


def test_a_link_whose_reply_was_lost_counts_as_won(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def repeat(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", repeat)
    local.create("log/1", b"mine")
    assert local.read("log/1") == b"mine"


def test_a_file_system_without_hard_links_is_refused(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StorageError, match="no hard links"):
        local.create("log/1", b"mine")
    assert list(local.list()) == []


def test_a_root_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = LocalStorage(str(tmp_path / "file" / "root"))
    with pytest.raises(StorageError, match=r"file/root: .*file is not a folder"):
        storage.write("a", b"1")
    with pytest.raises(NotFoundError):
        storage.read("a")


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("{file}", "{file} is not a folder"),
        ("{file}/below/it", "{file} is not a folder"),
        ("{nowhere}", "{nowhere} is not a folder"),
        ("/proc/strandline/ckpt", "No such file or directory"),
        ("/sys/strandline/ckpt", "/sys does not allow it: "),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_the_reason(root: str, reason: str, tmp_path: Path) -> None:
    file, nowhere = tmp_path / "file", tmp_path / "link"
    file.touch()
    nowhere.symlink_to(tmp_path / "missing")
    names = {"file": file, "nowhere": nowhere}
    root = root.format(**names)
    with pytest.raises(StorageRefusedError) as raised:
        LocalStorage(root).create("log/1", b"")
    assert f"cannot create the folder {root}/log: {reason.format(**names)}" in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error_that_asks_for_access(local: LocalStorage) -> None:
    local.write("dir/a", b"1")
    (local.root / "dir").chmod(0o500)
    try:
        with pytest.raises(StorageError, match="write access"):
            local.write("dir/b", b"1")
        with pytest.raises(StorageError, match="write access"):
            local.delete(["dir/a"])
        assert local.read("dir/a") == b"1"
    finally:
        (local.root / "dir").chmod(0o700)


def test_a_read_only_file_system_is_an_error_that_asks_for_access(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(StorageError, match="write access"):
        local.write("dir/b", b"1")


def test_a_download_into_a_missing_folder_is_an_error(local: LocalStorage, tmp_path: Path) -> None:
    local.write("a", b"1")
    with pytest.raises(StorageError, match="nowhere"):
        local.download("a", tmp_path / "nowhere" / "a")


class LocalStorageModel(RuleBasedStateMachine):
    """Whatever is done, local files hold what a dict would."""

    paths = st.builds(
        lambda folders, name: "/".join([*folders, name]),
        st.lists(st.sampled_from(["d", "d-", "d.x", "e"]), max_size=3),
        # Names of files and of folders differ, because a file system, unlike a dict, cannot have both at one path.
        st.sampled_from(["f", "f-", "f.1", "f0", "_metadata"]),
    )

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="strandline-test-"))
        self.storage = LocalStorage(str(self.folder / "root"))
        self.model: dict[str, bytes] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(path=paths, data=st.binary(max_size=20))
    def write(self, path: str, data: bytes) -> None:
        self.storage.write(path, data)
        self.model[path] = data

    @rule(path=paths, data=st.binary(max_size=20))
    def create(self, path: str, data: bytes) -> None:
        if path in self.model:
            with pytest.raises(AlreadyExistsError):
                self.storage.create(path, data)
        else:
            self.storage.create(path, data)
            self.model[path] = data

    @rule(path=paths, data=st.binary(max_size=20))
    def upload(self, path: str, data: bytes) -> None:
        source = self.folder / "source"
        source.write_bytes(data)
        self.storage.upload(source, path)
        self.model[path] = data

    @rule(old=paths, new=paths)
    def rename(self, old: str, new: str) -> None:
        if old in self.model:
            self.storage.rename(old, new)
            self.model[new] = self.model.pop(old)
        else:
            with pytest.raises(NotFoundError):
                self.storage.rename(old, new)

    @rule(paths=st.lists(paths, max_size=4))
    def delete(self, paths: list[str]) -> None:
        self.storage.delete(paths)
        for path in paths:
            self.model.pop(path, None)

    @rule(path=paths)
    def look_at(self, path: str) -> None:
        assert self.storage.exists(path) == (path in self.model)
        if path in self.model:
            assert self.storage.read(path) == self.model[path]
        else:
            with pytest.raises(NotFoundError):
                self.storage.read(path)

    @rule(prefix=st.sampled_from(["", "d", "d/d", "d.x", "e/d-/"]), after=st.none() | paths)
    def list_some(self, prefix: str, after: str | None) -> None:
        below = f"{prefix.rstrip('/')}/" if prefix else ""
        expected = sorted(p for p in self.model if p.startswith(below) and (after is None or p > after))
        assert [file.path for file in self.storage.list(prefix, after)] == expected

    @invariant()
    def the_tree_is_the_model(self) -> None:
        assert {file.path: file.size for file in self.storage.list()} == {p: len(d) for p, d in self.model.items()}
        if self.storage.root.exists():
            assert all(any(folder.iterdir()) for folder in self.storage.root.rglob("*") if folder.is_dir())


LocalStorageModel.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestLocalStorageModel = LocalStorageModel.TestCase


# --- object stores -------------------------------------------------------------------------------


def test_a_missing_bucket_is_not_found(s3_endpoint: str) -> None:
    storage = open_storage("s3://no-such-bucket/x", {"endpoint": s3_endpoint, **KEYS})
    calls: list[Callable[[], object]] = [
        lambda: storage.read("a"),
        lambda: storage.write("a", b"1"),
        lambda: storage.create("a", b"1"),
        lambda: list(storage.list()),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="no-such-bucket"):
            call()


def test_a_server_that_does_not_answer_leaves_a_write_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        storage = open_storage("s3://bucket/x", {"endpoint": endpoint, "timeout": "300ms", **KEYS})
        with pytest.raises(UnknownOutcomeError, match=r"s3://bucket/x/log/1.*read it back"):
            storage.create("log/1", b"1")


def test_a_server_that_is_gone_leaves_a_create_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    storage = open_storage("s3://bucket/x", {"endpoint": f"http://127.0.0.1:{port}", **KEYS})
    with pytest.raises(UnknownOutcomeError):
        storage.create("log/1", b"1")


def test_an_object_that_is_replaced_while_its_answer_breaks_off_is_read_again() -> None:
    """The client asks for the rest of what it began to read, and that is gone."""
    old, new = b"old " * 100, b"new " * 100
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            body, sent = (old, 40) if len(asked) == 1 else (new, len(new))
            if self.headers["Range"] is None:
                first = 0
                self.send_response(200)
            else:
                first = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - first))
            self.send_header("ETag", '"old"' if body is old else '"new"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(body[first:sent])

        def log_message(self, *_arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            storage = open_storage("s3://bucket/x", {"endpoint": f"http://127.0.0.1:{server.server_port}", **KEYS})
            assert storage.read("entry") == new
        finally:
            server.shutdown()
    assert asked == [None, "bytes=40-399", None]


class Answering:
    """An HTTP server that gives every request the same answer, and counts the requests."""

    def __init__(self, status: int, body: str) -> None:
        self.requests = 0
        answering = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                answering.requests += 1
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_PUT

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Answering:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def storage(self) -> Storage:
        return open_storage("s3://bucket/x", {"endpoint": f"http://127.0.0.1:{self._server.server_port}", **KEYS})


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (500, "InternalError", UnknownOutcomeError),
        (503, "SlowDown", UnknownOutcomeError),
        (409, "ConditionalRequestConflict", UnknownOutcomeError),
        (412, "PreconditionFailed", AlreadyExistsError),
        (400, "InvalidRequest", StorageError),
        (403, "AccessDenied", StorageRefusedError),
    ],
)
def test_a_create_is_sent_once_and_its_answer_is_not_overrated(
    status: int, body: str, expected: type[StorageError]
) -> None:
    with Answering(status, f"<Error><Code>{body}</Code></Error>") as server:
        with pytest.raises(StorageError) as raised:
            server.storage().create("log/1", b"1")
        assert raised.type is expected
        assert server.requests == 1


def test_a_refusal_names_the_place_and_the_credentials() -> None:
    with (
        Answering(403, "<Error><Code>AccessDenied</Code></Error>") as server,
        pytest.raises(StorageError, match=r"s3://bucket/x/a: .*check the credentials"),
    ):
        server.storage().read("a")


def test_a_full_local_disk_during_a_download_is_told_from_the_store(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"s3://{BUCKET}/full-disk", {"endpoint": s3_endpoint, **KEYS})
    storage.write("a", b"1")

    def no_space(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(StorageFullError, match="target"):
        storage.download("a", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


# --- paths ---------------------------------------------------------------------------------------


def test_the_layout_of_a_job_is_fixed() -> None:
    paths = JobPaths("visits")
    assert paths.root == "visits"
    assert paths.log_dir == "visits/log"
    assert paths.log_entry(42) == "visits/log/00000000000000000042.json"
    assert paths.checkpoint_dir(7) == "visits/chk-7"
    assert paths.metadata(7) == "visits/chk-7/_metadata"
    assert paths.exclusive(7, "abc") == "visits/chk-7/abc"
    assert paths.shared_dir == "visits/shared"
    assert paths.shared("abc.sst") == "visits/shared/abc.sst"
    assert paths.epochs(3, 42) == "visits/epochs/3/00000000000000000042"
    assert paths.run_entry(1_760_000_000_000, "ab12") == "visits/history/runs/001760000000000-ab12/entry.json"
    assert paths.history_part(5, "ab12", 3, whole=False) == "visits/history/runs/000000000000005-ab12/00000003.part"
    assert paths.history_part(5, "ab12", 3, whole=True) == "visits/history/runs/000000000000005-ab12/00000003.whole"
    assert paths.history_log("ab12", "slot-0") == "visits/history/logs/ab12/slot-0.log"


@pytest.mark.parametrize("n", [0, 1, 9, 10, 10**18 - 1])
def test_numbers_come_back_from_their_paths(n: int) -> None:
    paths = JobPaths("visits")
    assert paths.parse_log_entry(paths.log_entry(n)) == n
    assert paths.parse_metadata(paths.metadata(n)) == n
    assert paths.parse_epochs(paths.epochs(n, n)) == (n, n)
    assert JobPaths("visits2").parse_epochs(paths.epochs(n, n)) is None
    assert JobPaths("visits2").parse_log_entry(paths.log_entry(n)) is None
    assert JobPaths("visits2").parse_metadata(paths.metadata(n)) is None


def test_files_of_the_history_come_back_from_their_paths() -> None:
    paths = JobPaths("visits")
    assert paths.parse_history(paths.run_entry(7, "ab12")) == HistoryFile(7, "ab12", None, False)
    assert paths.parse_history(paths.history_part(7, "ab12", 3, whole=False)) == HistoryFile(7, "ab12", 3, False)
    assert paths.parse_history(paths.history_part(7, "ab12", 3, whole=True)) == HistoryFile(7, "ab12", 3, True)
    assert paths.parse_history_log(paths.history_log("ab12", "slot-0")) == ("ab12", "slot-0")
    for path in (paths.run_entry(7, "ab12"), paths.history_log("ab12", "slot-0")):
        assert paths.is_history(path)
        assert not JobPaths("visits2").is_history(path)
        assert JobPaths("visits2").parse_history(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "visits/history/runs/7-ab12/entry.json",
        "visits/history/runs/000000000000007-../entry.json",
        "visits/history/runs/000000000000007-ab12/3.part",
        "visits/history/runs/000000000000007-ab12/00000003.part.bak",
        "visits/history/runs/000000000000007-ab12/x/00000003.part",
        "visits/history/logs/ab12/.hidden.log",
        "visits/history/logs/ab12/x/driver.log",
        "visits/history/logs/../driver.log",
        "visits/log/00000000000000000042.json",
    ],
)
def test_other_files_are_no_history_of_a_run(path: str) -> None:
    assert JobPaths("visits").parse_history(path) is None
    assert JobPaths("visits").parse_history_log(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        "visits",
        "visits/log/1.json",
        "visits/log/00000000000000000042.json.bak",
        "visits/log/x/00000000000000000042.json",
        "visits/log/٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠.json",
        "visits/chk-7",
        "visits/chk-07/_metadata",
        "visits/chk-7/_metadata/x",
        "visits/chk--7/_metadata",
        "visits/chk-/_metadata",
        "x/visits/chk-7/_metadata",
        "visits/epochs/1/7",
        "visits/epochs/01/00000000000000000007",
        "visits/epochs/00000000000000000007",
        "visits/epochs/1/00000000000000000007/x",
    ],
)
def test_other_files_are_neither_entries_nor_metadata_nor_epochs(path: str) -> None:
    assert JobPaths("visits").parse_epochs(path) is None
    assert JobPaths("visits").parse_log_entry(path) is None
    assert JobPaths("visits").parse_metadata(path) is None


def test_log_entries_sort_by_number() -> None:
    entries = [JobPaths("j").log_entry(n) for n in (0, 1, 9, 10, 99, 100, 10**12)]
    assert entries == sorted(entries)


def test_negative_numbers_have_no_path() -> None:
    with pytest.raises(ValueError, match="from 0"):
        JobPaths("j").log_entry(-1)
    with pytest.raises(ValueError, match="from 0"):
        JobPaths("j").metadata(-1)


@pytest.mark.parametrize("job", ["a", "A-b_c.9", "-x", "_x", "9", "x" * 200])
def test_good_job_names_pass(job: str) -> None:
    assert JobPaths(job).root == job


@pytest.mark.parametrize("job", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "ä", "a:b", "x" * 201])
def test_bad_job_names_are_told_what_is_allowed(job: str) -> None:
    with pytest.raises(JobDefinitionError, match="allowed: 1 to 200 letters"):
        JobPaths(job)


# --- who may read --------------------------------------------------------------------------------


@pytest.fixture
def open_umask() -> Iterator[None]:
    """The umask under which everybody may read everything, whatever the shell of the tests has."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fill(storage: Storage, tmp_path: Path) -> dict[str, int]:
    """Puts files into a storage in every way; returns the modes of all files and folders below its root."""
    (tmp_path / "source").write_bytes(b"3")
    storage.write("a/b/written", b"1")
    storage.create("a/created", b"2")
    storage.upload(tmp_path / "source", "c/uploaded")
    storage.write("c/renamed", b"4")
    storage.rename("c/renamed", "d/renamed")
    root = Path(storage.url)
    return {str(path.relative_to(root)): mode_of(path) for path in root.rglob("*")}


@pytest.mark.usefixtures("open_umask")
def test_other_users_cannot_read_checkpoints_on_local_disk(tmp_path: Path) -> None:
    modes = fill(open_storage(str(tmp_path / "above" / "root")), tmp_path)
    assert len(modes) == 8
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes
    assert mode_of(tmp_path / "above" / "root") == 0o700
    assert mode_of(tmp_path / "above") == 0o755, "a folder above the storage is not ours"


@pytest.mark.usefixtures("open_umask")
def test_other_users_can_read_the_output_of_a_sink(tmp_path: Path) -> None:
    modes = fill(open_storage(str(tmp_path / "out"), private=False), tmp_path)
    assert set(modes.values()) == {0o755, 0o644}
    late = {"stale_folder": str(tmp_path / "late"), "stale_seconds": "1"}
    for name, options in (("faulty", {}), ("stale", late)):
        open_storage(f"faulty+file://{tmp_path}/{name}", options, private=False).write("a", b"1")
        assert mode_of(tmp_path / name / "a") == 0o644


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_root_that_its_group_may_write_is_shared_with_the_group(tmp_path: Path, umask: int) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o2770)
    before = os.umask(umask)
    try:
        modes = fill(open_storage(str(tmp_path / "root")), tmp_path)
    finally:
        os.umask(before)
    assert {mode & 0o777 for mode in modes.values()} == {0o770, 0o660}
    assert mode_of(tmp_path / "root" / "a" / "b") & stat.S_ISGID
