from __future__ import annotations

import pytest

from strandline.errors import SourceDataLostError
from strandline.runtime.driver.realtime.offsets import Offsets
from strandline.runtime.driver.realtime.topics import Held, within


def at(**offsets: int) -> Offsets:
    return {"clicks": {number.removeprefix("p"): offset for number, offset in offsets.items()}}


HELD = [Held(at(p0=10, p1=0), at(p0=50, p1=7), may_lose=False), Held(at(p0=10), at(p0=50), may_lose=True)]


def test_a_position_that_kafka_holds_stays_as_it_is() -> None:
    position = {0: at(p0=10, p1=7), 1: at(p0=50)}
    assert within("visits", position, HELD) == position


@pytest.mark.parametrize(
    ("offsets", "told"),
    [
        (at(p0=9), "partition 0 of topic 'clicks' begins at offset 10, and the job has read up to 9"),
        (at(p1=8), "partition 1 of topic 'clicks' ends at offset 7, and the job has read up to 8: the topic was made"),
        (at(p2=1), "partition 2 of topic 'clicks' does not exist any more"),
    ],
)
def test_what_is_gone_is_named(offsets: Offsets, told: str) -> None:
    with pytest.raises(SourceDataLostError, match=told):
        within("visits", {0: offsets}, HELD)


@pytest.mark.parametrize(("offsets", "moved"), [(at(p0=9), at(p0=10)), (at(p0=51), at(p0=10)), (at(p2=1), {})])
def test_a_source_that_may_lose_rows_goes_on_with_the_first_that_is_there(offsets: Offsets, moved: Offsets) -> None:
    assert within("visits", {1: offsets}, HELD) == {1: moved}
