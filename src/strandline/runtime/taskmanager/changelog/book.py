"""The book of a task manager's changelog: what is durable of each subtask's state, and what nobody needs any more.

The state of a subtask is a materialization and the segments after it. Both are uploaded independently of checkpoints; a
checkpoint only names them. Files that are not needed any more are not deleted here: the next checkpoint reports them,
and the coordinator deletes those that no retained checkpoint refers to. Pure bookkeeping: no I/O, no threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState, last_batch, paths_of
from strandline.errors import CheckpointError

Subtask = tuple[str, int]
"""Operator uid and subtask index."""


@dataclass(slots=True, eq=False)
class SubtaskLog:
    """What is durable of one subtask's state."""

    base: tuple[StateFile, ...] | None
    """The newest materialization; empty for a state that began empty; None if there is nothing to build on yet."""
    segments: list[StateFile]
    """What changed since, in the order of batches."""
    base_batch: int = -1
    """The batch of a materialization that was made here: no earlier segment may come after it."""

    @property
    def files(self) -> tuple[StateFile, ...]:
        return (*(self.base or ()), *self.segments)

    @property
    def base_bytes(self) -> int:
        return sum(file.size for file in self.base or ())

    @property
    def log_bytes(self) -> int:
        return sum(file.size for file in self.segments)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a checkpoint names of one subtask."""

    subtask: Subtask
    files: tuple[StateFile, ...]
    full_bytes: int
    new_bytes: int
    """What of it the last acknowledged checkpoint did not name."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a checkpoint names, and what it reports as not needed any more."""

    entries: tuple[Entry, ...]
    beforehand: tuple[str, ...]
    """Paths that no completed checkpoint is known to refer to."""
    obsolete: tuple[FileHandle, ...]


@dataclass(slots=True)
class _Asked:
    """A checkpoint since its barrier."""

    logs: dict[Subtask, SubtaskLog] = field(default_factory=dict)
    files: dict[Subtask, tuple[StateFile, ...]] = field(default_factory=dict)
    """What it names; of a subtask without a base nothing, before it is acknowledged."""
    obsolete: frozenset[str] = frozenset()
    """What it reports."""

    def paths(self) -> set[str]:
        return {path for files in self.files.values() for path in paths_of(files)}


