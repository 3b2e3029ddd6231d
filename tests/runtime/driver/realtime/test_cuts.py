"""Relays and driver agree on who takes part in an epoch, also when messages come twice or relays vanish."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from strandline.errors import SlotLostError, StorageFullError
from strandline.runtime.driver.realtime.cuts import Cuts
from strandline.runtime.protocol.cuts import Cut, ReadPart, RelayNews
from strandline.runtime.protocol.failures import Failure


def never() -> None:
    """Nothing ends the wait."""


def cut(batch: int, relay: int, first: int, last: int) -> Cut:
    return Cut(batch, [], [ReadPart(0, "topic", relay, first, last, last - first, None)])


class Relay:
    """A relay whose rows are numbers. Some of its messages arrive twice."""

    def __init__(self, cuts: Cuts, number: int, rows: int, seed: int) -> None:
        self._cuts = cuts
        self._number = number
        self._rows = rows
        self._chance = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        done, made = 0, None
        while True:
            news = RelayNews(str(self._number), made, done < self._rows)
            order = self._cuts.next_cut(news)
            if self._chance.random() < 0.3:
                order = self._cuts.next_cut(news)  # the answer was lost
            made = None
            if order.batch is not None:
                first, done = done, min(self._rows, done + self._chance.randrange(1, 5))
                made = cut(order.batch, self._number, first, done)
            elif done == self._rows:
                return


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_epoch_and_each_epoch_ends_with_a_prefix(seed: int) -> None:
    cuts = Cuts("job", patience=30.0)
    relays = [Relay(cuts, number, 50 + 10 * number, seed + number) for number in range(4)]
    reached = dict.fromkeys(range(4), 0)
    batch = 0
    while reached != {0: 50, 1: 60, 2: 70, 3: 80}:
        assert cuts.wait_for_rows(30.0)
        batch += 1
        for one in cuts.cut(batch, None, never):
            assert one.batch == batch
            (part,) = one.read
            assert part.next_offset - part.rows == reached[part.partition]
            reached[part.partition] = part.next_offset
    for relay in relays:
        relay.join()


def test_nobody_waits_for_a_relay_without_rows() -> None:
    cuts = Cuts("job", patience=30.0)
    assert cuts.next_cut(RelayNews("idle", None, has_rows=False)).batch is None
    assert not cuts.wait_for_rows(0.0)
    assert cuts.cut(1, None, never) == []


def in_background(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_relay_that_does_not_deliver_is_lost() -> None:
    cuts = Cuts("job", patience=0.2)
    asking = in_background(lambda: cuts.next_cut(RelayNews("frozen", None, has_rows=True)))
    assert cuts.wait_for_rows(5.0)
    with pytest.raises(SlotLostError, match=r"job job, batch 1: 1 of Spark's tasks .*0.2 s \(heartbeat"):
        cuts.cut(1, None, never)
    asking.join(5)


def test_the_end_of_the_run_ends_the_wait_for_relays() -> None:
    cuts = Cuts("job", patience=30.0)
    asking = in_background(lambda: cuts.next_cut(RelayNews("slow", None, has_rows=True)))
    assert cuts.wait_for_rows(5.0)

    def ends() -> None:
        raise SlotLostError("the run ends")

    with pytest.raises(SlotLostError, match="the run ends"):
        cuts.cut(1, None, ends)
    asking.join(5)


def test_the_failure_of_a_relay_arrives_as_the_error_that_it_was() -> None:
    cuts = Cuts("job", patience=30.0)
    asking = in_background(lambda: cuts.next_cut(RelayNews("full", None, has_rows=True)))
    assert cuts.wait_for_rows(5.0)
    failure = Failure.of(StorageFullError("the disk of slot 1 is full"))
    told = in_background(lambda: cuts.next_cut(RelayNews("full", None, has_rows=False, failure=failure)))
    with pytest.raises(StorageFullError, match="the disk of slot 1 is full"):
        cuts.cut(1, None, never)
    with pytest.raises(StorageFullError):
        cuts.wait_for_rows(0.0)
    asking.join(5)
    told.join(5)


def test_the_cut_of_an_earlier_epoch_counts_for_nothing() -> None:
    cuts = Cuts("job", patience=0.2)
    asking = in_background(lambda: cuts.next_cut(RelayNews("late", None, has_rows=True)))
    assert cuts.wait_for_rows(5.0)
    with pytest.raises(SlotLostError):
        cuts.cut(1, None, never)
    asking.join(5)
    cuts.next_cut(RelayNews("late", cut(0, 0, 0, 1), has_rows=False))
    assert cuts.cut(2, None, never) == []
