"""What a job must do in every durable storage: go on, be taken over while it runs, and go on after a cancel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import strandline as sl
from strandline.errors import FencedError
from tests.jobs.place import Place, batches, running_sums


def live_three_times(
    place: Place, runs: list[sl.JobRun], job: Callable[[], sl.Job], rows: Callable[[], list[tuple[object, ...]]]
) -> None:
    """Run `job` three times, the second time while the first run lives. `rows` reads its output."""
    data = batches(4)
    place.write(data[0])
    place.write(data[1])
    first = job().start()
    runs.append(first)
    first.process_all_available()
    assert rows() == running_sums(data[:2])
    second = job().start()
    runs.append(second)
    place.write(data[2])
    with pytest.raises(FencedError):
        first.await_termination(timeout=60)
    second.process_all_available()
    second.cancel()
    place.write(data[3])
    third = job().start()
    runs.append(third)
    third.process_all_available()
    assert rows() == running_sums(data)
