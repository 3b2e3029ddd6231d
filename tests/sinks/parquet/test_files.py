"""A sink's folder shows exactly the rows of completed checkpoints, whatever was staged, published or left half done."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.job_log import CheckpointRef, JobLog, Start, WentBack
from strandline.checkpoint.metadata import HIGHEST_KNOWN_GENERATION, CheckpointMetadata, SinkFile
from strandline.errors import (
    DirectoryNotOursError,
    FencedError,
    MetadataError,
    NotFoundError,
    SinkFilesMissingError,
    StorageError,
)
from strandline.sinks.names import STAGING_FOLDER, check_names
from strandline.sinks.parquet.files import check_sink, recover_sink
from strandline.sinks.parquet.owner import OWNER, Owner, check_still_owner, claim_sink
from strandline.sinks.staging import RENAMES_AT_ONCE, publish
from strandline.storage import StoredFile
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.examples import examples
from tests.factories import checkpoint_metadata

JOB = "visits"
SINK = "out"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where it exists, hundreds of files need not wait for a disk."""


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


def recover(
    sink: LocalStorage, restored: CheckpointMetadata | None, *, job: str = JOB, generation: int = 1 << 30
) -> None:
    """Recover the sink in a generation that nobody has taken over."""
    recover_sink(sink, SINK, job, restored, generation, lambda: None)


def output(sink: LocalStorage) -> set[str]:
    """The job's files, visible or staged."""
    return {path for path in everything(sink) if path.rsplit("/", 1)[-1].startswith("part-")}


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
        recover(sink, checkpoint(7, [covered]))
        assert output(sink) == {old.final, covered.final}


def test_batches_are_told_apart_by_number_not_by_text(sink: LocalStorage) -> None:
    young, old = sink_file(2_000_000_010), sink_file(1_000_000_999)
    stage(sink, young, old)
    publish(sink, [young, old])
    recover(sink, checkpoint(1_999_999_999, []))
    assert visible(sink) == {old.final}


def test_other_jobs_and_strangers_beside_a_running_job_are_left_alone(sink: LocalStorage) -> None:
    mine, other = sink_file(9), sink_file(9, job="other")
    stage(sink, mine, other, staged := sink_file(10, job="other"))
    publish(sink, [mine, other])
    sink.write("notes.txt", b"")
    recover(sink, checkpoint(5, []))
    assert output(sink) == {other.final, staged.staged}
    assert sink.exists("notes.txt")


def test_a_job_whose_name_begins_like_another_one_is_another_one(sink: LocalStorage) -> None:
    longer = sink_file(9, job=f"{JOB}-2024")
    stage(sink, longer)
    publish(sink, [longer])
    recover(sink, checkpoint(5, []))
    assert visible(sink) == {longer.final}
    recover(sink, checkpoint(5, []), job=f"{JOB}-2024")
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
    recover(sink, None)
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
    recover(sink, None)
    assert everything(sink) == set()


def test_recovery_that_cannot_publish_withdraws_nothing(sink: LocalStorage) -> None:
    later = sink_file(9)
    stage(sink, later)
    publish(sink, [later])
    with pytest.raises(NotFoundError):
        recover(sink, checkpoint(7, [sink_file(7)]))
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


def test_a_driver_leaves_alone_what_later_generations_wrote(sink: LocalStorage) -> None:
    """It was stopped after its takeover, and another driver has taken the job over and published rows since."""
    mine, newer, staged = (sink_file(first_batch(generation)) for generation in (2, 4, 5))
    stage(sink, mine, newer, staged)
    publish(sink, [mine, newer])
    recover(sink, checkpoint(first_batch(1), []), generation=3)
    assert output(sink) == {newer.final, staged.staged}


@pytest.mark.parametrize("batch", [first_batch(HIGHEST_KNOWN_GENERATION + 1), 10**20 - 1])
def test_a_file_name_with_a_generation_that_no_job_reaches_is_not_believed(sink: LocalStorage, batch: int) -> None:
    """Its generation would be that of the next takeover, which the job's log cannot hold."""
    mine, crafted = sink_file(1), sink_file(batch)
    stage(sink, mine, crafted)
    publish(sink, [mine, crafted])
    assert check_sink(sink, SINK, JOB, checkpoint(1, [])) == 0


def test_copies_in_other_folders_are_the_users(sink: LocalStorage) -> None:
    later = sink_file(8)
    stage(sink, later)
    publish(sink, [later])
    copies = [f"backup/{later.final}", f"backup/{later.final}.staged", f"_a/b/{later.final}.staged"]
    for copy in copies:
        sink.write(copy, b"rows")
    strange = sink.root / "x\\y"
    strange.mkdir()
    (strange / later.final).touch()
    recover(sink, checkpoint(7, []))
    assert {file.path for file in sink.list()} >= set(copies)
    assert not sink.exists(later.final)
    assert (strange / later.final).exists()


