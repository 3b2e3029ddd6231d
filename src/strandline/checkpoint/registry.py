"""Which checkpoints use which uploaded file, and so which file may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

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


class SharedStateRegistry(Generic[K, H]):
    """Knows which checkpoints use which uploaded file.

    A file may be deleted when the last checkpoint that names it is dropped. Uses are kept as sets of checkpoint ids,
    not as counts, so that a repeated or lost notification can never make a file look free while somebody needs it.

    `location` says where a handle's bytes lie (default: the handle itself). One location may be known under several
    keys (after a rescale, or when small files share one upload); it is given up with the last of them.
    """

    def __init__(self, location: Callable[[H], Hashable] | None = None) -> None:
        self._location = location
        self._handles: dict[K, H] = {}
        # Most keys have the same users. They share one frozenset, so that a million files do not need a million sets.
        self._uses: dict[K, frozenset[int]] = {}
        self._files: dict[int, list[K]] = {}
        self._holders: dict[Hashable, int] = {}

    def register(self, checkpoint_id: int, files: Mapping[K, H]) -> Registration[K, H]:
        """Record `files` as used by the checkpoint; where a key is known already, the first copy wins.

        May be repeated. Returns the handles the checkpoint must refer to, and the duplicate uploads.
        """
        mine = self._files.setdefault(checkpoint_id, [])
        alone = frozenset((checkpoint_id,))
        grown: dict[frozenset[int], frozenset[int]] = {}
        replaced: dict[K, H] = {}
        rivals: list[H] = []
        uses, handles, holders, location = self._uses, self._handles, self._holders, self._location
        for key, handle in files.items():
            users = uses.get(key)
            if users is None:
                uses[key] = alone
                handles[key] = handle
                place = handle if location is None else location(handle)
                holders[place] = holders.get(place, 0) + 1
                mine.append(key)
                continue
            if checkpoint_id not in users:
                more = grown.get(users)
                if more is None:
                    more = grown[users] = users | alone
                uses[key] = more
                mine.append(key)
            first = handles[key]
            if first is not handle and first != handle:
                replaced[key] = first
                rivals.append(handle)
        return Registration(handles={**files, **replaced}, duplicates=self.unused(rivals), replaced=replaced)

    def drop(self, checkpoint_id: int) -> list[H]:
        """Forget the checkpoint; returns the handles nobody uses any more. Dropping it again returns nothing.

        Costs time in proportion to the checkpoint's own files.
        """
        keys = self._files.pop(checkpoint_id, None)
        if keys is None:
            return []
        gone = frozenset((checkpoint_id,))
        shrunk: dict[frozenset[int], frozenset[int]] = {}
        free: list[H] = []
        uses, handles, holders, location = self._uses, self._handles, self._holders, self._location
        for key in keys:
            users = uses[key]
            rest = shrunk.get(users)
            if rest is None:
                rest = shrunk[users] = users - gone
            if rest:
                uses[key] = rest
                continue
            del uses[key]
            handle = handles.pop(key)
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
        return self._uses.get(key, frozenset())

    def handle(self, key: K) -> H | None:
        """The surviving copy of `key`, or None if no checkpoint refers to it."""
        return self._handles.get(key)

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
        return key in self._uses

    def __len__(self) -> int:
        """How many files are in use."""
        return len(self._uses)
