"""Figures of a task manager's changelog, as they reach the driver and the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts that a user may read."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values that `json.dumps` takes: dicts, lists, numbers and texts."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return fields


class ChangelogFigures(Facts, frozen=True):
    """What the changelog holds and costs, summed over the task managers.

    Attributes:
        wait_ms: How long batches have waited for their segments to become durable.
        upload_requests: Uploads of segments.
        upload_attempts: Attempts of these uploads. More attempts than requests mean that uploads were slow or failed.
        upload_failures: Uploads that were given up after all their attempts.
        upload_bytes: Bytes of segments that were uploaded.
        behind_bytes: Bytes of committed segments that are not durable yet, because uploads fail.
        segments: Segments since the last materialization.
        segment_bytes: Bytes of these segments.
        base_bytes: Bytes of the last materialization.
        materializations: Materializations that were completed.
        early_materializations: Materializations that began early because the changelog had grown too large.
        failed_materializations: Materializations that failed.
        last_materialization_ms: How long the last materialization took; of several task managers, the longest time.
        materialized_bytes: Bytes that materializations uploaded.
        merges: How often the segments of a long changelog were merged.
    """

    wait_ms: float = 0.0
    upload_requests: int = 0
    upload_attempts: int = 0
    upload_failures: int = 0
    upload_bytes: int = 0
    behind_bytes: int = 0
    segments: int = 0
    segment_bytes: int = 0
    base_bytes: int = 0
    materializations: int = 0
    early_materializations: int = 0
    failed_materializations: int = 0
    last_materialization_ms: float = 0.0
    materialized_bytes: int = 0
    merges: int = 0

    @classmethod
    def total(cls, figures: Sequence[Self]) -> Self:
        """The sum over several task managers; of the last materialization, the longest time."""
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in figures) for name in cls.__struct_fields__}
        sums["last_materialization_ms"] = max((one.last_materialization_ms for one in figures), default=0.0)
        return cls(**sums)