@dataclass(slots=True)
class LogBook:
    """One task manager's; the caller sees to it that one thread at a time uses it."""

    _logs: dict[Subtask, SubtaskLog] = field(default_factory=dict)
    _users: Counter[str] = field(default_factory=Counter)
    """How many files of the logs, and of uploads that are not decided yet, lie at a path."""
    _handles: dict[str, FileHandle] = field(default_factory=dict)
    _obsolete: dict[str, FileHandle] = field(default_factory=dict)
    _spared: set[str] = field(default_factory=set)
    """Paths that somebody may refer to without our knowing: what was restored, what older checkpoints named."""
    _confirmed: set[str] = field(default_factory=set)
    """Paths that the newest completed checkpoint refers to."""
    _completed: int = -1
    """The newest completed checkpoint."""
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _named: dict[Subtask, frozenset[str]] = field(default_factory=dict)
    """The files of each subtask that the last acknowledged checkpoint named."""

    # --- subtasks --------------------------------------------------------------------------------

    def open(
        self,
        subtask: Subtask,
        base: Iterable[StateFile] | None,
        segments: Iterable[StateFile],
        restored: Iterable[StateFile] = (),
    ) -> SubtaskLog:
        """Begin the log of a subtask.

        `restored` is what the job's newest completed checkpoint names of it, whether the log builds on that or not.
        """
        before = self._logs.get(subtask)
        log = SubtaskLog(None if base is None else tuple(base), sorted(segments, key=_order))
        self._use(log.files)
        self._logs[subtask] = log
        self._confirmed.update(paths_of(restored))
        self._spared.update(paths_of(restored), paths_of(log.files))
        if before is not None:
            self._release(before.files)
        return log

    def close(self, subtask: Subtask) -> None:
        """The subtask is not here any more."""
        log = self._logs.pop(subtask, None)
        self._named.pop(subtask, None)
        if log is not None:
            self._release(log.files)

    def __contains__(self, subtask: Subtask) -> bool:
        return subtask in self._logs

    def log(self, subtask: Subtask) -> SubtaskLog:
        return self._logs[subtask]

    def subtasks(self) -> list[Subtask]:
        """The subtasks with a log, in order."""
        return sorted(self._logs)

    # --- what becomes durable ------------------------------------------------------------------------

    def hold(self, file: StateFile) -> None:
        """A segment is uploaded whose batch is not decided yet: its file must stay."""
        self._use([file])

    def void(self, file: StateFile) -> None:
        """A segment that was held belongs to an attempt that never commits."""
        self._release([file])

    def append(self, subtask: Subtask, file: StateFile) -> None:
        """A held segment's batch is committed. Segments may come out of order where an upload had to be repeated."""
        log = self._logs.get(subtask)
        if log is None or last_batch(file) <= log.base_batch:
            self._release([file])
            return
        log.segments.append(file)
        log.segments.sort(key=_order)

    def materialized(self, states: Sequence[tuple[SubtaskLog, SubtaskState, int]]) -> bool:
        """The states of a slot's logs are durable, each at its batch: segments up to that are not needed any more.

        False, and nothing changes, if a log was begun anew since the state was frozen, or has a newer base by now.
        """
        if any(
            self._logs.get((state.operator, state.subtask)) is not log or batch < log.base_batch
            for log, state, batch in states
        ):
            return False
        for log, state, batch in states:
            self._use(state.files)
            gone = [*(log.base or ()), *(one for one in log.segments if last_batch(one) <= batch)]
            log.base = state.files
            log.base_batch = batch
            log.segments = [one for one in log.segments if last_batch(one) > batch]
            self._release(gone)
        return True

    def merged(self, subtask: Subtask, log: SubtaskLog, replaced: Sequence[StateFile], by: StateFile) -> bool:
        """One uploaded segment stands for several that follow each other. False if they are not needed any more."""
        self._use([by])
        if self._logs.get(subtask) is not log or any(one not in log.segments for one in replaced):
            self._release([by])
            return False
        at = log.segments.index(replaced[0])
        log.segments[at : at + len(replaced)] = [by]
        self._release(replaced)
        return True

    # --- checkpoints -----------------------------------------------------------------------------

    def without_base(self) -> list[Subtask]:
        """The subtasks that must be materialized before a checkpoint can name their state."""
        return [subtask for subtask, log in sorted(self._logs.items()) if log.base is None]

    def barrier(self, checkpoint_id: int) -> None:
        """A checkpoint comes after everything committed so far: it names, and reports, what there is to name now."""
        self._asked[checkpoint_id] = _Asked(
            logs=dict(self._logs),
            files={subtask: () if log.base is None else log.files for subtask, log in self._logs.items()},
            obsolete=frozenset(self._obsolete),
        )

    def acknowledge(
        self, checkpoint_id: int, late: Mapping[Subtask, Sequence[StateFile]] | None = None
    ) -> Acknowledged:
        """What a checkpoint names, as of its barrier; `late` has what became durable of it only since.

        Raises `CheckpointError` if it was given up meanwhile.
        """
        asked = self._asked.get(checkpoint_id)
        if asked is None:
            raise CheckpointError(f"checkpoint {checkpoint_id} was given up before all of its state was durable")
        for subtask, files in (late or {}).items():
            asked.files[subtask] = tuple(sorted((*asked.files[subtask], *files), key=_order))
        asked.obsolete = frozenset(path for path in asked.obsolete if path in self._obsolete)
        return Acknowledged(
            entries=tuple(self._entry(subtask, files) for subtask, files in sorted(asked.files.items())),
            beforehand=tuple(asked.paths() - self._confirmed),
            obsolete=tuple(self._obsolete[path] for path in sorted(asked.obsolete)),
        )

    def _entry(self, subtask: Subtask, files: tuple[StateFile, ...]) -> Entry:
        before = self._named.get(subtask, frozenset())
        self._named[subtask] = frozenset(file.identity for file in files)
        new = sum(file.size for file in files if file.identity not in before)
        return Entry(subtask, files, sum(file.size for file in files), new)

    def completed(self, checkpoint_id: int) -> list[Subtask]:
        """The checkpoint is complete: it keeps its files, and what it reported is dealt with. May be said again.

        Returns the subtasks that it does not name as this book has them: another task manager acknowledged them. Their
        files may be gone by now, so that they have to be materialized anew.
        """
        if checkpoint_id <= self._completed:
            return []
        self._completed = checkpoint_id
        asked = self._asked.pop(checkpoint_id, _Asked())
        for older in [number for number in self._asked if number < checkpoint_id]:
            self._spared |= self._asked.pop(older).paths()  # completed, perhaps, and we did not hear of it
        self._confirmed = asked.paths()
        for path in asked.obsolete:
            self._obsolete.pop(path, None)
        lost = [subtask for subtask, log in sorted(self._logs.items()) if asked.logs.get(subtask) is not log]
        for subtask in lost:
            self.open(subtask, None, ())
        return lost

    def aborted(self, checkpoint_id: int) -> None:
        """The checkpoint is given up; its files stay part of the log."""
        self._asked.pop(checkpoint_id, None)

    def identities(self) -> set[str]:
        """All files of the logs, and of checkpoints that may still complete."""
        named = (files for asked in self._asked.values() for files in asked.files.values())
        return {file.identity for files in (*(log.files for log in self._logs.values()), *named) for file in files}

    def leftovers(self) -> list[str]:
        """Paths that certainly nobody refers to, nor will once all subtasks are closed."""
        referred = self._confirmed.union(self._spared, *(asked.paths() for asked in self._asked.values()))
        return sorted({*self._users, *self._obsolete} - referred)

    # --- paths -----------------------------------------------------------------------------------

    def _use(self, files: Iterable[StateFile]) -> None:
        for file in files:
            if file.handle is not None:
                path = file.handle.path
                self._users[path] += 1
                self._handles[path] = file.handle
                self._obsolete.pop(path, None)

    def _release(self, files: Iterable[StateFile]) -> None:
        for path in paths_of(files):
            self._users[path] -= 1
            if not self._users[path]:
                del self._users[path]
                self._obsolete[path] = self._handles.pop(path)


def _order(file: StateFile) -> str:
    """The files of a base as they are, then the segments by batch."""
    return file.name if file.is_segment else ""
