"""What the processes of a run listen on, and the address by which others reach them."""

from __future__ import annotations

import socket

import pytest

from strandline.runtime.protocol.address import default_bind_host, driver_listens_on, listen_on

NOT_OURS = "192.0.2.1"
"""An address that no host has."""


@pytest.mark.parametrize(("master", "host"), [("local[2]", "127.0.0.1"), ("local-cluster[2,1,512]", ""), ("yarn", "")])
def test_spark_in_one_process_needs_loopback_only(master: str, host: str) -> None:
    assert default_bind_host(master, None) == host
    assert default_bind_host(master, "10.0.0.7") == "10.0.0.7"


def test_a_process_listens_on_the_network_that_leads_to_the_driver() -> None:
    assert listen_on("", "127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert listen_on("", "localhost")[0] in ("127.0.0.1", "::1")


def test_a_process_listens_on_every_network_only_when_told_to() -> None:
    assert listen_on("0.0.0.0", "127.0.0.1") == ("0.0.0.0", "127.0.0.1")
    assert listen_on("10.0.0.7", "127.0.0.1") == ("10.0.0.7", "10.0.0.7")


def test_the_driver_listens_on_its_own_address() -> None:
    assert driver_listens_on("", "127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    own, advertised = driver_listens_on("", socket.gethostname())
    assert advertised == socket.gethostname()
    assert own in {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), 0)} | {"0.0.0.0"}


def test_a_driver_behind_a_forwarded_address_listens_on_every_network() -> None:
    assert driver_listens_on("", NOT_OURS) == ("0.0.0.0", NOT_OURS)
    assert driver_listens_on("0.0.0.0", NOT_OURS) == ("0.0.0.0", NOT_OURS)
    assert driver_listens_on("127.0.0.1", NOT_OURS) == ("127.0.0.1", "127.0.0.1")
