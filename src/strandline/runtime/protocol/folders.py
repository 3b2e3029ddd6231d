"""Local folders and file names that several processes of a run on one host agree on."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.protocol.user_folder import user_folder

DRIVER_SOCKET: Final = "c.sock"
"""The name of the driver's Unix socket in the socket folder."""


def slot_folder(spec: SlotSpec) -> Path:
    return (
        run_folder(spec.run.local_dir, spec.run.job, spec.run.run_id) / f"gen-{spec.generation}" / f"slot-{spec.index}"
    )


def operator_folder(spec: SlotSpec, number: int) -> Path:
    """The folder of one of the operators of a slot, in the order of the specification."""
    return slot_folder(spec) / f"op-{number}"


def run_folder(local_dir: str, job: str, run_id: str) -> Path:
    """Where a run keeps its local files on a host. `make_private` makes it."""
    return user_folder(local_dir) / job / run_id


def socket_folder(run_id: str) -> Path:
    """Where the processes of a run on a host keep their Unix sockets. `make_private` makes it.

    It is short, because a Unix socket's path may not be longer than about a hundred characters.
    """
    return user_folder("/tmp") / ".sockets" / run_id[:12]


def clear_socket_folder(run_id: str) -> None:
    """Delete what task managers of this host have in the socket folder, but not the driver's socket.

    A task manager that has not heard of its driver for long ends. The driver may only have been stopped for a while: it
    goes on, and nobody could reach it without its socket.
    """
    folder = socket_folder(run_id)
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != DRIVER_SOCKET:
                path.unlink(missing_ok=True)
    with suppress(OSError):  # the driver's socket is there: the driver removes the folder
        folder.rmdir()


def copy_name(identity: str) -> str:
    """The file name of the local copy of a durable file with this identity."""
    return hashlib.sha1(identity.encode(), usedforsecurity=False).hexdigest()
