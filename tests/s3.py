"""An S3 server on loopback with one bucket."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "bucket"
KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
"""The `storage_options` that the server accepts, without its `endpoint`."""


@contextmanager
def s3_server() -> Iterator[str]:
    """Gives the server's endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=KEYS["region"],
            aws_access_key_id=KEYS["access_key_id"],
            aws_secret_access_key=KEYS["secret_access_key"],
        )
        client.create_bucket(Bucket=BUCKET)
        yield endpoint
    finally:
        server.stop()
