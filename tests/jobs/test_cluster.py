"""On several executors: slots are spread, hosts are lost, executors come; the query goes on, nobody else is hurt."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.cluster_driver import start_spark_process
from tests.waiting import wait_until

pytestmark = pytest.mark.spark


def drive(root: Path, master: str, parallelism: int, losses: int, tls: str = "off") -> dict[str, Any]:
    with (root / "driver.log").open("wb") as log:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.jobs.cluster_driver",
                str(root / "job"),
                master,
                str(parallelism),
                str(losses),
                tls,
            ],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=120 + 40 * losses,
            check=False,
        )
    assert done.returncode == 0, (root / "driver.log").read_text()[-4000:]
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def check(facts: dict[str, Any], parallelism: int, losses: int) -> None:
    assert facts["equal"]
    assert [len(slots) for slots in facts["slots"]] == [parallelism // 2] * 2, "half of them on each executor"
    assert facts["same_query"], "the query was not replaced"
    assert facts["restarts"] == 0
    assert len(facts["lost"]) == losses
    assert facts["kinds"] == ["slots"]
    assert facts["recovered"] == [sorted(slots) for slots in facts["lost"]], "nobody else's state was touched"
    assert facts["slots_of_one"] == [[0]]
    assert facts["left_behind"] == [], "a rescale to fewer ends the slots of the executor that gets none"


def test_lost_hosts_cost_only_their_own_subtasks_also_with_tls(tmp_path: Path) -> None:
    check(drive(tmp_path, "local-cluster[2,1,1024]", 2, 1, tls="auto"), 2, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_lost_hosts_in_a_row(tmp_path: Path) -> None:
    check(drive(tmp_path, "local-cluster[2,2,1024]", 4, 10), 4, 10)


@pytest.mark.slow
def test_a_standalone_cluster_that_grows(tmp_path: Path) -> None:
    with standalone(tmp_path / "cluster") as master:
        facts = drive(tmp_path, master, 4, 2)
    assert facts["slots_at_start"] == [[0, 1, 2, 3]]
    check(facts, 4, 2)


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and one worker on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    here = ("--host", "127.0.0.1", "--webui-port", "0")
    processes = [start_spark_process(folder, "master.Master", *here, "--port", str(port))]
    try:
        wait_until(lambda: _listens(port), 60, "the master")
        processes.append(start_spark_process(folder, "worker.Worker", *here, url))
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
