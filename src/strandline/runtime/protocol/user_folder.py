"""The folder of one user in a place that all users of a host share: nobody else can enter it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from strandline.errors import StorageRefusedError, UnsafeFolderError


def user_folder(parent: str | Path) -> Path:
    """The path of this user's folder in `parent`."""
    return Path(parent) / f"strandline-{os.geteuid()}"


def make_private(folder: Path, setting: str = "for all but sockets, the option local_dir") -> Path:
    """Makes a folder inside this user's folder, and returns it. `setting` names another place: errors say so.

    Raises `UnsafeFolderError` if the user's folder belongs to somebody else, is a link, or was open to others: they
    could have put files there, or could read ours. Raises `StorageRefusedError` if the folder cannot be created.
    """
    try:
        return _made(folder, setting)
    except OSError as error:
        raise StorageRefusedError(
            f"cannot create the local folder {folder}: {error.strerror or error}; give the user that runs the job "
            f"write access; {setting} names another place"
        ) from error


def _made(folder: Path, setting: str) -> Path:
    own = [place for place in (folder, *folder.parents) if place.name == user_folder("").name]
    assert own, folder
    for place in reversed(own):  # more than one, if a job has that name, too
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        _check(place, setting)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check(folder: Path, setting: str) -> None:
    # A descriptor, so that what is checked is what is changed.
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _unsafe(folder, f"it is a link, or cannot be opened ({error.strerror})", setting) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise _unsafe(folder, f"it belongs to user {found.st_uid}", setting)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _unsafe(folder, f"others can write there (mode {stat.S_IMODE(found.st_mode):o})", setting)
        if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
            os.fchmod(descriptor, stat.S_IRWXU)
    finally:
        os.close(descriptor)


def _unsafe(folder: Path, reason: str, setting: str) -> UnsafeFolderError:
    return UnsafeFolderError(
        f"the local files of user {os.geteuid()} cannot be kept in {folder}: {reason}; remove it (another "
        f"user's: ask that user, or root); {setting} names another place"
    )
