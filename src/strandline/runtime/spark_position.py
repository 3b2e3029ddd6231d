"""The position in the input stream: what Spark's own checkpoint folder says about one batch, taken out and put back.

Spark's folder is scratch. At a barrier the entries that describe the batch are copied into our checkpoint; a restore
seeds a fresh folder with them, and Spark goes on with the batch after it. The old folder is never edited.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from pathlib import Path

import msgspec

from strandline.checkpoint.metadata import SourcePosition
from strandline.errors import CheckpointError
from strandline.runtime.clock import FIRST_TICK, is_tick

_LOG_ENTRY = re.compile(r"(\d+)(\.compact)?")
_FIRST_COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'


def capture(folder: Path, batch: int) -> SourcePosition:
    """The position after Spark's batch `batch`, from its checkpoint folder."""
    files: dict[str, bytes] = {}
    for number in (batch - 1, batch):
        path = folder / "offsets" / str(number)
        if path.exists():
            files[f"offsets/{number}"] = path.read_bytes()
    offsets = files.get(f"offsets/{batch}")
    if offsets is None:
        raise CheckpointError(f"Spark's offset log in {folder} has no entry for batch {batch}")
    earlier = folder / "commits" / str(batch - 1)
    files[f"commits/{batch}"] = earlier.read_bytes() if earlier.exists() else _FIRST_COMMIT
    for number, offset in enumerate(offsets.decode().split("\n")[2:]):
        for path in _source_files(folder / "sources" / str(number), offset):
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return SourcePosition(batch=batch, files=files)


def with_watermark(folder: Path, position: SourcePosition, patience: float) -> SourcePosition:
    """The position with the watermark that follows from its own batch.

    At a barrier Spark may not have noted it; it does once the batch function has returned, so it is waited for.
    """
    name = f"commits/{position.batch}"
    path = folder / name
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() >= deadline:
            return position
        time.sleep(0.005)
    return msgspec.structs.replace(position, files={**position.files, name: path.read_bytes()})


def _source_files(folder: Path, offset: str) -> list[Path]:
    """A source's own log: entries up to its offset, from the last compacted one on; other files as they are."""
    if not folder.is_dir():
        return []
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
    return others + [path for number, paths in sorted(entries.items()) if number >= first for path in paths]


def _log_offset(offset: str) -> int | None:
    try:
        value = json.loads(offset)
    except ValueError:
        return None
    return value.get("logOffset") if isinstance(value, dict) else None


def seed(position: SourcePosition, folder: Path, *, ticks: bool) -> None:
    """Fill a fresh checkpoint folder, so that Spark goes on with the batch after `position`.

    `ticks` says whether the query has a tick source, which comes last: the job may have had none, or not need it now.
    """
    for name, data in {**position.files, "metadata": json.dumps({"id": str(uuid.uuid4())}).encode()}.items():
        if name.startswith("offsets/"):
            data = _with_ticks(data, ticks)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _with_ticks(offsets: bytes, ticks: bool) -> bytes:
    lines = offsets.decode().split("\n")
    there = len(lines) > 2 and is_tick(lines[-1])
    if ticks and not there:
        lines.append(FIRST_TICK)
    elif there and not ticks:
        lines.pop()
    return "\n".join(lines).encode()
