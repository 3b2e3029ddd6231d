"""Local folders and file names that several processes of a run on one host agree on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from strandline.runtime.protocol.messages import SlotSpec
from strandline.runtime.protocol.user_folder import user_folder


def slot_folder(spec: SlotSpec) -> Path:
    return (
        run_folder(spec.run.local_dir, spec.run.job, spec.run.run_id) / f"gen-{spec.generation}" / f"slot-{spec.index}"
    )


def run_folder(local_dir: str, job: str, run_id: str) -> Path:
    """Where a run keeps its local files on a host. `make_private` makes it."""
    return user_folder(local_dir) / job / run_id


def socket_folder(run_id: str) -> Path:
    """Where the processes of a run on a host keep their Unix sockets. `make_private` makes it.

    It is short, because a Unix socket's path may not be longer than about a hundred characters.
    """
    return user_folder("/tmp") / ".sockets" / run_id[:12]


def copy_name(identity: str) -> str:
    """The file name of the local copy of a durable file with this identity."""
    return hashlib.sha1(identity.encode(), usedforsecurity=False).hexdigest()
