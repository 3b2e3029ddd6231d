"""Everybody who asks for a checkpoint gets exactly one answer: its figures, or the error that ended it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import CheckpointError
from strandline.runtime.driver.checkpoint_requests import (
    FIRST_RETRY_PAUSE,
    TRIES,
    CheckpointInterruptedError,
    SavepointRequests,
    Waiters,
    take_with_retries,
)
from strandline.runtime.driver.restore.savepoints import SavepointTarget

DONE = CheckpointStats(7, "completed", "checkpoint", 5, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 10, 10)


def answered(outcome: CheckpointStats | Exception) -> Future[CheckpointStats]:
    future: Future[CheckpointStats] = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


class Requests:
    """Answers one request after the other with the given outcomes."""

    def __init__(self, *outcomes: CheckpointStats | Exception) -> None:
        self.left = list(outcomes)

    def __call__(self) -> Future[CheckpointStats]:
        return answered(self.left.pop(0))


def test_a_request_that_a_lost_slot_interrupts_is_made_again_after_healing() -> None:
    pauses: list[float] = []
    healed: list[int] = []
    lost = CheckpointInterruptedError("lost")
    requests = Requests(lost, lost, DONE)
    assert take_with_retries(requests, lambda: healed.append(len(requests.left)), pauses.append) is DONE
    assert healed == [2, 1]
    assert pauses == [FIRST_RETRY_PAUSE, 2 * FIRST_RETRY_PAUSE]


def test_a_request_is_not_made_again_for_ever() -> None:
    pauses: list[float] = []
    requests = Requests(*[CheckpointInterruptedError("lost")] * TRIES, DONE)
    with pytest.raises(CheckpointInterruptedError):
        take_with_retries(requests, None, pauses.append)
    assert requests.left == [DONE]
    assert len(pauses) == TRIES - 1


def test_another_failure_is_not_tried_again() -> None:
    pauses: list[float] = []
    requests = Requests(CheckpointError("declined"), DONE)
    with pytest.raises(CheckpointError, match="declined"):
        take_with_retries(requests, None, pauses.append)
    assert (requests.left, pauses) == ([DONE], [])


def test_without_anything_to_checkpoint_nobody_waits() -> None:
    assert take_with_retries(lambda: None, None) is None


def test_those_who_ask_before_a_checkpoint_begins_wait_for_the_same_one() -> None:
    waiters = Waiters()
    early = [waiters.request(), waiters.request()]
    before = waiters.requested
    waiters.begin_checkpoint(1)
    assert (before, waiters.requested) == (True, False)
    late = waiters.request()
    waiters.begin_checkpoint(2)
    assert waiters.begun == (1, 2)
    assert waiters.end([1]) == early
    assert waiters.end([1]) == []
    assert waiters.end([2]) == [late]


def test_a_refusal_reaches_only_those_whose_checkpoint_has_not_begun() -> None:
    waiters = Waiters()
    begun = waiters.request()
    waiters.begin_checkpoint(1)
    waiting = waiters.request()
    waiters.refuse(CheckpointError("the run ended"))
    assert isinstance(waiting.exception(), CheckpointError)
    assert not begun.done()
    assert not waiters.requested


@pytest.fixture
def target() -> Callable[[], SavepointTarget]:
    return lambda: SavepointTarget.within("/savepoints", "visits", "canonical", {})


def test_savepoints_begin_in_the_order_of_their_requests(target: Callable[[], SavepointTarget]) -> None:
    savepoints = SavepointRequests()
    assert not savepoints
    targets = [target(), target()]
    futures = [savepoints.request(one) for one in targets]
    assert savepoints
    assert [savepoints.next(), savepoints.next(), savepoints.next()] == [*zip(targets, futures, strict=True), None]
    assert not savepoints


def test_a_savepoint_has_its_target_until_it_ends(target: Callable[[], SavepointTarget]) -> None:
    savepoints, where = SavepointRequests(), target()
    savepoints.begin(3, where)
    assert (savepoints.target(3), savepoints.target(4)) == (where, None)
    savepoints.end(4)  # a checkpoint
    savepoints.end(3)
    assert savepoints.target(3) is None


def test_refused_savepoints_do_not_begin(target: Callable[[], SavepointTarget]) -> None:
    savepoints = SavepointRequests()
    future = savepoints.request(target())
    savepoints.refuse(CheckpointError("the run ended"))
    assert isinstance(future.exception(), CheckpointError)
    assert not savepoints
