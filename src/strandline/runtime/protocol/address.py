"""Where a process of a run listens, and what its host is called."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

TCP_ONLY = "STRANDLINE_TCP_ONLY"
"""If this variable is set, Unix sockets are not used even between processes of one host."""

ANY = ("0.0.0.0", "::")
"""Addresses to listen on that mean every network of the host. Nobody can call them."""


class Address(msgspec.Struct, frozen=True):
    """Where a process listens: a Unix socket for callers on its host, TCP for all others."""

    host_id: str
    unix_path: str
    host: str
    port: int

    def location(self) -> str:
        """The cheapest way to reach it from here."""
        if TCP_ONLY not in os.environ and self.host_id == host_identity() and os.path.exists(self.unix_path):
            return f"grpc+unix://{self.unix_path}"
        return f"grpc://{self.host}:{self.port}"


NOWHERE = Address("", "", "", 0)
"""The address of a process that is not known yet."""


def host_identity() -> str:
    """The same for two processes exactly when they share a host (and so its Unix sockets and local files)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}:{boot}"


def is_local_master(master: str) -> bool:
    """Whether Spark runs in the driver's own process: `local` or `local[...]`, but not `local-cluster[...]`."""
    return master == "local" or master.startswith("local[")


def default_bind_host(master: str, configured: str | None) -> str:
    """What the processes of a run listen on: loopback alone when Spark runs in one process, else every network."""
    if configured:
        return configured
    return "127.0.0.1" if is_local_master(master) else ANY[0]


def own_host(bind_host: str, peer: str) -> str:
    """The name by which other hosts reach this one, if it listens on `bind_host` and `peer` is one of them."""
    if bind_host not in ANY:
        return bind_host
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing: only asks which of the host's addresses would be used
        return str(probe.getsockname()[0])