def test_a_driver_that_was_taken_over_deletes_nothing(sink: LocalStorage) -> None:
    later, staged = sink_file(8), sink_file(9)
    stage(sink, later, staged)
    publish(sink, [later])
    before = output(sink)

    def fenced() -> None:
        raise FencedError("another driver took the job over")

    with pytest.raises(FencedError):
        recover_sink(sink, SINK, JOB, checkpoint(7, []), 1, fenced)
    assert output(sink) == before


def test_rows_that_an_older_driver_publishes_meanwhile_are_withdrawn_as_well(sink: LocalStorage) -> None:
    later = sink_file(8)
    stage(sink, later)
    checks = [lambda: publish(sink, [later]), lambda: None]
    recover_sink(sink, SINK, JOB, checkpoint(7, []), 1, lambda: checks.pop(0)())
    assert output(sink) == set()


class LateListings(LocalStorage):
    """Lists deleted files for a while."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.listings = 0
        self.deleted: dict[str, StoredFile] = {}

    def delete(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        self.deleted |= {file.path: file for file in super().list() if file.path in paths}
        super().delete(paths)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        self.listings += 1
        shown = self.deleted.values() if self.listings < 50 else ()
        return iter(sorted({*super().list(prefix, after), *shown}, key=lambda file: file.path))


def test_files_that_are_listed_although_they_were_deleted_are_not_deleted_again_and_again(tmp_path: Path) -> None:
    sink = LateListings(str(tmp_path / "out"))
    later, staged = sink_file(8), sink_file(9)
    stage(sink, later, staged)
    publish(sink, [later])
    recover(sink, checkpoint(7, []))
    assert sink.listings < 10
    assert set(sink.deleted) == {later.final, staged.staged}
    assert not any(sink.exists(path) for path in sink.deleted)


def test_a_checkpoint_whose_own_rows_are_gone_is_refused(sink: LocalStorage) -> None:
    covered = sink_file(7)
    stage(sink, covered)
    check_sink(sink, SINK, JOB, checkpoint(7, [covered]))
    publish(sink, [covered])
    check_sink(sink, SINK, JOB, checkpoint(7, [covered]))
    sink.delete([covered.final])
    with pytest.raises(SinkFilesMissingError, match=rf"checkpoint 1 of job 'visits'.*{covered.final}.* 3 rows"):
        check_sink(sink, SINK, JOB, checkpoint(7, [covered]))


class Late(LocalStorage):
    """A store that lists some files late."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.hidden: set[str] = set()

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        return (file for file in super().list(prefix, after) if file.path not in self.hidden)


