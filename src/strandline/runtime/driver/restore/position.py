"""The position in the sources, copied from Spark's checkpoint folder and into a fresh one.

Spark's folder is scratch. At a barrier the entries of the last committed batch are copied into our checkpoint. A
restore seeds a fresh folder with them, and Spark continues with the next batch. The old folder is never edited.

Private Spark API: the format of Spark's offset log, commit log and source logs is internal. Spark offers no public way
to start a query at the offsets of another one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from strandline.checkpoint.metadata import SourceLog, SourcePosition, Times
from strandline.errors import CheckpointError, IncompatibleCheckpointError
from strandline.runtime.driver.restore.source_logs import named_log
from strandline.runtime.driver.restore.tick_offset import FIRST_TICK, is_tick

_LOG_ENTRY = re.compile(r"(\d+)(\.compact)?")
_HEADER = 2
"""How many lines of an offset log entry come before those of the sources."""
_FIRST_COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'


def capture(folder: Path, batch: int, places: Sequence[int] = (), times: Times | None = None) -> SourcePosition:
    """The position after Spark's batch `batch`, read from Spark's checkpoint folder; `times` are those of that batch.

    `places` names the source of each line of an offset log entry; see `Graph.source_places`. The position has one line
    for every source, in the order of the sources. Without `places`, each line is a source of its own.

    The logs of file sources are named, but not read: they may be long, and the caller holds up commits. Their files do
    not change any more, so `SourceLogs.store` reads them later.
    """
    files: dict[str, bytes] = {}
    logs: list[SourceLog] = []
    for number in (batch - 1, batch):
        path = folder / "offsets" / str(number)
        if path.exists():
            files[f"offsets/{number}"] = _gathered(path.read_bytes(), places)
    offsets = files.get(f"offsets/{batch}")
    if offsets is None:
        raise CheckpointError(f"Spark's offset log in {folder} has no entry for batch {batch}")
    earlier = folder / "commits" / str(batch - 1)
    files[f"commits/{batch}"] = earlier.read_bytes() if earlier.exists() else _FIRST_COMMIT
    lines = offsets.decode().split("\n")[_HEADER:]
    for number, source in enumerate(dict.fromkeys(places) or range(len(lines))):
        own = folder / "sources" / str(number)
        entries, others = _source_files(own, lines[source])
        log = named_log(source, entries)
        for path in others if log is not None else [*others, *entries]:
            files[f"sources/{source}/{path.relative_to(own).as_posix()}"] = path.read_bytes()
        if log is not None and entries:
            logs.append(log)
    return SourcePosition(batch=batch, files=files, logs=tuple(logs), times=times)


def _gathered(entry: bytes, places: Sequence[int]) -> bytes:
    """An offset log entry with one line for every source, and the line of the tick source if there is one."""
    if not places:
        return entry
    lines = entry.decode().split("\n")
    sources = [lines[_HEADER + places.index(source)] for source in range(max(places) + 1)]
    return "\n".join([*lines[:_HEADER], *sources, *lines[_HEADER + len(places) :]]).encode()


def _source_files(folder: Path, offset: str) -> tuple[list[Path], list[Path]]:
    """The files of a source: the entries of its log from the last compacted one up to `offset`, and all other files."""
    if not folder.is_dir():
        return [], []
    last = _log_offset(offset)
    entries: dict[int, list[Path]] = {}
    others: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name.startswith("."):
            continue
        match = _LOG_ENTRY.fullmatch(path.name) if path.parent == folder else None
        if match is None or last is None:
            others.append(path)
        elif int(match[1]) <= last:
            entries.setdefault(int(match[1]), []).append(path)
    compacted = [number for number, paths in entries.items() if any(path.suffix == ".compact" for path in paths)]
    first = max(compacted, default=0)
    return [path for number, paths in sorted(entries.items()) if number >= first for path in paths], others


def _log_offset(offset: str) -> int | None:
    try:
        value = json.loads(offset)
    except ValueError:
        return None
    log = value.get("logOffset") if isinstance(value, dict) else None
    return log if isinstance(log, int) else None  # Kafka's offsets have the names of topics there


def seed(position: SourcePosition, folder: Path, *, ticks: bool, places: Sequence[int] = ()) -> None:
    """Fill a fresh checkpoint folder, so that Spark continues with the batch after `position`.

    `ticks` says whether the new query has a tick source; the query that the position comes from may differ in this.
    `places` describes the new query; see `capture`. All logs must be among the files; see `with_logs`. Raises
    `IncompatibleCheckpointError` if the position has another number of sources.
    """
    folders = {str(source): str(number) for number, source in enumerate(dict.fromkeys(places))}
    for name, data in {**position.files, "metadata": json.dumps({"id": str(uuid.uuid4())}).encode()}.items():
        kind, _, rest = name.partition("/")
        if kind == "offsets":
            data = _spread(data, ticks, places)
        elif kind == "sources" and folders:
            source, _, file = rest.partition("/")
            name = f"sources/{folders.get(source, source)}/{file}"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _spread(entry: bytes, ticks: bool, places: Sequence[int]) -> bytes:
    """An offset log entry with a line for every place at which the query reads a source, and for its tick source."""
    try:
        lines = entry.decode().split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the checkpoint's position in the sources is damaged: {error}") from error
    header, sources = lines[:_HEADER], lines[_HEADER:]
    tick = sources.pop() if sources and is_tick(sources[-1]) else FIRST_TICK
    if places:
        if len(sources) != max(places) + 1:
            raise IncompatibleCheckpointError(
                f"the checkpoint has the positions of {len(sources)} sources, the job reads {max(places) + 1}. A job "
                "that restores must have the same sources, with job.source() called in the same order."
            )
        sources = [sources[source] for source in places]
    return "\n".join([*header, *sources, *([tick] if ticks else [])]).encode()
