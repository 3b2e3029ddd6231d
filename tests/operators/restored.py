"""What a restore does with the state of a step that has changed, without a job around it."""

from __future__ import annotations

import msgspec

from strandline.checkpoint.metadata import SubtaskState
from strandline.checkpoint.steps import StepDescription
from strandline.operators.base import Operator
from strandline.operators.schema_evolution import StateChanges, check_step
from strandline.state.backends.base import StateBackend


def changes_between(before: Operator, now: Operator, allow: bool = False) -> StateChanges:
    """What the driver finds out before it takes a job over; raises `IncompatibleCheckpointError` if it refuses."""
    step = msgspec.msgpack.decode(msgspec.msgpack.encode(before.describe()), type=StepDescription)
    # An operator that user code has opened knows its states; it cannot be opened once more.
    described = tuple(msgspec.to_builtins(state) for state in before.states() or before.check())
    state = SubtaskState(before.uid, 0, 0, 128, "heap", False, (), described)
    return check_step(now, now.check(), step, state, allow)


def carry_over(before: Operator, now: Operator, backend: StateBackend, key_groups: range) -> None:
    """Make the state of `before` that of `now`; raises `IncompatibleCheckpointError` if the driver refuses."""
    changes_between(before, now).apply(backend, key_groups)
