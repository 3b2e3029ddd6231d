"""The commit protocol of a micro-batch: every subtask prepares, then one decision commits the batch exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from strandline.checkpoint.pending import Subtask
from strandline.errors import CheckpointError, StaleAttemptError

O = TypeVar("O")  # noqa: E741 - the outcome of an attempt

BATCHES_PER_GENERATION = 1_000_000_000


def first_batch(generation: int) -> int:
    """The first batch id of a generation. It is greater than every id of earlier generations."""
    return generation * BATCHES_PER_GENERATION


def batch_id(generation: int, number: int) -> int:
    """The id of a batch: its number within the range of the generation, so that no id is used twice.

    The number -1 is that of the batch with initial state. Raises `CheckpointError` if the range is used up.
    """
    if not -1 <= number < BATCHES_PER_GENERATION - 1:
        raise CheckpointError(
            f"batch {number} of generation {generation}: a generation has ids for {BATCHES_PER_GENERATION:,} batches. "
            "In real time a restart begins with 0 again; otherwise start the job under another name from a savepoint."
        )
    return first_batch(generation) + number


def numbered(batch: int) -> tuple[int, int]:
    """The generation of a batch, and its number there; the batch with initial state has the number -1."""
    generation, above = divmod(batch + 1, BATCHES_PER_GENERATION)
    return generation, above - 1


def is_of(batch: int, generation: int) -> bool:
    """Whether a batch, which may be that with initial state, is one of the generation."""
    return 0 <= batch - first_batch(generation) + 1 < BATCHES_PER_GENERATION


def generation_of(batch: int) -> int:
    """The generation of a batch that Spark called for."""
    return batch // BATCHES_PER_GENERATION


class Round(NamedTuple):
    """One attempt to prepare and commit a batch. A message about a round that is not the current one is stale."""

    generation: int
    batch: int
    number: int


@dataclass(frozen=True, slots=True)
class PreparedSubtask(Generic[O]):
    """The first task attempt that prepared a subtask in this round. Later attempts get the same outcome."""

    attempt: int
    incarnation: int
    outcome: O
    first: bool
    """Whether the call that returned this value also recorded it."""


class BatchProtocol(Generic[O]):
    """The state machine of batches in one generation.

    A batch commits only if every subtask of every operator is prepared in the current round, the action on the rows has
    finished, and no slot was replaced since the round began. The rows of a lost slot may have reached other slots and
    the sink, so one slot cannot repeat its part alone. If a round cannot commit, the next round prepares every subtask
    again. After the decision no subtask is prepared again; a lost slot is rebuilt to the decided batch.

    Slot i hosts subtask i of every operator. `last_batch` is the last committed batch when the generation begins.
    """

    def __init__(self, subtasks: Sequence[Subtask], generation: int = 1, last_batch: int = -1) -> None:
        self._subtasks = tuple(sorted(set(subtasks)))
        self._known = frozenset(self._subtasks)
        self._slots = frozenset(index for _, index in self._subtasks)
        self._generation = generation
        self._decided = last_batch
        self._round: Round | None = None
        self._open = False
        self._prepared: dict[Subtask, PreparedSubtask[O]] = {}
        self._incarnations: dict[int, int] = {}
        self._behind: set[int] = set()
        self._spoiled: str | None = None
        self._finished = False

    @property
    def decided_batch(self) -> int:
        """The newest decided batch. Every slot must apply it."""
        return self._decided

    @property
    def round(self) -> Round | None:
        """The current round; None before the first batch and after a decision."""
        return self._round if self._open else None

    def begin(self, batch: int) -> Round:
        """Begin the first round of a batch.

        Raises `StaleAttemptError` if the id is not greater than all earlier ids. Raises `CheckpointError` if the
        previous batch is not decided, or some slot has not applied it.
        """
        newest = self._decided if self._round is None else max(self._decided, self._round.batch)
        if batch <= newest:
            raise StaleAttemptError(
                f"Batch {batch} cannot begin: batch {newest} has begun in generation {self._generation}, and a batch "
                "id is never used twice. Restart the run from its last completed checkpoint."
            )
        if self._open:
            raise CheckpointError(
                f"Batch {batch} cannot begin: batch {newest} is not decided. Commit it, or restart the run."
            )
        return self._begin_round(Round(self._generation, batch, 0))

    def next_round(self) -> Round:
        """Give up the current round and begin the next round of the same batch. Every subtask prepares again.

        Raises `CheckpointError` if no batch is open, or a replaced slot is not rebuilt to the decided batch yet.
        """
        current = self._current()
        return self._begin_round(current._replace(number=current.number + 1))

    def prepared(
        self, operator: str, subtask: int, incarnation: int, round: Round, outcome: O, attempt: int = 0
    ) -> PreparedSubtask[O]:
        """Record that an attempt has prepared a subtask completely, in incarnation `incarnation` of its slot.

        The first attempt of a round wins. The result holds the winner's outcome, and `first` if this call recorded it.
        Raises `StaleAttemptError` for another round, an older incarnation, or a round that cannot commit any more.
        """
        who = f"Operator {operator!r}, subtask {subtask}, attempt {attempt}"
        if (operator, subtask) not in self._known:
            raise StaleAttemptError(
                f"{who}: this job has no such subtask, so the attempt belongs to another run. It is refused."
            )
        if not self._open or round != self._round:
            raise StaleAttemptError(
                f"{who}: prepared for {_text(round)}, but {_text(self.round)} is current. The result is refused; "
                "the current round prepares the subtask again."
            )
        known = self._incarnations.get(subtask)
        if known is not None and incarnation < known:
            raise StaleAttemptError(
                f"{who}: prepared in incarnation {incarnation} of slot {subtask}, which was replaced by {known}. The "
                "result is refused; the next round prepares the subtask again."
            )
        if known != incarnation:
            self.slot_replaced(subtask, incarnation)
        if self._spoiled is not None:
            raise StaleAttemptError(
                f"{who}: {self._spoiled} during {_text(round)}, so the round cannot commit. Begin the next."
            )
        record = self._prepared.get((operator, subtask))
        if record is not None:
            return PreparedSubtask(record.attempt, record.incarnation, record.outcome, first=False)
        self._prepared[operator, subtask] = PreparedSubtask(attempt, incarnation, outcome, first=False)
        return PreparedSubtask(attempt, incarnation, outcome, first=True)

    def slot_replaced(self, index: int, incarnation: int) -> int:
        """Record the newest incarnation of slot `index`; returns the batch that its state must be rebuilt to.

        The first incarnation is not a replacement. Repeated reports and older incarnations change nothing.
        """
        known = self._incarnations.get(index)
        if known is None:
            self._incarnations[index] = incarnation
        elif incarnation > known:
            self._incarnations[index] = incarnation
            self._behind.add(index)
            if self._open:
                self._spoiled = f"slot {index} was replaced (incarnation {known} by {incarnation})"
        return self._decided

    def action_failed(self) -> None:
        """Record that the action on the batch's rows failed. The round cannot commit any more."""
        self._current()
        if self._spoiled is None:
            self._spoiled = "the action on the rows failed"

    def action_finished(self) -> None:
        """Record that the action on the batch's rows has finished."""
        self._current()
        self._finished = True

    def outcome(self, operator: str, subtask: int) -> PreparedSubtask[O] | None:
        """The attempt that prepared a subtask in the current round, if one has."""
        return self._prepared.get((operator, subtask))

    def missing(self) -> list[Subtask]:
        """The subtasks that are not prepared in the current round."""
        if not self._open:
            return []
        return [subtask for subtask in self._subtasks if subtask not in self._prepared]

    def can_commit(self) -> bool:
        """Whether the current round may be decided now."""
        return self._open and self._finished and self._spoiled is None and len(self._prepared) == len(self._subtasks)

    def commit(self) -> int:
        """Decide the open batch and return its id. Every slot must now apply it.

        Raises `CheckpointError`, with the reason, if the round cannot commit.
        """
        current = self._current()
        if not self.can_commit():
            why = self._spoiled
            if why is None:
                why = (
                    "the action on the rows has not finished"
                    if not self._finished
                    else f"not prepared: {self.missing()}"
                )
            raise CheckpointError(f"{_text(current)} cannot commit: {why}.")
        self._open = False
        self._decided = current.batch
        self._behind.update(self._slots)
        return current.batch

    def applied(self, index: int, incarnation: int, batch: int) -> None:
        """Record that a slot has applied `batch`. A report about an older batch or incarnation changes nothing."""
        if batch == self._decided and self._incarnations.get(index, incarnation) == incarnation:
            self._behind.discard(index)

    def behind(self) -> list[int]:
        """The slots that have not reported that they applied the decided batch."""
        return sorted(self._behind)

    def _current(self) -> Round:
        if not self._open or self._round is None:
            raise CheckpointError(f"No batch is open: batch {self._decided} is decided. Begin the next one first.")
        return self._round

    def _begin_round(self, round: Round) -> Round:
        if self._behind:
            raise CheckpointError(
                f"{_text(round)} cannot begin: slots {sorted(self._behind)} are not at batch {self._decided}. "
                "Let them apply it, or rebuild them to it, first."
            )
        self._round = round
        self._open = True
        self._prepared = {}
        self._spoiled = None
        self._finished = False
        return round


def _text(round: Round | None) -> str:
    if round is None:
        return "no batch"
    return f"batch {round.batch}, round {round.number} of generation {round.generation}"
