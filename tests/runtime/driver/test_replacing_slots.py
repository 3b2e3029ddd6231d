"""Lost slots that cannot be replaced: before every further attempt the driver looks whether it is still wanted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strandline.checkpoint.batch import BatchProtocol
from strandline.errors import FencedError, SlotLostError
from strandline.runtime.driver.batches import MAX_ROUNDS, Batches
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.driver.deployment import Deployment
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.progress import RunProgress
from strandline.runtime.protocol.folders import socket_folder
from strandline.runtime.protocol.messages import BackendSettings
from strandline.storage.local import LocalStorage
from tests.runtime.driver.one_slot import checkpoints_by_hand
from tests.runtime.driver.restore.generations import take_the_job_over
from tests.runtime.processes import GROUPS, JOB, OPERATORS, UID, cluster_without_spark

NOBODY: Any = None
"""In place of what nobody needs here: Spark's query, sinks and timers."""


class BrokenSpark(SimpleNamespace):
    """A Spark that starts no task manager. `then` is called in the second attempt."""

    master, defaultParallelism = "local[1]", 1

    def __init__(self) -> None:
        self.attempts = 0
        self.then: Callable[[], object] = lambda: None

    def getLocalProperty(self, _name: str) -> None:
        return None

    def setLocalProperty(self, _name: str, _value: str | None) -> None:
        pass

    def cancelJobGroup(self, _group: str) -> None:
        pass

    def parallelize(self, _numbers: object, _slices: int) -> None:
        self.attempts += 1
        if self.attempts == 2:
            self.then()
        raise RuntimeError("no executor")


@pytest.fixture
def broken() -> BrokenSpark:
    return BrokenSpark()


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "durable"))


@pytest.fixture
def cluster(tmp_path: Path, broken: BrokenSpark) -> Iterator[Cluster]:
    cluster = cluster_without_spark(tmp_path)
    cluster.spark_context = broken  # type: ignore[assignment]
    backend = BackendSettings("rocksdb", 16 << 20, 1 << 20, True, "lz4")
    cluster._deployment = Deployment(1, 1, GROUPS, backend, tuple(OPERATORS), (tuple(op.uid for op in OPERATORS),))
    yield cluster
    cluster.close(0.1)
    shutil.rmtree(socket_folder(cluster.run.run_id), ignore_errors=True)


@pytest.fixture
def generation(cluster: Cluster, storage: LocalStorage) -> Generation:
    claim = take_the_job_over(storage, job=JOB)
    checkpoints = checkpoints_by_hand(cluster, claim)
    protocol: BatchProtocol[None] = BatchProtocol([(UID, 0)])
    return Generation(
        number=1,
        parallelism=1,
        opened=NOBODY,
        query=NOBODY,
        start_query=NOBODY,
        batches=Batches(cluster, 1, protocol, NOBODY, checkpoints, NOBODY, NOBODY, checkpoint_every_batch=False),
        checkpoints=checkpoints,
        cluster=cluster,
        scratch=NOBODY,
        clock=NOBODY,
        state_memory=0,
        progress=RunProgress(JOB),
        drain=NOBODY,
    )


def test_a_driver_gives_up_after_some_attempts(generation: Generation, broken: BrokenSpark) -> None:
    with pytest.raises(SlotLostError, match="slots were lost in each of"):
        generation.heal()
    assert broken.attempts == MAX_ROUNDS


def test_a_driver_that_is_fenced_meanwhile_makes_no_further_attempt(
    generation: Generation, broken: BrokenSpark, storage: LocalStorage
) -> None:
    broken.then = lambda: take_the_job_over(storage, job=JOB)
    with pytest.raises(FencedError):
        generation.heal()
    assert broken.attempts == 2


def test_a_failure_of_the_checkpoints_ends_the_attempts(generation: Generation, broken: BrokenSpark) -> None:
    broken.then = lambda: generation.checkpoints.give_up(FencedError("taken over"))
    with pytest.raises(FencedError, match="taken over"):
        generation.heal()
    assert broken.attempts == 2


def test_a_run_that_is_cancelled_meanwhile_makes_no_further_attempt(
    generation: Generation, broken: BrokenSpark, cluster: Cluster
) -> None:
    broken.then = cluster.abandon
    with pytest.raises(SlotLostError, match="the run ends"):
        generation.heal()
    assert broken.attempts == 2


def test_the_supervisor_makes_no_further_attempt_once_the_run_is_asked_to_end(
    generation: Generation, broken: BrokenSpark
) -> None:
    generation._query = SimpleNamespace(isActive=True, status={"message": ""})  # type: ignore[assignment]
    generation._clock = SimpleNamespace(tick_if_due=lambda: None)  # type: ignore[assignment]
    assert generation.watch(lambda: broken.attempts >= 2) is None
    assert broken.attempts == 2
    assert not generation.batches.busy.locked()
