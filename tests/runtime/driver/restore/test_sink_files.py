"""A sink's folder shows exactly the rows of completed checkpoints, whatever was staged, published or left half done."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.errors import DirectoryNotOursError, MetadataError, NotFoundError, StorageError
from strandline.runtime.driver.restore.sink_files import RENAMES_AT_ONCE, check_names, check_sink, publish, recover_sink
from strandline.runtime.task.parquet_writer import STAGING_FOLDER
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.factories import checkpoint_metadata

JOB = "visits"
SINK = "out"


def sink_file(batch: int, number: int = 0, job: str = JOB) -> SinkFile:
    final = f"part-{job}-{batch:020d}-{number:032x}.parquet"
    return SinkFile(SINK, f"{STAGING_FOLDER}/{final}.staged", final, rows=3, size=5)


def checkpoint(batch: int, files: list[SinkFile]) -> CheckpointMetadata:
    """A completed checkpoint that covers everything up to `batch`, of which `files` may not be published yet."""
    return checkpoint_metadata(1, batch_id=batch, sink_files=tuple(files))


@pytest.fixture
def sink(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "out"))


def stage(sink: LocalStorage, *files: SinkFile) -> None:
    for file in files:
        sink.write(file.staged, b"rows" + file.final.encode())


def visible(sink: LocalStorage) -> set[str]:
    """What a plain reader of the folder sees."""
    return {file.path for file in sink.list() if not file.path.startswith("_")}


def everything(sink: LocalStorage) -> set[str]:
    return {file.path for file in sink.list()}


def test_publishing_makes_staged_rows_visible(sink: LocalStorage) -> None:
    one, two = sink_file(1), sink_file(2)
    stage(sink, one, two)
    assert visible(sink) == set()
    publish(sink, [one])
    assert visible(sink) == {one.final}
    assert everything(sink) == {one.final, two.staged}


class Sociable(LocalStorage):
    """A rename waits until as many are in progress as should be."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.together = threading.Barrier(RENAMES_AT_ONCE, timeout=30)

    def rename(self, source: str, target: str) -> None:
        self.together.wait()
        super().rename(source, target)


def test_many_files_are_published_at_the_same_time(tmp_path: Path) -> None:
    sink = Sociable(str(tmp_path / "out"))
    files = [sink_file(1, number) for number in range(3 * RENAMES_AT_ONCE)]
    stage(sink, *files)
    publish(sink, files)
    assert visible(sink) == {file.final for file in files}


def test_one_file_that_cannot_be_published_does_not_hold_up_the_others(sink: LocalStorage, tmp_path: Path) -> None:
    files = [sink_file(1, number) for number in range(40)]
    stage(sink, *files)
    failing = FaultyStorage(f"faulty+file://{sink.root}", {"fail_pattern": f"^rename {files[7].staged}"})
    with pytest.raises(StorageError, match="fails on purpose"):
        publish(failing, files)
    assert everything(sink) == {*(file.final for file in files if file != files[7]), files[7].staged}
    publish(sink, files)
    assert visible(sink) == {file.final for file in files}


@pytest.mark.parametrize("mode", ["before", "unknown", "after"])
def test_a_rename_that_fails_before_or_after_it_happened_is_repeated(sink: LocalStorage, mode: str) -> None:
    files = [sink_file(1, number) for number in range(3)]
    stage(sink, *files)
    lying = FaultyStorage(
        f"faulty+file://{sink.root}", {"fail_pattern": "^rename", "fail_mode": mode, "fail_times": "2"}
    )
    with pytest.raises(StorageError, match="fails on purpose"):
        publish(lying, files)
    publish(lying, files)
    assert everything(sink) == {file.final for file in files}


def test_publishing_may_be_repeated_from_any_point(sink: LocalStorage) -> None:
    files = [sink_file(1, number) for number in range(3)]
    stage(sink, *files)
    publish(sink, files[:2])
    publish(sink, files)
    publish(sink, files)
    assert everything(sink) == {file.final for file in files}
    assert all(sink.read(file.final) == b"rows" + file.final.encode() for file in files)


def test_rows_that_are_nowhere_are_a_clear_error(sink: LocalStorage) -> None:
    lost = sink_file(1)
    with pytest.raises(NotFoundError, match=r"neither the staged file _strandline/part-visits.*covers its 3 rows") as e:
        publish(sink, [lost])
    assert sink.url in str(e.value)


def test_recovery_publishes_what_is_covered_withdraws_what_came_after_and_clears_the_rest(sink: LocalStorage) -> None:
    old, covered, later, undecided = sink_file(3), sink_file(7), sink_file(8), sink_file(9)
    stage(sink, old, covered, later, undecided)
    publish(sink, [old, later])
    for _ in range(2):
        recover_sink(sink, SINK, JOB, checkpoint(7, [covered]))
        assert everything(sink) == {old.final, covered.final}


