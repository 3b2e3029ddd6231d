"""How many bytes of its state a slot that starts has on its disk so far."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from strandline.runtime.protocol.folders import operator_folder
from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.slot.local_files import OperatorFolder


class RestoredBytes:
    """Looks at the files that a slot brings to its disk, also at those that are not whole yet.

    A file leaves its folder when the database takes it, so the most that was seen of each step counts.
    """

    def __init__(self, spec: SlotSpec) -> None:
        folders = [OperatorFolder(operator_folder(spec, number)) for number in range(len(spec.operators))]
        self._folders = [folder.download(spec.incarnation) for folder in folders]
        self._most = dict.fromkeys(self._folders, 0)

    def so_far(self) -> int:
        """The number of bytes."""
        for folder in self._folders:
            self._most[folder] = max(self._most[folder], _size(folder))
        return sum(self._most.values())


def _size(folder: Path) -> int:
    size = 0
    with suppress(OSError):  # the folder goes while it is looked at
        for path in folder.rglob("*"):
            with suppress(OSError):
                size += path.stat().st_size if path.is_file() else 0
    return size
