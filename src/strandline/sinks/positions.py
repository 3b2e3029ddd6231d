"""What a checkpoint notes about its sinks: the last batch that each target had when the checkpoint was completed.

A target that has fewer rows than that has lost some, for instance because a backup of it was restored.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.errors import MetadataError

_PROPERTY = "sinks"
_positions = msgspec.json.Decoder(dict[str, int])


def with_positions(properties: Mapping[str, str], positions: Mapping[str, int]) -> dict[str, str]:
    """The properties of a checkpoint, with the positions of its sinks."""
    noted = {_PROPERTY: msgspec.json.encode(positions).decode()} if positions else {}
    return {**properties, **noted}


def with_positions_of(properties: Mapping[str, str], metadata: CheckpointMetadata) -> dict[str, str]:
    """The properties of a checkpoint, with the positions of the sinks that an earlier one has noted."""
    return {**properties, **{name: value for name, value in metadata.properties.items() if name == _PROPERTY}}


def without_positions(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties of a checkpoint, without the positions of its sinks."""
    return {name: value for name, value in properties.items() if name != _PROPERTY}


def position_in(metadata: CheckpointMetadata, place: str) -> int | None:
    """The position of one sink in a checkpoint; None if the job had no such sink, or if the sink keeps none."""
    try:
        return _positions.decode(metadata.properties.get(_PROPERTY, "{}")).get(place)
    except msgspec.MsgspecError as error:
        raise MetadataError(
            f"checkpoint {metadata.checkpoint_id} of job {metadata.job!r} has damaged notes about its sinks: {error}. "
            "Restore another one."
        ) from error
