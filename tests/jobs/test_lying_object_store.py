"""Whole jobs on two S3 servers, through a proxy that throttles, cuts connections, loses answers and is slow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.storage import open_storage
from strandline.testing.fault_proxy import Fault, FaultProxy
from tests.jobs.place import Place, Sum, batches, running_sums
from tests.s3 import BUCKET, KEYS, second_s3_server

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SEED = int(os.environ.get("STRANDLINE_SEED", "7"))
FAULTS = [
    Fault(status=503),
    Fault(status=500, code="InternalError"),
    Fault(lose_answer=True),
    Fault(cut_request=True),
    Fault(cut_answer=True),
    Fault(delay=1.5),
    Fault(bytes_per_second=100_000),
]


@pytest.fixture(params=["moto", "versitygw"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "moto":
        yield request.getfixturevalue("s3_endpoint")
    else:
        with second_s3_server(tmp_path / "second-s3") as url:
            yield url


@pytest.mark.parametrize("changelog", [False, True])
def test_whatever_the_store_says_every_row_is_there_once(
    place: Place, runs: list[sl.JobRun], endpoint: str, changelog: bool
) -> None:
    data = batches(10)
    root = f"s3://{BUCKET}/lies-{place.root.name}-{SEED}"

    def job(endpoint: str) -> sl.Job:
        config = sl.Config(
            checkpoint_dir=f"{root}/checkpoints",
            checkpoint_interval="300ms",
            tolerable_failed_checkpoints=-1,
            restart_delay="100ms",
            changelog=changelog,
            parallelism=2,
            local_dir=str(place.root / "local"),
            storage_options={**KEYS, "endpoint": endpoint},
        )
        made = sl.Job("visits", place.spark, config)
        stream = made.source(place.source()).key_by("user").process(Sum(), "user string, n long, s long", uid="sums")
        stream.sink(sl.ParquetSink(f"{root}/output"))
        return made

    with FaultProxy(endpoint) as proxy:
        first = job(proxy.url).start()
        runs.append(first)
        for number, fault in enumerate(FAULTS):
            proxy.fail_at_random(".", fault, share=0.02, seed=SEED * 100 + number)
        for rows in data[:8]:
            place.write(rows)
            first.process_all_available()
        first.stop()
        restarts = first.figures().restarts
        print(f"seed {SEED}: {len(proxy.requests)} requests, {proxy.faults} faults, {restarts} restarts")
        assert proxy.faults > 20
    again = job(endpoint).start()
    runs.append(again)
    for rows in data[8:]:
        place.write(rows)
    again.process_all_available()
    again.stop()
    options = {**KEYS, "endpoint": endpoint}
    assert stored_rows(f"{root}/output", options, place.root) == running_sums(data)
    storage = open_storage(f"{root}/checkpoints", options)
    garbage = find_garbage(storage, "visits", now=float("inf"), min_age=0, take_over=True)
    delete_garbage(storage, garbage)
    left = find_garbage(storage, "visits", now=float("inf"), min_age=0, take_over=True).files
    assert (left.orphans, left.live, left.young) == ((), (), ())


def stored_rows(url: str, options: dict[str, str], folder: Path) -> list[tuple[object, ...]]:
    """What a plain reader sees in a sink's folder."""
    storage = open_storage(url, options)
    found: list[tuple[object, ...]] = []
    for file in storage.list():
        if not file.path.startswith(("_", ".")):
            storage.download(file.path, folder / "part.parquet")
            found += [tuple(row.values()) for row in pq.read_table(folder / "part.parquet").to_pylist()]
    return sorted(found, key=repr)
