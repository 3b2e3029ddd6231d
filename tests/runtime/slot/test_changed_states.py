"""Slots of a changed job: whatever files they are rebuilt from, all their entries are as the job declares them now."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.batch import first_batch
from strandline.checkpoint.metadata import SubtaskState
from strandline.errors import IncompatibleCheckpointError
from strandline.runtime.driver.durable_segments import DurableSegments
from strandline.runtime.protocol.folders import slot_folder
from strandline.runtime.protocol.messages import OperatorSpec, SlotSpec
from strandline.state.coding.codec import ValueCodec
from strandline.state.coding.ddl import parse_schema
from strandline.state.coding.keys import key_group_range, state_prefix
from strandline.state.descriptors import StateDescriptor
from strandline.storage.local import LocalStorage
from tests.examples import examples
from tests.runtime.taskmanager.changelog.host import (
    GROUPS,
    MEMORY,
    PARALLELISM,
    Changes,
    Host,
    Puts,
    Subtask,
    changelog_settings,
    run_info,
    slot_spec,
)

OLD, NEW = parse_schema("n long, s string"), parse_schema("x double, n long, y int, s string")
OLD_ROWS, NEW_ROWS = ValueCodec(OLD, "old"), ValueCodec(NEW, "new")
BEFORE = [StateDescriptor("total", "value", OLD.json()), StateDescriptor("old", "value", OLD.json())]
NOW = [StateDescriptor("total", "value", NEW.json()), StateDescriptor("more", "value", OLD.json())]

Model = dict[Subtask, dict[bytes, tuple[Any, ...]]]


class Declares(Puts):
    """Its rows are changes of its state, of which it says what it likes."""

    def __init__(self, uid: str, declared: list[StateDescriptor]) -> None:
        super().__init__(uid)
        self.declared = declared

    def states(self) -> list[StateDescriptor]:
        return self.declared


V1 = [Declares("op", BEFORE), Declares("gone", BEFORE)]
V2 = [Declares("op", NOW), Declares("fresh", NOW)]


class Driver:
    """One job in one process, from generation to generation: what the driver knows of its slots."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self.storage = LocalStorage(str(folder / "durable"))
        self.generation = 0
        self.batch = -1
        self.checkpoint = 0
        self.base: tuple[int, list[SubtaskState]] = (-1, [])
        self.model: Model = {}

    def start(self, operators: list[Declares], changelog: bool, allow: bool = True) -> None:
        """A new generation, from the last checkpoint."""
        self.generation += 1
        self.operators = operators
        self.batch = self.base[0]
        self.log = DurableSegments(self.batch)
        self.incarnations = 0
        self.allow = allow
        quiet = changelog_settings(upload_timeout=10.0)
        run = run_info(self.folder, self.storage, quiet if changelog else None, f"run-{self.generation}")
        self.host = Host(run, self.storage)
        self.host.start(*(self.spec(index) for index in range(PARALLELISM)))

    def spec(self, index: int) -> SlotSpec:
        self.incarnations += 1
        uids = {operator.uid for operator in self.operators}
        return slot_spec(
            self.host.run,
            index,
            kind=self.kind,
            generation=self.generation,
            incarnation=self.incarnations,
            operators=[OperatorSpec(one.uid, pickle.dumps(one)) for one in self.operators],
            restore=[state for state in self.base[1] if state.subtask == index and state.operator in uids],
            restore_batch=self.base[0],
            decided_batch=self.batch,
            segments=self.log.of(index),
            segments_complete=self.log.complete,
            allow_non_restored=self.allow,
        )

    def run(self, changes: Mapping[Subtask, Changes]) -> None:
        self.batch = max(self.batch + 1, first_batch(self.generation))
        self.host.prepare(self.batch, 0, changes)
        for index, outcome in self.host.wait_until_durable(self.batch, 0).items():
            self.log.prepared(self.batch, index, outcome)
        self.log.decided(self.batch, has_changelog=self.host.has_changelog)
        self.host.commit(self.batch)

    def take_checkpoint(self) -> None:
        self.checkpoint += 1
        if not self.host.has_changelog:
            acks = self.host.upload_snapshots(self.checkpoint)
            self.host.uploader.completed(self.checkpoint, {})
        else:
            acks = self.host.acknowledged(self.checkpoint)
            self.host.changelog.completed(self.checkpoint)
        assert {ack.state.operator for ack in acks} == {operator.uid for operator in self.operators}
        self.base = self.batch, [ack.state for ack in acks]
        self.log.truncate(self.batch)

    def lose(self, index: int, local_files: bool) -> None:
        """A slot dies, with its files if something else leads to the last batch."""
        slot = self.host.slots.pop(index)
        slot.kill()
        if not local_files and (self.log.complete or self.batch == self.base[0]):
            shutil.rmtree(slot_folder(slot.spec), ignore_errors=True)
        self.host.start(self.spec(index))

    def rows(self) -> Model:
        """What all slots have, as the present job reads it."""
        codec = NEW_ROWS if self.operators is V2 else OLD_ROWS
        return {
            subtask: {key: codec.decode(data) for key, data in entries.items()}
            for subtask, entries in self.host.contents().items()
        }


def stored(index: int, state: str, name: str) -> bytes:
    return state_prefix(key_group_range(index, PARALLELISM, GROUPS).start, state) + name.encode()