def test_batches_are_told_apart_by_number_not_by_text(sink: LocalStorage) -> None:
    young, old = sink_file(2_000_000_010), sink_file(1_000_000_999)
    stage(sink, young, old)
    publish(sink, [young, old])
    recover_sink(sink, SINK, JOB, checkpoint(1_999_999_999, []))
    assert visible(sink) == {old.final}


def test_other_jobs_and_strangers_beside_a_running_job_are_left_alone(sink: LocalStorage) -> None:
    mine, other = sink_file(9), sink_file(9, job="other")
    stage(sink, mine, other, staged := sink_file(10, job="other"))
    publish(sink, [mine, other])
    sink.write("notes.txt", b"")
    recover_sink(sink, SINK, JOB, checkpoint(5, []))
    assert everything(sink) == {other.final, staged.staged, "notes.txt"}


def test_a_job_whose_name_begins_like_another_one_is_another_one(sink: LocalStorage) -> None:
    longer = sink_file(9, job=f"{JOB}-2024")
    stage(sink, longer)
    publish(sink, [longer])
    recover_sink(sink, SINK, JOB, checkpoint(5, []))
    assert visible(sink) == {longer.final}
    recover_sink(sink, SINK, f"{JOB}-2024", checkpoint(5, []))
    assert visible(sink) == set()


def test_a_fresh_job_refuses_a_folder_with_foreign_files(sink: LocalStorage) -> None:
    sink.write("2024/data.parquet", b"")
    sink.write("more.csv", b"")
    with pytest.raises(DirectoryNotOursError, match=r"2024/data.parquet' and 1 other files"):
        check_sink(sink, SINK, JOB, None)
    assert everything(sink) == {"2024/data.parquet", "more.csv"}


def test_a_fresh_job_does_not_mind_hidden_files(sink: LocalStorage) -> None:
    sink.write("_SUCCESS", b"")
    sink.write(".part.crc", b"")
    sink.write("_temporary/0/x", b"")
    check_sink(sink, SINK, JOB, None)
    recover_sink(sink, SINK, JOB, None)
    assert everything(sink) == {"_SUCCESS", ".part.crc", "_temporary/0/x"}


def test_a_fresh_job_refuses_its_own_rows_of_an_earlier_life(sink: LocalStorage) -> None:
    file = sink_file(1)
    stage(sink, file)
    publish(sink, [file])
    with pytest.raises(DirectoryNotOursError, match="published earlier, but it has no checkpoint"):
        check_sink(sink, SINK, JOB, None)
    check_sink(sink, SINK, JOB, checkpoint(5, []))
    assert visible(sink) == {file.final}


def test_a_job_with_a_checkpoint_but_no_rows_yet_still_refuses_strangers(sink: LocalStorage) -> None:
    sink.write("data.parquet", b"")
    with pytest.raises(DirectoryNotOursError, match=r"job 'visits'.*data.parquet"):
        check_sink(sink, SINK, JOB, checkpoint(5, []))


def test_strangers_beside_published_rows_do_not_stop_a_restart(sink: LocalStorage) -> None:
    file = sink_file(1)
    stage(sink, file)
    publish(sink, [file])
    sink.write("notes.txt", b"")
    check_sink(sink, SINK, JOB, checkpoint(5, []))


def test_a_fresh_job_clears_what_an_earlier_life_staged(sink: LocalStorage) -> None:
    stage(sink, sink_file(1))
    recover_sink(sink, SINK, JOB, None)
    assert everything(sink) == set()


def test_recovery_that_cannot_publish_withdraws_nothing(sink: LocalStorage) -> None:
    later = sink_file(9)
    stage(sink, later)
    publish(sink, [later])
    with pytest.raises(NotFoundError):
        recover_sink(sink, SINK, JOB, checkpoint(7, [sink_file(7)]))
    assert visible(sink) == {later.final}


@pytest.mark.parametrize(
    ("staged", "final"),
    [
        ("private/keys", "part-0.parquet"),
        ("_strandline/x.staged", "index.html"),
        (f"_strandline/{sink_file(1, job='other').final}.staged", sink_file(1, job="other").final),
        ("_delta_log/0.json", sink_file(1).final),
        (f"secret/{sink_file(1).final}.staged", sink_file(1).final),
    ],
)
def test_a_checkpoint_that_would_publish_anything_but_the_jobs_own_files_is_refused(staged: str, final: str) -> None:
    check_names(checkpoint(1, [sink_file(1)]))
    with pytest.raises(MetadataError, match="gives no file such a name"):
        check_names(checkpoint(1, [SinkFile(SINK, staged, final, rows=1, size=1)]))
