"""A job whose checkpoint folder was tampered with: it does not start, and nothing outside its folders is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import strandline as sl
from strandline.checkpoint.metadata import CheckpointMetadata, SourcePosition, encode
from strandline.errors import MetadataError
from tests.jobs.durable import chk, metadata
from tests.jobs.place import Place, batches, running_sums

pytestmark = pytest.mark.spark


def renamed_state_file(found: CheckpointMetadata, victim: Path) -> CheckpointMetadata:
    state = found.subtasks[0]
    file = msgspec.structs.replace(state.files[0], name=str(victim))
    state = msgspec.structs.replace(state, files=(file, *state.files[1:]))
    return msgspec.structs.replace(found, subtasks=(state, *found.subtasks[1:]))


def moved_source_file(found: CheckpointMetadata, victim: Path) -> CheckpointMetadata:
    files = {**found.source.files, f"sources/../../{'../' * 20}{victim}": b"overwritten"}
    return msgspec.structs.replace(found, source=SourcePosition(found.source.batch, files))


def test_a_tampered_checkpoint_does_not_start_and_the_genuine_one_does(
    place: Place, runs: list[sl.JobRun], tmp_path: Path
) -> None:
    data = batches(2, users=5, rows=20)
    run = place.sums().start()
    runs.append(run)
    place.write(data[0])
    run.process_all_available()
    run.stop()
    newest = chk(place, run.checkpoints()[-1].id)
    genuine = (newest / "_metadata").read_bytes()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    crafts: list[Callable[[CheckpointMetadata, Path], CheckpointMetadata]] = [renamed_state_file, moved_source_file]
    for craft in crafts:
        (newest / "_metadata").write_bytes(encode(craft(metadata(newest), victim)))
        with pytest.raises(MetadataError, match="is refused"):
            place.sums().start()
        assert victim.read_text() == "mine"
        (newest / "_metadata").write_bytes(genuine)
    run = place.sums().start()
    runs.append(run)
    place.write(data[1])
    run.process_all_available()
    assert place.rows() == running_sums(data)
    run.stop()
