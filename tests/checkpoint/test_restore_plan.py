"""Going on from a checkpoint: what fits, what is refused, and what becomes of rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint import (
    CheckpointMetadata,
    ListedSinkFile,
    SinkFile,
    SinkRecovery,
    SourcePosition,
    SubtaskState,
    check_compatible,
    plan_restore,
)
from strandline.checkpoint.restore import common_groups, left_out, overlapping
from strandline.checkpoint.retention import retain
from strandline.errors import IncompatibleCheckpointError
from strandline.state.coding.keys import key_group_range


def checkpoint(**fields: Any) -> CheckpointMetadata:
    defaults: dict[str, Any] = {
        "job": "visits",
        "checkpoint_id": 7,
        "generation": 1,
        "batch_id": 10,
        "kind": "checkpoint",
        "parallelism": 2,
        "max_parallelism": 128,
        "operators": ("count", "join"),
        "subtasks": tuple(
            SubtaskState(operator, index, index * 64, index * 64 + 64, "heap", False, ())
            for operator in ("count", "join")
            for index in (0, 1)
        ),
        "source": SourcePosition(10, {}),
        "sink_files": (),
        "trigger_time": 0.0,
        "completed_time": 0.0,
        "properties": {},
    }
    return CheckpointMetadata(**{**defaults, **fields})


def check(
    job: str = "visits",
    operators: tuple[str, ...] = ("join", "count"),
    max_p: int = 128,
    allow: bool = False,
) -> None:
    check_compatible(checkpoint(), job, operators, max_p, allow_non_restored=allow)


def test_the_same_job_fits_whatever_the_order_of_its_steps() -> None:
    check()


def test_steps_may_be_added_and_with_leave_taken_away() -> None:
    check(operators=("join", "count", "extra"))
    for operators in (("count",), ("count", "extra"), ("extra",), ()):
        check(operators=operators, allow=True)
    assert left_out(checkpoint(), ["count", "extra"]) == ["join"]
    assert left_out(checkpoint(), ["join", "count"]) == []


def test_a_job_without_state_may_get_its_first_step() -> None:
    check_compatible(checkpoint(operators=(), subtasks=()), "visits", ["count"], 128)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"job": "clicks"}, ["Checkpoint 7", "'visits'", "'clicks'"]),
        ({"max_p": 256}, ["max_parallelism=128", "256", "life of a job's state", "new job"]),
        ({"operators": ("count",)}, ["state of 'join'", "uid=", "allow_non_restored_state=True"]),
        ({"operators": ()}, ["state of 'count', 'join'", "no step in common"]),
        ({"operators": ("count", "joined")}, ["'join'", "'joined'", "uid=", "allow_non_restored_state=True"]),
        ({"operators": ("other",)}, ["the job has 'other'", "no step in common", "allow_non_restored_state=True"]),
        ({"operators": ("count", "join", "join")}, ["'join'", "more than once", "uid="]),
        ({"operators": ("other",), "allow": True, "max_p": 256}, ["max_parallelism=128"]),
    ],
)
def test_a_job_of_another_shape_is_told_what_differs(arguments: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(IncompatibleCheckpointError) as caught:
        check(**arguments)
    for text in texts:
        assert text in str(caught.value)


def test_a_checkpoint_with_a_hole_is_refused() -> None:
    states = checkpoint().subtasks
    assert plan_restore(checkpoint()) == states
    with pytest.raises(IncompatibleCheckpointError, match="lacks key groups of operator 'join', from 64 on"):
        plan_restore(checkpoint(subtasks=states[:-1]))
    with pytest.raises(IncompatibleCheckpointError, match="lacks key groups of operator 'count', around 0"):
        plan_restore(checkpoint(subtasks=states[1:]))
    with pytest.raises(IncompatibleCheckpointError, match="has twice key groups of operator 'count', around 64"):
        plan_restore(checkpoint(subtasks=(states[0], *states)))


@given(st.integers(1, 300), st.data())
def test_every_key_group_is_restored_once_at_any_parallelism(max_p: int, data: st.DataObject) -> None:
    before, after = (data.draw(st.integers(1, max_p)) for _ in range(2))
    states = [
        SubtaskState("count", index, groups.start, groups.stop, "heap", False, ())
        for index in range(before)
        for groups in [key_group_range(index, before, max_p)]
    ]
    restored: list[int] = []
    for index in range(after):
        own = key_group_range(index, after, max_p)
        parts = [common_groups(state, own) for state in overlapping(states, own)]
        assert len(parts[0]) == max(map(len, parts))
        restored += [group for part in parts for group in part]
        assert all(group in own for part in parts for group in part)
    assert sorted(restored) == list(range(max_p))


def staged(name: str, batch: int) -> ListedSinkFile:
    return ListedSinkFile("out", name, batch, published=False)


def published(name: str, batch: int) -> ListedSinkFile:
    return ListedSinkFile("out", name, batch, published=True)


def test_rows_are_published_withdrawn_or_discarded_as_the_checkpoint_says() -> None:
    covered = [SinkFile("out", f"_s{n}", f"f{n}", 1, 1) for n in (8, 9, 10)]
    listing = [
        published("f7", 7),
        published("f8", 8),
        staged("_s9", 9),
        published("f10", 10),
        staged("_s10", 10),
        staged("_s11", 11),
        staged("_old", 3),
        published("f12", 12),
    ]
    recovery = SinkRecovery.plan(checkpoint(sink_files=tuple(covered)), listing)
    assert [file.final for file in recovery.publish] == ["f9", "f10"]
    assert [file.name for file in recovery.discard] == ["_s11", "_old"]
    assert [file.name for file in recovery.withdraw] == ["f12"]
    assert recovery.missing == ()
    assert recovery.unaccounted == ()


def test_rows_that_are_gone_are_reported() -> None:
    lost = SinkFile("out", "_s9", "f9", 1, 1)
    assert SinkRecovery.plan(checkpoint(sink_files=(lost,)), []).missing == (lost,)


def test_recovery_after_recovery_has_nothing_left_to_do() -> None:
    file = SinkFile("out", "_s9", "f9", 1, 1)
    assert SinkRecovery.plan(checkpoint(sink_files=(file,)), [published("f9", 9)]) == SinkRecovery()


def test_without_a_checkpoint_nothing_that_is_visible_is_touched() -> None:
    recovery = SinkRecovery.plan(None, [staged("_s0", 0), published("f0", 0)])
    assert recovery == SinkRecovery(discard=(staged("_s0", 0),), unaccounted=(published("f0", 0),))


def test_retention_keeps_the_newest() -> None:
    assert retain((), 1, 1) == ((1,), ())
    assert retain((1, 2), 3, 2) == ((2, 3), (1,))
    assert retain((1, 2, 3), 4, 1) == ((4,), (1, 2, 3))
