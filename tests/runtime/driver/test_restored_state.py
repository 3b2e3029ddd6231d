"""How far a restore is, from what task managers tell."""

from __future__ import annotations

from pathlib import Path

from strandline.checkpoint.metadata import StateFile, SubtaskState
from strandline.runtime.driver.figures import Restoring
from strandline.runtime.driver.restored_state import RestoredState
from strandline.runtime.protocol.messages import SlotSpec
from strandline.storage import open_storage
from tests.runtime.taskmanager.changelog.host import run_info, slot_spec


def spec(folder: Path, generation: int) -> SlotSpec:
    file = StateFile("a", "a", True, inline=b"x" * 100)
    state = SubtaskState("op", 0, 0, 1, "heap", True, (file,))
    run = run_info(folder, open_storage(str(folder), {}), None)
    return slot_spec(run, 0, generation=generation, restore=[state])


def test_bytes_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    restored = RestoredState()
    assert restored.progress() is None
    restored.begin([spec(tmp_path, 3)])
    restored.note("a", 3, 60)
    restored.end()
    assert restored.progress() is None

    restored.begin([spec(tmp_path, 4)])
    restored.note("a", 3, 60)  # a heartbeat that was under way
    assert restored.progress() == Restoring(0, 100)
    restored.note("a", 4, 20)
    restored.note("b", 4, 30)
    restored.note("b", 4, 0)  # its slots are ready
    assert restored.progress() == Restoring(50, 100)
