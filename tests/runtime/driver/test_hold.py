"""Whoever waits for a batch to end gives up silent task managers meanwhile, and does not wait once the run ends."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strandline.errors import JobFailedError
from strandline.runtime.driver.batches import Batches
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.progress import RunProgress
from strandline.runtime.driver.task_managers import TaskManagers
from strandline.runtime.protocol.address import NOWHERE
from strandline.runtime.protocol.coordinator_calls import Registration
from strandline.runtime.protocol.folders import socket_folder
from tests.runtime.processes import cluster_without_spark
from tests.waiting import wait_until

ELSEWHERE = msgspec.structs.replace(NOWHERE, host_id="another host")
NOBODY: Any = None
"""In place of what nobody needs here: Spark, slots and checkpoints."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = cluster_without_spark(tmp_path)
    cluster._managers = TaskManagers(0.1)
    cluster.register(Registration("silent", ELSEWHERE, 1))
    yield cluster
    cluster.close(0.1)
    shutil.rmtree(socket_folder(cluster.run.run_id), ignore_errors=True)


@pytest.fixture
def generation(cluster: Cluster) -> Generation:
    batches = Batches(cluster, 1, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, checkpoint_every_batch=False)
    return Generation(
        number=1,
        parallelism=1,
        opened=NOBODY,
        query=NOBODY,
        start_query=NOBODY,
        batches=batches,
        checkpoints=NOBODY,
        cluster=cluster,
        scratch=NOBODY,
        clock=NOBODY,
        state_memory=0,
        progress=RunProgress("visits"),
        drain=NOBODY,
    )


@pytest.mark.parametrize("waits", ["hold", "heal"])
def test_a_task_manager_that_falls_silent_during_the_batch_is_given_up(
    cluster: Cluster, generation: Generation, waits: str
) -> None:
    acts = {"hold": lambda: generation.hold(lambda: None), "heal": generation.heal}
    generation.batches.recover = lambda asked_to_end=None: None  # type: ignore[method-assign]  # there is no slot
    waiting = threading.Thread(target=acts[waits], daemon=True)
    with generation.batches.busy:
        waiting.start()
        wait_until(lambda: "silent" not in cluster._managers, what="the end of the patience")
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()


def test_nobody_waits_for_a_batch_once_the_run_is_cancelled(generation: Generation) -> None:
    def cancelled() -> None:
        raise JobFailedError("cancelled")

    with generation.batches.busy, pytest.raises(JobFailedError):
        generation.hold(cancelled)
