"""What happens to a job in tests: facts event by event, and storages that hold their history."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from strandline.checkpoint.stats import CheckpointStats, SubtaskStats
from strandline.errors import NotFoundError, StorageError
from strandline.observe.facts import FailureFacts, JobFacts, Sample, StatusChange
from strandline.observe.history import RunHistory
from strandline.observe.history_reader import read_history
from strandline.observe.run_entries import RunEntry, encode_entry, own_entry
from strandline.runtime.driver.recoveries import Recovery, Rescaling
from strandline.runtime.driver.status import RunStatus
from strandline.storage import JobPaths, Storage, StoredFile

JOB = "visits"
PATHS = JobPaths(JOB)
START = 1_760_000_000_000


def checkpoint(number: int, status: str = "completed", subtasks: int = 2) -> CheckpointStats:
    figures = tuple(
        SubtaskStats("count", n, START + number, 5.0, 1.0, 1.0, 3.0, 0.5, 100, 1000, 2) for n in range(subtasks)
    )
    return CheckpointStats(
        id=number,
        status="failed" if status == "failed" else "in_progress" if status == "in_progress" else "completed",
        kind="checkpoint",
        batch_id=number * 3,
        trigger_time=START / 1000 + number,
        end_to_end_ms=12.5,
        sync_ms=1.0,
        async_ms=3.0,
        start_delay_ms=1.0,
        alignment_ms=0.5,
        barrier_to_completed_ms=9.0,
        checkpointed_bytes=100 * subtasks,
        full_bytes=1000 * subtasks,
        path=f"/checkpoints/visits/chk-{number}",
        subtasks=figures,
        failure="disk full" if status == "failed" else None,
        acknowledged=subtasks,
        expected=subtasks,
    )


def first_facts(run: str = "run1", start: int = START) -> JobFacts:
    return JobFacts(
        id="x", name=JOB, run=run, status=RunStatus.RUNNING, taken_ms=start, start_ms=start, checkpoint_dir="/elsewhere"
    )


def after(facts: JobFacts, event: str, kept: int = 50) -> JobFacts:
    """The facts after one more event. They hold the newest `kept` checkpoints, as those of a running job do."""
    seen = facts.checkpoints
    now = facts.taken_ms + 1000
    number = max((one.id for one in seen.history), default=0) + 1
    facts = msgspec.structs.replace(
        facts, taken_ms=now, samples=(*facts.samples, Sample(now, rows_per_second=float(now % 1000)))[-600:]
    )
    if event in ("completed", "failed", "in_progress"):
        counts = replace(seen.counts, total=seen.counts.total + 1, **{event: getattr(seen.counts, event) + 1})
        one = checkpoint(number, event)
        last = {"last_completed": one} if event == "completed" else {"last_failed": one} if event == "failed" else {}
        changed = msgspec.structs.replace(seen, counts=counts, history=(*seen.history, one)[-kept:], **last)
        return msgspec.structs.replace(facts, checkpoints=changed)
    if event == "failure":
        return msgspec.structs.replace(
            facts, failures=(*facts.failures, FailureFacts(now, "slots", f"at {now}", "x"))[-200:]
        )
    if event == "recovery":
        one_more = Recovery(now / 1000, "slots", (0,), 5, 10.0, 1, 2, "slot 0 was killed")
        return msgspec.structs.replace(facts, recoveries=(*facts.recoveries, one_more))
    if event == "rescale":
        rescaling = Rescaling(now / 1000, 1, 2, 5, 10.0, 5.0, 1.0, 2.0, 64, 0, 0)
        return msgspec.structs.replace(facts, rescalings=(*facts.rescalings, rescaling))
    if event == "status":
        return msgspec.structs.replace(facts, statuses=(*facts.statuses, StatusChange(now, RunStatus.RESTARTING)))
    return facts


def ended_of(facts: JobFacts) -> list[tuple[int, str]]:
    return [(one.id, one.status) for one in facts.checkpoints.history if one.status != "in_progress"]


class Crashed(Exception):
    """The process died here."""


class Remembered(Storage):
    """A storage in memory, whose caller dies at a chosen call: before the call is carried out, or after."""

    def __init__(self) -> None:
        self.url = "/memory"
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.dies_at: int | None = None
        self.fails_at: set[int] = set()
        self.done_first = False

    def _call(self, name: str, act: object = None) -> None:
        number = len(self.calls)
        self.calls.append(name)
        due = number == self.dies_at or number in self.fails_at
        if callable(act) and (not due or self.done_first):
            act()
        if number == self.dies_at:
            raise Crashed
        if number in self.fails_at:
            raise StorageError("on purpose")

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise NotFoundError(path)
        return self.files[path]

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self.read(path)[offset : offset + length]

    def write(self, path: str, data: bytes) -> None:
        self._call("write", lambda: self.files.__setitem__(path, data))

    def create(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def upload(self, source: Path, path: str) -> None:
        raise NotImplementedError

    def download(self, path: str, target: Path) -> None:
        raise NotImplementedError

    def rename(self, source: str, target: str) -> None:
        raise NotImplementedError

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:  # each on its own, so that a crash can come in between
            self._call("delete", lambda path=path: self.files.pop(path, None))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        found = sorted(path for path in self.files if path.startswith(f"{prefix}/"))
        return iter([StoredFile(path, len(self.files[path]), float(zlib.crc32(self.files[path]))) for path in found])

    def exists(self, path: str) -> bool:
        return path in self.files


def entry_of(facts: JobFacts, **changes: object) -> RunEntry:
    return msgspec.structs.replace(own_entry(facts), **changes)


def stored(storage: Storage, facts: JobFacts, entry: RunEntry | None = None) -> None:
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write(whole=True)
    if entry is not None:
        storage.write(PATHS.run_entry(entry.started_ms, entry.run), encode_entry(entry))


def facts_in(storage: Storage) -> JobFacts:
    found = read_history(storage, JOB)
    assert found is not None
    return found.facts


def many(events: str, facts: JobFacts | None = None) -> JobFacts:
    words = {"c": "completed", "f": "failed", "p": "in_progress", "F": "failure", "R": "recovery", "S": "rescale"}
    facts = facts or first_facts()
    for event in events:
        facts = after(facts, words[event])
    return facts
