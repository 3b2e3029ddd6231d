"""Where a process of a run listens, and what its host is called."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
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

    def location(self, *, tls: bool = False) -> str:
        """The cheapest way to reach it from here. With `tls`, connections between hosts are encrypted."""
        if TCP_ONLY not in os.environ and self.host_id == host_identity() and os.path.exists(self.unix_path):
            return f"grpc+unix://{self.unix_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"grpc{'+tls' if tls else ''}://{host}:{self.port}"


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
    """What the processes of a run listen on: loopback when Spark runs in one process, else "": see `listen_on`."""
    return configured or ("127.0.0.1" if is_local_master(master) else "")


def listen_on(bind_host: str, peer: str) -> tuple[str, str]:
    """Where a process listens, and the address by which others reach it.

    `bind_host` is an address, or one for every network; "" stands for the network that leads to `peer`, the driver.
    """
    if bind_host and bind_host not in ANY:
        return bind_host, bind_host
    own = _address_towards(peer)
    return bind_host or own, own


def driver_listens_on(bind_host: str, driver_host: str) -> tuple[str, str]:
    """The same for the driver, which executors reach as `driver_host`.

    If that is no address of this host, such as a port of it that is forwarded, the driver listens on every network.
    """
    if bind_host and bind_host not in ANY:
        return bind_host, bind_host
    return bind_host or _own_address(driver_host) or ANY[0], driver_host


def _address_towards(peer: str) -> str:
    family, kind, _protocol, _name, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: only asks which of the host's addresses would be used
        return str(probe.getsockname()[0])


def _own_address(host: str) -> str | None:
    with suppress(OSError):
        for family, kind, _protocol, _name, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return None
