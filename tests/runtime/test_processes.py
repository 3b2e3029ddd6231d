"""Real task managers and slots without Spark: how they work together, and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from strandline.errors import (
    AuthenticationError,
    DamagedFileError,
    SlotLostError,
    StaleAttemptError,
    StrandlineError,
    UnsafeFolderError,
    UserCodeError,
)
from strandline.runtime.driver.rocksdb_factory import pickle_factory
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.folders import socket_folder
from strandline.runtime.protocol.messages import (
    BackendSettings,
    OperatorSpec,
    SlotSpec,
)
from strandline.runtime.protocol.slot_calls import (
    BatchRound,
    Freeze,
    SlotClient,
    SnapshotRef,
)
from strandline.runtime.protocol.taskmanager_calls import (
    ForSlots,
    OlderSlots,
    StartSlots,
    TaskManagerClient,
)
from strandline.runtime.protocol.user_folder import user_folder
from strandline.runtime.task.launcher import ensure_task_manager
from strandline.runtime.taskmanager.durability import SnapshotDurability
from strandline.runtime.taskmanager.process import TaskManager
from tests.runtime.processes import (
    B0,
    B1,
    B2,
    GROUPS,
    OPERATORS,
    SECRET,
    UID,
    Driver,
    checkpoint,
    cluster_without_spark,
    gone,
    send,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.faults


def test_a_slot_that_was_killed_comes_back_with_everything_that_was_committed(driver: Driver) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0), driver.spec(1))

    # A batch: each subtask prepares, whoever asks again gets the same rows, and commit makes it state.
    assert send(slots[0], 0, B0, [("a", 1), ("b", 2), ("a", 3)]) == [("a", 2, 4), ("b", 1, 2)]
    assert send(slots[0], 0, B0, [("other", 9)]) == [("a", 2, 4), ("b", 1, 2)]
    driver.prepare_empty(B0, 0)
    assert {index: status.prepared for index, status in driver.statuses().values.items()} == {
        0: {UID: (B0, 0)},
        1: {UID: (B0, 0)},
    }
    counts = {index: status.counts[UID] for index, status in driver.statuses().values.items()}
    assert {index: (one.rows_in, one.rows_out) for index, one in counts.items()} == {0: (3, 2), 1: (0, 0)}, (
        "each row once, whoever asked again"
    )
    driver.commit(B0)
    figures = driver.manager.slot_figures(ForSlots([0, 1], NOTHING)).values
    assert [figures[index].operators[UID].estimated_keys for index in (0, 1)] == [2, 0]
    with pytest.raises(StaleAttemptError, match="is over"):
        send(slots[0], 0, B0, [("a", 1)])

    # A checkpoint holds it; the next batch is only in a segment.
    restore = checkpoint(driver, 1)
    assert driver.declined == []
    assert send(slots[0], 0, B1, [("a", 10)]) == [("a", 3, 14)]
    assert send(slots[1], 1, B1, [("z", 5)]) == [("z", 1, 5)]
    driver.commit(B1)

    # A third one is prepared only: it dies with the slot.
    send(slots[0], 0, B2, [("a", 1000)])
    victim, other = driver.slot_pids()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: driver.lost == {0}, what="the report of the loss")
    assert driver.manager.describe(NOTHING).slots[0].ended == f"its process {victim} was killed by SIGKILL"
    assert isinstance(driver.statuses().failures[0].error(), SlotLostError)
    with pytest.raises(SlotLostError):
        send(slots[0], 0, B2, [("a", 1)])

    mine = [state for state in restore if state.subtask == 0]
    slots |= driver.start(driver.spec(0, 2, restore=mine, restore_batch=B0, decided_batch=B1))
    assert driver.slot_pids()[1] == other
    assert driver.statuses().values[0].incarnation == 2
    wait_until(lambda: driver.lost == set(), what="the end of the loss")
    assert driver.manager.discard(ForSlots([0, 1], BatchRound(B2, 1))).failures == {}
    with pytest.raises(StaleAttemptError, match="round 0 is over"):
        send(slots[0], 0, B2, [("a", 1)])
    assert send(slots[0], 0, B2, [("a", 1), ("b", 0)], round_=1) == [("a", 4, 15), ("b", 2, 2)]

    # The next checkpoint names what is durable already, and uploads only the rest.
    driver.prepare_empty(B2, 1)
    driver.commit(B2)
    durable = {file.handle.path for state in restore for file in state.files if file.shared and file.handle}
    states = checkpoint(driver, 2)
    named = {file.handle.path for state in states for file in state.files if file.shared and file.handle}
    uploaded = {handle.path for ack in driver.acks[2].values() for handle in ack.uploaded}
    assert durable & named
    assert not durable & uploaded
    assert uploaded == named - durable


def test_a_slot_refuses_callers_without_the_secret(driver: Driver) -> None:
    driver.start_manager()
    slot = driver.start(driver.spec(0))[0]
    for address in (slot.address, driver.manager.address):
        with pytest.raises(AuthenticationError):
            driver.client(address, "guessed").status(NOTHING)
    with pytest.raises(AuthenticationError):
        send(driver.client(slot.address, "guessed"), 0, B0, [("a", 1)])
    assert send(slot, 0, B0, [("a", 1)]) == [("a", 1, 1)]


def test_slots_end_with_their_task_manager_and_the_next_one_finds_their_files(driver: Driver) -> None:
    driver.start_manager()
    assert ensure_task_manager(driver.run) == driver.identity
    slots = driver.start(driver.spec(0), driver.spec(1))
    send(slots[0], 0, B0, [("a", 1)])
    driver.prepare_empty(B0, 0)
    driver.commit(B0)
    pids = driver.slot_pids()
    first = driver.identity
    os.kill(driver.manager_pid, signal.SIGKILL)
    wait_until(lambda: all(gone(pid) for pid in pids), what="the end of the slots")
    driver.start_manager()
    assert driver.identity != first
    slots = driver.start(*(driver.spec(index, 2, decided_batch=B0) for index in range(2)))
    assert send(slots[0], 0, B1, [("a", 1)]) == [("a", 2, 2)]


@pytest.mark.parametrize("how", ["is gone", "does not answer", "does not want it any more"])
def test_without_its_driver_a_task_manager_ends_and_leaves_nothing(driver: Driver, how: str) -> None:
    driver.start_manager()
    driver.start(driver.spec(0))
    pids = [driver.manager_pid, *driver.slot_pids()]
    assert driver.local.is_dir()
    if how == "is gone":
        driver.server.close()
    elif how == "does not answer":
        driver.asleep = True
    else:
        driver.wanted = False
    wait_until(lambda: all(map(gone, pids)), what="the end of all processes")
    assert not driver.local.exists()
    assert not any(socket_folder(driver.run.run_id).glob("*/address.json"))


def test_a_task_manager_that_never_reaches_its_driver_leaves_nothing(driver: Driver) -> None:
    driver.server.close()
    impatient = msgspec.structs.replace(driver.run, heartbeat_timeout=0.5)
    with pytest.raises(StrandlineError, match="did not start"):
        ensure_task_manager(impatient)
    assert not driver.local.exists()


def test_an_upload_whose_local_files_cannot_be_read_is_declined(driver: Driver) -> None:
    """Else the coordinator would wait for it until the checkpoint times out."""
    manager = TaskManager(driver.run, "in this process")
    try:
        manager.start_slots(StartSlots([driver.spec(0)], use_copies=False))
        (slot,) = manager._slots.all()
        slot.client.freeze(Freeze(1))
        (report,) = slot.client.report(SnapshotRef(1))
        (manifest,) = [Path(path) for name, path, *_ in report.files if name.startswith("MANIFEST")]
        manifest.unlink()
        assert isinstance(manager._durability, SnapshotDurability)
        upload = partial(manager._durability._uploader.upload, 1)
        manager._background.upload([slot], 1, time.time(), upload)
        assert [(one.generation, one.checkpoint, one.slot_lost) for one in driver.declined] == [(1, 1, False)]
        assert manifest.name in driver.declined[0].reason
    finally:
        manager._slots.end_all()
        manager.server.close()


def test_a_checkpoint_file_that_is_damaged_or_missing_is_named(driver: Driver) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0))
    send(slots[0], 0, B0, [("a", 1)])
    driver.commit(B0)
    restore = checkpoint(driver, 1)
    (handle,) = [file.handle for file in restore[0].files if file.shared and file.handle]
    path = driver.durable / handle.path
    content = path.read_bytes()

    def restored(generation: int) -> dict[int, SlotClient]:
        spec = driver.spec(0, 2, generation=generation, restore=restore, restore_batch=B0, decided_batch=B0)
        return driver.start(spec)

    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(DamagedFileError, match=rf"visits, operator totals, subtask 0: \S+/{handle.path} is damaged"):
        restored(2)
    path.write_bytes(content[:-1])
    with pytest.raises(DamagedFileError, match=f"{handle.path} is damaged: {len(content) - 1} bytes"):
        restored(3)
    path.unlink()
    with pytest.raises(DamagedFileError, match=f"{handle.path} is missing"):
        restored(4)
    assert driver.slot_pids() == []

    broken = [OperatorSpec(UID, b"junk")]
    with pytest.raises(StrandlineError, match="UnpicklingError"):
        driver.start(driver.spec(0, 2, generation=5, operators=broken))

    path.write_bytes(content)
    restored(6)
    assert driver.statuses().values[0].committed == {UID: B0}


def test_a_discard_that_is_repeated_or_late_drops_nothing_of_its_round_or_a_later_one(driver: Driver) -> None:
    driver.start_manager()
    slots = driver.start(driver.spec(0), driver.spec(1))
    second = ForSlots([0, 1], BatchRound(B0, 2))
    assert driver.manager.discard(second).failures == {}
    assert send(slots[0], 0, B0, [("a", 1), ("a", 2)], round_=2) == [("a", 2, 3)]
    for late in (second, ForSlots([0, 1], BatchRound(B0, 1))):
        driver.manager.discard(late)
        assert driver.statuses().values[0].prepared == {UID: (B0, 2)}
    with pytest.raises(StaleAttemptError, match="round 1 is over"):
        send(slots[0], 0, B0, [("a", 1)], round_=1)
    driver.prepare_empty(B0, 2)
    driver.commit(B0)
    assert send(slots[0], 0, B1, [("a", 10)]) == [("a", 3, 13)]


def test_a_slot_that_is_asked_for_late_does_not_replace_a_later_one(driver: Driver) -> None:
    driver.start_manager()
    driver.start(driver.spec(0, 3), driver.spec(1))
    before = driver.slot_pids()
    for incarnation in (2, 3):
        with pytest.raises(StaleAttemptError, match=f"incarnation {incarnation} of generation 1 is not later"):
            driver.start(driver.spec(0, incarnation))
    assert driver.slot_pids() == before
    assert driver.statuses().values[0].incarnation == 3


def test_slots_of_a_generation_that_ended_while_their_start_waited_are_not_started(driver: Driver) -> None:
    manager = TaskManager(driver.run, "another")
    try:
        with ThreadPoolExecutor() as pool:
            with manager._changing:
                late = pool.submit(manager.start_slots, StartSlots([driver.spec(0)], use_copies=False))
                wait_until(lambda: manager._slots.generation == 1)
                following = pool.submit(manager.end_older_slots, OlderSlots(2))
                wait_until(lambda: manager._slots.generation == 2)
            with pytest.raises(StaleAttemptError, match="generation 2 has begun"):
                late.result()
            following.result()
        with pytest.raises(StaleAttemptError, match="generation 2 has begun"):
            manager.end_older_slots(OlderSlots(1))
        assert manager.describe(NOTHING).slots == {}
    finally:
        manager._slots.end_all()
        manager.server.close()


def test_nobody_else_can_read_what_the_processes_of_a_run_write(driver: Driver) -> None:
    before = os.umask(0o022)
    try:
        driver.start_manager()
        driver.start(driver.spec(0), driver.spec(1))
    finally:
        os.umask(before)
    own = [user_folder(driver.run.local_dir), user_folder("/tmp")]
    assert [folder.stat().st_mode & 0o777 for folder in own] == [0o700, 0o700]
    driver.prepare_empty(B0, 0)
    driver.commit(B0)
    checkpoint(driver, 1)
    written = [*driver.local.rglob("*"), *driver.logs.iterdir()]
    assert any(path.suffix == ".log" for path in written)
    assert any(path.is_file() and path.parent.name.startswith("snap-") for path in written)
    assert {path.name: oct(path.stat().st_mode) for path in written if path.stat().st_mode & 0o077} == {}


def test_a_local_folder_that_others_can_write_is_an_error_that_says_so(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    user_folder(tmp_path / "open").mkdir(mode=0o700)
    user_folder(tmp_path / "open").chmod(0o777)
    driver.run = msgspec.structs.replace(driver.run, local_dir=str(tmp_path / "open"))
    with pytest.raises(UnsafeFolderError, match="others can write there"):
        driver.start_manager()


def test_processes_may_open_as_many_files_as_the_administrator_allows(driver: Driver) -> None:
    own = psutil.Process()
    before = own.rlimit(psutil.RLIMIT_NOFILE)
    own.rlimit(psutil.RLIMIT_NOFILE, (512, before[1]))
    try:
        driver.start_manager()
        driver.start(driver.spec(0))
    finally:
        own.rlimit(psutil.RLIMIT_NOFILE, before)
    for pid in (driver.manager_pid, *driver.slot_pids()):
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE) == (before[1], before[1])


def test_no_secret_is_in_the_arguments_or_the_environment_of_a_process(driver: Driver) -> None:
    driver.run = msgspec.structs.replace(
        driver.run, storage=msgspec.structs.replace(driver.run.storage, options={"password": "hunter2"})
    )
    driver.start_manager()
    driver.start(driver.spec(0))
    for pid in (driver.manager_pid, *driver.slot_pids()):
        process = psutil.Process(pid)
        seen = " ".join([*process.cmdline(), *process.environ(), *process.environ().values()])
        assert "hunter2" not in seen
        assert SECRET not in seen


def test_an_error_with_a_long_text_arrives_whole(driver: Driver) -> None:
    def fail_at_length(_options: Any, _info: Any) -> None:
        raise ValueError("a long explanation " * 5000)

    driver.start_manager()
    spec = driver.spec(0)
    backend = msgspec.structs.replace(spec.backend, rocksdb_factory=pickle_factory(fail_at_length))
    with pytest.raises(UserCodeError) as caught:
        driver.start(msgspec.structs.replace(spec, backend=backend))
    assert str(caught.value).count("a long explanation") >= 5000


def test_a_task_manager_that_refuses_old_news_is_not_forgotten(tmp_path: Path) -> None:
    cluster = cluster_without_spark(tmp_path)
    try:
        identity = ensure_task_manager(cluster.run)
        manager = cluster._managers.get(identity)
        assert manager is not None
        # Generation 2 has begun there, and the driver still tells of an abort in generation 0.
        backend = BackendSettings("heap", 16 << 20, 1 << 20, True, "none")
        spec = SlotSpec(cluster.run, 2, 0, 1, 1, GROUPS, backend, OPERATORS, [], -1, -1)
        newer = TaskManagerClient(manager.client.address, SECRET, cluster.run.run_id, lambda: 2)
        newer.start_slots(StartSlots([spec], use_copies=False))
        cluster.checkpoint_aborted(7)
        assert identity in cluster._managers
    finally:
        cluster.close()
        shutil.rmtree(socket_folder(cluster.run.run_id), ignore_errors=True)
