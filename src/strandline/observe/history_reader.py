"""Reads the history of a job from storage: the facts of its newest run, and what happened to the runs before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from strandline.errors import HistoryError, NotFoundError
from strandline.observe.facts import Finding, JobFacts
from strandline.observe.health import findings
from strandline.observe.history import KEPT_RUNS
from strandline.observe.history_format import (
    MAX_CONTENT_BYTES,
    MAX_FILE_BYTES,
    Part,
    content_bytes,
    decode_head,
    decode_part,
)
from strandline.observe.history_merge import RunFacts, merged
from strandline.observe.history_record import KEPT_CHECKPOINTS, KEPT_SUBTASKS
from strandline.observe.registration import stored_run
from strandline.observe.run_entries import DEAD_SECONDS, FoundRun, is_on_this_host
from strandline.storage import JobPaths, Storage, StoredFile
from strandline.storage.paths import HistoryFile

MAX_READ_BYTES = 512 << 20
"""The parts that are read have no more content than this. Newer ones come first."""
MAX_FILES_BYTES = 128 << 20
"""The files of one run that are read at once have no more bytes than this."""
_ATTEMPTS = 5
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class JobHistory:
    """What the history tells about a job."""

    facts: JobFacts
    """The facts of its newest run, with the checkpoints, failures, recoveries and rescalings of earlier runs in front.
    `health` has a finding for every part of the history that cannot be read."""
    runs: tuple[FoundRun, ...]
    """Its runs, newest first."""
    notes: tuple[str, ...]
    """What cannot be read, and why."""


def read_history(storage: Storage, job: str) -> JobHistory | None:
    """The history of a job; None if it has none. Raises `StorageError` if the storage cannot be read."""
    return HistoryReader(storage, job).read()


@dataclass(slots=True)
class _Files:
    """The files of one run."""

    entry: StoredFile | None = None
    parts: list[tuple[HistoryFile, StoredFile]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A file that was read, or why it cannot be."""

    file: StoredFile
    part: Part | HistoryError
    size: int = 0
    """How many bytes its content has."""


