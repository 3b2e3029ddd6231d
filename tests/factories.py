"""Values that several tests need and none of them is about."""

from __future__ import annotations

from typing import Any

import msgspec

from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition


def checkpoint_metadata(number: int, **changes: Any) -> CheckpointMetadata:
    """A completed checkpoint without state, covering batch `number`, but for what `changes` say."""
    plain = CheckpointMetadata(
        job="visits",
        checkpoint_id=number,
        generation=1,
        batch_id=number,
        kind="checkpoint",
        parallelism=1,
        max_parallelism=128,
        operators=(),
        subtasks=(),
        source=SourcePosition(number, {}),
        sink_files=(),
        trigger_time=0.0,
        completed_time=0.0,
        properties={},
    )
    return msgspec.structs.replace(plain, **changes)
