"""The local folder that a query uses as Spark's own checkpoint folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")


def make_scratch_folder(directory: str | None, job: str, generation: int) -> Path:
    """A fresh folder in `directory`, else in memory, else on the disk. Folders of drivers that have died are removed.

    Its content is needed only while the generation runs: what a restore needs of it is part of our checkpoints.
    """
    if directory is not None:
        parent = Path(directory)
    else:
        parent = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob("strandline-spark-*"):
        owner = old.name.split("-")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"strandline-spark-{os.getpid()}-{job}-{generation}-", dir=parent))
