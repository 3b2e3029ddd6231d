"""The contract of `Storage`, as tests that every storage must pass."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strandline.errors import AlreadyExistsError, NotFoundError, StorageError
from strandline.storage.base import Storage

WRITERS = 8


class StorageContract:
    """To use it, write a subclass `Test...` with a fixture `storage` that returns an empty `Storage`."""

    @pytest.fixture
    def storage(self) -> Storage:
        """An empty storage. The subclass overrides this fixture."""
        raise NotImplementedError("a subclass of StorageContract must give a `storage` fixture")

    # --- whole files -------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000], ids=["empty", "one-byte", "binary"])
    def test_a_written_file_reads_back(self, storage: Storage, data: bytes) -> None:
        storage.write("a/b/file", data)
        assert storage.read("a/b/file") == data
        assert storage.exists("a/b/file")

    def test_a_write_replaces_what_was_there(self, storage: Storage) -> None:
        storage.write("file", b"a longer first version")
        storage.write("file", b"second")
        assert storage.read("file") == b"second"

    def test_a_part_of_a_file_is_read(self, storage: Storage) -> None:
        storage.write("dir/file", b"0123456789")
        assert storage.read_range("dir/file", 0, 10) == b"0123456789"
        assert storage.read_range("dir/file", 3, 4) == b"3456"
        assert storage.read_range("dir/file", 8, 100) == b"89"
        assert storage.read_range("dir/file", 100, 5) == b""
        assert storage.read_range("dir/file", 3, 0) == b""
        for length in (0, 5):
            with pytest.raises(NotFoundError):
                storage.read_range("dir/other", 0, length)

    def test_readers_never_see_a_part_of_a_write(self, storage: Storage) -> None:
        versions = [bytes([n]) * 200_000 for n in range(8)]
        storage.write("file", versions[0])
        done = threading.Event()

        def read_on() -> set[bytes]:
            seen = set()
            while not done.is_set():
                seen.add(storage.read("file"))
            return seen

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_on)
            for version in versions:
                storage.write("file", version)
            done.set()
            assert reading.result() <= set(versions)

    @pytest.mark.parametrize("name", ["with space", "a=b+c", "100%25 %", "#?&@:,", "ümläut-日本", "_metadata", ".dot"])
    def test_unusual_names_are_kept(self, storage: Storage, name: str) -> None:
        storage.write(f"dir/{name}", b"1")
        assert storage.read(f"dir/{name}") == b"1"
        assert [file.path for file in storage.list("dir")] == [f"dir/{name}"]
        storage.delete([f"dir/{name}"])
        assert not storage.exists(f"dir/{name}")

    @pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\\b", "a\nb", "x/.tmp-1"])
    def test_paths_outside_the_tree_are_refused(self, storage: Storage, path: str) -> None:
        with pytest.raises(StorageError, match="is not a valid path in a storage"):
            storage.write(path, b"1")
        with pytest.raises(StorageError, match="is not a valid path in a storage"):
            storage.read(path)
        with pytest.raises(StorageError, match="is not a valid path in a storage"):
            storage.delete([path])
        assert list(storage.list()) == []

    # --- create if absent --------------------------------------------------------------------

    def test_create_makes_a_file_that_is_not_there(self, storage: Storage) -> None:
        storage.create("log/1", b"mine")
        assert storage.read("log/1") == b"mine"

    @pytest.mark.parametrize("data", [b"mine", b"theirs", b""])
    def test_create_leaves_a_file_that_is_there(self, storage: Storage, data: bytes) -> None:
        storage.write("log/1", b"theirs")
        with pytest.raises(AlreadyExistsError, match="log/1"):
            storage.create("log/1", data)
        assert storage.read("log/1") == b"theirs"

    def test_create_works_again_after_a_delete(self, storage: Storage) -> None:
        storage.create("log/1", b"first")
        storage.delete(["log/1"])
        storage.create("log/1", b"second")
        assert storage.read("log/1") == b"second"

    def test_of_many_creators_exactly_one_wins(self, storage: Storage) -> None:
        start = threading.Barrier(WRITERS)

        def create(n: int, path: str) -> bool:
            start.wait()
            try:
                storage.create(path, b"%d" % n)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(WRITERS) as pool:
            for entry in range(20):
                path = f"log/{entry:020d}"
                won = list(pool.map(create, range(WRITERS), [path] * WRITERS))
                assert won.count(True) == 1
                assert storage.read(path) == b"%d" % won.index(True)
        assert len(list(storage.list("log"))) == 20

    # --- missing files -----------------------------------------------------------------------

    def test_a_missing_file_is_named_in_the_error(self, storage: Storage, tmp_path: Path) -> None:
        storage.write("there/file", b"1")
        target = tmp_path / "target"
        target.write_bytes(b"before")
        calls: list[Callable[[], object]] = [
            lambda: storage.read("no/such"),
            lambda: storage.download("no/such", target),
            lambda: storage.rename("no/such", "elsewhere"),
        ]
        for call in calls:
            with pytest.raises(NotFoundError, match="no/such"):
                call()
        assert not storage.exists("no/such")
        assert target.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [target]
        assert [file.path for file in storage.list()] == ["there/file"]

    def test_a_folder_is_not_a_file(self, storage: Storage, tmp_path: Path) -> None:
        storage.write("a/b/file", b"1")
        assert not storage.exists("a/b")
        with pytest.raises(NotFoundError):
            storage.read("a/b")
        with pytest.raises(NotFoundError):
            storage.download("a/b", tmp_path / "target")
        with pytest.raises(NotFoundError):
            storage.rename("a/b", "c")
        storage.delete(["a/b", "a"])
        assert storage.read("a/b/file") == b"1"

    def test_a_file_is_not_a_folder(self, storage: Storage) -> None:
        storage.write("a", b"1")
        assert not storage.exists("a/b")
        with pytest.raises(NotFoundError):
            storage.read("a/b")
        storage.delete(["a/b"])
        assert list(storage.list("a")) == []

    # --- copies ------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 20 << 20], ids=["empty", "one-byte", "20mb"])
    def test_an_uploaded_file_comes_back(self, storage: Storage, tmp_path: Path, size: int) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(os.urandom(size))
        storage.upload(source, "shared/file")
        storage.download("shared/file", target)
        assert target.read_bytes() == source.read_bytes()
        assert [(file.path, file.size) for file in storage.list()] == [("shared/file", size)]
        assert sorted(tmp_path.iterdir()) == [source, target]

    def test_upload_and_download_replace_what_was_there(self, storage: Storage, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(b"new")
        target.write_bytes(b"a longer old file")
        storage.write("file", b"a longer old file")
        storage.upload(source, "file")
        assert storage.read("file") == b"new"
        storage.download("file", target)
        assert target.read_bytes() == b"new"

    def test_an_upload_does_not_share_the_source(self, storage: Storage, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"uploaded")
        storage.upload(source, "file")
        with source.open("r+b") as stream:
            stream.write(b"CHANGED!")
        assert storage.read("file") == b"uploaded"

    def test_an_upload_without_a_source_is_an_error(self, storage: Storage, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="missing-source"):
            storage.upload(tmp_path / "missing-source", "file")
        assert not storage.exists("file")

    # --- rename ------------------------------------------------------------------------------

    def test_a_renamed_file_is_only_at_its_new_place(self, storage: Storage) -> None:
        storage.write("staged/file", b"1")
        storage.rename("staged/file", "published/2024/file")
        assert storage.read("published/2024/file") == b"1"
        assert [file.path for file in storage.list()] == ["published/2024/file"]

    def test_a_rename_replaces_its_target(self, storage: Storage) -> None:
        storage.write("a", b"new")
        storage.write("b", b"old")
        storage.rename("a", "b")
        assert storage.read("b") == b"new"
        assert not storage.exists("a")

    def test_a_rename_to_itself_changes_nothing(self, storage: Storage) -> None:
        storage.write("a/b", b"1")
        storage.rename("a/b", "a/b")
        assert storage.read("a/b") == b"1"

    # --- delete ------------------------------------------------------------------------------

    def test_deleted_files_are_gone_and_others_stay(self, storage: Storage) -> None:
        for n in range(5):
            storage.write(f"dir/{n}", b"1")
        storage.delete(f"dir/{n}" for n in (0, 2, 4))
        assert [file.path for file in storage.list()] == ["dir/1", "dir/3"]

    def test_delete_is_idempotent(self, storage: Storage) -> None:
        storage.write("a", b"1")
        storage.write("b", b"1")
        storage.delete(["a", "never-there", "no/such/folder/file"])
        storage.delete(["a", "b", "a"])
        storage.delete([])
        assert list(storage.list()) == []

    def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(self, storage: Storage) -> None:
        def churn(worker: int) -> None:
            for n in range(15):
                path = f"deep/folder/{worker}-{n}"
                storage.write(path, b"1")
                storage.rename(path, f"other/place/{worker}-{n}")
                storage.delete([f"other/place/{worker}-{n}"])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
        assert list(storage.list()) == []

    # --- list --------------------------------------------------------------------------------

    def test_an_empty_storage_lists_nothing(self, storage: Storage) -> None:
        assert list(storage.list()) == []
        assert list(storage.list("no/such/folder")) == []

    def test_a_listing_is_in_order_of_the_whole_path(self, storage: Storage) -> None:
        # "-" and "." sort before "/", digits and letters after it. A walk of the tree would give another order.
        paths = ["a-b", "a.b", "a/b.c/d", "a/b/c", "a0", "b", "a/b-c/d"]
        for path in paths:
            storage.write(path, b"1")
        assert [file.path for file in storage.list()] == sorted(paths)

    def test_a_listing_is_of_a_folder_not_of_a_prefix_of_names(self, storage: Storage) -> None:
        for path in ("job/log/1", "job/log-old/1", "job/log.json", "job2/log/1"):
            storage.write(path, b"1")
        assert [file.path for file in storage.list("job/log")] == ["job/log/1"]
        assert [file.path for file in storage.list("job/log/")] == ["job/log/1"]
        assert len(list(storage.list("job"))) == 3

    def test_a_listing_can_start_after_a_path(self, storage: Storage) -> None:
        paths = ["a/1", "a/2", "a/2.x", "a/2-/y", "a/3/z", "b/1"]
        for path in paths:
            storage.write(path, b"1")
        for after in [*paths, "a", "a/", "a/0", "a/3", "a/3/", "c"]:
            assert [file.path for file in storage.list(after=after)] == sorted(p for p in paths if p > after)
            below = sorted(p for p in paths if p > after and p.startswith("a/"))
            assert [file.path for file in storage.list("a", after=after)] == below

    def test_the_folders_below_the_root_are_named_once_each(self, storage: Storage) -> None:
        assert storage.folders() == ()
        for path in ("a/1", "a/2/3", "a-b/1", "a0/1", "a.b/1", "b", "a-c"):
            storage.write(path, b"1")
        assert storage.folders() == ("a", "a-b", "a.b", "a0")

    def test_a_listing_tells_size_and_time(self, storage: Storage) -> None:
        storage.write("file", b"12345")
        (file,) = storage.list()
        assert file.size == 5
        assert abs(file.modified - time.time()) < 60

    def test_a_long_listing_is_complete(self, storage: Storage) -> None:
        paths = [f"shared/{n:04d}" for n in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda path: storage.write(path, b""), paths))
        assert [file.path for file in storage.list("shared")] == paths
        assert [file.path for file in storage.list("shared", after=paths[999])] == paths[1000:]
        storage.delete(paths)
        assert list(storage.list()) == []
