"""With the changelog the barrier of a checkpoint comes with the commit of a batch, and no call is made for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import decode
from strandline.errors import SlotLostError
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.protocol.taskmanager_calls import Barrier, CommittedSlot
from tests.runtime.driver.one_slot import BATCHES, one_slot, prepare
from tests.runtime.processes import JOB
from tests.runtime.taskmanager.changelog.host import changelog_settings
from tests.waiting import wait_until

pytestmark = pytest.mark.faults


def commit(cluster: Cluster, checkpoints: Checkpoints, number: int) -> tuple[Barrier, list[CommittedSlot]]:
    """Commit a batch with a barrier, as far as the slot is concerned. The caller holds the commit lock."""
    prepare(cluster, BATCHES[number])
    barrier = checkpoints.begin_with_commit(BATCHES[number], 0.0, wanted=True)
    assert barrier is not None
    return barrier, list(cluster.commit(BATCHES[number], barrier).values())


def statuses(checkpoints: Checkpoints) -> list[str]:
    return [one.status for one in checkpoints._coordinator.checkpoints()]


def test_a_checkpoint_takes_its_barrier_with_the_commit_and_knows_the_position_of_its_batch(tmp_path: Path) -> None:
    written = tmp_path / "durable" / JOB
    with one_slot(tmp_path, changelog=changelog_settings()) as (cluster, checkpoints):
        checkpoints.start()
        with checkpoints.commit_lock:
            barrier, told = commit(cluster, checkpoints, 0)
            assert [len(one.acks) for one in told] == [1]
            checkpoints.committed(BATCHES[0], 7, [], 0.0)
            checkpoints.end_barrier(barrier.checkpoint, told)
        checkpoints.cover()  # waits for that one, and begins none
        assert statuses(checkpoints) == ["completed"]

        # A full checkpoint is acknowledged later. That may be before the position is known.
        full = checkpoints._waiters.request(full=True)
        with checkpoints.commit_lock:
            barrier, told = commit(cluster, checkpoints, 1)
            assert (barrier.full, [one.acks for one in told]) == (True, [[]])
            wait_until(lambda: checkpoints._coordinator.ready() == (2,), what="the acknowledgement")
            assert not (written / "chk-2").exists()
            checkpoints.committed(BATCHES[1], 8, [], 0.0)
            checkpoints.end_barrier(barrier.checkpoint, told)
        assert full.result(timeout=60).id == 2
        assert decode((written / "chk-2" / "_metadata").read_bytes(), "the test", Home(JOB, 2)).source.batch == 8

        # A slot that is lost in the commit: the barrier is given up, and the run is not harmed.
        with checkpoints.commit_lock:
            prepare(cluster, BATCHES[2])
            lost = checkpoints.begin_with_commit(BATCHES[2], 0.0, wanted=True)
            assert lost is not None
            (manager,) = cluster.processes()
            os.kill(manager.slots[0].pid, signal.SIGKILL)
            with pytest.raises(SlotLostError):
                cluster.commit(BATCHES[2], lost)
            assert 0 in cluster.recover(BATCHES[2])
            cluster.commit(BATCHES[2])
            checkpoints.committed(BATCHES[2], 9, [], 0.0)
            checkpoints.end_barrier(lost.checkpoint, ())
        assert statuses(checkpoints)[2] == "failed"
        checkpoints.cover()
        assert statuses(checkpoints) == ["completed", "completed", "failed", "completed"]
        assert checkpoints.failure is None
