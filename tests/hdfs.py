"""A real HDFS on loopback: Hadoop's own mini cluster, with a NameNode and DataNodes in one process."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HADOOP = Path(__file__).parents[1] / ".tools" / "hadoop"
"""Where `make mini-hdfs` puts Hadoop's jars."""


@contextmanager
def mini_hdfs(folder: Path, data_nodes: int = 1) -> Iterator[str]:
    """Gives the URL of a cluster that keeps its files below `folder`. Skips the test without Hadoop or Java."""
    if not HADOOP.is_dir() or shutil.which("java") is None:
        pytest.skip("Hadoop's mini cluster is not installed: run `make mini-hdfs` (needs Maven and Java 17)")
    program = Path(__file__).parent / "storage" / "MiniHdfs.java"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["java", "-Xmx512m", "-cp", f"{HADOOP}/*", str(program), str(folder / "cluster"), str(data_nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        assert url.startswith("hdfs://"), (folder / "log").read_text()
        yield url
    finally:
        process.kill()
        process.communicate()
