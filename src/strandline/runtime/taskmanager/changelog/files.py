"""Knows which durable files make up the state of each subtask, and which files nobody needs any more.

The state of a subtask is a materialization and the segments after it. Both are uploaded independently of checkpoints. A
checkpoint only names them. Files that are not needed any more are not deleted here: the next checkpoint reports them as
obsolete, and the coordinator deletes those that no retained checkpoint refers to. This module does no I/O and starts no
thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState, last_batch, paths_of
from strandline.checkpoint.pending import Subtask
from strandline.errors import CheckpointError


@dataclass(slots=True, eq=False)
class SubtaskFiles:
    """The durable files of one subtask's state. A subtask that is opened again gets a new object."""

    base: tuple[StateFile, ...] | None
    """The newest materialization. Empty if the state began empty; None if the state must be materialized first."""
    segments: list[StateFile]
    """What changed after the materialization, in the order of batches."""
    base_batch: int = -1
    """The batch of a materialization that was made here. Segments of earlier batches are not part of the state."""

    @property
    def files(self) -> tuple[StateFile, ...]:
        return (*(self.base or ()), *self.segments)

    @property
    def base_bytes(self) -> int:
        return sum(file.size for file in self.base or ())

    @property
    def segment_bytes(self) -> int:
        return sum(file.size for file in self.segments)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a checkpoint names of one subtask."""

    subtask: Subtask
    files: tuple[StateFile, ...]
    new_bytes: int
    """The size of those files that the last acknowledged checkpoint did not name."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a checkpoint names, and what it reports as not needed any more."""

    entries: tuple[Entry, ...]
    beforehand: tuple[str, ...]
    """Paths that the checkpoint names, and that no completed checkpoint is known to refer to."""
    obsolete: tuple[FileHandle, ...]


@dataclass(slots=True)
class _Pending:
    """A checkpoint between its barrier and its completion."""

    subtasks: dict[Subtask, SubtaskFiles] = field(default_factory=dict)
    files: dict[Subtask, tuple[StateFile, ...]] = field(default_factory=dict)
    """What the checkpoint names. A subtask without a base, and every one of a full checkpoint, has no files here until
    the acknowledgement."""
    obsolete: frozenset[str] = frozenset()
    """What the checkpoint reports."""

    def paths(self) -> set[str]:
        return {path for files in self.files.values() for path in paths_of(files)}


