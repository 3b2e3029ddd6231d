"""A slot's local files: sealed segments and local snapshots, and which of them can rebuild its state.

Segments form a chain: each file name says which batch it follows and which batch it brings. A lost slot is rebuilt from
the newest start (a local snapshot, or the checkpoint in `SlotSpec.restore`) from which a complete chain leads to the
last committed batch.
"""

from __future__ import annotations

import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from strandline.checkpoint.metadata import BatchId, Natural, PlainName, StateFile
from strandline.decoding import json_decoder
from strandline.state.backends.base import SnapshotFile

_SEGMENT = re.compile(r"seg-(-?\d+)-(\d+)\.segment")
_SNAPSHOT = re.compile(r"snap-(\d+)(\.json|\.new|\.tmp)?")


class SnapshotMarker(msgspec.Struct, frozen=True):
    """Describes a complete snapshot. It is written last, so a snapshot without a marker is incomplete."""

    checkpoint_id: Natural
    batch: BatchId
    files: list[tuple[PlainName, str, Natural, bool]]
    """(name, identity, size, shared)"""


class _Checked(msgspec.Struct, frozen=True):
    """A marker on disk, with a checksum: a flipped bit in its batch would otherwise lead to a wrong state."""

    crc32: int
    marker: msgspec.Raw


@dataclass(frozen=True, slots=True)
class RebuildStart:
    """Where the rebuild of a state starts, and the segments that lead from there to the last committed batch."""

    batch: int
    """The last batch that the start covers."""
    snapshot: SnapshotMarker | None
    """The local snapshot; None if the rebuild starts from the checkpoint in `SlotSpec.restore`."""
    segments: tuple[Path, ...]
    """The chain of local segments."""
    durable_segments: tuple[StateFile, ...] = ()
    """The same chain in durable storage, if the local files do not have it."""


class OperatorFolder:
    """The local folder of one operator in one slot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def database(self, incarnation: int) -> Path:
        return self.root / f"db-{incarnation}"

    def download(self, incarnation: int) -> Path:
        return self.root / f"restore-{incarnation}"

    def spill(self) -> Path:
        return self.root / "spill"

    def segment(self, previous: int, batch: int) -> Path:
        return self.root / f"seg-{previous}-{batch}.segment"

    def snapshot(self, checkpoint_id: int) -> Path:
        return self.root / f"snap-{checkpoint_id}"

    def _marker(self, checkpoint_id: int) -> Path:
        return self.root / f"snap-{checkpoint_id}.json"

    def mark(self, checkpoint_id: int, batch: int, files: list[SnapshotFile]) -> None:
        """Record that the snapshot's files are all there."""
        marker = SnapshotMarker(checkpoint_id, batch, [(f.name, f.identity, f.size, f.shared) for f in files])
        temporary = self._marker(checkpoint_id).with_suffix(".new")
        body = msgspec.json.encode(marker)
        temporary.write_bytes(msgspec.json.encode(_Checked(zlib.crc32(body), msgspec.Raw(body))))
        temporary.replace(self._marker(checkpoint_id))

    def snapshots(self) -> list[int]:
        """The checkpoints of which there are snapshot files, complete or not, in ascending order."""
        found = {int(match[1]) for path in self.root.glob("snap-*") if (match := _SNAPSHOT.fullmatch(path.name))}
        return sorted(found)

    def drop_snapshot(self, checkpoint_id: int) -> None:
        self._marker(checkpoint_id).unlink(missing_ok=True)
        self._marker(checkpoint_id).with_suffix(".new").unlink(missing_ok=True)
        # RocksDB first writes a snapshot to a folder of this name, which a killed process leaves behind.
        shutil.rmtree(self.snapshot(checkpoint_id).with_suffix(".tmp"), ignore_errors=True)
        shutil.rmtree(self.snapshot(checkpoint_id), ignore_errors=True)

    def drop_segments(self, up_to_batch: int) -> None:
        """Segments that a local snapshot covers are not needed any more."""
        for path, _previous, batch in self._segments():
            if batch <= up_to_batch:
                path.unlink(missing_ok=True)

    def clear_databases(self, keep_incarnation: int) -> None:
        """Delete the databases, downloads and spilled changes of earlier incarnations of the slot."""
        keep = {self.database(keep_incarnation).name, self.download(keep_incarnation).name}
        for pattern in ("db-*", "restore-*", "spill"):
            for path in self.root.glob(pattern):
                if path.name not in keep:
                    shutil.rmtree(path, ignore_errors=True)

    def rebuild_starts(self, restored_batch: int, decided_batch: int) -> list[RebuildStart]:
        """Every start from which a complete local chain leads to `decided_batch`.

        The local snapshots come first, the newest of them at the head. The checkpoint in `SlotSpec.restore` comes last.
        """
        chain = {batch: (previous, path) for path, previous, batch in self._segments()}
        reach: dict[int, tuple[Path, ...]] = {decided_batch: ()}
        batch = decided_batch
        paths: list[Path] = []
        while batch in chain:
            batch, path = chain[batch]
            paths.insert(0, path)
            reach[batch] = tuple(paths)
        found = [
            RebuildStart(marker.batch, marker, reach[marker.batch])
            for marker in self._markers()
            if marker.batch in reach
        ]
        if restored_batch in reach:
            found.append(RebuildStart(restored_batch, None, reach[restored_batch]))
        return sorted(found, key=lambda start: (start.snapshot is None, -start.batch))

    def _markers(self) -> list[SnapshotMarker]:
        markers = []
        for path in self.root.glob("snap-*.json"):
            try:
                checked = json_decoder(_Checked).decode(path.read_bytes())
                if zlib.crc32(checked.marker) == checked.crc32:
                    markers.append(json_decoder(SnapshotMarker).decode(checked.marker))
            except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # a snapshot with a damaged marker does not exist
        return markers

    def _segments(self) -> list[tuple[Path, int, int]]:
        found = []
        for path in self.root.glob("seg-*.segment"):
            match = _SEGMENT.fullmatch(path.name)
            if match:
                found.append((path, int(match[1]), int(match[2])))
        return found
