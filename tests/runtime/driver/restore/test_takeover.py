"""A takeover that is interrupted: by storage that fails, or by another driver while this one stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.decisions import CompletionPlan
from strandline.checkpoint.metadata import SinkFile
from strandline.errors import DirectoryNotOursError, FencedError, SinkFilesMissingError, StorageError
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.restore.takeover import Claim, Restore, Wanted, take_over
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.protocol.messages import StorageSettings
from strandline.sinks.base import SinkStart
from strandline.sinks.names import new_final_name, staged_name
from strandline.sinks.parquet.target import ParquetTarget
from strandline.storage.base import StoredFile
from strandline.storage.local import LocalStorage
from strandline.storage.retries import Retries
from tests.factories import checkpoint_metadata

JOB = "visits"


class Interrupted(LocalStorage):
    """Calls a function before one of the next calls of a name."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.calls: list[str] = []
        self.at: dict[int, Callable[[], None]] = {}
        self.away = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        act = self.at.pop(len(self.calls), None)
        if act is not None:
            act()
        if self.away:
            raise StorageError("storage is away")

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        self._call("list")
        return super().list(prefix, after)

    def rename(self, source: str, target: str) -> None:
        self._call("rename")
        super().rename(source, target)

    def write(self, path: str, data: bytes) -> None:
        self._call("write")
        super().write(path, data)

    def delete(self, paths: Iterable[str]) -> None:
        self._call("delete")
        super().delete(paths)


class Job:
    """A job with one sink and no state, and the drivers that run it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = LocalStorage(str(root / "checkpoints"))
        self.settings = StorageSettings(self.storage.url, {})
        self.sink = LocalStorage(str(root / "out"))
        self.path = "out"
        """The path of the sink as the user writes it."""
        self.numbers = 0

    def start(
        self,
        sink: LocalStorage | None = None,
        *,
        after: int | None = None,
        run: str | None = None,
        restore: str | None = None,
        path: str | None = None,
        checkpoint_dir: LocalStorage | None = None,
        job: str = JOB,
        on_won: Callable[[int], None] = lambda _generation: None,
    ) -> Claim:
        if restore is not None:
            path = self.location(restore)
        wanted = Wanted(
            job=job,
            operators=(),
            max_parallelism=128,
            sinks={self.path: ParquetTarget(sink or self.sink, self.path, job)},
            can_go_back=True,
            restore=Restore(path) if path is not None else None,
        )
        retries = Retries(2, first_pause=0)
        storage = checkpoint_dir or self.storage
        settings = StorageSettings(storage.url, {})
        return take_over(storage, settings, wanted, after, run=run, on_won=on_won, retries=retries)

    def complete(self, claim: Claim, publish: bool = True) -> str:
        """Complete a checkpoint with one file of rows. Returns the name of the file."""
        self.numbers += 1
        batch = first_batch(claim.generation) + self.numbers
        final = new_final_name(JOB, batch)
        file = SinkFile(self.path, staged_name(final), final, rows=1, size=4)
        self.sink.write(file.staged, b"rows")
        metadata = checkpoint_metadata(
            self.numbers, batch_id=batch, generation=claim.generation, sink_files=(file,), job=JOB
        )
        durable = DurableCheckpoints(claim)
        durable.write_metadata(metadata)
        retained = (*claim.store.job_log.retained, self.numbers)
        durable.win_log_entry(CompletionPlan(metadata, (), retained, ()))
        if publish:
            SinkCommits(claim).publish(metadata)
        return final

    def location(self, checkpoint: str) -> str:
        return f"{self.storage.url}/{JOB}/{checkpoint}"

    def visible(self) -> set[str]:
        return {file.path for file in self.sink.list() if not file.path.startswith("_")}

    def everything(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class Told(ParquetTarget):
    """A target that remembers what it is told before a takeover."""

    reached: bool | None = None

    def check(self, start: SinkStart) -> int:
        self.reached = start.reached
        return super().check(start)


def test_a_target_knows_whether_the_run_has_worked_with_it_before(job: Job) -> None:
    told = Told(job.sink, job.path, JOB)
    wanted = Wanted(JOB, (), 128, {job.path: told}, can_go_back=True)
    claim = take_over(job.storage, job.settings, wanted, None, run="run")
    assert told.reached is False
    take_over(job.storage, job.settings, wanted, claim.generation, run="run")
    assert told.reached is True


@pytest.mark.parametrize("moved", [False, True], ids=["linked", "moved"])
def test_rows_that_were_not_published_yet_appear_also_if_the_folder_has_another_name_now(job: Job, moved: bool) -> None:
    job.path = job.sink.url
    rows = job.complete(job.start(), publish=False)
    other = job.root / "other"
    if moved:
        Path(job.path).rename(other)
    else:
        other.symlink_to(job.path)
    job.path, job.sink = str(other), LocalStorage(str(other))
    job.start()
    assert job.visible() == {rows}


@pytest.mark.parametrize("call", range(1, 7))
def test_a_driver_that_stands_still_in_its_takeover_touches_nothing_of_the_next_one(job: Job, call: int) -> None:
    """It goes back, so it has rows to withdraw. Meanwhile another driver goes on from the job's newest checkpoint."""
    claim = job.start()
    old = [job.complete(claim) for _ in range(3)]
    shown: dict[int, set[str]] = {}
    """What readers must see if this generation is the newest."""

    def another() -> None:
        newest = job.start()
        shown[newest.generation] = {*job.visible(), job.complete(newest), job.complete(newest)}

    sink = Interrupted(job.sink.url)
    sink.at[call] = another
    with suppress(FencedError):  # it may have had nothing left to do, and learn later that it is fenced
        shown[job.start(sink, restore="chk-1").generation] = {old[0]}
    for _ in range(2):
        assert job.visible() == shown[max(shown)]
        job.start()


