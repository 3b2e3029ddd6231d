"""The end of a generation's checkpoints while storage does not answer: nobody waits for ever."""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState
from strandline.checkpoint.pending import SubtaskAck
from strandline.runtime.driver.restore.takeover import Claim
from strandline.runtime.protocol.coordinator_calls import Acknowledgement
from strandline.runtime.protocol.folders import socket_folder
from strandline.storage.checksums import checksum_text
from strandline.storage.local import LocalStorage
from tests.runtime.driver.one_slot import checkpoints_by_hand
from tests.runtime.driver.restore.generations import take_the_job_over
from tests.runtime.processes import GROUPS, JOB, UID, cluster_without_spark
from tests.waiting import wait_until

BATCH = batch_id(1, 0)
SHARED = f"{JOB}/shared/one"


class Hanging(LocalStorage):
    """Calls with `hangs_at` in them do not return until the test ends."""

    hangs_at: str | None = None

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.hanging = threading.Event()
        self.over = threading.Event()

    def create(self, path: str, data: bytes) -> None:
        self._pass(f"create {path}")
        super().create(path, data)

    def delete(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        self._pass(f"delete {paths}")
        super().delete(paths)

    def _pass(self, call: str) -> None:
        if self.hangs_at is not None and self.hangs_at in call:
            self.hanging.set()
            self.over.wait()


class Job:
    """A generation of a job whose first slot the test speaks for. Others do not answer."""

    def __init__(self, root: Path, slots: int = 1) -> None:
        self.storage = Hanging(str(root / "durable"))
        self.claim: Claim = take_the_job_over(self.storage, job=JOB)
        self.cluster = cluster_without_spark(root)
        self.checkpoints = checkpoints_by_hand(self.cluster, self.claim, slots)
        self.checkpoints.start()

    def begin_checkpoint(self) -> None:
        """Take a checkpoint whose one file is uploaded and acknowledged. It is complete once storage says so."""
        self.checkpoints.committed(BATCH, 0, [], 0.0)
        assert self.checkpoints._request(self.checkpoints._waiters.request) is not None
        wait_until(lambda: self.checkpoints._waiters.begun == (1,), what="the barrier")
        self.storage.write(SHARED, b"state")
        handle = FileHandle(SHARED, 5, checksum_text(zlib.crc32(b"state")))
        state = SubtaskState(UID, 0, 0, GROUPS, "heap", True, (StateFile("one", "one", True, handle),))
        ack = SubtaskAck(
            state=state,
            uploaded=(handle,),
            barrier_time=0.0,
            ack_time=0.0,
            sync_ms=0.0,
            async_ms=0.0,
            checkpointed_bytes=5,
            full_bytes=5,
        )
        self.checkpoints.acknowledge(Acknowledgement(1, 1, ack))

    def close(self) -> None:
        self.storage.over.set()
        self.checkpoints.close()
        self.cluster.close(1.0)
        shutil.rmtree(socket_folder(self.cluster.run.run_id), ignore_errors=True)


@pytest.fixture(params=[1])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(tmp_path, request.param)
    yield job
    job.close()


def returns(act: Callable[[], object]) -> bool:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_checkpoints_are_not_deleted_beside_a_checkpoint_that_hangs_in_storage(job: Job) -> None:
    """Two threads would write the job's log at the same time."""
    job.storage.hangs_at = "_metadata"
    job.begin_checkpoint()
    assert job.storage.hanging.wait(10)
    entries = len(list(job.storage.list(f"{JOB}/log/")))
    assert returns(lambda: job.checkpoints.delete_all(0.1))
    assert len(list(job.storage.list(f"{JOB}/log/"))) == entries


@pytest.mark.parametrize("call", ["/log/", "delete "])
def test_the_deletion_of_checkpoints_has_a_deadline(job: Job, call: str) -> None:
    job.begin_checkpoint()
    wait_until(lambda: job.checkpoints._waiters.begun == (), what="the checkpoint")
    job.storage.hangs_at = call
    assert returns(lambda: job.checkpoints.delete_all(0.5))
    assert job.storage.hanging.is_set()


@pytest.mark.parametrize("job", [2], indirect=True)
def test_files_of_an_aborted_checkpoint_that_cannot_be_deleted_do_not_keep_the_end_waiting(job: Job) -> None:
    job.begin_checkpoint()
    job.storage.hangs_at = "delete "
    assert returns(lambda: job.checkpoints.close(0.5))
    assert job.storage.hanging.is_set()
