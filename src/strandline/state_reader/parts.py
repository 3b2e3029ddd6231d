"""One part of a step's state, the state of a subtask: fetches its files, and scans the entries of one state.

A full snapshot without segments is read block by block. Everything else is opened as a RocksDB database in a scratch
folder, whatever the backend of the job is, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from strandline.checkpoint.metadata import SubtaskState
from strandline.errors import DamagedFileError, StorageFullError, StrandlineError
from strandline.state.backends.base import StateBackend
from strandline.state.backends.factory import RestoredFile, open_backend
from strandline.state.backends.full_snapshot import FULL_SNAPSHOT_NAME, read_full_snapshot
from strandline.state.batch.merge import merged_changes
from strandline.state.chunks import CHUNK_BYTES, CHUNK_ENTRIES
from strandline.state.coding.keys import state_prefix
from strandline.state.key_ranges import prefix_end
from strandline.state_files import fetch_state_files
from strandline.state_reader.locations import Located

_MEMORY: Final = 32 << 20
_COUNTED: Final = 1024
_GONE: Final = (
    "If the job has dropped the checkpoint meanwhile, read again: the job's folder stands for its newest checkpoint. "
    "Otherwise read another checkpoint, or bring the file back."
)

Entries = tuple[list[bytes], list[bytes]]


@dataclass(frozen=True, slots=True)
class Part:
    """The state of one subtask, and those of its key groups that are wanted."""

    state: SubtaskState
    groups: range

    def fetch(self, located: Located, folder: Path) -> OpenPart:
        """Bring the files to `folder`, verified. Raises `DamagedFileError` if one is missing or damaged."""
        state = self.state
        whose = f"job {located.metadata.job}, operator {state.operator}, subtask {state.subtask}"
        fetched = fetch_state_files(state.files, located.storage, folder / "files", whose, advice=_GONE).files
        both = list(zip(state.files, fetched, strict=True))
        return OpenPart(
            whose,
            self.groups,
            folder,
            [one for file, one in both if not file.is_segment],
            [one.path for file, one in both if file.is_segment],
        )


@dataclass(frozen=True, slots=True)
class OpenPart:
    """The files of a part on local disk."""

    whose: str
    groups: range
    folder: Path
    files: Sequence[RestoredFile]
    segments: Sequence[Path]

    def entries(self, state: str, starts: Sequence[bytes]) -> Iterator[Entries]:
        """The entries of `state` in the order of their keys, in chunks of bounded size.

        The stored keys begin with one of `starts` behind the name of the state; `starts` are ascending, and the empty
        one stands for all keys. Raises `DamagedFileError` if the files cannot be read.
        """
        try:
            if len(self.files) == 1 and self.files[0].name == FULL_SNAPSHOT_NAME and not self.segments:
                yield from self._in_snapshot(state, starts)
            else:
                yield from self._in_database(state, starts)
        except (StorageFullError, DamagedFileError):
            raise
        except (OSError, StrandlineError) as error:
            raise DamagedFileError(f"{self.whose}: the state cannot be read: {error}") from error

    def _in_snapshot(self, state: str, starts: Sequence[bytes]) -> Iterator[Entries]:
        for keys, values in read_full_snapshot(self.files[0].path, self.groups):
            prefix = keys[0][:2] + state_prefix(0, state)[2:]
            wanted = tuple(prefix + start for start in starts)
            places = [at for at, key in enumerate(keys) if key.startswith(wanted)]
            if places:
                yield from _chunks(zip([keys[at] for at in places], [values[at] for at in places], strict=True))

    def _in_database(self, state: str, starts: Sequence[bytes]) -> Iterator[Entries]:
        with closing(self._opened()) as backend:
            yield from _chunks(self._scan(backend, state, starts))

    def _opened(self) -> StateBackend:
        full = len(self.files) == 1 and self.files[0].name == FULL_SNAPSHOT_NAME
        backend = open_backend(
            "rocksdb",
            self.folder / "database",
            memory=_MEMORY,
            compression="none",
            restored_files=self.files,
            key_groups=self.groups if full else None,  # a database is opened as it is, and not changed
        )
        try:
            for keys, values in merged_changes(self.segments, self.groups):
                backend.apply(keys, values)
        except BaseException:
            backend.close()
            raise
        return backend

    def _scan(self, backend: StateBackend, state: str, starts: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for group in self.groups:
            prefix = state_prefix(group, state)
            for start in starts:
                yield from backend.scan(prefix + start, prefix_end(prefix + start))


def _chunks(entries: Iterator[tuple[bytes, bytes]]) -> Iterator[Entries]:
    """What `chunked` does, but faster: entries are counted by the thousand, as scans read them."""
    keys: list[bytes] = []
    values: list[bytes] = []
    size = 0
    while some := list(islice(entries, _COUNTED)):
        more_keys, more_values = zip(*some, strict=True)
        keys += more_keys
        values += more_values
        size += sum(map(len, more_keys)) + sum(map(len, more_values))
        if len(keys) >= CHUNK_ENTRIES or size >= CHUNK_BYTES:
            yield keys, values
            keys, values, size = [], [], 0
    if keys:
        yield keys, values


def parts_of(located: Located, operator: str, key_groups: range | None) -> list[Part]:
    """The parts of an operator that hold some of `key_groups`, in the order of their key groups."""
    found = []
    for state in located.metadata.subtasks:
        if state.operator != operator:
            continue
        groups = range(state.key_group_start, state.key_group_end)
        if key_groups is not None:
            groups = range(max(groups.start, key_groups.start), min(groups.stop, key_groups.stop))
        if groups:
            found.append(Part(state, groups))
    return sorted(found, key=lambda part: part.groups.start)