def drawn_batch(data: st.DataObject, driver: Driver, states: tuple[str, ...]) -> None:
    """A batch of some puts and deletes, in the job and in the model."""
    codec = NEW_ROWS if driver.operators is V2 else OLD_ROWS
    narrow = st.tuples(st.none() | st.integers(0, 99), st.none() | st.text(max_size=3))
    wide = st.tuples(st.none() | st.floats(0, 1), st.none() | st.integers(0, 99), st.none() | st.just(7), st.just("s"))
    row = wide if codec is NEW_ROWS else narrow
    changes: dict[Subtask, dict[bytes, bytes | None]] = {}
    names = st.tuples(st.sampled_from(states), st.sampled_from("abcd"))
    for operator in driver.operators:
        for index in range(PARALLELISM):
            subtask = (operator.uid, index)
            for (state, name), value in data.draw(st.dictionaries(names, st.none() | row, max_size=3)).items():
                key = stored(index, state, name)
                changes.setdefault(subtask, {})[key] = None if value is None else codec.encode(value)
                driver.model.setdefault(subtask, {})
                if value is None:
                    driver.model[subtask].pop(key, None)
                else:
                    driver.model[subtask][key] = value
    driver.run(changes)


def changed(model: Model) -> Model:
    """The model of the first job, as the second must find it."""
    return {
        (uid, index): {
            key: (None, row[0], None, row[1]) for key, row in rows.items() if not key[2:].startswith(b"old\0")
        }
        for (uid, index), rows in model.items()
        if uid == "op"
    }


def complete(model: Model, operators: list[Declares]) -> Model:
    return {(one.uid, index): model.get((one.uid, index), {}) for one in operators for index in range(PARALLELISM)}


@pytest.mark.parametrize("kind", ["heap", "rocksdb"])
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_entries_are_in_the_new_form_whatever_they_are_rebuilt_from(kind: str, data: st.DataObject) -> None:
    folder = Path(tempfile.mkdtemp(prefix="strandline-changed-", dir=MEMORY))
    driver = Driver(folder, kind)
    hosts: list[Host] = []
    try:
        driver.start(V1, changelog=data.draw(st.booleans(), "changelog before"))
        hosts.append(driver.host)
        for _ in range(data.draw(st.integers(1, 4), "old batches")):
            drawn_batch(data, driver, ("total", "old"))
            if driver.host.has_changelog and data.draw(st.booleans(), "materialize"):
                driver.host.changelog.materializer.materialize(data.draw(st.integers(0, 1)))
        driver.take_checkpoint()
        original, first = driver.base, driver.model
        assert driver.rows() == complete(driver.model, V1)
        driver.host.kill()

        driver.model = changed(driver.model)
        driver.start(V2, changelog=data.draw(st.booleans(), "changelog after"))
        hosts.append(driver.host)
        assert driver.rows() == complete(driver.model, V2)
        for _ in range(data.draw(st.integers(1, 5), "steps")):
            step = data.draw(st.sampled_from(["batch", "batch", "lose", "lose all", "checkpoint"]), "step")
            if step == "batch":
                drawn_batch(data, driver, ("total", "more"))
            elif step == "lose":
                driver.lose(data.draw(st.integers(0, 1)), data.draw(st.booleans(), "local files"))
            elif step == "lose all":
                driver.lose(0, False)
                driver.lose(1, False)
            else:
                driver.take_checkpoint()
            assert driver.rows() == complete(driver.model, V2)
        driver.take_checkpoint()
        driver.host.kill()

        driver.start(V2, changelog=data.draw(st.booleans(), "changelog at last"), allow=False)
        hosts.append(driver.host)
        assert not any(one.changed for slot in driver.host.slots.values() for one in slot.rebuilt)
        assert driver.rows() == complete(driver.model, V2)
        driver.host.kill()

        # The first checkpoint is untouched: the first job can still be started from it.
        driver.base = original
        driver.start(V1, changelog=False, allow=False)
        hosts.append(driver.host)
        assert driver.rows() == complete(first, V1)
    finally:
        for host in hosts:
            host.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_the_changelog_does_not_build_on_files_of_the_old_form() -> None:
    folder = Path(tempfile.mkdtemp(prefix="strandline-changed-", dir=MEMORY))
    driver = Driver(folder, "rocksdb")
    driver.start(V1, changelog=True)
    try:
        many = {stored(0, "old", f"{n:04d}"): OLD_ROWS.encode((n, "x" * 200)) for n in range(2000)}
        driver.run({("op", 0): {**many, stored(0, "total", "a"): OLD_ROWS.encode((1, "s"))}})
        driver.host.changelog.materializer.materialize(0)
        driver.take_checkpoint()
        driver.host.kill()
        driver.start(V2, changelog=True)
        barrier = driver.host.changelog.barrier(2)
        # "gone" is not of the job any more, "fresh" begins empty: only "op" has to be materialized.
        assert driver.host.changelog.files.without_base() == [("op", 0), ("op", 1)]
        acks = {(ack.state.operator, ack.state.subtask): ack for ack in driver.host.acknowledge(barrier)}
        assert [state["name"] for state in acks["op", 0].state.states] == ["total", "more"]
        assert not [file for file in acks["op", 0].state.files if file.is_segment]
        assert driver.rows()["op", 0] == {stored(0, "total", "a"): (None, 1, None, "s")}
    finally:
        driver.host.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_without_leave_the_slot_drops_nothing() -> None:
    folder = Path(tempfile.mkdtemp(prefix="strandline-changed-", dir=MEMORY))
    driver = Driver(folder, "heap")
    driver.start(V1, changelog=False)
    try:
        driver.run({("op", 0): {stored(0, "old", "a"): OLD_ROWS.encode((1, "s"))}})
        driver.take_checkpoint()
        driver.host.kill()
        with pytest.raises(IncompatibleCheckpointError, match="operator op: the checkpoint has the state 'old'"):
            driver.start(V2, changelog=False, allow=False)
    finally:
        driver.host.kill()
        shutil.rmtree(folder, ignore_errors=True)
