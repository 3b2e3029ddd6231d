"""The batch protocol: a batch commits once, completely, and never on stale work."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strandline.checkpoint import BatchProtocol, Round
from strandline.checkpoint.batch import BATCHES_PER_GENERATION, batch_id, first_batch, generation_of, is_of
from strandline.errors import CheckpointError, StaleAttemptError
from tests.examples import examples

SUBTASKS = [("count", 0), ("count", 1), ("join", 0), ("join", 1)]


def started(batch: int = 0) -> tuple[BatchProtocol[str], Round]:
    protocol: BatchProtocol[str] = BatchProtocol(SUBTASKS)
    for slot in (0, 1):
        protocol.slot_replaced(slot, 1)
    return protocol, protocol.begin(batch)


def prepare_all(protocol: BatchProtocol[str], round: Round, incarnation: int = 1) -> None:
    for operator, subtask in protocol.missing():
        protocol.prepared(operator, subtask, incarnation, round, "rows")


def apply_all(protocol: BatchProtocol[str], batch: int, incarnation: int = 1) -> None:
    for slot in (0, 1):
        protocol.applied(slot, incarnation, batch)


@settings(max_examples=examples(200))
@given(st.integers(0, 1 << 32), st.integers(-1, BATCHES_PER_GENERATION - 2))
def test_the_id_of_a_batch_belongs_to_one_generation(generation: int, number: int) -> None:
    batch = batch_id(generation, number)
    assert is_of(batch, generation)
    assert not is_of(batch, generation + 1)
    assert not is_of(batch, generation - 1)
    assert number == -1 or generation_of(batch) == generation


def test_a_number_that_would_be_the_id_of_another_generation_is_refused() -> None:
    for number in (-2, BATCHES_PER_GENERATION - 1, BATCHES_PER_GENERATION):
        with pytest.raises(CheckpointError, match="a generation has ids for 1,000,000,000 batches"):
            batch_id(3, number)


def test_a_batch_commits_when_everyone_is_prepared_and_the_action_has_finished() -> None:
    protocol, round = started(5)
    assert protocol.missing() == SUBTASKS
    prepare_all(protocol, round)
    assert not protocol.can_commit()
    with pytest.raises(CheckpointError, match="action on the rows has not finished"):
        protocol.commit()
    protocol.action_finished()
    assert protocol.can_commit()
    assert protocol.commit() == 5
    assert protocol.decided_batch == 5
    assert protocol.behind() == [0, 1]
    with pytest.raises(CheckpointError, match="not at batch 5"):
        protocol.begin(6)
    apply_all(protocol, 5)
    assert protocol.begin(6) == Round(1, 6, 0)


def test_a_subtask_that_is_not_prepared_keeps_the_batch_from_committing() -> None:
    protocol, round = started()
    protocol.prepared("count", 0, 1, round, "rows")
    protocol.action_finished()
    with pytest.raises(CheckpointError, match=r"not prepared: \[\('count', 1\)"):
        protocol.commit()


def test_the_first_attempt_of_a_round_wins() -> None:
    protocol, round = started()
    first = protocol.prepared("count", 0, 1, round, "ten rows", attempt=7)
    second = protocol.prepared("count", 0, 1, round, "eleven rows", attempt=9)
    assert (first.first, second.first) == (True, False)
    assert (second.attempt, second.outcome) == (7, "ten rows")
    assert protocol.outcome("count", 0) == second


def test_a_slot_replaced_during_a_round_makes_it_start_again() -> None:
    protocol, round = started()
    prepare_all(protocol, round)
    protocol.action_finished()
    assert protocol.slot_replaced(1, 2) == -1
    assert not protocol.can_commit()
    with pytest.raises(CheckpointError, match=r"cannot commit: slot 1 was replaced \(incarnation 1 by 2\)"):
        protocol.commit()
    with pytest.raises(CheckpointError, match="slots \\[1\\] are not at batch -1"):
        protocol.next_round()
    protocol.applied(1, 2, -1)
    again = protocol.next_round()
    assert again == Round(1, 0, 1)
    assert protocol.missing() == SUBTASKS
    with pytest.raises(StaleAttemptError, match="batch 0, round 0 of generation 1, but batch 0, round 1"):
        protocol.prepared("count", 0, 1, round, "rows")
    with pytest.raises(StaleAttemptError, match="was replaced by 2"):
        protocol.prepared("count", 1, 1, again, "rows")
    protocol.prepared("count", 1, 2, again, "rows")


def test_an_unheard_of_incarnation_is_a_replacement() -> None:
    protocol, round = started()
    with pytest.raises(StaleAttemptError, match="slot 0 was replaced"):
        protocol.prepared("count", 0, 2, round, "rows")
    assert protocol.behind() == [0]


def test_the_first_incarnation_of_a_slot_is_no_replacement() -> None:
    protocol: BatchProtocol[str] = BatchProtocol(SUBTASKS)
    round = protocol.begin(0)
    prepare_all(protocol, round, incarnation=4)
    protocol.action_finished()
    assert protocol.can_commit()


def test_a_slot_lost_after_the_decision_is_rebuilt_to_it() -> None:
    protocol, round = started(3)
    prepare_all(protocol, round)
    protocol.action_finished()
    protocol.commit()
    apply_all(protocol, 3)
    assert protocol.slot_replaced(0, 2) == 3
    assert protocol.behind() == [0]
    protocol.applied(0, 1, 3)
    protocol.applied(0, 2, 2)
    assert protocol.behind() == [0], "neither the old incarnation's word nor an older batch counts"
    protocol.applied(0, 2, 3)
    protocol.begin(4)


def test_a_failed_action_needs_another_round() -> None:
    protocol, round = started()
    prepare_all(protocol, round)
    protocol.action_failed()
    protocol.action_finished()
    assert not protocol.can_commit()
    prepare_all(protocol, protocol.next_round())
    protocol.action_finished()
    assert protocol.commit() == 0


def test_a_batch_id_never_goes_back_and_is_never_used_twice() -> None:
    protocol, _ = started(5)
    for batch in (5, 4):
        with pytest.raises(StaleAttemptError, match="never used twice"):
            protocol.begin(batch)
    with pytest.raises(CheckpointError, match="batch 5 is not decided"):
        protocol.begin(6)
    restored: BatchProtocol[str] = BatchProtocol(SUBTASKS, generation=2, last_batch=9)
    with pytest.raises(StaleAttemptError):
        restored.begin(9)
    assert first_batch(3) > first_batch(2) + 10**8


def test_another_generation_and_an_unknown_subtask_are_refused() -> None:
    protocol, round = started()
    with pytest.raises(StaleAttemptError, match="generation 0"):
        protocol.prepared("count", 0, 1, round._replace(generation=0), "rows")
    with pytest.raises(StaleAttemptError, match="no such subtask"):
        protocol.prepared("count", 7, 1, round, "rows")


class BatchMachine(RuleBasedStateMachine):
    """Real slots: each knows what it holds prepared, dies, and is rebuilt. State is the list of batches it applied."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: BatchProtocol[tuple[Round, int]] = BatchProtocol(SUBTASKS)
        self.incarnations = {0: 1, 1: 1}
        self.reported = {0: 1, 1: 1}
        for slot in (0, 1):
            self.protocol.slot_replaced(slot, 1)
        self.batch = 0
        self.round: Round | None = None
        self.rounds: list[Round] = []
        self.committed: list[int] = []
        # (operator, subtask) -> the round and incarnation that the live slot holds prepared
        self.held: dict[tuple[str, int], tuple[Round, int]] = {}
        self.finished = False
        self.failed = False
        self.spoiled = False

    def open_round(self, round: Round) -> None:
        assert round not in self.rounds
        self.round = round
        self.rounds.append(round)
        self.held.clear()
        self.finished = self.failed = False
        self.spoiled = False

    @precondition(lambda self: self.round is None and not self.protocol.behind())
    @rule(skip=st.integers(1, 3))
    def begin(self, skip: int) -> None:
        self.batch += skip
        self.open_round(self.protocol.begin(self.batch))

    @precondition(lambda self: bool(self.rounds))
    @rule(back=st.integers(-3, 0))
    def begin_an_old_batch(self, back: int) -> None:
        with pytest.raises(StaleAttemptError):
            self.protocol.begin(self.batch + back)

    @precondition(lambda self: self.round is not None)
    @rule(who=st.sampled_from(SUBTASKS), attempt=st.integers(0, 5))
    def prepare(self, who: tuple[str, int], attempt: int) -> None:
        assert self.round is not None
        incarnation = self.incarnations[who[1]]
        if incarnation != self.reported[who[1]]:
            # The slot's own word is the first that the coordinator hears of the loss.
            self.reported[who[1]] = incarnation
            self.spoiled = True
        if self.spoiled or self.failed:
            with pytest.raises(StaleAttemptError):
                self.protocol.prepared(*who, incarnation, self.round, (self.round, attempt), attempt)
            return
        answer = self.protocol.prepared(*who, incarnation, self.round, (self.round, attempt), attempt)
        assert answer.first == (who not in self.held)
        assert answer.outcome[0] == self.round
        self.held.setdefault(who, (self.round, incarnation))

    @precondition(lambda self: self.round is not None)
    @rule()
    def prepare_everything(self) -> None:
        for who in SUBTASKS:
            self.prepare(who, 0)

    @precondition(lambda self: self.round is None)
    @rule(lost=st.none() | st.sampled_from([0, 1]))
    def run_a_whole_batch(self, lost: int | None) -> None:
        """From a state where everyone is at the decided batch to a decision, with a slot lost in the middle perhaps."""
        for slot in (0, 1):
            self.come_to_the_decided_batch(slot)
        self.begin(1)
        self.prepare_everything()
        self.end_the_action(fails=False)
        if lost is not None:
            self.lose_a_slot(lost, heard=True)
            self.commit()
            self.come_to_the_decided_batch(lost)
            self.next_round()
            self.prepare_everything()
            self.end_the_action(fails=False)
        self.commit()
        assert self.committed[-1] == self.batch

    @precondition(lambda self: len(self.committed) > 1)
    @rule(slot=st.sampled_from([0, 1]), back=st.integers(2, 4))
    def an_old_report_of_applying_changes_nothing(self, slot: int, back: int) -> None:
        before = self.protocol.behind()
        self.protocol.applied(slot, self.reported[slot], self.committed[-min(back, len(self.committed))])
        self.protocol.applied(slot, self.reported[slot] - 1, self.committed[-1])
        assert self.protocol.behind() == before

    @precondition(lambda self: bool(self.rounds))
    @rule(who=st.sampled_from(SUBTASKS), data=st.data())
    def a_stale_prepare_is_refused(self, who: tuple[str, int], data: st.DataObject) -> None:
        round = data.draw(st.sampled_from(self.rounds))
        incarnation = data.draw(st.integers(0, self.reported[who[1]]))
        if round == self.round and incarnation == self.reported[who[1]]:
            return
        with pytest.raises(StaleAttemptError):
            self.protocol.prepared(*who, incarnation, round, (round, 99), 99)

    @rule(slot=st.sampled_from([0, 1]), heard=st.booleans())
    def lose_a_slot(self, slot: int, heard: bool) -> None:
        """The slot dies and is replaced at once; the coordinator hears of it now, or with the slot's next word."""
        self.incarnations[slot] += 1
        if heard:
            self.hear(slot)

    @rule(slot=st.sampled_from([0, 1]))
    def hear(self, slot: int) -> None:
        target = self.protocol.slot_replaced(slot, self.incarnations[slot])
        if self.round is not None and self.reported[slot] != self.incarnations[slot]:
            self.spoiled = True
        self.reported[slot] = self.incarnations[slot]
        assert target == (self.committed[-1] if self.committed else -1)

    @rule(slot=st.sampled_from([0, 1]))
    def come_to_the_decided_batch(self, slot: int) -> None:
        self.hear(slot)
        self.protocol.applied(slot, self.incarnations[slot], self.protocol.decided_batch)
        assert slot not in self.protocol.behind()

    @precondition(lambda self: self.round is not None)
    @rule(fails=st.booleans())
    def end_the_action(self, fails: bool) -> None:
        if fails:
            self.protocol.action_failed()
            self.failed = True
        else:
            self.protocol.action_finished()
            self.finished = True

    @precondition(lambda self: self.round is not None and not self.protocol.behind())
    @rule()
    def next_round(self) -> None:
        for slot in (0, 1):
            self.hear(slot)
            self.protocol.applied(slot, self.incarnations[slot], self.protocol.decided_batch)
        self.open_round(self.protocol.next_round())

    @precondition(lambda self: self.round is not None)
    @rule()
    def commit(self) -> None:
        assert self.round is not None
        complete = self.finished and not self.failed and len(self.held) == len(SUBTASKS)
        if not complete or self.spoiled:
            assert not self.protocol.can_commit()
            with pytest.raises(CheckpointError):
                self.protocol.commit()
            return
        assert self.protocol.can_commit()
        batch = self.protocol.commit()
        assert batch == self.round.batch
        assert batch not in self.committed
        assert {round for round, _ in self.held.values()} == {self.round}
        for (_, slot), (_, incarnation) in self.held.items():
            # A loss nobody has heard of yet leaves the decision right: the slot is rebuilt to it.
            assert incarnation == self.reported[slot]
        self.committed.append(batch)
        event("a batch commits")
        self.round = None
        with pytest.raises(CheckpointError):
            self.protocol.commit()

    @invariant()
    def batches_only_go_up(self) -> None:
        assert self.committed == sorted(set(self.committed))
        assert self.protocol.decided_batch == (self.committed[-1] if self.committed else -1)


BatchMachine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=50, deadline=None)
TestBatchMachine = BatchMachine.TestCase
