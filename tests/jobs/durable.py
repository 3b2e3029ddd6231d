"""What a job has left in its checkpoint folder."""

from __future__ import annotations

import time
from pathlib import Path

from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.admin.verification import Verification
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import CheckpointMetadata, all_files, decode
from strandline.storage import JobPaths
from strandline.storage.external import inner_path, list_files
from strandline.storage.local import LocalStorage
from tests.jobs.place import Place


def chk(place: Place, number: int, job: str = "visits") -> Path:
    return place.checkpoints / job / f"chk-{number}"


def metadata(folder: Path) -> CheckpointMetadata:
    home = Home(folder.parent.name, int(folder.name.removeprefix("chk-")), others=None)
    return decode((folder / "_metadata").read_bytes(), str(folder), home)


def files_of(place: Place, folder: Path) -> dict[Path, bytes]:
    """Everything that a checkpoint consists of, by path."""
    paths = [place.checkpoints / f.handle.path for _state, f in all_files(metadata(folder)) if f.handle is not None]
    return {path: path.read_bytes() for path in (*paths, folder / "_metadata")}


def is_data(path: str, job: str = "visits") -> bool:
    """Whether a file holds state or describes it; the log and the history of a job do not."""
    return not path.startswith((f"{JobPaths(job).log_dir}/", f"{JobPaths(job).history_dir}/"))


def check_storage(place: Place, *others: str) -> None:
    """Every file of the retained checkpoints is there and sound, and nothing else after a collection."""
    storage = LocalStorage(str(place.checkpoints))
    delete_garbage(
        storage, find_garbage(storage, "visits", now=time.time() + 10, min_age=0, take_over=True, others=others)
    )
    verification = Verification.of_job(storage, "visits", others=others)
    assert all(found.damage == () for found in verification.run())
    needed = [handle.path for handle in verification.handles]
    left = {file.path for file in list_files(storage, "visits", needed) if is_data(inner_path(file.path))}
    assert {path for path in left if not path.endswith("/_metadata")} == {h.path for h in verification.handles}
