"""On which task manager each slot runs: close to its state, and evenly spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from strandline.runtime.driver.deployment import Deployment
from strandline.state.coding.keys import key_group_range, subtask_of


def spread(slots: Iterable[int], managers: Iterable[str], occupied: Iterable[str]) -> dict[int, str]:
    """Gives each slot to the task manager that has the fewest; `occupied` has one entry for every slot that stays."""
    load = Counter(dict.fromkeys(managers, 0))
    for manager in occupied:
        if manager in load:
            load[manager] += 1
    homes: dict[int, str] = {}
    for index in slots:
        homes[index] = min(load, key=lambda identity: load[identity])
        load[homes[index]] += 1
    return homes


def rescaled_homes(
    before: Deployment, after: Deployment, homes: Mapping[int, str], managers: Sequence[str]
) -> dict[int, str]:
    """Homes for the slots of another parallelism: near most of their state, and no task manager gets more than others.

    A slot whose state is near a task manager that is full already gets no home here.
    """
    room = Counter({identity: -(-after.parallelism // len(managers)) for identity in managers})
    found: dict[int, str] = {}
    for index in range(after.parallelism):
        groups = key_group_range(index, after.parallelism, after.max_parallelism)
        middle = groups[len(groups) // 2]
        near = homes.get(subtask_of(middle, before.parallelism, before.max_parallelism))
        if near is not None and room[near] > 0:
            found[index] = near
            room[near] -= 1
    return found
