"""Which checkpoints use which uploaded file, and so which file may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)
H = TypeVar("H", bound=Hashable)


class SharedKey(NamedTuple):
    """What a state file is known by: its operator, its range of key groups, and the identity of its bytes."""

    operator: str
    key_group_start: int
    key_group_end: int
    identity: str


@dataclass(frozen=True, slots=True)
class Registration(Generic[K, H]):
    """What a checkpoint gets for the files it registered."""

    handles: dict[K, H]
    """The handles the checkpoint must refer to, one for every key."""
    duplicates: tuple[H, ...]
    """Uploads that an earlier copy made superfluous. They may be deleted once the checkpoint is confirmed."""
    replaced: dict[K, H]
    """The part of `handles` that differs from what was registered."""


class _Entry(msgspec.Struct, Generic[K, H], gc=False):
    """A file in use. There are a million of them, none in a cycle: the garbage collector need not visit them."""

    key: K
    handle: H
    users: frozenset[int]
    """Most files have the same users. They share one frozenset, so that a million files do not need a million sets."""


@dataclass(frozen=True, slots=True)
class Matched(Generic[K, H]):
    """Files of a checkpoint, compared with what the registry knew of them when it was asked."""

    known: list[_Entry[K, H]]
    unknown: list[tuple[K, H]]
    """Those that no registered checkpoint uses; one that came twice is twice in here."""
    replaced: dict[K, H]
    """The surviving copy of those that came with another handle."""
    rivals: list[H]
    """The handles that came instead."""


class SharedStateRegistry(Generic[K, H]):
    """Knows which checkpoints use which uploaded file.

    A file may be deleted when the last checkpoint that names it is dropped. Uses are kept as sets of checkpoint ids,
    not as counts, so that a repeated or lost notification can never make a file look free while somebody needs it.

    `location` says where a handle's bytes lie (default: the handle itself). One location may be known under several
    keys (after a rescale, or when small files share one upload); it is given up with the last of them.
    """

    def __init__(self, location: Callable[[H], Hashable] | None = None) -> None:
        self._location = location
        self._entries: dict[K, _Entry[K, H]] = {}
        self._files: dict[int, list[_Entry[K, H]]] = {}
        self._holders: dict[Hashable, int] = {}

    def register(self, checkpoint_id: int, files: Mapping[K, H]) -> Registration[K, H]:
        """Record `files` as used by the checkpoint; where a key is known already, the first copy wins.

        May be repeated. Returns the handles the checkpoint must refer to, and the duplicate uploads.
        """
        matched = self.match(files.items())
        self.record(checkpoint_id, matched)
        return Registration(
            handles={**files, **matched.replaced},
            duplicates=self.unused(matched.rivals),
            replaced=matched.replaced,
        )

    def match(self, files: Iterable[tuple[K, H]]) -> Matched[K, H]:
        """Look `files` up without recording anything; for the same key the first handle wins here, too.

        The answer is for `record`, before anything else is recorded or dropped.
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
        """Record what `match` found as used by the checkpoint. May be repeated."""
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
        """Forget the checkpoint; returns the handles nobody uses any more. Dropping it again returns nothing.

        Costs time in proportion to the checkpoint's own files.
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
                free.append(handle)
        return free

    def uses(self, key: K) -> frozenset[int]:
        """The ids of the checkpoints that refer to `key`."""
        entry = self._entries.get(key)
        return entry.users if entry is not None else frozenset()

    def handle(self, key: K) -> H | None:
        """The surviving copy of `key`, or None if no checkpoint refers to it."""
        entry = self._entries.get(key)
        return entry.handle if entry is not None else None

    def unused(self, handles: list[H]) -> tuple[H, ...]:
        """Those of `handles` whose bytes no registered checkpoint refers to, each location once."""
        found: dict[Hashable, H] = {}
        for handle in handles:
            place = handle if self._location is None else self._location(handle)
            if place not in self._holders:
                found.setdefault(place, handle)
        return tuple(found.values())

    def checkpoints(self) -> tuple[int, ...]:
        """The registered checkpoints, lowest id first."""
        return tuple(sorted(self._files))

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        """How many files are in use."""
        return len(self._entries)
