"""The entry by which a run can be found, and whether the run behind it is still there."""

from __future__ import annotations

import getpass
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from strandline.decoding import json_decoder
from strandline.observe.facts import JobFacts
from strandline.redaction import shown
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.liveness.processes import is_there, started_at
from strandline.runtime.protocol.address import host_identity

FORMAT_VERSION = 1
DEAD_SECONDS = 45.0
"""A run on another host that did not renew its entry for so long is dead."""
MAX_ENTRY_BYTES = 64 << 10

Liveness = Literal["alive", "dead", "ended"]


class RunEntry(msgspec.Struct, frozen=True):
    """What a run tells about itself, so that others find it.

    Attributes:
        job: The name of the job.
        job_id: See `facts.job_id`.
        run: The id of the run.
        user: The user that it belongs to.
        host: The name of its host.
        host_id: The same for two processes that see each other's process ids.
        pid: Its process id.
        pid_started: When the process began, in ticks since its host did: ids are used again.
        started_ms: When the run began, in milliseconds since the epoch.
        rest_url: Where its REST server is; empty if it has none.
        checkpoint_dir: The absolute path or URL of its checkpoints.
        status: Where the run stands.
        beat_ms: When the entry was renewed last, by a clock that nobody sets back.
        version: The version of the format.
    """

    job: str
    job_id: str
    run: str
    user: str
    host: str
    host_id: str
    pid: int
    pid_started: int
    started_ms: int
    checkpoint_dir: str
    status: RunStatus
    rest_url: str = ""
    beat_ms: int = 0
    version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class FoundRun:
    """An entry that was found, and whether its run is still there.

    The token of `token_file` may only be sent to the `rest_url` of this entry, never to one that came from storage.
    """

    entry: RunEntry
    liveness: Liveness
    source: str
    """The path of the entry."""
    token_file: Path | None = None
    """The file with the token that steers the job; None for an entry in storage, and for a run that is over."""
    problem: str = ""
    """Why the entry cannot be read. Only its run and its start are known then."""

    @property
    def alive(self) -> bool:
        """Whether the run is still there."""
        return self.liveness == "alive"


def own_entry(facts: JobFacts, url: str = "") -> RunEntry:
    """The entry of a run of this process."""
    return RunEntry(
        job=facts.name,
        job_id=facts.id,
        run=facts.run,
        user=user_name(),
        host=socket.gethostname(),
        host_id=_host_id(),
        pid=os.getpid(),
        pid_started=started_at(os.getpid()),
        started_ms=facts.start_ms,
        checkpoint_dir=facts.checkpoint_dir,
        status=facts.status,
        rest_url=url,
    )


def encode_entry(entry: RunEntry) -> bytes:
    """The content of an entry's file."""
    return msgspec.json.format(msgspec.json.encode(entry), indent=1)


def user_name() -> str:
    """The name of the user of this process; its number if it has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _host_id() -> str:
    """The host, and the space of its process ids: two containers of one host may share all else."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{host_identity()}:{space}"


def decode_entry(data: bytes, source: str, run: str, started_ms: int, modified: float | None = None) -> FoundRun:
    """The run whose entry has the content `data`; `run` and `started_ms` are what its path tells, if it is damaged."""
    try:
        version = json_decoder(_Version).decode(data).version
        if version > FORMAT_VERSION:
            return unreadable(
                source, run, started_ms, f"a later release wrote it, in format version {version}; use that release"
            )
        entry = json_decoder(RunEntry).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return unreadable(source, run, started_ms, f"it is damaged: {error}")
    entry = msgspec.structs.replace(
        entry, user=shown(entry.user), host=shown(entry.host), rest_url=shown(entry.rest_url)
    )
    return FoundRun(entry, liveness(entry, time.time(), modified), source)


class _Version(msgspec.Struct):
    version: int = FORMAT_VERSION


def unreadable(source: str, run: str, started_ms: int, why: str, job: str = "") -> FoundRun:
    """A run of which no more is known than what the path of its entry tells."""
    entry = RunEntry(job, "", run, "", "", "", 0, 0, started_ms, "", RunStatus.STARTING)
    return FoundRun(entry, "dead", source, None, f"the entry {source} cannot be read: {why}")


def liveness(entry: RunEntry, now: float, modified: float | None = None) -> Liveness:
    """Whether the process of a run is still there.

    On the same host the process itself tells. On others the last heartbeat does, by the clock of the run or by that of
    the storage (`modified`), whichever is later. Clocks differ, so a heartbeat in the future is as good as a fresh one.
    """
    if entry.status.ended:
        return "ended"
    if is_on_this_host(entry):
        return "alive" if entry.pid > 0 and is_there(entry.pid, entry.pid_started) else "dead"
    beat = max(entry.beat_ms / 1000, modified or 0.0)
    return "alive" if now - beat <= DEAD_SECONDS else "dead"


def is_on_this_host(entry: RunEntry) -> bool:
    """Whether this process can see the process of the run."""
    return entry.host_id == _host_id()
