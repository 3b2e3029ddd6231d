"""Uploads of segments to a storage that is slow or fails: what counts is durable and whole, and nothing else stays."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.metadata import FileHandle
from strandline.errors import StorageError
from strandline.runtime.taskmanager.changelog.segment_uploader import THREADS, SegmentUploader, Upload
from strandline.runtime.taskmanager.changelog.upload_pace import UploadPace
from strandline.runtime.taskmanager.packing import PACK_BYTES
from strandline.storage import JobPaths, Storage
from strandline.storage.checksums import checksum_text
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.examples import examples

PATHS = JobPaths("job")


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "durable"))


Make = Callable[..., SegmentUploader]


@pytest.fixture
def make() -> Iterator[Make]:
    """Opens uploaders that are closed in the end."""
    opened: list[SegmentUploader] = []

    def new(storage: Storage, timeout: float = 5.0, attempts: int = 3, pack_bytes: int = PACK_BYTES) -> SegmentUploader:
        opened.append(SegmentUploader(storage, PATHS, timeout, attempts, retry_delay=0.01, pack_bytes=pack_bytes))
        return opened[-1]

    yield new
    for uploader in opened:
        uploader.close()


def faulty(storage: LocalStorage, **options: str) -> FaultyStorage:
    return FaultyStorage(f"faulty+file://{storage.root}", options)


def segments(folder: Path, *contents: bytes) -> list[Path]:
    paths = [folder / f"{number}.segment" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def stored(storage: Storage) -> list[str]:
    return [file.path for file in storage.list()]


def content(storage: Storage, handle: FileHandle) -> bytes:
    data = storage.read_range(handle.path, handle.offset, handle.size)
    assert len(data) == handle.size
    assert handle.checksum == checksum_text(zlib.crc32(data))
    if handle.whole:
        assert len(storage.read(handle.path)) == handle.whole == handle.stored_size
    else:
        assert storage.read(handle.path) == data
    return data


def test_segments_of_all_slots_go_into_one_file(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    contents = [b"first", b"", b"the third", b"x" * 1000]
    uploader = make(storage)
    handles = uploader.upload(segments(tmp_path, *contents))
    assert [content(storage, handle) for handle in handles] == contents
    assert [handle.offset for handle in handles] == [0, 5, 5, 14]
    (path,) = stored(storage)
    assert path.startswith(PATHS.shared_dir)
    figures = uploader.figures
    assert (figures.requests, figures.attempts, figures.failures, figures.bytes) == (1, 1, 0, 1014)


def test_one_segment_is_a_file_of_its_own(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    (handle,) = make(storage).upload(segments(tmp_path, b"alone"))
    assert (handle.offset, handle.whole) == (0, 0)
    assert content(storage, handle) == b"alone"


def test_nothing_to_upload_is_no_request(storage: LocalStorage, make: Make) -> None:
    uploader = make(storage)
    assert uploader.upload([]) == []
    assert uploader.figures.requests == 0


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.binary(max_size=12), max_size=8))
def test_large_groups_are_several_files(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("groups")
    storage = LocalStorage(str(folder / "durable"))
    uploader = SegmentUploader(storage, PATHS, 5.0, 1, pack_bytes=16)
    try:
        handles = uploader.upload(segments(folder, *contents))
    finally:
        uploader.close()
    assert [content(storage, handle) for handle in handles] == contents
    assert {handle.path for handle in handles} == set(stored(storage))
    assert all(handle.whole <= 16 for handle in handles)
    assert uploader.figures.bytes == sum(map(len, contents))


class Hesitant(LocalStorage):
    """Its first upload waits until it is told to go on."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.tries = count()
        self.go_on = threading.Event()

    def write(self, path: str, data: bytes) -> None:
        self.hesitate()
        super().write(path, data)

    def upload(self, source: Path, path: str) -> None:
        self.hesitate()
        super().upload(source, path)

    def hesitate(self) -> None:
        if next(self.tries) == 0:
            assert self.go_on.wait(10)