class HistoryReader:
    """Reads the history of one job again and again. Files that it has read are not read again, but for the newest part
    of the newest run: it may have been written again within the second that an object store says, at the same size.

    A run on another host is alive as long as its heartbeat changes between two looks, whatever the clocks say.
    """

    def __init__(self, storage: Storage, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._paths = JobPaths(job)
        self._clock = clock
        self._known: dict[str, _Loaded] = {}
        """The parts that were read last, by their paths."""
        self._ended: dict[tuple[int, str], tuple[StoredFile, FoundRun]] = {}
        """The entries of runs that are over."""
        self._beats: dict[str, tuple[int, float]] = {}
        """For each run, its last heartbeat and when this process saw it first."""

    def read(self) -> JobHistory | None:
        """See `read_history`."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._read(last=attempt == _ATTEMPTS - 1)
            except NotFoundError:
                continue  # A driver has replaced parts by a whole part since they were listed.
        raise AssertionError

    def _read(self, last: bool) -> JobHistory | None:
        runs = self._listed()
        if not runs:
            return None
        before, self._known = self._known, {}
        found, facts, notes = [], [], []
        checkpoints = figures = 0
        for run, entry in self._newest(runs):
            found.append(entry)
            notes += [entry.problem] if entry.problem else []
            if checkpoints < KEPT_CHECKPOINTS:
                files = [file for _named, file in runs[run].parts]
                grows = files[:1] if entry.alive or entry is found[0] else []
                known = {path: one for path, one in before.items() if one.file not in grows}
                self._load(files, known, last, bare=figures >= KEPT_SUBTASKS)
                facts.append(self._run(entry, files, notes))
                ended = [one for events in facts[-1].events for one in events.checkpoints]
                checkpoints += len(ended)
                figures += sum(len(one.subtasks) for one in ended)
        whole = merged(facts, self._storage.url, self._paths.job)
        # The findings of a run that is alive are its own. Of one that is gone, only its facts are left.
        health = whole.health if found[0].alive else findings(msgspec.structs.replace(whole, health=()))
        health += tuple(_finding(note) for note in notes)
        return JobHistory(msgspec.structs.replace(whole, health=health), tuple(found), tuple(notes))

    def _newest(self, runs: Mapping[tuple[int, str], _Files]) -> list[tuple[tuple[int, str], FoundRun]]:
        """The newest runs with their entries. One that is alive comes first: a clock may have been set back since."""
        chosen = [
            (run, self._observed(self._entry(run, runs[run].entry))) for run in sorted(runs, reverse=True)[:KEPT_RUNS]
        ]
        return sorted(chosen, key=lambda pair: not pair[1].alive)

    def _entry(self, run: tuple[int, str], file: StoredFile | None) -> FoundRun:
        known = self._ended.get(run)
        if known is not None and file is not None and known[0] == file:
            return known[1]
        entry = stored_run(self._storage, self._paths, *run, file)
        if entry.liveness == "ended" and file is not None:
            self._ended[run] = (file, entry)
        return entry

    def _listed(self) -> Mapping[tuple[int, str], _Files]:
        runs: dict[tuple[int, str], _Files] = {}
        for file in self._storage.list(self._paths.history_runs_dir):
            part = self._paths.parse_history(file.path)
            if part is None:
                continue
            files = runs.setdefault((part.started_ms, part.run), _Files())
            if part.number is None:
                files.entry = file
            else:
                files.parts.append((part, file))
        for files in runs.values():
            # Newest first; a whole part before the part of the same number, which it stands for.
            files.parts.sort(key=lambda pair: (pair[0].number or 0, pair[0].whole), reverse=True)
        return runs

    def _load(self, files: Sequence[StoredFile], before: Mapping[str, _Loaded], last: bool, *, bare: bool) -> None:
        """Read the files that were not known before, several at a time. `bare`: without figures of subtasks."""
        for file in files:
            if file.path in before and before[file.path].file == file:
                self._known[file.path] = before[file.path]
        missing = [file for file in files if file.path not in self._known]
        while missing and sum(file.size for file in missing) > MAX_FILES_BYTES:
            # The oldest one goes. Files of this size are none that a run has written.
            left_out = missing.pop()
            where = f"{self._storage.url}/{left_out.path}"
            self._known[left_out.path] = _Loaded(
                left_out, HistoryError(f"{where}: the files of this run are too large")
            )
        if not missing:
            return
        with ThreadPoolExecutor(_AT_ONCE, "strandline-history-reader") as pool:
            contents = pool.map(lambda file: self._content(file, last), missing)
            for file, content in zip(missing, contents, strict=True):
                self._known[file.path] = self._loaded(file, content, bare)

    def _content(self, file: StoredFile, last: bool) -> bytes | HistoryError:
        where = f"{self._storage.url}/{file.path}"
        if file.size > MAX_FILE_BYTES:
            return HistoryError(f"{where}: it has {file.size:,} bytes, too many for a part of the history")
        try:
            return self._storage.read_range(file.path, 0, MAX_FILE_BYTES)
        except NotFoundError:
            if not last:
                raise
            return HistoryError(f"{where}: this part of the history was deleted while it was read; look again")

    def _loaded(self, file: StoredFile, content: bytes | HistoryError, bare: bool) -> _Loaded:
        if isinstance(content, HistoryError):
            return _Loaded(file, content)
        where = f"{self._storage.url}/{file.path}"
        room = MAX_READ_BYTES - sum(one.size for one in self._known.values())
        try:
            part = decode_part(content, where, min(room, MAX_CONTENT_BYTES))
        except HistoryError as error:
            return _Loaded(file, error)
        named = self._paths.parse_history(file.path)
        assert named is not None
        if (part.run, part.number, part.whole, part.job) != (named.run, named.number, named.whole, self._paths.job):
            return _Loaded(
                file,
                HistoryError(f"{where}: this part belongs to another place of the history, or to another job"),
            )
        return _Loaded(file, _without_subtasks(part) if bare else part, content_bytes(content))

    def _run(self, found: FoundRun, files: Iterable[StoredFile], notes: list[str]) -> RunFacts:
        """What the files of a run tell: the newest facts, and the events of all parts back to a whole one."""
        head: JobFacts | None = None
        events = []
        for file in files:
            part = self._known[file.path].part
            if isinstance(part, HistoryError):
                notes.append(str(part))
                continue
            if head is None:
                try:
                    head = decode_head(part, f"{self._storage.url}/{file.path}")
                except HistoryError as error:
                    notes.append(str(error))
            events.append(part.events)
            if part.whole:
                break
        return RunFacts(found, head, tuple(reversed(events)))

    def _observed(self, found: FoundRun) -> FoundRun:
        entry = found.entry
        if found.liveness == "ended" or found.problem or is_on_this_host(entry):
            return found
        now = self._clock()
        beat, since = self._beats.get(entry.run, (None, now))
        changed = beat is not None and beat != entry.beat_ms
        if beat != entry.beat_ms:
            since = now
        self._beats[entry.run] = (entry.beat_ms, since)
        if changed:
            return replace(found, liveness="alive")
        return replace(found, liveness="dead") if now - since > DEAD_SECONDS else found


def _without_subtasks(part: Part) -> Part:
    bare = tuple(replace(one, subtasks=()) for one in part.events.checkpoints)
    return msgspec.structs.replace(part, events=msgspec.structs.replace(part.events, checkpoints=bare))


def _finding(note: str) -> Finding:
    return Finding(
        rule="history-unreadable",
        severity="info",
        title="A part of the job's history cannot be read",
        text=note,
        remedy="Nothing, as far as the job is concerned: it does not need its history. What can be read is shown.",
    )
