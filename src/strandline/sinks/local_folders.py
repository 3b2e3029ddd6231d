"""Local folders of sinks, looked at before a takeover: what is in the way is named, with what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

from strandline.errors import ConfigError, StorageRefusedError
from strandline.storage import is_local, open_storage


def check_folder(place: str, job: str, path: str) -> None:
    """Raise `StorageRefusedError` unless the driver may write into the folder `path`, or make it.

    Raises `ConfigError` if `path` is no path. Changes nothing. A folder that is not local is not looked at. `place`
    names the sink.
    """
    if not is_local(path):
        return
    try:
        folder = Path(open_storage(path).url)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not there.is_dir():
        what = "a link that leads nowhere" if there.is_symlink() and not there.exists() else "no folder"
        raise StorageRefusedError(
            f"{place}: job {job!r} cannot write into the folder {folder}, because {there} is {what}. Move it away, or "
            "give the sink another path"
        )
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise StorageRefusedError(
            f"{place}: the user that runs job {job!r} (uid {os.geteuid()}) may not write into {there}. Give it write "
            "access to that folder, or give the sink another path"
        )
