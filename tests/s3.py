"""S3 servers on loopback with one bucket: moto, and versitygw, which shares no code with moto."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.waiting import wait_until

BUCKET = "bucket"
KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
"""The `storage_options` that the server accepts, without its `endpoint`."""


VERSITYGW = Path(__file__).parents[1] / ".tools" / "versitygw"
"""Where `make second-store` puts the second server."""


@contextmanager
def s3_server() -> Iterator[str]:
    """Gives the server's endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        _make_bucket(endpoint)
        yield endpoint
    finally:
        server.stop()


@contextmanager
def second_s3_server(folder: Path, *, conditional_writes: bool = True) -> Iterator[str]:
    """Gives the endpoint of versitygw, which stores objects in files below `folder`. Skips the test without it.

    If it may not keep attributes, versitygw ignores the conditions of writes.
    """
    program = shutil.which("versitygw") or (str(VERSITYGW) if VERSITYGW.exists() else None)
    if program is None:
        pytest.skip("versitygw, the second S3 server, is not installed: run `make second-store` (needs Go)")
    (folder / "root").mkdir(parents=True)
    (folder / "attributes").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    attributes = [] if conditional_writes else ["--nometa"]
    environment = {**os.environ, "ROOT_ACCESS_KEY": KEYS["access_key_id"], "ROOT_SECRET_KEY": KEYS["secret_access_key"]}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "--port", f"127.0.0.1:{port}", "posix", *attributes, str(folder / "root")],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: _answers(port, process), what="the second S3 server")
        endpoint = f"http://127.0.0.1:{port}"
        _make_bucket(endpoint)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the second S3 server has ended; see its log"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def _make_bucket(endpoint: str) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=KEYS["region"],
        aws_access_key_id=KEYS["access_key_id"],
        aws_secret_access_key=KEYS["secret_access_key"],
    )
    client.create_bucket(Bucket=BUCKET)
