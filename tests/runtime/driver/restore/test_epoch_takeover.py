"""A takeover with durable epochs: whatever happens to drivers, every durable epoch counts once, in state and sinks."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.coordinator import CheckpointCoordinator
from strandline.errors import (
    FencedError,
    IncompatibleCheckpointError,
    NewerFormatError,
    SinkError,
    StorageError,
    StrandlineError,
)
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.restore.registry_recovery import recover_registry
from strandline.storage import open_storage
from strandline.storage.local import LocalStorage
from tests.examples import examples
from tests.runtime.driver.restore.durable_epochs import JOB, OUTPUTS, PATHS, EpochDriver, EpochJob, interrupted

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
NAMED = [batch_id(1, number) for number in range(10)]


@pytest.fixture
def job() -> Iterator[EpochJob]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        yield EpochJob(Path(root))


def test_the_job_goes_on_behind_its_last_durable_epoch(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.write()
    first.write(3)
    second = job.start()
    second.check(NAMED[:5])
    assert second.claim.restored is not None
    assert second.claim.restored.checkpoint_id == 2
    assert second.claim.store.job_log.retained == (2,)
    assert second.claim.owned
    third = job.start()
    assert third.claim.restored == second.claim.restored, "nothing came since, so nothing is written"


def test_a_generation_without_durable_epochs_restores_its_checkpoint(job: EpochJob) -> None:
    job.start().checkpoint()
    second = job.start()
    second.check(NAMED[:1])
    assert second.claim.restored is not None
    assert second.claim.restored.checkpoint_id == 1


def test_checkpoints_and_epochs_follow_each_other_over_generations(job: EpochJob) -> None:
    batches: list[int] = []
    for generation in range(1, 4):
        driver = job.start()
        driver.checkpoint()
        driver.write()
        driver.checkpoint()
        driver.write(2)
        batches += [batch_id(generation, number) for number in range(5)]
    last = job.start()
    last.check(batches)


def test_epochs_before_the_first_checkpoint_of_their_generation_come_again(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    second = job.start()
    second.write()
    third = job.start()
    third.check(NAMED[:1])


def test_rows_that_the_checkpoint_covers_and_that_were_not_published_come_too(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.checkpoint(publish=False)
    first.write()
    job.start().check(NAMED[:3])


def test_a_restore_that_the_user_names_has_no_epochs(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.write()
    second = job.start(restore=job.location(1))
    second.check(NAMED[:1])
    job.start().check(NAMED[:1])


def test_a_job_that_goes_back_to_an_older_checkpoint_has_no_epochs(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint(num_retained=2)
    first.checkpoint(num_retained=2)
    first.write()
    (Path(job.location(2)) / "_metadata").write_bytes(b"damaged")
    job.outputs = (None,)  # SQLite cannot take rows back
    job.start(allow_non_restored=True).check(NAMED[:1], (None,))
    job.start(allow_non_restored=True).check(NAMED[:1], (None,))


def test_the_epochs_after_a_damaged_file_come_again(job: EpochJob, caplog: pytest.LogCaptureFixture) -> None:
    first = job.start()
    first.checkpoint()
    for _ in range(3):
        first.write()
    storage = LocalStorage(f"{job.root}/checkpoints")
    path = PATHS.epochs(1, 2)
    storage.write(path, storage.read(path)[:-1])
    with caplog.at_level(logging.WARNING):
        job.start().check(NAMED[:2])
    assert sum("cannot be restored" in record.getMessage() for record in caplog.records) == 1
    job.start().check(NAMED[:2])


def test_a_later_release_is_not_taken_over(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.write()
    storage = LocalStorage(f"{job.root}/checkpoints")
    data = storage.read(PATHS.epochs(1, 1))
    storage.write(PATHS.epochs(1, 1), data[:5] + b"\x09" + data[6:])
    with pytest.raises(NewerFormatError):
        job.start()
    first.write()


def test_rows_without_a_sink_are_refused_before_the_takeover_or_dropped(
    job: EpochJob, caplog: pytest.LogCaptureFixture
) -> None:
    first = job.start()
    first.checkpoint()
    first.write()
    job.outputs = (None,)
    with pytest.raises(IncompatibleCheckpointError, match=r"1 rows of output 'late' of step 'count' .*allow_non"):
        job.start()
    first.write()
    with caplog.at_level(logging.WARNING):
        job.start(allow_non_restored=True).check(NAMED[:3], (None,))
    assert any("2 rows of output 'late' of step 'count' are dropped" in one.getMessage() for one in caplog.records)
    job.outputs = OUTPUTS
    job.start()
    assert job.visible()["late"] == NAMED[:1]


def test_a_step_that_the_job_lost_takes_its_rows_along(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.write()
    with pytest.raises(IncompatibleCheckpointError):
        job.start(uid="another")
    second = job.start(uid="another", allow_non_restored=True)
    assert second.claim.restored is not None
    assert second.claim.restored.batch_id == NAMED[1]
    assert job.visible() == {None: NAMED[:1], "late": NAMED[:1]}


def test_epochs_of_a_driver_that_was_taken_over_are_harmless_whether_they_count_or_not(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.write()
    LocalStorage(f"{job.root}/checkpoints").delete([PATHS.epochs(1, 1)])
    second = job.start()
    second.check(NAMED[:1])
    first.number, first.uncovered = 0, []
    with pytest.raises(FencedError):
        first.write()
    third = job.start()  # the second one has made nothing durable, so the epoch follows its checkpoint still
    third.check(NAMED[:2])
    third.checkpoint()
    with pytest.raises(FencedError):
        first.write()
    job.start().check([*NAMED[:2], batch_id(3, 0)])


def test_files_of_earlier_generations_that_no_checkpoint_names_are_deleted(job: EpochJob) -> None:
    def recover(driver: EpochDriver) -> None:
        recover_registry(CheckpointCoordinator(interval=1.0, subtasks=[]), driver.claim)

    first = job.start()
    first.write()
    first.checkpoint(epoch=False)
    first.write()
    second = job.start()
    recover(second)
    assert job.epochs() == {PATHS.epochs(1, 0), PATHS.epochs(1, 1)}
    second.check(NAMED[:2])
    with suppress(FencedError):
        first.write()
    second.files, second.inline = (), NAMED[:2]
    second.checkpoint()
    second.write()
    recover(job.start())
    assert job.epochs() == {PATHS.epochs(2, 1)}


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_takeover_that_storage_interrupts_anywhere_is_repeated(mode: str) -> None:
    for call in itertools.count(1):
        with tempfile.TemporaryDirectory(dir=MEMORY) as root:
            job = EpochJob(Path(root))
            if not interrupted_and_repeated(job, [(call, mode)]):
                break
    assert call > 25, "there were calls to interrupt"


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["before", "after"])), min_size=2, max_size=4))
def test_takeovers_that_storage_interrupts_again_and_again_lose_and_repeat_nothing(
    faults: list[tuple[int, str]],
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        interrupted_and_repeated(EpochJob(Path(root)), faults)


def interrupted_and_repeated(job: EpochJob, faults: list[tuple[int, str]]) -> bool:
    """One driver after the other is interrupted. Returns whether the last one was."""
    here = {"fail_pattern": "never", "fail_times": "0"}  # the same names of places for all drivers
    first = job.start(faults=here)
    first.checkpoint()
    first.checkpoint(publish=False)
    first.write(2)
    first.write()
    failed = False
    for number, (call, mode) in enumerate(faults):
        options = {
            "fail_pattern": ".",
            "fail_mode": mode,
            "fail_from": str(call),
            "fail_times": "1",
            "counter": str(job.root / f"calls-{number}"),
        }
        try:
            job.start(faults=options)
            failed = (job.root / f"calls-{number}").stat().st_size >= call
        except (StorageError, SinkError):
            failed = True
    last = job.start(faults=here)
    last.check(NAMED[:5])
    last.checkpoint()
    last.write()
    job.start(faults=here).check([*NAMED[:5], batch_id(last.claim.generation, 0), batch_id(last.claim.generation, 1)])
    return failed


def test_an_epoch_that_is_written_during_a_takeover_counts_or_its_writer_is_fenced() -> None:
    """The older driver stands still, and goes on at every call of the takeover."""
    outcomes = set()
    for call in itertools.count(1):
        with tempfile.TemporaryDirectory(dir=MEMORY) as root:
            job = EpochJob(Path(root))
            first = job.start()
            first.checkpoint()
            first.write()
            durable: list[bool] = []

            def write() -> None:
                try:
                    first.write()  # noqa: B023  # called at once
                    durable.append(True)  # noqa: B023
                except FencedError:
                    durable.append(False)  # noqa: B023

            second = job.start(interrupted(open_storage(f"{job.root}/checkpoints"), call, write))
            if not durable:
                break
            restored = second.claim.restored
            assert restored is not None
            assert restored.batch_id in NAMED[2 if durable[0] else 1 : 3]
            second.check(NAMED[: NAMED.index(restored.batch_id) + 1])
            outcomes.add((durable[0], restored.batch_id == NAMED[2]))
            third = job.start()
            third.check(NAMED[: NAMED.index(restored.batch_id) + 1])
    assert outcomes == {(True, True), (False, True), (False, False)}


def test_a_takeover_that_stands_still_while_another_one_runs_does_no_harm() -> None:
    for call in itertools.count(1):
        with tempfile.TemporaryDirectory(dir=MEMORY) as root:
            job = EpochJob(Path(root))
            first = job.start()
            first.checkpoint()
            first.write(2)
            shown: list[int] = []

            def another() -> None:
                driver = job.start()  # noqa: B023  # called at once
                driver.check(NAMED[:3])
                driver.checkpoint()
                driver.write()
                shown.extend([*NAMED[:3], *(batch_id(driver.claim.generation, number) for number in range(2))])  # noqa: B023

            try:
                job.start(interrupted(open_storage(f"{job.root}/checkpoints"), call, another))
            except StrandlineError as error:
                assert isinstance(error, FencedError) or "claimed" in str(error)  # noqa: PT017  # either may come
            if not shown:
                break
            job.start().check(shown)


def test_everything_of_a_cancelled_job_is_deleted(job: EpochJob) -> None:
    first = job.start()
    first.write()
    first.checkpoint(epoch=False)
    first.write()
    DurableCheckpoints(first.claim).delete_all((1,), ())
    left = {file.path for file in LocalStorage(f"{job.root}/checkpoints").list(JOB)}
    assert all(path.startswith(PATHS.log_dir) or "/sinks/" in path for path in left), left


def test_epochs_that_a_released_checkpoint_names_stay_when_the_job_is_cancelled(job: EpochJob) -> None:
    first = job.start()
    first.write()
    first.checkpoint(epoch=False)
    first.write()
    second = job.start(restore=job.location(1))
    DurableCheckpoints(second.claim).delete_all((), ())
    assert job.epochs() == {PATHS.epochs(1, 0)}


def test_gc_spares_the_epochs_that_the_next_start_needs_also_if_it_takes_the_job_over(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.write(2)
    first.checkpoint()
    first.files = ()  # the covered ones are not needed any more
    first.write()
    first.write()
    storage = LocalStorage(f"{job.root}/checkpoints")
    for _ in range(2):
        garbage = find_garbage(storage, JOB, now=time.time() + 10, min_age=0, take_over=True)
        delete_garbage(storage, garbage)
    assert PATHS.epochs(1, 4) in job.epochs()
    job.start().check(NAMED[:6])
    with pytest.raises(FencedError):
        first.write()


def test_gc_deletes_epochs_of_earlier_generations_and_those_that_are_covered(job: EpochJob) -> None:
    first = job.start()
    first.checkpoint()
    first.write()
    first.files = ()
    first.inline.append(first.batch)
    first.checkpoint()
    first.write()
    second = job.start(restore=job.location(2))
    second.checkpoint()
    storage = LocalStorage(f"{job.root}/checkpoints")
    delete_garbage(storage, find_garbage(storage, JOB, now=time.time() + 10, min_age=0, take_over=True))
    assert job.epochs() == set()
    job.start().check([*NAMED[:3], batch_id(2, 0)])
