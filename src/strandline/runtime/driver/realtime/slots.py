"""The slots as epochs call them: directly, without their task managers in between.

A task manager would pass each call on and its answer back, which costs a small epoch as much as the work itself. It
hears of the epochs when a checkpoint needs it; see `Epochs.settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import msgspec

from strandline.errors import SlotLostError
from strandline.runtime.protocol.exchange import Delivery
from strandline.runtime.protocol.messages import BatchTime
from strandline.runtime.protocol.slot_calls import Commit, NextTimers, PreparedEpoch, PrepareEpoch, SlotClient

Told = TypeVar("Told")

LOOK_EVERY = 0.1
"""Seconds between two looks whether the epoch is still wanted, while slots work on it."""


class EpochSlots:
    """Calls all slots of a generation at the same time. One thread uses it."""

    def __init__(self, clients: Mapping[int, SlotClient], levels: Sequence[Collection[str]], addresses: str) -> None:
        """`levels` are the steps, those that read no step first; `addresses` is as in `Cluster.addresses`."""
        self._clients = clients
        self._levels = levels
        self._addresses = addresses
        self._pool = ThreadPoolExecutor(max(1, len(clients)), thread_name_prefix="epoch-slots")

    def prepare(
        self,
        batch: int,
        when: BatchTime,
        deliveries: Sequence[Delivery],
        commits: int | None,
        check: Callable[[], None],
    ) -> dict[int, PreparedEpoch]:
        """Have every slot commit the epoch before, if it is `commits`, and prepare this one.

        `check` is called while slots work; its error ends the wait.
        """
        known = list(deliveries)
        done: dict[int, PreparedEpoch] = {}
        for number, steps in enumerate(self._levels):
            wanted = [one for one in known if one.operator in steps]

            def request(
                index: int,
                steps: Collection[str] = steps,
                wanted: Sequence[Delivery] = wanted,
                commits: int | None = commits if number == 0 else None,
            ) -> PrepareEpoch:
                mine = [one for one in wanted if one.subtask == index]
                return PrepareEpoch(batch, when, mine, list(steps), self._addresses, commits)

            prepared = self._each(lambda index, client: client.prepare_epoch(request(index)), check)
            known += [one for some in prepared.values() for one in some.forwarded]
            done = {index: joined(done.get(index), some) for index, some in prepared.items()}
        return done

    def commit(self, batch: int, check: Callable[[], None]) -> dict[int, NextTimers]:
        """Have every slot commit an epoch."""
        return self._each(lambda _index, client: client.commit(Commit(batch)), check)

    def _each(self, call: Callable[[int, SlotClient], Told], check: Callable[[], None]) -> dict[int, Told]:
        """The answers of all slots. Raises the first error of one."""
        asked = {index: self._pool.submit(partial(call, index, client)) for index, client in self._clients.items()}
        while wait(asked.values(), LOOK_EVERY, FIRST_EXCEPTION).not_done:
            for answer in asked.values():
                if answer.done():
                    answer.result()
            check()
        return {index: answer.result() for index, answer in asked.items()}

    def close(self) -> None:
        """Give up the calls that are under way, and let go of the connections."""
        for client in self._clients.values():
            client.abandon()
        self._pool.shutdown(wait=False)


def joined(before: PreparedEpoch | None, after: PreparedEpoch) -> PreparedEpoch:
    """What a slot has prepared of two levels of steps. Raises `SlotLostError` if it was replaced in between."""
    if before is None:
        return after
    if before.incarnation != after.incarnation:
        raise SlotLostError("a slot was replaced while it prepared an epoch")
    return msgspec.structs.replace(
        after,
        counts={**before.counts, **after.counts},
        timers={**before.timers, **after.timers},
        segments=[*before.segments, *after.segments],
        rows=[*before.rows, *after.rows],
        pushed=[*before.pushed, *after.pushed],
    )