@pytest.mark.parametrize("call", range(1, 7))
def test_a_restart_goes_on_with_a_takeover_of_its_own_that_storage_interrupted(job: Job, call: int) -> None:
    first = job.start(run="run")
    rows = {job.complete(first), job.complete(first, publish=False)}
    sink = Interrupted(job.sink.url)

    def fail() -> None:
        sink.away = True

    sink.at[call] = fail
    begun = [first.generation]
    try:
        job.start(sink, after=begun[-1], run="run", on_won=begun.append)
    except StorageError:
        sink.away = False
        job.start(sink, after=begun[-1], run="run", on_won=begun.append)
    assert job.visible() == rows
    job.start(run="another")
    with pytest.raises(FencedError, match="took the job over"):
        job.start(after=begun[-1], run="run")


def test_rows_that_were_withdrawn_are_missed_before_a_takeover_changes_anything(job: Job) -> None:
    claim = job.start()
    rows = [job.complete(claim) for _ in range(3)]
    # A copy of the job's folder stands for a savepoint: it is not the job's own, so the newer ones are released.
    job.start(restore="chk-1")
    assert job.visible() == {rows[0]}
    copy = LocalStorage(str(job.root / "copy"))
    for file in list(job.storage.list(JOB)):
        copy.write(file.path, job.storage.read(file.path))
    before = job.everything()
    wanted = Wanted(
        job=JOB,
        operators=(),
        max_parallelism=128,
        sinks={"out": ParquetTarget(job.sink, "out", JOB)},
        can_go_back=True,
        restore=Restore(f"{copy.url}/{JOB}/chk-3"),
    )
    with pytest.raises(
        SinkFilesMissingError, match=r"checkpoint 3 of job 'visits'.*generation 2 .*went back behind it"
    ):
        take_over(job.storage, job.settings, wanted, None)
    assert job.everything() == before
    assert job.start().generation == 3


def test_a_second_job_is_refused_before_it_takes_anything(job: Job) -> None:
    claim = job.start()
    before = job.everything()
    with pytest.raises(DirectoryNotOursError, match="output of job 'visits', so job 'clicks' cannot write there"):
        job.start(job="clicks")
    assert job.everything() == before
    job.complete(claim)


def test_a_generation_comes_after_all_that_the_sinks_know(job: Job) -> None:
    """The job goes on from a copy of an old checkpoint, and the log that knew its newer generations is lost."""
    claim = job.start()
    old = job.complete(claim)
    copy = LocalStorage(str(job.root / "copy"))
    for file in list(job.storage.list(JOB)):
        copy.write(file.path, job.storage.read(file.path))
    for _ in range(3):
        claim = job.start()
    job.complete(claim)
    lost, job.storage = job.storage, LocalStorage(str(job.root / "new"))
    wanted = Wanted(
        job=JOB,
        operators=(),
        max_parallelism=128,
        sinks={"out": ParquetTarget(job.sink, "out", JOB)},
        can_go_back=True,
        restore=Restore(f"{copy.url}/{JOB}/chk-1"),
    )
    assert take_over(job.storage, StorageSettings(job.storage.url, {}), wanted, None).generation == claim.generation + 1
    assert job.visible() == {old}
    assert lost.url != job.storage.url


class Late(LocalStorage):
    """A store that lists some files late."""

    hidden: frozenset[str] = frozenset()

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        return (file for file in super().list(prefix, after) if file.path not in self.hidden)


def damage(job: Job, number: int) -> None:
    (job.root / "checkpoints" / JOB / f"chk-{number}" / "_metadata").write_bytes(b"damaged")


