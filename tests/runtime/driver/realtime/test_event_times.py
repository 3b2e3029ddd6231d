from __future__ import annotations

import pytest

from strandline.runtime.driver.realtime.event_times import EventTimes
from strandline.runtime.driver.realtime.offsets import Offsets
from strandline.runtime.protocol.cuts import ReadPart


def read(partition: int, up_to: int, latest_ms: int | None, stream: int = 0, rows: int = 1) -> ReadPart:
    return ReadPart(stream, "clicks", partition, up_to - rows, up_to, rows, latest_ms)


def at(*offsets: int) -> list[Offsets]:
    return [{"clicks": {str(number): offset for number, offset in enumerate(offsets)}}]


@pytest.fixture
def times() -> EventTimes:
    return EventTimes({0: 0}, [1])


def told(times: EventTimes, position: list[Offsets], *parts: ReadPart, followed: int = -1) -> int | None:
    """The latest event time that an epoch tells of source 0; None if it tells none."""
    seen = times.seen(parts, position, followed)
    return seen[0].latest_ms[0] if 0 in seen else None


def goes_on(times: EventTimes) -> bool:
    return times.goes_on


def test_a_partition_that_catches_up_holds_the_others_back(times: EventTimes) -> None:
    times.look(at(10, 10), at(0, 0), -1)
    assert told(times, at(10, 0), read(0, 10, 900)) is None, "nobody has read the other partition yet"
    assert told(times, at(10, 4), read(1, 4, 300)) == 300
    assert told(times, at(12, 4), read(0, 12, 950)) == 300
    assert told(times, at(12, 4)) is None, "an epoch without rows knows nothing new"
    assert told(times, at(12, 10), read(1, 10, 800)) == 800


def test_once_all_is_read_the_latest_time_of_all_partitions_counts(times: EventTimes) -> None:
    times.look(at(0, 0), at(0, 0), -1)
    assert told(times, at(5, 3), read(0, 5, 700), read(1, 3, 500)) == 500
    assert times.may_go_on
    assert not goes_on(times), "nobody has looked whether there is more"
    assert told(times, at(5, 3)) is None
    times.look(at(5, 9), at(5, 3), -1)  # Spark only took a while to pass on more rows
    assert not goes_on(times)
    assert told(times, at(5, 9), read(1, 9, 600)) == 600
    times.look(at(5, 9), at(5, 9), -1)
    assert goes_on(times)
    assert told(times, at(5, 9)) == 700
    assert not goes_on(times)
    assert told(times, at(6, 9), read(0, 6, 750)) == 750, "a partition without rows holds nobody back"
    assert not times.may_go_on


def test_rows_that_come_after_the_look_make_it_void(times: EventTimes) -> None:
    assert told(times, at(5, 3), read(0, 5, 700), read(1, 3, 500)) == 500
    times.look(at(5, 3), at(5, 3), -1)
    assert told(times, at(5, 4), read(1, 4, 510)) == 510
    assert not goes_on(times)


def test_a_partition_that_ends_with_what_is_no_row_is_read_once_a_batch_has_found_nothing(times: EventTimes) -> None:
    times.look(at(10, 6), at(0, 0), 3)
    assert told(times, at(10, 5), read(0, 10, 900), read(1, 5, 300), followed=4) == 300
    times.look(at(10, 6), at(10, 5), 5)
    assert not goes_on(times)
    times.look(at(10, 6), at(10, 5), 6)  # batch 6 began after the last row
    assert goes_on(times)
    assert told(times, at(10, 5), followed=6) == 900


def test_rows_without_an_event_time_tell_none(times: EventTimes) -> None:
    assert told(times, at(5), read(0, 5, None)) is None
    assert not times.may_go_on
    assert times.seen([read(0, 6, None)], at(6), -1)[0].rows == 1


def test_streams_whose_event_times_nobody_wants_are_left_out() -> None:
    times = EventTimes({0: -1, 1: 0}, [2])
    times.look([*at(9), *at(0)], [*at(0), *at(0)], -1)
    assert times.wanted
    seen = times.seen([read(0, 5, 100), read(0, 4, 200, stream=1)], [*at(5), *at(4)], -1)
    assert {source: one.latest_ms for source, one in seen.items()} == {0: (200, 200)}
    assert not EventTimes({0: 0}, [0]).wanted
