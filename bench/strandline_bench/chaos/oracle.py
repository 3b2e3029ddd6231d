"""Looks at what a trial leaves: the output, a fresh start, the files after garbage collection, threads and handles."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.admin.verification import Verification
from strandline.checkpoint.metadata import file_paths
from strandline.rest.server import THREAD
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.runtime.protocol.logs import LOGS
from strandline.storage import JobPaths, open_storage
from strandline_bench.chaos.job import JOB, Place

PATIENCE: Final = 8.0
"""Seconds until threads and handles must be gone."""


def output_problems(place: Place) -> Iterator[str]:
    """How the output differs from the batch computation. A foreach sink may get rows twice, but none that is wrong."""
    found, expected = place.found(), place.expected()
    if place.variant.sink == "foreach":
        found = Counter(dict.fromkeys(found, 1))
    missing, extra = expected - found, found - expected
    if missing:
        yield f"{missing.total()} of {expected.total()} rows are missing, such as {min(missing)}"
    if extra:
        yield f"{extra.total()} rows are wrong or twice, such as {min(extra)}"
    staged = [path.relative_to(place.output) for path in files_below(place.output) if path.name.endswith(".staged")]
    if staged:
        yield f"{len(staged)} staged files are left in the sink's folder, such as {min(staged)}"


def file_problems(place: Place, others: Collection[str] = ()) -> Iterator[str]:
    """Collect garbage, then compare the files of the job with those that its checkpoints refer to, and read all.

    `others` may be there, too.
    """
    storage = open_storage(str(place.checkpoints))
    paths = JobPaths(JOB)
    garbage = find_garbage(storage, JOB, now=time.time() + 1.0, min_age=0.0, take_over=True)
    delete_garbage(storage, garbage)
    store = JobLogStore(storage, paths)
    known = store.load()
    referenced: set[str] = set()
    for number in (*known.retained, *store.released()):
        referenced |= {paths.metadata(number), *file_paths(read_metadata(storage, paths, number, ()))}
    below = place.checkpoints / paths.root
    there = {path.relative_to(place.checkpoints).as_posix() for path in files_below(below)}
    there = {path for path in there if not path.startswith(f"{paths.log_dir}/") and not paths.is_history(path)}
    there.difference_update(others)
    for names, problem in ((there - referenced, "no checkpoint refers to"), (referenced - there, "missing:")):
        if names:
            yield f"{len(names)} files: {problem} {min(names)}"
    for verified in Verification.of_job(storage, JOB).run():
        for damage in verified.damage:
            yield f"checkpoint {verified.id}: {damage.path}: {damage.problem}"


class Handles:
    """The threads and open files of this process, before a trial and after it; and the local files of the runs."""

    def __init__(self, jvm: int) -> None:
        self._jvm = jvm
        self._threads = set(threading.enumerate())

    def problems(self, place: Place) -> list[str]:
        """What is left of a trial when the patience is over."""
        deadline = time.monotonic() + PATIENCE
        while (left := list(self._left(place))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _left(self, place: Place) -> Iterator[str]:
        for thread in threading.enumerate():
            if thread not in self._threads and not _of_py4j(thread) and not thread.name.startswith(THREAD):
                yield f"thread {thread.name} is left"
        for process in (os.getpid(), self._jvm):
            for path in open_files(process):
                if path.startswith(f"{place.folder}/"):
                    yield f"{'driver' if process == os.getpid() else 'JVM'} keeps {path} open"
        for name, folder in (("local_dir", place.local), ("spark_checkpoint_dir", place.spark)):
            files = [file for file in files_below(folder) if LOGS not in file.parts]
            if files:
                yield f"{len(files)} files are left in {name}, such as {files[0].relative_to(folder)}"


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder in which others may delete files and folders meanwhile."""
    for where, _folders, names in os.walk(folder):
        yield from (Path(where, name) for name in names)


def open_files(pid: int) -> Iterator[str]:
    """What the descriptors of a process lead to: paths, `socket:[...]`, `pipe:[...]`."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield str(descriptor.readlink())
        except OSError:  # it was closed meanwhile
            continue


def _of_py4j(thread: threading.Thread) -> bool:
    """Py4J keeps a thread for each connection from the JVM, and reuses it."""
    return type(thread).__module__.startswith("py4j") or "py4j" in str(getattr(thread, "_target", ""))
