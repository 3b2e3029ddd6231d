"""Where the files of a checkpoint may be, and which names they may have.

A checkpoint folder may be crafted. Names and paths in `_metadata` become local files that are written and durable files
that are deleted, so `Home.check` refuses all that do not lie where this release puts them. Only `metadata.decode` makes
metadata from bytes, and it checks every time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile, SourcePosition, SubtaskState

NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,250}"
"""A single component of a path. No name is `.`, `..` or `_metadata`, and none is a temporary file."""
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_FOLDER = rf"(?:shared|chk-{_NUMBER}|epochs/{_NUMBER})"
_STATE_NAME = re.compile(rf"{NAME}\n", re.ASCII)
_SEGMENT_NAME = re.compile(r"[0-9]{20}\.segment\n", re.ASCII)
_SOURCE_NAME = re.compile(rf"metadata|(?:offsets|commits)/{_NUMBER}|sources/{_NUMBER}/.+", re.ASCII | re.DOTALL)
_MAX_COMPONENT = 255
_MAX_LENGTH = 1000


class Refused(ValueError):
    """A name or a path leads out of the checkpoint's home. The message is a part of a sentence."""


@dataclass(frozen=True, slots=True)
class Home:
    """The place that a checkpoint was read from. It decides which names and paths the checkpoint may contain."""

    job: str | None
    """The job whose folder holds the checkpoint; None for a savepoint, whose files lie beside its `_metadata`."""
    checkpoint_id: int | None = None
    """The id in the name of the checkpoint's folder; None for a savepoint."""
    others: tuple[str, ...] | None = ()
    """The roots of the other storages that may hold files of the job, such as `changelog_dir`. None accepts every
    root, and also a folder that was renamed. It is for callers that open no file."""

    def check(self, metadata: CheckpointMetadata) -> None:
        """Raise `Refused` unless every name and every path in `metadata` stays at home."""
        for state in metadata.subtasks:
            _check_groups(state, metadata.max_parallelism)
            _check_names(state)
        _check_paths(metadata, self._pattern(), self._advice())
        check_source(metadata.source)
        _check_steps(metadata)
        for file in metadata.sink_files:
            _check_sink_file(file)

    def _pattern(self) -> re.Pattern[str]:
        if self.job is None:
            return re.compile(rf"{NAME}\n", re.ASCII)
        if self.others is None:
            return re.compile(rf"(?:[^\n]+//)?[^/\n]+/{_FOLDER}/{NAME}\n", re.ASCII)
        roots = "|".join(re.escape(f"{root}//") for root in self.others)
        return re.compile(rf"(?:{roots}|){re.escape(self.job)}/{_FOLDER}/{NAME}\n", re.ASCII)

    def _advice(self) -> str:
        if self.job is None:
            return "the files of a savepoint lie beside its _metadata"
        places = [f"{self.job}/shared", f"{self.job}/chk-N", f"{self.job}/epochs/N", *(self.others or ())]
        return (
            f"its files may lie in {', '.join(places)}. If the other place is yours, name it with changelog_dir or "
            "trusted_dirs (--changelog-dir on the command line)"
        )


def _check_groups(state: SubtaskState, max_parallelism: int) -> None:
    if not state.key_group_start <= state.key_group_end <= max_parallelism:
        raise Refused(
            f"subtask {state.subtask} of {state.operator!r} has key groups {state.key_group_start} to "
            f"{state.key_group_end} of {max_parallelism}"
        )


def _check_names(state: SubtaskState) -> None:
    names = [file.name for file in state.files]
    wrong = _first_mismatch(_STATE_NAME, names)
    if wrong is None:
        wrong = _first_mismatch(_SEGMENT_NAME, [name for name in names if name.endswith(".segment")])
    if wrong is not None:
        raise Refused(f"{wrong!r} cannot be the name of a state file, which is a single plain file name")
    if len(set(names)) < len(names):
        single = [file.name for file in state.files if not file.is_segment]
        if len(set(single)) < len(single):
            raise Refused(f"two state files of subtask {state.subtask} of {state.operator!r} have the same name")


def _check_paths(metadata: CheckpointMetadata, pattern: re.Pattern[str], advice: str) -> None:
    handles = [handle for state in metadata.subtasks for file in state.files if (handle := file.handle) is not None]
    handles += [piece.handle for log in metadata.source.logs for piece in log.pieces]
    wrong = _first_mismatch(pattern, [handle.path for handle in handles])
    if wrong is not None:
        raise Refused(f"{wrong!r} is a path that leads elsewhere; {advice}")
    for handle in handles:
        if handle.whole and handle.offset + handle.size > handle.whole:
            raise Refused(f"{handle.path!r} has a part that ends behind the end of the file")


def _first_mismatch(pattern: re.Pattern[str], texts: list[str]) -> str | None:
    """The first text that, with a line feed behind it, is not a match. A million texts take a fraction of a second."""
    lines = "\n".join(chain(texts, ("",)))
    if lines.count("\n") == len(texts) and re.fullmatch(rf"(?:{pattern.pattern})*+", lines, pattern.flags):
        return None
    return next(text for text in texts if not pattern.fullmatch(f"{text}\n"))


def check_source(source: SourcePosition) -> None:
    """Raise `Refused` if a file of the position cannot be one of Spark's checkpoint folder."""
    folders: set[str] = set()
    names = [*source.files, *(f"sources/{log.source}/{name}" for log in source.logs for name, _length in log.entries)]
    if len(set(names)) < len(names):
        raise Refused("two files of the source's position have the same name")
    pieces = [piece.handle.path for log in source.logs for piece in log.pieces]
    if len(set(pieces)) < len(pieces):
        raise Refused("two pieces of a source's log are the same file")
    for log in source.logs:
        if sum(length for _name, length in log.entries) != sum(piece.length for piece in log.pieces) + len(log.rest):
            raise Refused(f"the entries of the log of source {log.source} do not have the length of the log")
    for name in names:
        parts = name.split("/")
        if (
            not _SOURCE_NAME.fullmatch(name)
            or not name.isprintable()
            or len(name.encode()) > _MAX_LENGTH
            or not all(_is_component(part) for part in parts)
        ):
            raise Refused(f"{name!r} cannot be a file of a source's position, such as offsets/7 or sources/0/7")
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    both = next(iter(folders.intersection(names)), None)
    if both is not None:
        raise Refused(f"the source's position has a file and a folder with the name {both!r}")


def _check_steps(metadata: CheckpointMetadata) -> None:
    described = [step.operator for step in metadata.steps]
    if len(set(described)) < len(described) or not set(described) <= set(metadata.operators):
        raise Refused(f"it describes the steps {described}, but has state of {list(metadata.operators)}")


def _check_sink_file(file: SinkFile) -> None:
    for path in (file.staged, *([file.final] if file.final else [])):
        if not path.isprintable() or len(path.encode()) > _MAX_LENGTH or not all(map(_is_component, path.split("/"))):
            raise Refused(f"{path!r} cannot be the path of a file in the folder of a sink")


def _is_component(part: str) -> bool:
    return part not in ("", ".", "..") and "\\" not in part and len(part.encode()) <= _MAX_COMPONENT