@dataclass(slots=True)
class ChangelogFiles:
    """The files of one task manager's changelog. The caller makes sure that only one thread at a time uses it."""

    _subtasks: dict[Subtask, SubtaskFiles] = field(default_factory=dict)
    _users: Counter[str] = field(default_factory=Counter)
    """How many files of subtasks, and of segments whose batch is undecided, lie at a path."""
    _handles: dict[str, FileHandle] = field(default_factory=dict)
    _obsolete: dict[str, FileHandle] = field(default_factory=dict)
    _spared: set[str] = field(default_factory=set)
    """Paths that somebody else may refer to: restored files, and files that older checkpoints named."""
    _confirmed: set[str] = field(default_factory=set)
    """Paths that the newest completed checkpoint refers to."""
    _completed: int = -1
    """The newest completed checkpoint."""
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _named: dict[Subtask, frozenset[str]] = field(default_factory=dict)
    """The identities of each subtask's files that the last acknowledged checkpoint named."""

    # --- subtasks --------------------------------------------------------------------------------

    def open(
        self,
        subtask: Subtask,
        base: Iterable[StateFile] | None,
        segments: Iterable[StateFile],
        restored: Iterable[StateFile] = (),
    ) -> SubtaskFiles:
        """Begin the changelog of a subtask with these files; an earlier one of the subtask ends.

        `restored` are the files that the job's newest completed checkpoint names for the subtask, whether the changelog
        builds on them or not.
        """
        before = self._subtasks.get(subtask)
        opened = SubtaskFiles(None if base is None else tuple(base), sorted(segments, key=_order))
        self._use(opened.files)
        self._subtasks[subtask] = opened
        self._confirmed.update(paths_of(restored))
        self._spared.update(paths_of(restored), paths_of(opened.files))
        if before is not None:
            self._release(before.files)
        return opened

    def close(self, subtask: Subtask) -> None:
        """Forget a subtask that left this task manager."""
        known = self._subtasks.pop(subtask, None)
        self._named.pop(subtask, None)
        if known is not None:
            self._release(known.files)

    def clear(self) -> list[str]:
        """Forget everything; returns the paths that certainly nobody refers to."""
        for subtask in self.subtasks():
            self.close(subtask)
        unneeded = self.leftovers()
        self._users.clear()
        self._handles.clear()
        self._obsolete.clear()
        self._spared.clear()
        self._confirmed.clear()
        self._completed = -1
        self._pending.clear()
        self._named.clear()
        return unneeded

    def __contains__(self, subtask: Subtask) -> bool:
        return subtask in self._subtasks

    def __getitem__(self, subtask: Subtask) -> SubtaskFiles:
        return self._subtasks[subtask]

    def subtasks(self) -> list[Subtask]:
        """The open subtasks, in order."""
        return sorted(self._subtasks)

    # --- what becomes durable ------------------------------------------------------------------------

    def hold(self, file: StateFile) -> None:
        """Keep an uploaded segment whose batch is not decided yet."""
        self._use([file])

    def void(self, file: StateFile) -> None:
        """Give up a held segment: it belongs to an attempt that never commits."""
        self._release([file])

    def append(self, subtask: Subtask, file: StateFile) -> None:
        """Add a held segment: its batch is committed.

        Segments may come out of order, because an upload that failed is repeated later.
        """
        known = self._subtasks.get(subtask)
        if known is None or last_batch(file) <= known.base_batch:
            self._release([file])
            return
        late = bool(known.segments) and _order(file) < _order(known.segments[-1])
        known.segments.append(file)
        if late:
            known.segments.sort(key=_order)

    def newest(self, subtask: Subtask) -> int:
        """The last batch that the files of a subtask are known to hold; -1 if none is."""
        known = self._subtasks[subtask]
        return max([known.base_batch, *(last_batch(one) for one in known.segments[-1:])])

    def take_in(self, subtask: Subtask, file: StateFile) -> None:
        """Add a segment of a committed batch that lies in a file of the driver's: nobody here deletes that file."""
        self.hold(file)
        self._spared.update(paths_of([file]))
        self.append(subtask, file)

    def materialized(self, states: Sequence[tuple[SubtaskFiles, SubtaskState, int]]) -> bool:
        """Replace the base of each subtask by a state that is durable; segments up to its batch are dropped.

        Returns False and changes nothing if a subtask was opened again since its state was frozen, or has a newer base.
        """
        if any(
            self._subtasks.get((state.operator, state.subtask)) is not known or batch < known.base_batch
            for known, state, batch in states
        ):
            return False
        for known, state, batch in states:
            self._use(state.files)
            dropped = [*(known.base or ()), *(one for one in known.segments if last_batch(one) <= batch)]
            known.base = state.files
            known.base_batch = batch
            known.segments = [one for one in known.segments if last_batch(one) > batch]
            self._release(dropped)
        return True

    def merged(self, subtask: Subtask, known: SubtaskFiles, replaced: Sequence[StateFile], by: StateFile) -> bool:
        """Replace segments that follow each other by one uploaded segment. False if they are not needed any more."""
        self._use([by])
        if self._subtasks.get(subtask) is not known or any(one not in known.segments for one in replaced):
            self._release([by])
            return False
        at = known.segments.index(replaced[0])
        known.segments[at : at + len(replaced)] = [by]
        self._release(replaced)
        return True

    # --- checkpoints -----------------------------------------------------------------------------

    def without_base(self) -> list[Subtask]:
        """The subtasks that must be materialized before a checkpoint can name their state."""
        return [subtask for subtask, known in sorted(self._subtasks.items()) if known.base is None]

    def barrier(self, checkpoint_id: int, full: bool = False) -> None:
        """Note what the checkpoint names and reports: everything that is known now.

        A `full` checkpoint names nothing of it: all of its state becomes durable after the barrier.
        """
        self._pending[checkpoint_id] = _Pending(
            subtasks=dict(self._subtasks),
            files={
                subtask: () if full or known.base is None else known.files for subtask, known in self._subtasks.items()
            },
            obsolete=frozenset(self._obsolete),
        )

    def acknowledge(
        self, checkpoint_id: int, late: Mapping[Subtask, Sequence[StateFile]] | None = None
    ) -> Acknowledged:
        """What a checkpoint names, as of its barrier. `late` are files of it that became durable after the barrier.

        Raises `CheckpointError` if the checkpoint was given up meanwhile.
        """
        pending = self._pending.get(checkpoint_id)
        if pending is None:
            raise CheckpointError(f"checkpoint {checkpoint_id} was given up before all of its state was durable")
        for subtask, files in (late or {}).items():
            pending.files[subtask] = tuple(sorted((*pending.files[subtask], *files), key=_order))
        pending.obsolete = frozenset(path for path in pending.obsolete if path in self._obsolete)
        return Acknowledged(
            entries=tuple(self._entry(subtask, files) for subtask, files in sorted(pending.files.items())),
            beforehand=tuple(pending.paths() - self._confirmed),
            obsolete=tuple(self._obsolete[path] for path in sorted(pending.obsolete)),
        )

    def _entry(self, subtask: Subtask, files: tuple[StateFile, ...]) -> Entry:
        before = self._named.get(subtask, frozenset())
        self._named[subtask] = frozenset(file.identity for file in files)
        return Entry(subtask, files, sum(file.size for file in files if file.identity not in before))

    def completed(self, checkpoint_id: int) -> list[Subtask]:
        """Note that the checkpoint is complete. Repeated and late calls change nothing.

        Returns the subtasks whose files the checkpoint does not name as they are known here, because another task
        manager acknowledged them. Their files may be deleted by now, so these subtasks must be materialized again.
        """
        if checkpoint_id <= self._completed:
            return []
        self._completed = checkpoint_id
        pending = self._pending.pop(checkpoint_id, _Pending())
        for older in [number for number in self._pending if number < checkpoint_id]:
            # The older checkpoint may be complete, too: its notification can get lost.
            self._spared |= self._pending.pop(older).paths()
        for path in pending.obsolete:
            self._obsolete.pop(path, None)
        # A full checkpoint names nothing that the one before named, and that one may be retained. What it alone names
        # is not reported as obsolete yet.
        self._spared |= (self._confirmed - pending.paths()).intersection({*self._users, *self._obsolete})
        self._confirmed = pending.paths()
        lost = [
            subtask for subtask, known in sorted(self._subtasks.items()) if pending.subtasks.get(subtask) is not known
        ]
        for subtask in lost:
            self.open(subtask, None, ())
        return lost

    def aborted(self, checkpoint_id: int) -> None:
        """Forget a checkpoint that was given up. Its files stay part of the changelog."""
        self._pending.pop(checkpoint_id, None)

    def identities(self) -> set[str]:
        """The identities of all files that subtasks need, or that pending checkpoints name."""
        named = (files for pending in self._pending.values() for files in pending.files.values())
        needed = (known.files for known in self._subtasks.values())
        return {file.identity for files in (*needed, *named) for file in files}

    def segment_identities(self) -> set[str]:
        """The identities of all segments that are part of a subtask's state."""
        return {file.identity for known in self._subtasks.values() for file in known.segments}

    def leftovers(self) -> list[str]:
        """The paths that certainly nobody refers to, once all subtasks are closed."""
        referred = self._confirmed.union(self._spared, *(pending.paths() for pending in self._pending.values()))
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
    """Sort key: the files of a base in the order they have, then the segments by batch."""
    return file.name if file.is_segment else ""
