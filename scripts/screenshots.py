"""Takes the pictures of the page in docs/images/ from a job that really runs: `python -m scripts.screenshots`.

The job counts generated clicks per user, and per page and ten seconds. While it runs, the script writes a savepoint,
kills a slot and rescales the job, so that the pictures have something to show. It takes about a minute and a half.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect
from pyspark.sql import SparkSession
from tests.web.browser import LAPTOP, PHONE, chromium, opened

import strandline as sl

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LARGEST = 300_000
TOKEN = "token-of-the-pictures"

log = logging.getLogger(__name__)


class Visits(sl.KeyedProcessor):
    """Counts the clicks of a user and keeps the slowest one."""

    def open(self, context: Any) -> None:
        self.seen = context.value_state("seen", "n long, slowest long")

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        n, slowest = self.seen.get() or (0, 0)
        for row in rows:
            n, slowest = n + 1, max(slowest, self.weigh(row.ms))
        self.seen.update((n, slowest))
        yield (*key, n, slowest)

    def weigh(self, ms: int) -> int:
        return sum(divmod(ms * step, 7)[1] for step in range(40))


def clicks_job(spark: SparkSession, root: Path) -> sl.Job:
    config = sl.Config(
        checkpoint_dir=str(root / "checkpoints"),
        checkpoint_interval="3s",
        savepoint_dir=str(root / "savepoints"),
        local_dir=str(root / "local"),
        parallelism=2,
        batch_interval="1s",
        rest_port=0,
        rest_token=TOKEN,
    )
    job = sl.Job("clicks", spark, config)
    rate = spark.readStream.format("rate").option("rowsPerSecond", 4000).load()
    # squares crowd at small remainders, so that some key groups are fuller than others
    clicks = rate.selectExpr(
        "timestamp as time",
        "concat('user-', value * value % 9973) as user",
        "concat('/page/', value * value % 97) as page",
        "value % 250 as ms",
    )
    stream = job.source(clicks, event_time="time", watermark_delay="5s")
    users = stream.key_by("user").process(Visits(), "user string, n long, slowest long", uid="visits-per-user")
    users.sink(sl.ParquetSink(str(root / "users")))
    pages = stream.key_by("page").window(sl.tumbling("10s")).aggregate(n=sl.count(), slowest=sl.max("ms"), uid="pages")
    pages.sink(sl.ParquetSink(str(root / "pages")))
    return job


@contextmanager
def running(root: Path) -> Iterator[sl.JobRun]:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    try:
        with clicks_job(spark, root).start() as run:
            yield run
    finally:
        spark.stop()


def make_a_life(run: sl.JobRun) -> None:
    """Things happen to the job: a savepoint, the loss of a slot, a rescale."""
    time.sleep(25)
    run.savepoint()
    os.kill(next(slot.pid for slot in run.processes().slots if slot.index == 1), signal.SIGKILL)
    time.sleep(12)
    run.rescale(3)
    time.sleep(20)


def shoot(page: Page, name: str, *, whole: bool = False) -> None:
    path = IMAGES / f"page-{name}.png"
    page.screenshot(path=path, full_page=whole)
    size = path.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{path} has {size:,} bytes; at most {LARGEST:,} are wanted")
    log.info("%s: %d bytes", path, size)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as run, chromium() as browser:
        make_a_life(run)
        url, job = run.ui_url or "", f"#token={TOKEN}&/jobs/clicks"
        for dark in (False, True):
            with opened(browser, url, job, size={"width": 1280, "height": 1060}, dark=dark) as page:
                expect(page.locator(".figure").first).to_be_visible()
                page.wait_for_timeout(1500)
                shoot(page, "overview-dark" if dark else "overview")
        with opened(browser, url, job, size=LAPTOP) as page:
            page.locator("button.node", has_text="visits-per-user").click()
            page.get_by_role("button", name="Sample for 10 seconds").click()
            expect(page.locator(".flame svg")).to_be_visible(timeout=30_000)
            page.locator("#step").screenshot(path=IMAGES / "page-step.png")
        with opened(browser, url, f"{job}/checkpoints/history", size={"width": 1280, "height": 1240}) as page:
            page.locator("tr", has_text="COMPLETED").nth(1).get_by_role("button").click()
            page.get_by_role("button", name="Open the subtasks of pages").click()
            page.wait_for_timeout(300)
            shoot(page, "checkpoints")
        with opened(browser, url, f"{job}/checkpoints/summary") as page:
            page.get_by_role("button", name="Percentiles").click()
            shoot(page, "summary", whole=True)
        for dark in (False, True):
            with opened(browser, url, job, size=PHONE, dark=dark) as page:
                expect(page.locator(".figure").first).to_be_visible()
                shoot(page, "phone-dark" if dark else "phone")


if __name__ == "__main__":
    main()
