"""Bringing an operator's state to the last committed batch: from local files, or from a checkpoint."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strandline.checkpoint.metadata import StateFile, SubtaskState
from strandline.errors import DamagedFileError, SegmentsLostError
from strandline.operators.base import Operator
from strandline.operators.schema_evolution import StateChanges, check_step
from strandline.runtime.protocol.messages import Rebuilt, SlotSpec, StorageSettings
from strandline.runtime.slot.local_copies import find_copy
from strandline.runtime.slot.local_files import OperatorFolder, RebuildStart, SnapshotMarker
from strandline.runtime.slot.rocksdb_factory import tuning
from strandline.state.backends.base import StateBackend
from strandline.state.backends.factory import RestoredFile, load_snapshot, open_backend
from strandline.state.backends.rocksdb import RocksDBMemory
from strandline.state.batch.merge import merged_changes
from strandline.state_files import fetch_state_files
from strandline.storage import open_storage

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _BytesRead:
    """How many bytes a rebuild has read."""

    local: int = 0
    durable: int = 0


def rebuild(
    spec: SlotSpec, operator: Operator, folder: OperatorFolder, memory: RocksDBMemory | None
) -> tuple[StateBackend, Rebuilt]:
    """Rebuild an operator's state at `spec.decided_batch`, from the newest start: local files, else durable ones.

    Raises `SegmentsLostError` when the files that lead there are gone, `DamagedFileError` when the checkpoint is bad,
    `IncompatibleCheckpointError` when the operator cannot go on with the state that it holds, `UserCodeError` or
    `ConfigError` when the user's `rocksdb_factory` fails or sets an option with which state is not safe.
    """
    folder.clear_databases(spec.incarnation)
    durable = [state for state in spec.restore if state.operator == operator.uid]
    # All subtasks of a checkpoint describe their states in the same way.
    step = next((step for step in spec.steps if step.operator == operator.uid), None)
    changed = check_step(operator, operator.states(), step, durable[0] if durable else None, spec.allow_non_restored)
    problems: list[str] = []
    starts = folder.rebuild_starts(spec.restore_batch, spec.decided_batch)
    if spec.segments_complete and spec.decided_batch > spec.restore_batch:
        durable_segments = tuple(file for uid, file in spec.segments if uid == operator.uid)
        starts.append(RebuildStart(spec.restore_batch, None, (), durable_segments))
    for start in starts:
        began = time.monotonic()
        try:
            backend, read = _open(spec, operator, folder, start, durable, changed, memory)
        except (OSError, DamagedFileError) as error:
            if start.snapshot is None and not start.segments and not start.durable_segments:
                raise  # the checkpoint itself is damaged, and there is no other start
            problems.append(str(error))
            continue
        finally:
            shutil.rmtree(folder.download(spec.incarnation), ignore_errors=True)
        duration_ms = (time.monotonic() - began) * 1000
        rebuilt = Rebuilt(operator.uid, read.local, read.durable, duration_ms, bool(changed))
        log.info("at batch %d, from batch %d: %s", spec.decided_batch, start.batch, rebuilt)
        return backend, rebuilt
    raise SegmentsLostError(
        f"job {spec.run.job}, operator {operator.uid}, subtask {spec.index}: the local files cannot bring the state to "
        f"batch {spec.decided_batch}{': ' + '; '.join(problems) if problems else ''}. The run goes back to its last "
        "completed checkpoint."
    )


def _open(
    spec: SlotSpec,
    operator: Operator,
    folder: OperatorFolder,
    start: RebuildStart,
    durable: Sequence[SubtaskState],
    changed: StateChanges,
    memory: RocksDBMemory | None,
) -> tuple[StateBackend, _BytesRead]:
    read = _BytesRead()
    download = folder.download(spec.incarnation)
    if start.snapshot is not None:
        parts = [_local_part(folder, start.snapshot, read)]
    else:
        parts = _durable_parts(spec, download, durable, read)
    downloaded = _download(spec, start.durable_segments, spec.run.storage, download / "segments", read)
    groups = spec.key_groups
    first = parts[0] if parts else _Part([])
    # The checkpoint's segments use the states as they were declared then.
    before = [path for part in parts for path in part.segments]
    since = [*(segment.path for segment in downloaded), *start.segments]
    backend = open_backend(
        spec.backend.kind,
        folder.database(spec.incarnation),
        memory=memory,
        incremental=spec.backend.incremental,
        compression=spec.backend.compression,
        restored_files=first.files,
        key_groups=groups if first.beyond else None,
        options=spec.backend.rocksdb,
        tune=tuning(spec, operator.uid, memory),
    )
    try:
        for part in parts[1:]:
            load_snapshot(backend, part.files, folder.root, groups)
        if changed and start.snapshot is None:
            _apply(backend, before, groups)
            changed.apply(backend, groups)
            _apply(backend, since)
        else:
            _apply(backend, [*before, *since], groups if any(part.beyond for part in parts) else None)
    except BaseException:
        backend.close()
        raise
    read.local += sum(path.stat().st_size for path in start.segments)
    return backend, read


@dataclass(frozen=True, slots=True)
class _Part:
    """Files that hold state, and the segments that follow them."""

    files: list[RestoredFile]
    segments: Sequence[Path] = ()
    beyond: bool = False
    """Whether they also hold key groups of other slots."""


def _local_part(folder: OperatorFolder, snapshot: SnapshotMarker, read: _BytesRead) -> _Part:
    where = folder.snapshot(snapshot.checkpoint_id)
    files = []
    for name, identity, size, shared in snapshot.files:
        if (where / name).stat().st_size != size:
            raise DamagedFileError(f"{where / name}: not {size} bytes")
        files.append(RestoredFile(name, where / name, identity, shared))
        read.local += size
    return _Part(files)


def _durable_parts(spec: SlotSpec, target: Path, durable: Sequence[SubtaskState], read: _BytesRead) -> list[_Part]:
    """The parts of the checkpoint that hold the slot's key groups: several if the parallelism has changed."""
    groups = spec.key_groups
    place = spec.restore_storage or spec.run.storage
    parts = []
    for number, state in enumerate(durable):
        fetched = _download(spec, state.files, place, target / str(number), read, state)
        parts.append(
            _Part(
                [one for file, one in zip(state.files, fetched, strict=True) if not file.is_segment],
                [one.path for file, one in zip(state.files, fetched, strict=True) if file.is_segment],
                state.key_group_start < groups.start or state.key_group_end > groups.stop,
            )
        )
    return parts


def _apply(backend: StateBackend, segments: Sequence[Path], key_groups: range | None = None) -> None:
    for keys, values in merged_changes(segments, key_groups):
        backend.apply(keys, values)


def _download(
    spec: SlotSpec,
    files: Sequence[StateFile],
    place: StorageSettings,
    target: Path,
    read: _BytesRead,
    state: SubtaskState | None = None,
) -> list[RestoredFile]:
    """Bring durable files to local disk and check size and checksum; local copies on this host are preferred."""
    whose = f"operator {state.operator}, subtask {state.subtask}" if state else f"slot {spec.index}"
    copies = partial(find_copy, Path(spec.copies)) if spec.copies is not None else None
    storage = open_storage(place.url, place.options)
    fetched = fetch_state_files(files, storage, target, f"job {spec.run.job}, {whose}", copies)
    read.local += fetched.local_bytes
    read.durable += fetched.durable_bytes
    return fetched.files
