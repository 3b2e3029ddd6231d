"""On which task manager each slot runs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from strandline.runtime.driver.deployment import Deployment
from strandline.runtime.driver.placement import rescaled_homes, spread
from strandline.runtime.protocol.messages import BackendSettings
from strandline.state.coding.keys import key_group_range, subtask_of

GROUPS = 128
MANAGERS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)


def deployment(parallelism: int) -> Deployment:
    return Deployment(1, parallelism, GROUPS, BackendSettings("heap", 1 << 20, 1 << 20, True, "none"), (), ((),))


@given(managers=MANAGERS, slots=st.integers(0, 20), occupied=st.lists(st.sampled_from("abcdx"), max_size=20))
def test_slots_without_a_home_go_where_the_fewest_are(managers: list[str], slots: int, occupied: list[str]) -> None:
    homes = spread(range(slots), managers, occupied)
    assert sorted(homes) == list(range(slots))
    assert set(homes.values()) <= set(managers)
    before = Counter(occupied)
    after = before + Counter(homes.values())
    for chosen in set(homes.values()):
        # Nobody who got a slot has more than one slot more than anybody else.
        assert after[chosen] <= min(after[manager] for manager in managers) + 1


@given(
    managers=MANAGERS,
    before=st.integers(1, 16),
    after=st.integers(1, 16),
    data=st.data(),
)
def test_a_rescaled_slot_stays_near_its_state_while_there_is_room(
    managers: list[str], before: int, after: int, data: st.DataObject
) -> None:
    homes = {index: data.draw(st.sampled_from("abcdx")) for index in range(before)}
    found = rescaled_homes(deployment(before), deployment(after), homes, managers)
    room = -(-after // len(managers))
    assert max(Counter(found.values()).values(), default=0) <= room
    taken: Counter[str] = Counter()
    for index in range(after):
        groups = key_group_range(index, after, GROUPS)
        near = homes[subtask_of(groups[len(groups) // 2], before, GROUPS)]
        if near in managers and taken[near] < room:
            assert found[index] == near
            taken[near] += 1
        else:
            assert index not in found


def test_the_same_parallelism_on_a_new_executor_moves_half_of_the_slots() -> None:
    found = rescaled_homes(deployment(4), deployment(4), dict.fromkeys(range(4), "old"), ["old", "new"])
    assert found == {0: "old", 1: "old"}
    assert spread([2, 3], ["old", "new"], found.values()) == {2: "new", 3: "new"}
