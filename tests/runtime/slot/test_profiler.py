"""Flame graphs: the sampler of a slot, alone and in a real slot process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strandline.errors import StrandlineError
from strandline.operators.process.keyed_processor import KeyedProcessor
from strandline.operators.process.process_operator import ProcessOperator
from strandline.runtime.driver.opening import pickled
from strandline.runtime.protocol.messages import OperatorSpec
from strandline.runtime.protocol.profiles import Profile
from strandline.runtime.protocol.taskmanager_calls import ForSlots
from strandline.runtime.slot.profiler import IDLE, MOST_FRAMES, Profiler
from strandline.state.coding.ddl import parse_schema
from tests.runtime.processes import B0, UID, Driver, send
from tests.waiting import wait_until


@contextmanager
def busy(target: Any) -> Iterator[None]:
    """A thread that calls `target` with a function that says whether to go on."""
    ended = threading.Event()
    thread = threading.Thread(target=target, args=(lambda: not ended.is_set(),))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_profile_of_all_threads_names_functions_root_first() -> None:
    def inner(go_on: Any) -> None:
        while go_on():
            sum(range(100))

    def outer(go_on: Any) -> None:
        inner(go_on)

    with busy(outer):
        folded = Profiler().profile(Profile(0.3, 100, all_threads=True))
    seen = [one for one in folded.stacks if "outer" in one]
    assert seen
    for stack in seen:
        names = [frame.split(" (")[0].rsplit(".", 1)[-1] for frame in stack.split(";")]
        assert names[names.index("outer") + 1] == "inner"
        assert "test_profiler.py:" in stack
    assert sum(folded.stacks[stack] for stack in seen) <= folded.samples
    assert folded.seconds >= 0.3


def test_threads_that_work_on_no_operator_do_not_count_by_default() -> None:
    def spin(go_on: Any) -> None:
        while go_on():
            sum(range(100))

    with busy(spin):
        folded = Profiler().profile(Profile(0.1, 50))
    assert folded.stacks == {IDLE: folded.samples}


def test_a_deep_stack_is_cut_at_its_leaves() -> None:
    def deep(go_on: Any, left: int = 400) -> None:
        if left:
            deep(go_on, left - 1)
        while go_on():
            time.sleep(0.001)

    with busy(deep):
        folded = Profiler().profile(Profile(0.1, 50, all_threads=True))
    assert max(stack.count(";") + 1 for stack in folded.stacks) == MOST_FRAMES


@pytest.mark.parametrize(("seconds", "hz"), [(0, 10), (31, 10), (float("nan"), 10), (1, 0), (1, 201)])
def test_a_profile_beyond_its_bounds_is_refused(seconds: float, hz: float) -> None:
    with pytest.raises(StrandlineError, match="up to 30 s, and 1 to 200"):
        Profiler().profile(Profile(seconds, hz))


def test_one_profile_is_taken_at_a_time() -> None:
    profiler = Profiler()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(profiler.profile, Profile(1.0, 100))
        wait_until(lambda: profiler._busy.locked(), what="the first profile")
        with pytest.raises(StrandlineError, match="already"):
            profiler.profile(Profile(0.1))
        assert first.result().samples > 0
    assert profiler.profile(Profile(0.05)).samples > 0


@pytest.mark.faults
def test_a_profile_of_a_real_slot_shows_the_users_function(driver: Driver, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    go_on.touch()

    class Visits(KeyedProcessor):
        def open(self, context: Any) -> None:
            self.total = context.value_state("total", "n long")

        def process(self, key: Any, rows: Any, context: Any) -> Any:
            yield (*key, self.count_slowly_on_purpose())

        def count_slowly_on_purpose(self) -> int:
            while go_on.exists():
                sum(range(1000))
            return 1

    operator = ProcessOperator(
        UID, Visits(), ["user"], parse_schema("user string, x long"), parse_schema("user string, n long")
    )
    driver.start_manager()
    slots = driver.start(driver.spec(0, operators=[OperatorSpec(UID, pickled(operator))]))
    idle = driver.manager.profile(ForSlots([0], Profile(0.1)))
    assert idle.values[0].stacks.keys() == {IDLE}
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(send, slots[0], 0, B0, [("a", 1)])
        try:
            answers = driver.manager.profile(ForSlots([0], Profile(1.0, 50)))
        finally:
            go_on.unlink()
        assert rows.result() == [("a", 1)]
    assert answers.failures == {}
    folded = answers.values[0]
    seen = [stack for stack in folded.stacks if "count_slowly_on_purpose" in stack]
    assert seen
    assert all(stack.startswith("OperatorSlot.work (operator_slot.py:") for stack in seen)
