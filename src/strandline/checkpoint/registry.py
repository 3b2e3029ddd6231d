"""Knows which checkpoints use which uploaded file, and so which file may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)
H = TypeVar("H", bound=Hashable)


class SharedKey(NamedTuple):
    """The key of a state file: its operator, its range of key groups, and the identity of its bytes."""

    operator: str
    key_group_start: int
    key_group_end: int
    identity: str


@dataclass(frozen=True, slots=True)
class Registration(Generic[K, H]):
    """The result of registering the files of a checkpoint."""

    handles: dict[K, H]
    """The handles that the checkpoint must refer to, one per key."""
    duplicates: tuple[H, ...]
    """Uploads of files of which an earlier copy exists. They may be deleted when the checkpoint is confirmed."""
    replaced: dict[K, H]
    """The entries of `handles` that differ from what the caller passed in."""


class _Entry(msgspec.Struct, Generic[K, H], gc=False):
    """A file in use. There may be a million of them, none in a cycle, so the garbage collector skips them."""

    key: K
    handle: H
    users: frozenset[int]
    """Files with the same users share one frozenset, so that a million files do not need a million sets."""


@dataclass(frozen=True, slots=True)
class Matched(Generic[K, H]):
    """The files of a checkpoint, compared with the registry at the time of the call."""

    known: list[_Entry[K, H]]
    unknown: list[tuple[K, H]]
    """Files that no registered checkpoint uses. A file that was passed in twice is listed twice."""
    replaced: dict[K, H]
    """The surviving handle of every file that was passed in with a different handle."""
    rivals: list[H]
    """The handles that were passed in instead of those in `replaced`."""


class SharedStateRegistry(Generic[K, H]):
    """Knows which checkpoints use which uploaded file.

    A file may be deleted when the last checkpoint that names it is dropped. Uses are kept as sets of checkpoint ids,
    not as counts, so that a repeated or lost notification can never make a file look free while somebody needs it.

    `location` maps a handle to the place of its bytes (default: the handle itself). Several keys may share a location,
    after a rescale or when small files share one upload. The location is free when the last of its keys is dropped.

    A location can also be held. It is then never free, whoever is dropped. Holding makes no key known: a checkpoint
    cannot build on a file that is only held.
    """

    def __init__(self, location: Callable[[H], Hashable] | None = None) -> None:
        self._location = location
        self._entries: dict[K, _Entry[K, H]] = {}
        self._files: dict[int, list[_Entry[K, H]]] = {}
        self._holders: dict[Hashable, int] = {}
        self._held: set[Hashable] = set()

    def register(self, checkpoint_id: int, files: Mapping[K, H]) -> Registration[K, H]:
        """Record `files` as used by the checkpoint. If a key is known already, the first copy wins.

        May be repeated. Returns the handles that the checkpoint must refer to, and the duplicate uploads.
        """
        matched = self.match(files.items())
        self.record(checkpoint_id, matched)
        return Registration(
            handles={**files, **matched.replaced},
            duplicates=self.unused(matched.rivals),
            replaced=matched.replaced,
        )

    def match(self, files: Iterable[tuple[K, H]]) -> Matched[K, H]:
        """Look up `files` without recording anything. If a key comes twice, its first handle wins.

        The result is meant for `record`. Between the two calls nothing else may be recorded or dropped.
        """
        known: list[_Entry[K, H]] = []
        unknown: list[tuple[K, H]] = []
        replaced: dict[K, H] = {}
        rivals: list[H] = []
        fresh: dict[K, H] = {}
        find, add = self._entries.get, known.append
        for pair in files:
            key, handle = pair
            entry = find(key)
            if entry is not None:
                add(entry)
                first = entry.handle
            else:
                unknown.append(pair)
                first = fresh.setdefault(key, handle)
            if first is not handle and first != handle:
                replaced[key] = first
                rivals.append(handle)
        return Matched(known, unknown, replaced, rivals)

    def record(self, checkpoint_id: int, matched: Matched[K, H]) -> None:
        """Record the files that `match` returned as used by the checkpoint. May be repeated."""
        mine = self._files.setdefault(checkpoint_id, [])
        alone = frozenset((checkpoint_id,))
        grown: dict[frozenset[int], frozenset[int]] = {}
        for entry in matched.known:
            users = entry.users
            more = grown.get(users)
            if more is None:
                more = grown[users] = users | alone
            if more is not users and checkpoint_id not in users:
                entry.users = more
                mine.append(entry)
        entries, holders, location = self._entries, self._holders, self._location
        for key, handle in matched.unknown:
            if key in entries:
                continue
            entry = entries[key] = _Entry(key, handle, alone)
            place = handle if location is None else location(handle)
            holders[place] = holders.get(place, 0) + 1
            mine.append(entry)

    def drop(self, checkpoint_id: int) -> list[H]:
        """Forget the checkpoint and return the handles that no checkpoint uses any more.

        Dropping it again returns nothing. The cost is proportional to the number of the checkpoint's files.
        """
        mine = self._files.pop(checkpoint_id, None)
        if mine is None:
            return []
        gone = frozenset((checkpoint_id,))
        shrunk: dict[frozenset[int], frozenset[int]] = {}
        free: list[H] = []
        entries, holders, location = self._entries, self._holders, self._location
        for entry in mine:
            users = entry.users
            rest = shrunk.get(users)
            if rest is None:
                rest = shrunk[users] = users - gone
            if rest:
                entry.users = rest
                continue
            del entries[entry.key]
            handle = entry.handle
            place = handle if location is None else location(handle)
            left = holders[place] - 1
            if left:
                holders[place] = left
            else:
                del holders[place]
                if place not in self._held:
                    free.append(handle)
        return free

    def hold(self, handles: Iterable[H]) -> None:
        """Never return the locations of `handles` as free: somebody outside the registry may need their bytes."""
        self._held.update(handle if self._location is None else self._location(handle) for handle in handles)

    def hold_all(self) -> None:
        """Hold every location that is known now."""
        self._held.update(self._holders)

    def uses(self, key: K) -> frozenset[int]:
        """The ids of the checkpoints that refer to `key`."""
        entry = self._entries.get(key)
        return entry.users if entry is not None else frozenset()

    def handle(self, key: K) -> H | None:
        """The surviving copy of `key`, or None if no checkpoint refers to it."""
        entry = self._entries.get(key)
        return entry.handle if entry is not None else None

    def unused(self, handles: list[H]) -> tuple[H, ...]:
        """The `handles` whose bytes nobody holds or refers to, one handle per location."""
        found: dict[Hashable, H] = {}
        for handle in handles:
            place = handle if self._location is None else self._location(handle)
            if place not in self._holders and place not in self._held:
                found.setdefault(place, handle)
        return tuple(found.values())

    def knows(self, handle: H) -> bool:
        """Whether a registered checkpoint refers to the location of `handle`."""
        return (handle if self._location is None else self._location(handle)) in self._holders

    def checkpoints(self) -> tuple[int, ...]:
        """The registered checkpoints, lowest id first."""
        return tuple(sorted(self._files))

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        """How many files are in use."""
        return len(self._entries)
