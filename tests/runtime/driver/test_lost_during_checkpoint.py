"""A task manager that is lost during a checkpoint, while no batch and no supervisor notices it: as when a run stops."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import SourcePosition
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs
from strandline.runtime.driver.checkpoint_requests import CheckpointInterruptedError
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.deployment import Deployment
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.protocol.folders import socket_folder
from strandline.runtime.protocol.messages import BackendSettings, StorageSettings
from strandline.runtime.protocol.slot_calls import PrepareEmpty
from strandline.runtime.task.launcher import ensure_task_manager
from strandline.storage.local import LocalStorage
from tests.runtime.driver.restore.generations import take_the_job_over
from tests.runtime.processes import GROUPS, JOB, NOON, OPERATORS, UID, cluster_without_spark

pytestmark = pytest.mark.faults

BATCH = batch_id(1, 0)


def test_whoever_waits_for_a_checkpoint_learns_that_a_task_manager_froze_in_the_middle_of_it(tmp_path: Path) -> None:
    cluster = cluster_without_spark(tmp_path)
    stops = {"fail_pattern": "^(upload|write|create) ", "fail_mode": "stop"}
    storage = StorageSettings(f"faulty+file://{tmp_path}/durable", stops)
    uploads = msgspec.structs.replace(cluster.run.uploads, inline_bytes=0)
    cluster.run = msgspec.structs.replace(cluster.run, storage=storage, uploads=uploads)
    claim = take_the_job_over(LocalStorage(str(tmp_path / "durable")), job=JOB)
    checkpoints = Checkpoints(
        CheckpointCoordinator(interval=float("inf"), subtasks=[(UID, 0)]),
        cluster,
        JobShape(JOB, 1, 1, GROUPS, (UID,)),
        {},
        CheckpointInputs(None, lambda batch: SourcePosition(batch, {})),
        DurableCheckpoints(claim),
        SinkCommits(claim),
        timeout=600,
    )
    try:
        cluster._homes = {0: ensure_task_manager(cluster.run)}
        backend = BackendSettings("rocksdb", 16 << 20, 1 << 20, True, "lz4")
        cluster.deploy(Deployment(1, 1, GROUPS, backend, tuple(OPERATORS), (tuple(op.uid for op in OPERATORS),)))
        cluster.prepare_empty(PrepareEmpty(BATCH, 0, NOON), [0])
        cluster.commit(BATCH)
        checkpoints.start()
        checkpoints.committed(BATCH, 0, [], 0.0)
        waiting = checkpoints._request(checkpoints._waiters.request)
        assert waiting is not None
        with pytest.raises(CheckpointInterruptedError, match="a slot was lost"):
            waiting.result(timeout=60)
    finally:
        checkpoints.close()
        cluster.close(1.0)
        shutil.rmtree(socket_folder(cluster.run.run_id), ignore_errors=True)
