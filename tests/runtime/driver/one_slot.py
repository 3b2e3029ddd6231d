"""A generation with real checkpoints, a real task manager and one slot, and without Spark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import SourcePosition
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs
from strandline.runtime.driver.checkpointing import Checkpoints
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.deployment import Deployment
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.restore.takeover import Claim
from strandline.runtime.driver.sink_commits import SinkCommits
from strandline.runtime.protocol.folders import socket_folder
from strandline.runtime.protocol.messages import BackendSettings
from strandline.runtime.protocol.slot_calls import PrepareEmpty
from strandline.runtime.task.launcher import ensure_task_manager
from strandline.storage.local import LocalStorage
from tests.runtime.driver.restore.generations import take_the_job_over
from tests.runtime.processes import GROUPS, JOB, NOON, OPERATORS, UID, cluster_without_spark

BATCHES = [batch_id(1, number) for number in range(4)]


def checkpoints_by_hand(cluster: Cluster, claim: Claim, slots: int = 1) -> Checkpoints:
    """The checkpoints of a generation, of which none is taken unless somebody asks for it."""
    return Checkpoints(
        CheckpointCoordinator(interval=float("inf"), subtasks=[(UID, slot) for slot in range(slots)]),
        cluster,
        JobShape(JOB, 1, 1, GROUPS, (UID,)),
        {},
        CheckpointInputs(None, lambda batch: SourcePosition(batch, {})),
        DurableCheckpoints(claim),
        SinkCommits(claim),
        timeout=600,
    )


@contextmanager
def one_slot(root: Path, **run: Any) -> Iterator[tuple[Cluster, Checkpoints]]:
    """A slot that is deployed, and the checkpoints of its generation, which are taken by hand only.

    `run` has fields of `RunInfo` that are not as usual.
    """
    cluster = cluster_without_spark(root)
    cluster.run = msgspec.structs.replace(cluster.run, **run)
    claim = take_the_job_over(LocalStorage(str(root / "durable")), job=JOB)
    checkpoints = checkpoints_by_hand(cluster, claim)
    try:
        cluster._homes = {0: ensure_task_manager(cluster.run)}
        backend = BackendSettings("rocksdb", 16 << 20, 1 << 20, True, "lz4")
        cluster.deploy(Deployment(1, 1, GROUPS, backend, tuple(OPERATORS), (tuple(op.uid for op in OPERATORS),)))
        yield cluster, checkpoints
    finally:
        checkpoints.close()
        cluster.close(1.0)
        shutil.rmtree(socket_folder(cluster.run.run_id), ignore_errors=True)


def prepare(cluster: Cluster, batch: int) -> None:
    """Have the slot prepare a batch without rows."""
    cluster.prepare_empty(PrepareEmpty(batch, 0, NOON), [0])
    cluster.collect_prepared(batch, 0)
