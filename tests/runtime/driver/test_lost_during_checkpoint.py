"""A task manager that is lost during a checkpoint, while no batch and no supervisor notices it: as when a run stops."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from strandline.runtime.driver.checkpoint_requests import CheckpointInterruptedError
from strandline.runtime.protocol.messages import StorageSettings
from tests.runtime.driver.one_slot import BATCHES, one_slot, prepare
from tests.runtime.taskmanager.changelog.host import upload_settings

pytestmark = pytest.mark.faults


def test_whoever_waits_for_a_checkpoint_learns_that_a_task_manager_froze_in_the_middle_of_it(tmp_path: Path) -> None:
    stops = {"fail_pattern": "^(upload|write|create) ", "fail_mode": "stop"}
    storage = StorageSettings(f"faulty+file://{tmp_path}/durable", stops)
    uploads = msgspec.structs.replace(upload_settings(), inline_bytes=0)
    with one_slot(tmp_path, storage=storage, uploads=uploads) as (cluster, checkpoints):
        prepare(cluster, BATCHES[0])
        cluster.commit(BATCHES[0])
        checkpoints.start()
        checkpoints.committed(BATCHES[0], 0, [], 0.0)
        waiting = checkpoints._request(checkpoints._waiters.request)
        assert waiting is not None
        with pytest.raises(CheckpointInterruptedError, match="a slot was lost"):
            waiting.result(timeout=60)
