"""A changed step: what differs between a step of a checkpoint and the job's step, in the user's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strandline.checkpoint.steps import (
    Column,
    StepDescription,
    columns_text,
    parameter_label,
    parameter_text,
    printable,
)
from strandline.errors import IncompatibleCheckpointError
from strandline.state.descriptors import StateDescriptor

_USER_CODE: Final = ("process", "spark", "arrow")
"""The user's code gives the states of these steps their meaning. So they may replace each other if their states fit."""

_REMEDY: Final = (
    "Define the step as before. Or give the changed step another uid, so that it begins empty, and start with "
    "allow_non_restored_state=True, so that the state of the old step is left out."
)


class StepChange:
    """A step as the checkpoint describes it, beside the job's step.

    An operator accepts the differences that its state allows. `check` refuses the others.
    """

    def __init__(
        self, before: StepDescription, now: StepDescription, stored: Mapping[str, StateDescriptor] | None = None
    ) -> None:
        self.before = before
        self.now = now
        self.stored = stored or {}
        """The states of the checkpoint by name."""
        self._differing: dict[str, tuple[str, str, str, str]] = {}
        self._compare()

    @property
    def same_kind(self) -> bool:
        """Whether the parameters of both steps mean the same."""
        return self.before.kind == self.now.kind

    def differs(self, *names: str) -> bool:
        """Whether one of the parameters or lists of columns differs."""
        return any(name in self._differing for name in names)

    def numbers(self, *names: str) -> tuple[list[int], list[int]] | None:
        """The old and the new values of parameters; None unless all of them are numbers."""
        old = [self.before.parameters.get(name) for name in names]
        new = [self.now.parameters.get(name) for name in names]
        numbers = [[one for one in values if isinstance(one, int)] for values in (old, new)]
        return (numbers[0], numbers[1]) if len(numbers[0]) == len(numbers[1]) == len(names) else None

    def accept(self, *names: str) -> None:
        """The state can be carried over although these differ."""
        for name in names:
            self._differing.pop(name, None)

    def explain(self, why: str, *names: str) -> None:
        """Say in the error why the difference matters, for those of `names` that differ."""
        for name in names:
            if name in self._differing:
                label, old, new, _ = self._differing[name]
                self._differing[name] = (label, old, new, f", {why}" if why else "")

    def check(self) -> None:
        """Raise `IncompatibleCheckpointError`, which names all differences that were not accepted, if there are any."""
        if self._differing:
            texts = [f"the {label}: {old} before, {new} now{why}" for label, old, new, why in self._differing.values()]
            raise IncompatibleCheckpointError(
                f"operator {self.now.operator}: the step has changed since the checkpoint, and its state cannot be "
                f"carried over ({'; '.join(texts)}). {_REMEDY}"
            )

    def _compare(self) -> None:
        before, now = self.before, self.now
        if before.kind != now.kind and not (before.kind in _USER_CODE and now.kind in _USER_CODE):
            self._note("kind", "kind of step", before.kind, now.kind)
            return
        self._columns("keys", "key", before.keys, now.keys)
        self._columns("times", "time column", before.times, now.times)
        for name in ("keys", "times"):
            self.explain(_renamed(getattr(before, name), getattr(now, name)), name)
        if before.kind != now.kind:
            return
        # A parameter that an earlier release did not describe cannot be compared.
        for name, value in now.parameters.items():
            if name in before.parameters and before.parameters[name] != value:
                old = before.parameters[name]
                self._note(name, parameter_label(name), parameter_text(name, old), parameter_text(name, value))
        for name, columns in now.columns.items():
            if name in before.columns:
                self._columns(name, name, before.columns[name], columns)

    def _columns(self, name: str, label: str, old: tuple[Column, ...], new: tuple[Column, ...]) -> None:
        if old != new:
            self._note(name, label, columns_text(old) or "none", columns_text(new) or "none")

    def _note(self, name: str, label: str, old: str, new: str) -> None:
        self._differing[name] = (label, printable(old), printable(new), "")


def _renamed(old: tuple[Column, ...], new: tuple[Column, ...]) -> str:
    if [kind for _, kind in old] != [kind for _, kind in new]:
        return ""
    return "and nothing tells a renamed column from another one: if it was only renamed, give the step the old name"
