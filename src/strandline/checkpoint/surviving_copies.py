"""Lets a checkpoint refer to the first copy of a file that was uploaded more than once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from strandline.checkpoint.metadata import FileHandle, SourcePosition, SubtaskState, file_key, source_key
from strandline.checkpoint.registry import SharedKey


def states_with_copies(
    states: Iterable[SubtaskState], handles: Mapping[SharedKey, FileHandle]
) -> Iterable[SubtaskState]:
    """Copies of `states` in which the files with the given keys refer to the given handles."""
    touched = {(key.operator, key.key_group_start, key.key_group_end) for key in handles}
    for state in states:
        if (state.operator, state.key_group_start, state.key_group_end) not in touched:
            yield state
            continue
        files = []
        for file in state.files:
            handle = handles.get(file_key(state, file)) if file.handle is not None else None
            files.append(file if handle is None else msgspec.structs.replace(file, handle=handle))
        yield msgspec.structs.replace(state, files=tuple(files))


def position_with_copies(position: SourcePosition, handles: Mapping[SharedKey, FileHandle]) -> SourcePosition:
    """A copy of `position` in which the pieces with the given keys refer to the given handles."""
    logs = []
    for log in position.logs:
        pieces = [
            msgspec.structs.replace(piece, handle=handles.get(source_key(log, piece), piece.handle))
            for piece in log.pieces
        ]
        logs.append(msgspec.structs.replace(log, pieces=tuple(pieces)))
    return msgspec.structs.replace(position, logs=tuple(logs))
