"""Starts the task manager of an executor from inside a Spark task. A lock file keeps it one per executor.

The process is started, never forked, because gRPC does not survive a fork. It has a session of its own and no inherited
pipes, so that it outlives the Spark task and the Python worker.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from strandline.errors import StrandlineError
from strandline.runtime.protocol.address import Address, host_identity
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.folders import socket_folder
from strandline.runtime.protocol.messages import RunInfo
from strandline.runtime.protocol.taskmanager_calls import TaskManagerClient
from strandline.runtime.protocol.user_folder import make_private

START_TIMEOUT = 60.0


def executor_identity() -> str:
    """Names this executor: its JVM is the nearest Java process above the Python worker."""
    for parent in psutil.Process().parents():
        if "java" in parent.name():
            return f"{host_identity()}/{parent.pid}-{parent.create_time():.2f}"
    return f"{host_identity()}/{os.getppid()}"


def ensure_task_manager(run: RunInfo) -> str:
    """The identity of this executor's task manager, which runs and has registered when the call returns."""
    executor = executor_identity()
    folder = make_private(socket_folder(run.run_id) / executor.rsplit("/", 1)[1])
    address_file = folder / "address.json"
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _answering(address_file, run)
        if known is not None:
            return known
        address_file.unlink(missing_ok=True)
        identity = f"{executor}#{time.time_ns()}"
        _start(run, identity, address_file, folder / "taskmanager.log")
        return identity


def _answering(address_file: Path, run: RunInfo) -> str | None:
    try:
        address = msgspec.json.decode(address_file.read_bytes(), type=Address)
        client = TaskManagerClient(address, run.secret, run.run_id, lambda: 0)
        try:
            return client.describe(NOTHING).identity
        finally:
            client.close()
    except (OSError, msgspec.DecodeError, StrandlineError):
        return None


def _python_path() -> list[str]:
    """The module path of the new process: that of this process, but with an installed PySpark before Spark's archive.

    Python caches no bytecode of modules in an archive: each process would compile PySpark again and take twice as long
    to start.
    """
    return sorted(filter(None, sys.path), key=lambda entry: Path(entry).name == "pyspark.zip")


def _start(run: RunInfo, identity: str, address_file: Path, log_path: Path) -> None:
    environment = {
        **os.environ,
        "STRANDLINE_ADDRESS_FILE": str(address_file),
        "STRANDLINE_IDENTITY": identity,
        "PYTHONPATH": os.pathsep.join(_python_path()),
    }
    with log_path.open("ab") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "strandline.runtime.taskmanager.process"],
            stdin=subprocess.PIPE,  # for the secrets: arguments and environment can be seen from outside
            stdout=subprocess.DEVNULL,
            stderr=log_file,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
    assert process.stdin is not None
    with suppress(OSError), process.stdin as description:  # a process that has died is noticed below
        description.write(msgspec.json.encode(run))
    threading.Thread(target=process.wait, daemon=True).start()  # reaps the process when it ends
    deadline = time.monotonic() + START_TIMEOUT
    while not address_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            tail = log_path.read_text(errors="replace")[-2000:]
            raise StrandlineError(f"the task manager of {identity} did not start; its log ends:\n{tail}")
        time.sleep(0.01)