class Life(RuleBasedStateMachine):
    """A job with one sink that commits, checkpoints, crashes and goes back at will. Listings may be late.

    After every restore that is not refused, readers see exactly the rows that the restored checkpoint covers. Rows that
    the folder did not list may be visible as well, until a restore that sees them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.sink = LocalStorage(self.folder.name)
        self.late = Late(self.folder.name)
        self.log = JobLog()
        self.log = self.log.apply(self.log.takeover_entry("me", 0.0, "nonce"))
        self.batch = first_batch(1)
        self.rows: tuple[SinkFile, ...] = ()
        """The rows of all batches in the history of the job as it is now."""
        self.uncovered: tuple[SinkFile, ...] = ()
        self.taken: list[tuple[CheckpointMetadata, tuple[SinkFile, ...]]] = []
        """Every checkpoint and savepoint ever taken, with the rows of its history."""
        self.latest: tuple[CheckpointMetadata, tuple[SinkFile, ...]] | None = None
        self.went_back: set[WentBack] = set()

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(rows=st.booleans())
    def commit(self, rows: bool) -> None:
        self.batch += 1
        if rows:
            file = sink_file(self.batch)
            stage(self.sink, file)
            self.rows += (file,)
            self.uncovered += (file,)

    @rule(publishes=st.booleans())
    def checkpoint(self, publishes: bool) -> None:
        """Complete a checkpoint; the driver may die before it publishes the rows."""
        self._take()
        self.latest = self.taken[-1]
        number = self.latest[0].checkpoint_id
        self.log = self.log.apply(
            self.log.completion_entry(number, f"chk-{number}/_metadata", self.batch, 0.0, "nonce", (number,), ())
        )
        if not publishes:
            self._restore(self.latest)
            return
        publish(self.sink, self.uncovered)
        self.uncovered = ()

    @rule()
    def savepoint(self) -> None:
        self._take()

    def _take(self) -> None:
        number = len(self.taken) + 1
        generation = self.log.generation
        taken = checkpoint_metadata(number, batch_id=self.batch, sink_files=self.uncovered, generation=generation)
        self.taken.append((taken, self.rows))

    @rule(late=st.booleans())
    def list_late(self, late: bool) -> None:
        """From now on, the folder does not list the files that are there now; or it lists all files again."""
        self.late.hidden = output(self.sink) if late else set()

    @precondition(lambda self: self.latest is not None)
    @rule()
    def crash(self) -> None:
        assert self.latest is not None
        self._restore(self.latest)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.taken), label="checkpoint")
        try:
            check_sink(self.late, SINK, JOB, chosen[0])
        except SinkFilesMissingError:
            there = everything(self.sink)
            gone = [file for file in chosen[1] if file.final not in there and file.staged not in there]
            assert gone or any(one.voids(chosen[0].batch_id) for one in self.went_back)
            return
        self.latest = chosen
        self._restore(chosen)

    def _restore(self, chosen: tuple[CheckpointMetadata, tuple[SinkFile, ...]]) -> None:
        restored, rows = chosen
        check_sink(self.late, SINK, JOB, restored)
        ref = CheckpointRef(restored.checkpoint_id, "_metadata", restored.batch_id)
        self.log = self.log.apply(self.log.takeover_entry("me", 0.0, "nonce", Start(ref, (), ())))
        self.went_back.update(self.log.went_back)
        recover_sink(self.late, SINK, JOB, restored, self.log.generation, lambda: None, went_back=self.log.went_back)
        expected = {file.final for file in rows}
        assert expected <= visible(self.sink) <= expected | self.late.hidden
        assert output(self.sink) <= visible(self.sink) | self.late.hidden
        self.batch, self.rows, self.uncovered = first_batch(self.log.generation), rows, ()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(60), stateful_step_count=25)


def a_log(log_id: str = "log", generation: int = 1, sinks_since: int = 0) -> JobLog:
    return JobLog(position=3, generation=generation, log_id=log_id, sinks_since=sinks_since)


def test_a_folder_belongs_to_one_job(sink: LocalStorage) -> None:
    check_sink(sink, SINK, JOB, None)
    claim_sink(sink, JOB, a_log())
    claim_sink(sink, JOB, a_log())
    check_sink(sink, SINK, JOB, None, a_log())
    assert everything(sink) == {OWNER}
    for attempt in (lambda: check_sink(sink, SINK, "other", None), lambda: claim_sink(sink, "other", a_log())):
        with pytest.raises(DirectoryNotOursError, match="output of job 'visits', so job 'other' cannot write there"):
            attempt()


def test_a_folder_belongs_to_one_log_of_the_job(sink: LocalStorage) -> None:
    claim_sink(sink, JOB, a_log("one", generation=3))
    for attempt in (
        lambda: check_sink(sink, SINK, JOB, None),
        lambda: check_sink(sink, SINK, JOB, None, a_log("two", generation=9)),
        lambda: claim_sink(sink, JOB, a_log("two", generation=9, sinks_since=3)),
    ):
        with pytest.raises(DirectoryNotOursError, match=r"another checkpoint_dir.*restore="):
            attempt()
    check_still_owner(sink, JOB, a_log("one"))
    assert check_sink(sink, SINK, JOB, None, a_log("two"), takes_sinks=True) == 3
    # A takeover that was told to take the folder over may be finished by a later one.
    check_sink(sink, SINK, JOB, None, a_log("two", generation=5, sinks_since=4))
    claim_sink(sink, JOB, a_log("two", generation=5, sinks_since=4))
    check_still_owner(sink, JOB, a_log("two"))
    with pytest.raises(FencedError, match=r"taken over by job 'visits' with another checkpoint_dir"):
        check_still_owner(sink, JOB, a_log("one"))
    with pytest.raises(DirectoryNotOursError, match="another checkpoint_dir"):
        claim_sink(sink, JOB, a_log("one", generation=6, sinks_since=2))


def test_the_owner_that_an_older_release_wrote_is_completed(sink: LocalStorage) -> None:
    sink.write(OWNER, b'{"job":"visits"}')
    check_sink(sink, SINK, JOB, None)
    check_still_owner(sink, JOB, a_log("one"))
    claim_sink(sink, JOB, a_log("one", generation=7))
    assert msgspec.json.decode(sink.read(OWNER), type=Owner) == Owner(JOB, "one", 7)


def test_the_output_of_a_job_of_an_older_release_marks_its_folder(sink: LocalStorage) -> None:
    file = sink_file(1)
    stage(sink, file)
    for _ in range(2):
        with pytest.raises(DirectoryNotOursError, match="output of job 'visits', so job 'other'"):
            check_sink(sink, SINK, "other", None)
        publish(sink, [file])
    claim_sink(sink, JOB, a_log())
    sink.write(OWNER, b"{")
    with pytest.raises(DirectoryNotOursError, match=r"owner\.json.*damaged"):
        check_sink(sink, SINK, JOB, checkpoint(5, []))


def test_the_newest_generation_in_the_folder_is_known_before_the_takeover(sink: LocalStorage) -> None:
    """A job that goes on from a savepoint under a new log must come after it, or it could not withdraw its rows."""
    assert check_sink(sink, SINK, JOB, None) == 0
    file = sink_file(first_batch(7) + 3)
    stage(sink, file)
    publish(sink, [file])
    assert check_sink(sink, SINK, JOB, checkpoint(first_batch(2), [])) == 7
