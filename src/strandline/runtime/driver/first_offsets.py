"""Where a run began to read Kafka, for the generations that follow one without a checkpoint.

A source with `startingOffsets=latest` would begin anew in the next generation, behind rows that nobody has read.

Private Spark API: Spark's Kafka source writes down where it began in `sources/N/0` of the checkpoint folder, and begins
there if the file is there.
"""

from __future__ import annotations

from pathlib import Path

from strandline.errors import CheckpointError
from strandline.runtime.driver.realtime.offsets import first_offsets_in


class FirstOffsets:
    """Keeps where each Kafka source of a run first began to read. Later generations do not change it."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def remember(self, folder: Path) -> None:
        """Keep where the sources of a query began, whose checkpoint folder is `folder`; what is known stays."""
        for path in folder.glob("sources/*/0"):
            data = path.read_bytes() if path.is_file() else b""
            if is_of_kafka(data):
                self._files.setdefault(path.relative_to(folder).as_posix(), data)

    def seed(self, folder: Path) -> None:
        """Have a query begin there, whose checkpoint folder is empty so far."""
        for name, data in self._files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def is_of_kafka(data: bytes) -> bool:
    """Whether a file says where a source of Kafka began. File sources write other files of the same name."""
    try:
        return bool(first_offsets_in(data))
    except (CheckpointError, UnicodeDecodeError):
        return False
