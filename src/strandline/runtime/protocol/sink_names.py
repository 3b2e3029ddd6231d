"""The names of the files in the folder of a `ParquetSink`: tasks write them, and the driver publishes them."""

from __future__ import annotations

import re
import uuid

STAGING_FOLDER = "_strandline"
"""The folder of staged files inside the folder of a sink. Readers skip folders whose name begins with `_`."""

FINAL_NAME = re.compile(r"part-(?P<job>.+)-(?P<batch>\d{20})-[0-9a-f]{32}\.parquet")
"""Matches the names that `new_final_name` makes. The batch id tells the generation that wrote the file."""


def new_final_name(job: str, batch: int) -> str:
    """A name for a file that nobody else writes."""
    return f"part-{job}-{batch:020d}-{uuid.uuid4().hex}.parquet"


EMPTY_NAME = re.compile(r"empty-(?P<job>.+)\.parquet")
"""Matches the names that `empty_name` makes."""


def empty_name(job: str) -> str:
    """The name of the job's file without rows. It sorts before the names of all files with rows."""
    return f"empty-{job}.parquet"


def staged_name(final: str) -> str:
    """The path of the file until it is published."""
    return f"{STAGING_FOLDER}/{final}.staged"
