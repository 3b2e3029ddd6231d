"""State as a table, read from the checkpoints of a job that runs."""

from __future__ import annotations

import threading

import pytest

import strandline as sl
from tests.jobs.place import Place

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("changelog", [False, True])
def test_the_state_of_a_running_job_is_read_while_it_drops_checkpoints(place: Place, changelog: bool) -> None:
    path = str(place.checkpoints / "visits")
    expected: dict[str, tuple[int, int]] = {}
    problems: list[Exception] = []
    counts: list[int] = []
    ended = threading.Event()

    def totals() -> dict[str, tuple[int, int]]:
        rows = sl.read_state(path, "sums", "total").read_all().to_pylist()
        return {row["user"]: (row["n"], row["s"]) for row in rows}

    def read_again_and_again() -> None:
        try:
            while not ended.is_set():
                counts.append(sum(n for n, _ in totals().values()))
        except Exception as error:  # noqa: BLE001  # the test fails with it
            problems.append(error)

    with place.sums(checkpoint_interval="100ms", num_retained=1, changelog=changelog).start() as run:
        reader = threading.Thread(target=read_again_and_again)
        for batch in range(6):
            rows = [(f"user{at}", at + batch) for at in range(50)]
            place.write(rows)
            run.process_all_available()
            for user, x in rows:
                n, s = expected.get(user, (0, 0))
                expected[user] = n + 1, s + x
            assert totals() == expected
            if batch == 0:
                reader.start()
        ended.set()
        reader.join()
    assert problems == []
    assert counts == sorted(counts)
    assert totals() == expected
