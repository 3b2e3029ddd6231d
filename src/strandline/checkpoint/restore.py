"""Decisions of a restore: whether the job fits the checkpoint, who gets which state, what sinks must undo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strandline.checkpoint.batch import generation_of
from strandline.checkpoint.job_log import WentBack
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile, SubtaskState
from strandline.errors import IncompatibleCheckpointError


def check_compatible(
    metadata: CheckpointMetadata,
    job: str,
    operators: Sequence[str],
    max_parallelism: int,
    any_job: bool = False,
    allow_non_restored: bool = False,
) -> None:
    """Raise `IncompatibleCheckpointError`, which says what differs, unless the job can restore the checkpoint.

    `any_job` accepts a checkpoint of a job with another name. `allow_non_restored` accepts state of operators that the
    job does not have. Operators without state in the checkpoint begin empty. Changes inside the states of an operator
    are not checked here.
    """
    what = f"{metadata.kind.capitalize()} {metadata.checkpoint_id}"
    if metadata.job != job and not any_job:
        raise IncompatibleCheckpointError(
            f"{what} belongs to job {metadata.job!r}, not to job {job!r}. Start the job under the name {metadata.job!r}"
            ", or choose a checkpoint of this job."
        )
    repeated = sorted(uid for uid, count in Counter(operators).items() if count > 1)
    if repeated:
        raise IncompatibleCheckpointError(
            f"Job {job!r}: the operator uids {_names(repeated)} are used more than once, so their state cannot be told "
            "apart. Give every stateful step its own uid=."
        )
    missing = left_out(metadata, operators)
    if missing and not allow_non_restored:
        added = sorted(set(operators) - set(metadata.operators))
        sides = [f"it has state of {_names(missing)}, which the job does not have"]
        if added:
            sides.append(f"the job has {_names(added)}, for which it has no state")
        if set(missing) == set(metadata.operators):
            sides.append("they have no step in common, so it may well be the checkpoint of another job")
        raise IncompatibleCheckpointError(
            f"{what} does not fit job {job!r}: {'; '.join(sides)}. If a step was renamed or moved, give it the uid it "
            "had with uid=; to go on without that state, start with allow_non_restored_state=True."
        )
    if metadata.max_parallelism != max_parallelism:
        raise IncompatibleCheckpointError(
            f"{what} of job {job!r} has max_parallelism={metadata.max_parallelism}, the job {max_parallelism}. It is "
            f"fixed for the life of a job's state: use max_parallelism={metadata.max_parallelism}, or start a new job."
        )


def left_out(metadata: CheckpointMetadata, operators: Iterable[str]) -> list[str]:
    """The operators of the checkpoint that the job does not have."""
    return sorted(set(metadata.operators) - set(operators))


def plan_restore(metadata: CheckpointMetadata) -> tuple[SubtaskState, ...]:
    """All states of the checkpoint. Raises `IncompatibleCheckpointError` unless they cover every key group once.

    A subtask needs the states that overlap its key groups, at any parallelism: see `overlapping`.
    """
    for operator in metadata.operators:
        expected = 0
        for state in sorted(_states_of(metadata, operator), key=lambda state: state.key_group_start):
            if state.key_group_start != expected:
                what = "lacks" if state.key_group_start > expected else "has twice"
                raise _incomplete(metadata, f"{what} key groups of operator {operator!r}, around {expected}")
            expected = state.key_group_end
        if expected != metadata.max_parallelism:
            raise _incomplete(metadata, f"lacks key groups of operator {operator!r}, from {expected} on")
    return metadata.subtasks


def overlapping(states: Iterable[SubtaskState], key_groups: range) -> list[SubtaskState]:
    """The states that hold some of `key_groups`. The state that holds most of them comes first."""
    found = [(shared, state) for state in states if (shared := len(common_groups(state, key_groups)))]
    return [state for _shared, state in sorted(found, key=lambda pair: -pair[0])]


def common_groups(state: SubtaskState, key_groups: range) -> range:
    """The part of `key_groups` that `state` holds; empty if it holds none."""
    first = max(state.key_group_start, key_groups.start)
    return range(first, max(first, min(state.key_group_end, key_groups.stop)))


@dataclass(frozen=True, slots=True)
class ListedSinkFile:
    """A file found in a sink's folder. `name` is its name as in `SinkFile`; `batch` is the batch id in that name."""

    sink: str
    name: str
    batch: int
    published: bool
    """True if readers see the file, False if it is staged."""

    @property
    def generation(self) -> int:
        """The generation that wrote the file."""
        return generation_of(self.batch)


@dataclass(frozen=True, slots=True)
class SinkRecovery:
    """The changes that make the sinks match the checkpoint a run starts from. All of them may be repeated."""

    publish: tuple[SinkFile, ...] = ()
    """Staged files that the checkpoint covers."""
    withdraw: tuple[ListedSinkFile, ...] = ()
    """Published files of batches after the checkpoint. The run produces their rows again."""
    discard: tuple[ListedSinkFile, ...] = ()
    """Staged files that no checkpoint covers."""
    missing: tuple[SinkFile, ...] = ()
    """Files that the checkpoint covers but that are neither staged nor published. They are lost: the run must stop."""
    unaccounted: tuple[ListedSinkFile, ...] = ()
    """Published files without any checkpoint that could have published them. The user must decide what they are."""

    @classmethod
    def plan(
        cls,
        metadata: CheckpointMetadata | None,
        listing: Iterable[ListedSinkFile],
        generation: int | None = None,
        went_back: Sequence[WentBack] = (),
    ) -> SinkRecovery:
        """Compare the files in the sinks with the checkpoint. Without a checkpoint nothing is withdrawn.

        `generation` is the one that recovers the sinks. It leaves alone what later generations wrote: a driver that
        was stopped for long may come here after others have taken over. `went_back` says which files earlier
        generations meant to withdraw. They may have missed some, because a store may list files late.
        """
        listed = [file for file in listing if generation is None or file.generation < generation]
        staged = {(file.sink, file.name): file for file in listed if not file.published}
        published = {(file.sink, file.name): file for file in listed if file.published}
        if metadata is None:
            return cls(discard=tuple(staged.values()), unaccounted=tuple(published.values()))
        covered = metadata.sink_files
        # Two sinks may name one folder in two ways, and no two files have the same name.
        names = {file.staged for file in covered}
        finals = {file.final for file in covered}
        return cls(
            publish=tuple(file for file in covered if (file.sink, file.staged) in staged),
            missing=tuple(
                file
                for file in covered
                if (file.sink, file.staged) not in staged and (file.sink, file.final) not in published
            ),
            discard=tuple(file for file in staged.values() if file.name not in names),
            withdraw=tuple(
                file
                for file in published.values()
                if file.name not in finals
                and (file.batch > metadata.batch_id or any(one.voids(file.batch) for one in went_back))
            ),
        )


def _states_of(metadata: CheckpointMetadata, operator: str) -> list[SubtaskState]:
    return [state for state in metadata.subtasks if state.operator == operator]


def _names(uids: Sequence[str]) -> str:
    return ", ".join(map(repr, uids))


def _incomplete(metadata: CheckpointMetadata, what: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"{metadata.kind.capitalize()} {metadata.checkpoint_id} of job {metadata.job!r} {what}. It cannot be restored: "
        "choose another retained checkpoint."
    )
