"""Durable epochs, checkpoints, takeovers and gc in any order, with drivers that die or are taken over at any call.

Whatever happens: a start goes on behind all that is durable, its state and the rows of two sinks are the same batches,
and what else it has is an epoch that some driver has tried to write.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.checkpoint.coordinator import CheckpointCoordinator
from strandline.checkpoint.metadata import FileHandle
from strandline.errors import FencedError
from strandline.runtime.driver.durable_checkpoints import DurableCheckpoints
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.runtime.driver.restore.registry_recovery import recover_registry
from strandline.storage import open_storage
from tests.examples import examples
from tests.runtime.driver.restore.durable_epochs import JOB, PATHS, EpochDriver, EpochJob, interrupted, state_of
from tests.runtime.driver.restore.generations import Crash, die

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
CALLS = st.none() | st.integers(1, 70)


@dataclass
class Running:
    """A driver that has not learnt yet that it is at its end."""

    driver: EpochDriver
    history: list[int]
    """All batches of its state."""
    has_checkpoint: bool = False
    """Whether it has completed a checkpoint, so that its epochs extend one."""


class EpochsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(dir=MEMORY)
        self.job = EpochJob(Path(self.root))
        self.running: list[Running] = []
        self.durable: list[int] = []
        """What every later start must have."""
        self.completed: list[int] = []
        """What the newest checkpoint has; empty as long as a driver may have completed another one and died."""
        self.tried: set[int] = set()
        """Epochs whose writer has not learnt that they are durable."""

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(dies_at=CALLS)
    def start(self, dies_at: int | None) -> None:
        storage = open_storage(f"{self.root}/checkpoints")
        try:
            driver = self.job.start(storage if dies_at is None else interrupted(storage, dies_at, die))
            self._begin(driver)
        except Crash:
            event("a driver died in its takeover")
            self.completed = []

    def _begin(self, driver: EpochDriver) -> None:
        restored = driver.claim.restored
        found = state_of(driver.claim.storage, restored) if restored is not None else []
        assert found[: len(self.durable)] == self.durable
        assert set(found[len(self.durable) :]) <= self.tried
        assert self.job.visible() == {None: found, "late": found}
        if restored is not None:
            assert restored.batch_id == max(found)
        event(f"a start has epochs: {found != self.completed}")
        self.durable = self.completed = found
        recover_registry(CheckpointCoordinator(interval=1.0, subtasks=[]), driver.claim)
        self.running.append(Running(driver, list(found)))

    @precondition(lambda self: self.completed)
    @rule()
    def restore_the_newest_checkpoint_by_its_name(self) -> None:
        store = JobLogStore(open_storage(f"{self.root}/checkpoints"), PATHS)
        latest = store.load().latest
        if latest is None or not latest.ours:
            return
        self.durable, self.tried = self.completed, set()
        self._begin(self.job.start(restore=self.job.location(latest.checkpoint_id)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), epochs=st.integers(1, 3))
    def write(self, data: st.DataObject, epochs: int) -> None:
        self._write(data.draw(st.sampled_from(self.running)), epochs)

    @rule(dies_at=CALLS, epochs=st.integers(1, 3), gc=st.booleans())
    def live(self, dies_at: int | None, epochs: int, gc: bool) -> None:
        """A driver starts, takes a checkpoint, and makes epochs durable; then the next one starts, perhaps after gc."""
        self.start(None)
        self._checkpoint(self.running[-1], publish=True, materialize=False)
        if self.running:
            self._write(self.running[-1], epochs)
        if gc:
            self.collect_garbage(take_over=True)
        self.start(dies_at)

    def _write(self, one: Running, epochs: int) -> None:
        first = one.driver.number + 1
        batches = [one.driver.claim.generation * 1_000_000_000 + number for number in range(first, first + epochs)]
        try:
            one.driver.write(epochs)
        except (FencedError, Crash) as error:
            event(f"a writer ended: {type(error).__name__}")
            self.running.remove(one)
            if one.has_checkpoint:
                self.tried.update(batches)
            return
        assert one is self.running[-1]
        one.history += batches
        if one.has_checkpoint:
            self.durable = list(one.history)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), publish=st.booleans(), materialize=st.booleans())
    def checkpoint(self, data: st.DataObject, publish: bool, materialize: bool) -> None:
        self._checkpoint(data.draw(st.sampled_from(self.running)), publish, materialize)

    def _checkpoint(self, one: Running, publish: bool, materialize: bool) -> None:
        driver = one.driver
        if materialize:
            driver.files, driver.inline = (), list(one.history)
        try:
            driver.checkpoint(publish=publish)
        except FencedError:
            self.running.remove(one)
            return
        except Crash:
            event("a driver died in its checkpoint")
            self.running.remove(one)
            self.tried.update([*one.history, driver.batch])
            self.completed = []
            return
        assert one is self.running[-1]
        one.history.append(driver.batch)
        one.has_checkpoint = True
        self.durable = self.completed = list(one.history)
        if not publish:
            self.running.remove(one)  # the next start publishes
            return
        named = {file.handle.path for file in driver.files if file.handle is not None}
        covered = [path for path in driver.log.covered(driver.batch) if path not in named]
        try:
            DurableCheckpoints(driver.claim).tidy_up([FileHandle(path, 0, "") for path in covered])
        except Crash:
            self.running.remove(one)
            return
        driver.log.forget(covered)

    @rule(take_over=st.booleans())
    def collect_garbage(self, take_over: bool) -> None:
        storage = open_storage(f"{self.root}/checkpoints")
        if next(storage.list(PATHS.log_dir), None) is None:
            return
        garbage = find_garbage(storage, JOB, now=time.time() + 10, min_age=0, take_over=take_over)
        delete_garbage(storage, garbage)


EpochsMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestEpochsMachine = EpochsMachine.TestCase
