"""What the driver knows of the changelog: enough to bring a slot back when its host is gone."""

from __future__ import annotations

from typing import Any

import msgspec

from strandline.checkpoint.metadata import StateFile, last_batch


class DurableLog:
    """The durable segments since the base: with them a slot can be rebuilt anywhere, its host and files being gone."""

    def __init__(self, batch: int = -1) -> None:
        self._covered = batch
        self._files: dict[int, list[tuple[str, StateFile]]] = {}
        self._settled: dict[int, dict[str, tuple[bool, StateFile | None]]] = {}
        self._settled_batch = -1
        self._gap = -1
        """The newest committed batch that is not durable as a whole."""

    @property
    def complete(self) -> bool:
        """Whether the segments lead from the base to the last committed batch."""
        return self._gap <= self._covered

    def settled(self, batch: int, index: int, log_: dict[str, Any]) -> None:
        """What slot `index` prepared for `batch`: of each operator, whether it is durable, and its file."""
        if batch != self._settled_batch:
            self._settled_batch = batch
            self._settled = {}
        self._settled[index] = msgspec.convert(log_, dict[str, tuple[bool, StateFile | None]])

    def decided(self, batch: int, logged: bool) -> None:
        """The batch that was settled last is committed; without a changelog, `logged` is false."""
        settled = self._settled if self._settled_batch == batch else {}
        self._settled, self._settled_batch = {}, -1
        if not logged:
            self._gap = batch
        for index, segments in settled.items():
            for operator, (durable, file) in segments.items():
                if not durable:
                    self._gap = batch
                elif file is not None:
                    self._files.setdefault(index, []).append((operator, file))

    def truncate(self, batch: int) -> None:
        """A completed checkpoint covers everything up to `batch`."""
        self._covered = batch
        for index, files in self._files.items():
            self._files[index] = [(uid, file) for uid, file in files if last_batch(file) > batch]

    def of(self, index: int) -> list[tuple[str, StateFile]]:
        """The segments of one slot, in the order of batches."""
        return list(self._files.get(index, ()))
