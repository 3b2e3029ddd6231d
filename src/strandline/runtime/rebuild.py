"""Bringing an operator's state to the last committed batch: from local files, or from a checkpoint."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from strandline.changelog.merge import changes
from strandline.checkpoint.metadata import FileHandle, StateFile, SubtaskState
from strandline.errors import DamagedFileError, NotFoundError, SegmentsLostError
from strandline.operators.base import Operator
from strandline.operators.changed_states import StateChanges, state_changes
from strandline.runtime.local_files import Base, OperatorFolder
from strandline.runtime.messages import Rebuilt, SlotSpec, StorageSettings
from strandline.state.backend import StateBackend
from strandline.state.descriptors import StateDescriptor
from strandline.state.disk import disk_full_names
from strandline.state.factory import RestoredFile, open_backend
from strandline.state.rocksdb import RocksDBMemory
from strandline.storage import Storage, open_storage
from strandline.storage.checksums import checksum
from strandline.storage.elsewhere import located

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Source:
    """What a state was made from."""

    local_bytes: int = 0
    durable_bytes: int = 0


def rebuild(
    spec: SlotSpec, operator: Operator, folder: OperatorFolder, memory: RocksDBMemory | None
) -> tuple[StateBackend, Rebuilt]:
    """The operator's state at `spec.decided_batch`, from the newest base that works: local files, else durable ones.

    Raises `SegmentsLostError` when the files that lead there are gone, `DamagedFileError` when the checkpoint is bad,
    `IncompatibleCheckpointError` when it holds a state that the operator declares differently.
    """
    folder.clear_databases(spec.incarnation)
    durable = next((state for state in spec.restore if state.operator == operator.uid), None)
    changed = check_states(operator, operator.states(), durable, spec.allow_non_restored)
    problems: list[str] = []
    bases = folder.bases(spec.restore_batch, spec.decided_batch)
    if spec.log_complete and spec.decided_batch > spec.restore_batch:
        bases.append(Base(spec.restore_batch, None, (), tuple(file for uid, file in spec.log if uid == operator.uid)))
    for base in bases:
        started = time.monotonic()
        try:
            backend, source = _open_base(spec, folder, base, durable, changed, memory)
        except (OSError, DamagedFileError) as error:
            if base.snapshot is None and not base.segments and not base.log:
                raise  # the checkpoint itself is damaged: nothing older can help here
            problems.append(str(error))
            continue
        finally:
            shutil.rmtree(folder.download(spec.incarnation), ignore_errors=True)
        duration_ms = (time.monotonic() - started) * 1000
        rebuilt = Rebuilt(operator.uid, source.local_bytes, source.durable_bytes, duration_ms, bool(changed))
        log.info("at batch %d, from batch %d: %s", spec.decided_batch, base.batch, rebuilt)
        return backend, rebuilt
    raise SegmentsLostError(
        f"job {spec.run.job}, operator {operator.uid}, subtask {spec.index}: the local files cannot bring the state to "
        f"batch {spec.decided_batch}{': ' + '; '.join(problems) if problems else ''}. The run goes back to its last "
        "completed checkpoint."
    )


def _open_base(
    spec: SlotSpec,
    folder: OperatorFolder,
    base: Base,
    durable: SubtaskState | None,
    changed: StateChanges,
    memory: RocksDBMemory | None,
) -> tuple[StateBackend, _Source]:
    source = _Source()
    files: list[RestoredFile] = []
    before: list[Path] = []
    """Segments of the restored checkpoint, written under its own declarations of states."""
    since: list[Path] = []
    if base.snapshot is not None:
        where = folder.snapshot(base.snapshot.checkpoint_id)
        for name, identity, size, shared in base.snapshot.files:
            if (where / name).stat().st_size != size:
                raise DamagedFileError(f"{where / name}: not {size} bytes")
            files.append(RestoredFile(name, where / name, identity, shared))
            source.local_bytes += size
    else:
        restored = durable.files if durable is not None else ()
        target = folder.download(spec.incarnation)
        fetched = _download(spec, durable, restored, spec.restore_storage or spec.run.storage, target)
        files = [one for file, one in zip(restored, fetched, strict=True) if not file.is_log]
        before = [one.path for file, one in zip(restored, fetched, strict=True) if file.is_log]
        if base.log:
            since = [one.path for one in _download(spec, durable, base.log, spec.run.storage, target / "log")]
        source.durable_bytes = sum(path.stat().st_size for path in (*(one.path for one in fetched), *since))
    since += base.segments
    source.local_bytes += sum(path.stat().st_size for path in base.segments)
    backend = open_backend(
        spec.backend.kind,
        folder.database(spec.incarnation),
        memory=memory,
        incremental=spec.backend.incremental,
        compression=spec.backend.compression,
        restored_files=files,
    )
    try:
        if changed and base.snapshot is None:
            _apply(backend, before)
            changed.apply(backend, spec.key_groups)
            _apply(backend, since)
        else:
            _apply(backend, before + since)
    except BaseException:
        backend.close()
        raise
    return backend, source


def _apply(backend: StateBackend, segments: Sequence[Path]) -> None:
    for keys, values in changes(segments):
        backend.apply(keys, values)


def _download(
    spec: SlotSpec, state: SubtaskState | None, files: Sequence[StateFile], place: StorageSettings, target: Path
) -> list[RestoredFile]:
    """Durable files, on local disk, each with the right size and checksum."""
    target.mkdir(parents=True, exist_ok=True)
    storage = open_storage(place.url, place.options)

    def fetch(position: int) -> RestoredFile:
        file = files[position]
        path = target / (f"{position}-{file.name}" if file.is_log else file.name)
        restored = RestoredFile(file.name, path, file.identity, file.shared)
        if file.handle is None:
            with disk_full_names(target):
                path.write_bytes(file.inline or b"")
            return restored
        whose = f"operator {state.operator}, subtask {state.subtask}" if state else f"slot {spec.index}"
        what = f"job {spec.run.job}, {whose}: {storage.url}/{file.handle.path}"
        advice = "Restore from another checkpoint, or bring the file back."
        try:
            with disk_full_names(target):
                fetch_file(storage, file.handle, path)
        except NotFoundError as error:
            raise DamagedFileError(f"{what} is missing, though the checkpoint needs it. {advice}") from error
        found = checksum(path)
        if path.stat().st_size != file.handle.size or found != file.handle.checksum:
            raise DamagedFileError(
                f"{what} is damaged: {path.stat().st_size} bytes with {found}, expected {file.handle.size} bytes with "
                f"{file.handle.checksum}. {advice}"
            )
        return restored

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(fetch, range(len(files))))


def fetch_file(storage: Storage, handle: FileHandle, target: Path) -> None:
    """Bring an uploaded file, or its part of one, to local disk."""
    place, path = located(storage, handle.path)
    if handle.whole:
        target.write_bytes(place.read_range(path, handle.offset, handle.size))
    else:
        place.download(path, target)


def check_states(
    operator: Operator, declared: Iterable[StateDescriptor], durable: SubtaskState | None, allow_non_restored: bool
) -> StateChanges:
    """What has to be done to a restored state so that it is as the operator declares it now.

    Raises `IncompatibleCheckpointError` where that cannot be; see `state_changes`.
    """
    deleted = operator.deleted_states
    before = durable.states if durable is not None else ()
    return state_changes(operator.uid, before, declared, lambda name: allow_non_restored or name in deleted)
