"""A checkpoint records the position and the sink files of what was committed when it began."""

from __future__ import annotations

import pytest

from strandline.checkpoint.metadata import SinkFile, SourcePosition
from strandline.runtime.driver.checkpoint_inputs import CheckpointInputs, CommittedBatch, Inputs
from tests.factories import checkpoint_metadata

RESTORED = checkpoint_metadata(1, batch_id=40, source=SourcePosition(batch=4, files={"offsets/4": b"restored"}))


def captured(spark_batch: int) -> SourcePosition:
    return SourcePosition(batch=spark_batch, files={f"offsets/{spark_batch}": b"captured"})


def file_of(batch: int) -> SinkFile:
    return SinkFile("out", f"_staged/{batch}", f"part-{batch}", rows=1, size=1)


@pytest.fixture
def inputs() -> CheckpointInputs:
    return CheckpointInputs(None, captured)


def test_a_job_that_has_committed_nothing_has_nothing_to_checkpoint(inputs: CheckpointInputs) -> None:
    assert (inputs.committed, inputs.batch, inputs.all_covered) == (None, None, True)


def test_sink_files_belong_to_the_next_checkpoint_until_one_that_covers_them_is_complete(
    inputs: CheckpointInputs,
) -> None:
    for batch in (1, 2, 3):
        inputs.add(CommittedBatch(batch, batch), [file_of(batch)])
    assert inputs.sink_files(2) == [file_of(1), file_of(2)]
    inputs.cover(2)
    assert inputs.sink_files(3) == [file_of(3)]
    assert not inputs.all_covered
    inputs.cover(3)
    assert inputs.all_covered


def test_a_restored_checkpoint_covers_what_it_restores() -> None:
    inputs = CheckpointInputs(RESTORED, captured)
    assert (inputs.batch, inputs.all_covered) == (40, True)


def test_the_position_of_the_restored_batch_is_the_restored_one() -> None:
    """Spark's offset log of this generation has no entry that could be captured for it."""
    inputs = CheckpointInputs(RESTORED, captured)
    assert inputs.committed is not None
    assert inputs.position(inputs.committed) == RESTORED.source
    inputs.add(CommittedBatch(41, 5), [])
    assert inputs.position(CommittedBatch(41, 5)) == captured(5)


def test_an_aborted_checkpoint_has_no_inputs(inputs: CheckpointInputs) -> None:
    noted = Inputs(captured(1), 1)
    inputs.note(7, noted)
    assert inputs.of(7) == noted
    inputs.end(7)
    assert inputs.of(7) is None
    inputs.end(7)


def test_rows_that_were_staged_late_come_before_those_of_later_batches() -> None:
    """Rows of epochs are staged with the checkpoint, and those of a drain behind them when they are prepared."""
    inputs = CheckpointInputs(None, captured)
    inputs.add(CommittedBatch(3, 3), [file_of(3)])
    inputs.add_staged(2, [file_of(2)])
    assert inputs.sink_files(3) == [file_of(2), file_of(3)]