@pytest.mark.parametrize("contents", [[b"alone"], [b"one", b"two"]])
def test_a_slow_upload_is_tried_again_beside_itself_and_the_loser_deleted(
    tmp_path: Path, make: Make, contents: list[bytes]
) -> None:
    storage = Hesitant(str(tmp_path / "durable"))
    uploader = make(storage, timeout=0.1)
    handles = uploader.upload(segments(tmp_path, *contents))
    assert [content(storage, handle) for handle in handles] == contents
    assert uploader.figures.attempts >= 2
    winner = {handle.path for handle in handles}
    assert set(stored(storage)) == winner
    storage.go_on.set()
    uploader._pool.shutdown()
    assert set(stored(storage)) == winner


def test_the_first_try_may_win_while_the_second_runs(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    slow = faulty(storage, bytes_per_second="25")  # ten bytes take 0.4 s, those of the next try 0.4 s more
    uploader = make(slow, timeout=0.25)
    (handle,) = uploader.upload(segments(tmp_path, b"0123456789"))
    assert content(storage, handle) == b"0123456789"
    assert uploader.figures.attempts > 1
    uploader._pool.shutdown()
    assert stored(storage) == [handle.path]


@pytest.mark.parametrize("contents", [[b"alone"], [b"one", b"two"]])
def test_failures_are_followed_by_another_try(
    tmp_path: Path, storage: LocalStorage, make: Make, contents: list[bytes]
) -> None:
    uploader = make(faulty(storage, fail_pattern="^(upload|write) ", fail_times="2"))
    handles = uploader.upload(segments(tmp_path, *contents))
    assert [content(storage, handle) for handle in handles] == contents
    assert (uploader.figures.attempts, uploader.figures.failures) == (3, 0)
    assert stored(storage) == [handles[0].path]


def test_when_every_try_fails_nothing_is_left(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    uploader = make(faulty(storage, fail_pattern="^(upload|write) "), attempts=2)
    for paths in (segments(tmp_path, b"alone"), segments(tmp_path, b"one", b"two")):
        with pytest.raises(StorageError, match=r"could not be uploaded .* in 2 tries: .*fails on purpose"):
            uploader.upload(paths)
    assert (uploader.figures.attempts, uploader.figures.failures, uploader.figures.bytes) == (4, 2, 0)
    assert stored(storage) == []


def test_when_every_try_is_too_slow_nothing_is_left(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    switch = tmp_path / "switch"
    switch.touch()
    slow = faulty(storage, switch=str(switch), bytes_per_second="0.001")
    uploader = make(slow, timeout=0.05, attempts=2)
    with pytest.raises(StorageError, match=r"tries took longer than 0\.05 s"):
        uploader.upload(segments(tmp_path, b"alone"))
    switch.unlink()  # they all end well, but nobody needs them
    uploader._pool.shutdown()
    assert stored(storage) == []


def hanging(storage: LocalStorage, switch: Path) -> FaultyStorage:
    """Its writes hang as long as the switch exists."""
    switch.touch()
    return faulty(storage, switch=str(switch), fail_pattern="^(upload|write) ", fail_mode="hang")


def test_a_try_that_succeeds_late_counts(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    switch = tmp_path / "switch"
    uploader = make(hanging(storage, switch), timeout=0.02, attempts=2)
    told: list[list[FileHandle]] = []
    upload = Upload(lambda: segments(tmp_path, b"one", b"two"), 6, told.append)
    uploader.settle([upload])
    with pytest.raises(StorageError, match=r"tries took longer .*, and go on"):
        uploader.result(upload)
    switch.unlink()
    uploader._pool.shutdown()
    assert len(told) == 1
    assert uploader.result(upload) == told[0]
    assert [content(storage, handle) for handle in told[0]] == [b"one", b"two"]
    assert stored(storage) == [told[0][0].path]
    assert uploader.figures.bytes == 6


def test_whoever_asks_again_waits_for_the_tries_that_run(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    switch = tmp_path / "switch"
    uploader = make(hanging(storage, switch), timeout=0.02, attempts=2)
    upload = Upload(lambda: segments(tmp_path, b"one"), 3)
    for _ in range(5):
        uploader.settle([upload])
    assert upload.tries == upload.running <= THREADS
    switch.unlink()
    while upload.handles is None:
        uploader.settle([upload])
    (handle,) = uploader.result(upload)
    uploader._pool.shutdown()
    assert stored(storage) == [handle.path]


def test_tries_that_hang_take_up_a_bounded_number_of_threads(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    switch = tmp_path / "switch"
    uploader = make(hanging(storage, switch), timeout=0.01)
    uploads = [Upload(lambda: segments(tmp_path, b"one"), 3) for _ in range(50)]
    for some in (uploads[:20], uploads):
        uploader.settle(some)
    assert uploader.figures.attempts == sum(upload.tries for upload in uploads) == THREADS
    assert uploader._pool._work_queue.qsize() == 0
    with pytest.raises(StorageError, match="tries of other uploads hang"):
        uploader.result(uploads[-1])
    switch.unlink()
    while not all(upload.handles for upload in uploads):
        uploader.settle(uploads)
    uploader._pool.shutdown()
    assert sorted(handle.path for upload in uploads for handle in uploader.result(upload)) == stored(storage)


def test_closing_ends_every_wait_at_once(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    switch = tmp_path / "switch"
    uploader = make(hanging(storage, switch), timeout=3600)
    upload = Upload(lambda: segments(tmp_path, b"one"), 3)
    waiting = threading.Thread(target=uploader.settle, args=([upload],))
    waiting.start()
    uploader.close()
    waiting.join(10)
    assert not waiting.is_alive()
    switch.unlink()


@given(
    st.lists(st.tuples(st.integers(0, 1 << 33), st.floats(0, 1e5)), max_size=20),
    st.integers(0, 1 << 33),
    st.integers(0, 1 << 33),
)
def test_the_patience_grows_with_the_size_and_follows_the_rate(
    seen: list[tuple[int, float]], size: int, more: int
) -> None:
    pace = UploadPace(1.0)
    for one in seen:
        before = pace.patience(size)
        pace.stored(*one)
        assert pace.patience(size) <= 4 * before + 8  # one upload that hung says little
    assert 1.0 <= pace.patience(size) <= pace.patience(size + more)
    for _ in range(40):
        pace.stored(90 << 20, 1.8)  # 50 MB/s
        pace.stored(1000, 0.2)
    assert 1.8 < pace.patience(90 << 20) < 1.0 + 3 * 2.0
    assert 0.2 < pace.patience(1000) < 1.5
    pace.stored(1000, 3.0)
    assert 3.0 < pace.patience(1000) < 8.0


def test_a_group_that_cannot_be_uploaded_takes_the_others_with_it(
    tmp_path: Path, storage: LocalStorage, make: Make
) -> None:
    uploader = make(faulty(storage, fail_pattern="^upload "), pack_bytes=6)
    with pytest.raises(StorageError):
        uploader.upload(segments(tmp_path, b"one", b"two", b"three"))  # one and two together, three alone
    assert stored(storage) == []


def test_a_segment_that_is_gone_is_an_error_and_leaves_nothing(
    tmp_path: Path, storage: LocalStorage, make: Make
) -> None:
    (path,) = segments(tmp_path, b"one")
    for missing in ([tmp_path / "gone"], [path, tmp_path / "gone"]):
        with pytest.raises(OSError, match="No such file"):
            make(storage).upload(missing)
    upload = Upload(lambda: [path, tmp_path / "gone"], 3)
    uploader = make(storage)
    uploader.settle([upload])
    with pytest.raises(StorageError, match="No such file"):
        uploader.result(upload)
    assert stored(storage) == []


def test_a_file_that_cannot_be_deleted_is_no_failure(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    uploader = make(faulty(storage, fail_pattern="^(upload|delete) ", fail_times="2"))
    (handle,) = uploader.upload(segments(tmp_path, b"alone"))
    assert content(storage, handle) == b"alone"


def test_a_closed_uploader_says_so(tmp_path: Path, storage: LocalStorage, make: Make) -> None:
    uploader = make(storage)
    uploader.close()
    with pytest.raises(StorageError, match="the task manager ends"):
        uploader.upload(segments(tmp_path, b"late"))
    assert stored(storage) == []
