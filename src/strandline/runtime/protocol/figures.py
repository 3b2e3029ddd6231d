"""Figures of a task manager's changelog, as they reach the driver and the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts that a user may read."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values that `json.dumps` takes: dicts, lists, numbers and texts."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class ChangelogFigures(Facts, frozen=True):
    """What the changelog holds and costs, summed over the task managers."""

    wait_ms: float = 0.0
    """How long batches have waited for their segments to become durable."""
    upload_requests: int = 0
    upload_attempts: int = 0
    """More attempts than requests mean that uploads were slow or failed."""
    upload_failures: int = 0
    upload_bytes: int = 0
    behind_bytes: int = 0
    """Bytes of committed segments that are not durable yet, because uploads fail."""
    segments: int = 0
    """Segments since the last materialization."""
    segment_bytes: int = 0
    """Bytes of these segments."""
    base_bytes: int = 0
    """Bytes of the last materialization."""
    materializations: int = 0
    early_materializations: int = 0
    """Materializations that began early because the changelog had grown too large."""
    failed_materializations: int = 0
    last_materialization_ms: float = 0.0
    materialized_bytes: int = 0
    merges: int = 0
    """How often the segments of a long changelog were merged."""

    @classmethod
    def total(cls, figures: Sequence[Self]) -> Self:
        """The sum over several task managers; of the last materialization, the longest time."""
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in figures) for name in cls.__struct_fields__}
        sums["last_materialization_ms"] = max((one.last_materialization_ms for one in figures), default=0.0)
        return cls(**sums)