def test_rows_that_are_listed_after_the_job_went_back_are_withdrawn_by_a_later_start(job: Job) -> None:
    claim = job.start()
    rows = [job.complete(claim) for _ in range(3)]
    damage(job, 2)
    damage(job, 3)
    late = Late(job.sink.url)
    late.hidden = frozenset(rows[1:])
    claim = job.start(late)
    assert claim.restored_path == f"{job.location('chk-1')}/_metadata"
    again = {job.complete(claim), job.complete(claim)}
    assert job.visible() == {*rows, *again}, "nobody can know the names"
    late.hidden = frozenset(rows[2:])
    job.start(late)
    assert job.visible() == {rows[0], rows[2], *again}
    job.start()
    assert job.visible() == {rows[0], *again}


@pytest.mark.parametrize("call", range(1, 5))
def test_a_job_that_died_while_it_went_back_still_knows_it(job: Job, call: int) -> None:
    claim = job.start()
    rows = [job.complete(claim) for _ in range(2)]
    damage(job, 2)

    class LateAndInterrupted(Interrupted, Late):
        pass

    sink = LateAndInterrupted(job.sink.url)
    sink.hidden = frozenset(rows[1:])

    def fail() -> None:
        sink.away = True

    sink.at[call] = fail
    with suppress(StorageError):
        job.start(sink)
    sink.away = False
    sink.at.clear()
    again = job.complete(job.start(sink))
    job.start()
    assert job.visible() == {rows[0], again}


def test_rows_that_newer_checkpoints_name_are_withdrawn_though_they_are_not_listed(job: Job) -> None:
    claim = job.start()
    rows = [job.complete(claim), job.complete(claim), job.complete(claim, publish=False)]
    late = Late(job.sink.url)
    late.hidden = frozenset({*rows, *map(staged_name, rows)})
    job.start(late, restore="chk-1")
    assert {Path(name).name for name in job.everything() if "part-" in name} == {rows[0]}


def test_a_second_checkpoint_dir_is_refused_before_it_takes_anything(job: Job) -> None:
    claim = job.start()
    before = job.everything()
    second = LocalStorage(str(job.root / "second"))
    for _ in range(2):
        with pytest.raises(DirectoryNotOursError, match="from another checkpoint_dir"):
            job.start(checkpoint_dir=second)
        assert job.everything() == before
    job.complete(claim)


def test_a_migration_hands_the_sinks_over_and_the_former_owner_stops(job: Job) -> None:
    former = job.start()
    rows = job.complete(former)
    second = LocalStorage(str(job.root / "second"))
    owner = job.start(checkpoint_dir=second, path=job.location("chk-1"))
    for _ in range(2):
        with pytest.raises(FencedError, match=r"out was taken over by job 'visits' with another checkpoint_dir"):
            job.complete(former)
    shown = {rows, job.complete(owner)}
    with pytest.raises(DirectoryNotOursError, match="from another checkpoint_dir"):
        job.start()
    assert job.visible() == shown
    shown.add(job.complete(job.start(checkpoint_dir=second)))
    assert job.visible() == shown
    # And back, again only by `restore=`.
    job.start(path=f"{second.url}/{JOB}/chk-{job.numbers}")
    with pytest.raises(DirectoryNotOursError, match="from another checkpoint_dir"):
        job.start(checkpoint_dir=second)
    shown.add(job.complete(job.start()))
    assert job.visible() == shown


@pytest.mark.parametrize("call", range(1, 5))
def test_a_migration_that_was_interrupted_is_finished_by_the_next_start(job: Job, call: int) -> None:
    former = job.start()
    rows = [job.complete(former) for _ in range(2)]
    second = LocalStorage(str(job.root / "second"))
    sink = Interrupted(job.sink.url)

    def fail() -> None:
        sink.away = True

    sink.at[call] = fail
    begun: list[int] = []
    path = job.location("chk-1")
    with suppress(StorageError):
        job.start(sink, checkpoint_dir=second, path=path, on_won=begun.append)
    sink.away = False
    sink.at.clear()
    job.start(sink, checkpoint_dir=second, path=None if begun else path)
    assert job.visible() == {rows[0]}
    with pytest.raises(FencedError):
        job.complete(former)


def test_a_driver_that_lost_its_sinks_while_it_stood_still_withdraws_nothing(job: Job) -> None:
    claim = job.start()
    rows = [job.complete(claim) for _ in range(2)]
    second = LocalStorage(str(job.root / "second"))
    sink = Interrupted(job.sink.url)

    def migrate() -> None:
        rows.append(job.complete(job.start(checkpoint_dir=second, path=job.location("chk-2"))))

    sink.at[2] = migrate  # the second listing: the log's entry is won, and the folder is claimed
    with pytest.raises((FencedError, SinkFilesMissingError)):
        job.start(sink, restore="chk-1")
    assert job.visible() == set(rows)
