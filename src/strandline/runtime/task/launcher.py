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
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import psutil

from strandline.decoding import json_decoder
from strandline.errors import StrandlineError
from strandline.runtime.liveness.processes import is_working, kill_task_manager, started_at
from strandline.runtime.protocol.address import host_identity
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.coordinator_calls import Registration
from strandline.runtime.protocol.folders import run_folder, socket_folder
from strandline.runtime.protocol.logs import log_file, log_folder, open_log, task_manager_log
from strandline.runtime.protocol.messages import RunInfo
from strandline.runtime.protocol.taskmanager_calls import TaskManagerClient
from strandline.runtime.protocol.user_folder import make_private

START_TIMEOUT = 60.0


def executor_process() -> psutil.Process:
    """This executor: its JVM is the nearest Java process above the Python worker."""
    parents = psutil.Process().parents()
    return next((parent for parent in parents if "java" in parent.name()), parents[0])


def ensure_task_manager(run: RunInfo, given_up: Collection[str] = ()) -> str:
    """The identity of this executor's task manager, which runs and has registered when the call returns.

    A task manager that does not answer is killed, with its slots, and replaced. So is one that is in `given_up`.
    """
    executor = executor_process()
    name = f"{executor.pid}-{started_at(executor.pid)}"
    folder = make_private(socket_folder(run.run_id) / name)
    make_private(run_folder(run.local_dir, run.job, run.run_id))  # an unsafe folder is an error here, not in a log
    address_file = folder / "address.json"
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _registered(address_file)
        if known is not None:
            if known.identity not in given_up and _answers(known, run):
                return known.identity
            kill_task_manager(known.pid, known.started)
        address_file.unlink(missing_ok=True)
        identity = f"{host_identity()}/{name}#{time.time_ns()}"
        logs = make_private(log_folder(run.local_dir, run.job, run.run_id))
        _start(run, identity, executor.pid, address_file, log_file(logs, task_manager_log(host_identity(), name)))
        return identity


def _registered(address_file: Path) -> Registration | None:
    try:
        return json_decoder(Registration).decode(address_file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def _answers(known: Registration, run: RunInfo) -> bool:
    """Whether a task manager answers before it counts as lost."""
    client = TaskManagerClient(known.address, run.secret, run.run_id, lambda: 0, tls=run.tls)
    deadline = time.monotonic() + run.heartbeat_timeout
    try:
        while True:
            if not is_working(known.pid, known.started):
                return False
            try:
                return client.describe(NOTHING).identity == known.identity
            except StrandlineError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.1)
    finally:
        client.close()


def _python_path() -> list[str]:
    """The module path of the new process: that of this process, but with an installed PySpark before Spark's archives.

    Python caches no bytecode of modules in an archive: each process would compile PySpark again and take twice as long
    to start. It would also read the table of contents of a jar with thousands of classes.
    """
    return sorted(filter(None, sys.path), key=_is_of_spark)


def _is_of_spark(entry: str) -> bool:
    """Whether Spark itself has put this archive on the path."""
    name = Path(entry).name
    return name == "pyspark.zip" or fnmatch(name, "py4j-*-src.zip") or fnmatch(name, "spark-core_*.jar")


def _start(run: RunInfo, identity: str, executor: int, address_file: Path, log_path: Path) -> None:
    environment = {
        **os.environ,
        "STRANDLINE_ADDRESS_FILE": str(address_file),
        "STRANDLINE_IDENTITY": identity,
        "STRANDLINE_EXECUTOR": str(executor),
        "PYTHONPATH": os.pathsep.join(_python_path()),
    }
    with os.fdopen(open_log(log_path), "ab") as log_end:
        process = subprocess.Popen(
            [sys.executable, "-m", "strandline.runtime.taskmanager.process"],
            stdin=subprocess.PIPE,  # for the secrets: arguments and environment can be seen from outside
            stdout=subprocess.DEVNULL,
            stderr=log_end,
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
                tail = log_path.read_text(errors="replace")[-2000:] if log_path.exists() else ""
                raise StrandlineError(f"the task manager of {identity} did not start; its log ends:\n{tail}")
            time.sleep(0.01)
