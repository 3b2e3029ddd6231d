"""Logs of real task managers and slots: read while they run, when one has died, and after the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strandline.errors import StrandlineError
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.runtime.driver.opening import pickled
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.coordinator_calls import Heartbeat
from strandline.runtime.protocol.logs import KEPT_RUNS, ReadLog
from strandline.runtime.protocol.messages import OperatorSpec
from strandline.runtime.protocol.taskmanager_calls import SpareSlots, TaskManagerClient
from strandline.runtime.task.launcher import ensure_task_manager
from strandline.runtime.taskmanager.logs import HostLogs
from strandline.state.coding.ddl import parse_schema
from tests.runtime.processes import B0, JOB, SECRET, UID, Driver, cluster_without_spark, gone, send
from tests.waiting import wait_until

pytestmark = pytest.mark.faults


def noisy() -> list[OperatorSpec]:
    class Noisy(KeyedProcessor):
        def open(self, context: Any) -> None:
            self.total = context.value_state("total", "n long")

        def process(self, key: Any, rows: Any, context: Any) -> Any:
            import logging
            import sys

            logging.getLogger("app").warning("counting %s", key[0])
            print(f"printed {key[0]} the-secret-of-the-run", file=sys.stderr)
            yield (*key, 1)

    operator = ProcessOperator(
        UID, Noisy(), ["user"], parse_schema("user string, x long"), parse_schema("user string, n long")
    )
    return [OperatorSpec(UID, pickled(operator))]


def test_logs_are_read_through_the_task_manager_and_outlive_slots_and_run(driver: Driver) -> None:
    driver.run = msgspec.structs.replace(driver.run, log_format="json")
    driver.start_manager()
    slots = driver.start(driver.spec(0, operators=noisy()))
    send(slots[0], 0, B0, [("ada", 1)])
    names = driver.manager.log_names(NOTHING)
    assert [name for name in names if name.startswith("slot-")] == ["slot-0"]
    assert len([name for name in names if name.startswith("task-manager-")]) == 1

    end = driver.manager.read_log(ReadLog("slot-0", 100_000))
    assert not end.cut
    assert "printed ada" in end.text
    assert SECRET not in end.text, "also in what user code prints"
    lines = [json.loads(line) for line in end.text.splitlines() if line.startswith("{")]
    (counting,) = [line for line in lines if line["logger"] == "app"]
    expected = {"job": JOB, "run": driver.run.run_id, "step": UID, "subtask": 0, "message": "counting ada"}
    assert {name: counting[name] for name in expected} == expected
    with pytest.raises(StrandlineError, match="no log of slot-5"):
        driver.manager.read_log(ReadLog("slot-5", 100))
    with pytest.raises(StrandlineError, match="there is no process"):
        driver.manager.read_log(ReadLog("../../etc/passwd", 100))

    # The slot dies, and a process that waited takes its place: the log goes on.
    (pid,) = driver.slot_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pid), what="the end of the slot")
    driver.manager.start_spares(SpareSlots(1))
    driver.start(driver.spec(0, 2, operators=noisy()))
    end = driver.manager.read_log(ReadLog("slot-0", 100_000))
    assert end.text.count("begins: generation 1, incarnation") == 2
    assert "printed ada" in end.text
    assert driver.manager.log_ends(NOTHING)["slot-0"].text == end.text

    driver.manager.shutdown(NOTHING)
    wait_until(lambda: gone(driver.manager_pid), what="the end of the task manager")
    wait_until(lambda: not driver.local.exists(), what="the end of the run's local files")
    assert "printed ada" in (driver.logs / "slot-0.log").read_text()


def test_logs_are_in_the_jobs_history_when_the_driver_has_died(driver: Driver) -> None:
    driver.start_manager()
    driver.start(driver.spec(0))
    driver.server.close()  # nobody answers the heartbeats
    wait_until(lambda: gone(driver.manager_pid), what="the end of the task manager")
    kept = driver.durable / JOB / "history" / "logs" / driver.run.run_id
    assert "slot 0 of job visits begins" in (kept / "slot-0.log").read_text()
    assert any("the driver has been silent" in path.read_text() for path in kept.glob("task-manager-*.log"))


def test_the_driver_reads_logs_and_keeps_their_ends(tmp_path: Path) -> None:
    cluster = cluster_without_spark(tmp_path)
    try:
        ensure_task_manager(cluster.run)
        first, manager = cluster.logs.processes()
        assert first == "driver"
        assert manager.startswith("task-manager-")
        cluster.logs.read("driver", 1000)
        assert cluster.logs.read(manager, 1000).process == manager
        with pytest.raises(StrandlineError, match="no log of 'slot-7'; there are those of: driver, task-manager-"):
            cluster.logs.read("slot-7", 1000)
    finally:
        cluster.close()
    assert cluster.logs.processes() == (first, manager)
    assert cluster.logs.read(manager, 1000).process == manager
    cluster.logs.keep_durably()
    kept = tmp_path / "durable" / JOB / "history" / "logs" / cluster.run.run_id
    assert sorted(path.name for path in kept.iterdir()) == ["driver.log", f"{manager}.log"]


def test_a_heartbeat_does_not_end_a_task_manager_before_it_has_given_its_logs(tmp_path: Path) -> None:
    cluster = cluster_without_spark(tmp_path)
    wanted: list[bool] = []
    collect = cluster.logs.collect

    def collect_after_a_heartbeat(client: TaskManagerClient) -> None:
        wanted.append(cluster.heartbeat(Heartbeat(identity, [], None)).wanted)
        collect(client)

    cluster.logs.collect = collect_after_a_heartbeat  # type: ignore[method-assign]  # between stop and shutdown
    try:
        identity = ensure_task_manager(cluster.run)
    finally:
        cluster.close()
    assert wanted == [True]
    assert not cluster.heartbeat(Heartbeat(identity, [], None)).wanted
    assert len(cluster.logs.processes()) == 2


def test_the_logs_of_the_newest_runs_stay_on_a_host(driver: Driver) -> None:
    runs = [msgspec.structs.replace(driver.run, run_id=f"{number:032x}") for number in range(KEPT_RUNS + 3)]
    for age, run in enumerate(reversed(runs)):
        log = HostLogs(run).folder / "slot-0.log"
        log.write_text("x\n")
        os.utime(log, (1_700_000_000 - age, 1_700_000_000 - age))
    newest = HostLogs(runs[-1])
    newest.delete_old()
    assert sorted(path.name for path in newest.folder.parent.iterdir()) == [run.run_id for run in runs[3:]]
