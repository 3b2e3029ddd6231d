"""The page of a job that runs: every tab, a savepoint and a rescale by button, a killed slot, a killed driver."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

import strandline as sl
from strandline.observe.facts import job_id
from strandline.observe.history_jobs import HistoryJobs
from strandline.rest.server import RestSettings, serve_jobs
from tests.jobs.driver import Driver
from tests.jobs.kills import slot_pid
from tests.jobs.place import Place, batches
from tests.web.browser import opened

TOKEN = "a-token-for-the-page"
PATIENCE = 40_000

pytestmark = pytest.mark.spark


@contextmanager
def rows_arriving(place: Place) -> Iterator[None]:
    """Writes a small input file every now and then, until the end of the block."""
    done = threading.Event()

    def write() -> None:
        for rows in batches(2000, rows=50):
            place.write(rows)
            if done.wait(0.3):
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


@dataclass
class OnCall:
    """A person with the page of a running job."""

    page: Page
    place: Place
    run: sl.JobRun

    def tab(self, name: str) -> None:
        self.page.get_by_role("tablist").first.get_by_role("tab", name=name).click()

    def press(self, button: str) -> None:
        self.page.get_by_role("group", name="Change the job visits").get_by_role("button", name=button).click()


@pytest.fixture(scope="module")
def on_call(spark: object, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnCall]:
    place = Place(tmp_path_factory.mktemp("page"), spark)  # type: ignore[arg-type]  # a session
    job = place.sums(rest_port=0, rest_token=TOKEN, savepoint_dir=str(place.root / "saved"))
    with rows_arriving(place), job.start() as run:
        assert run.ui_url is not None
        with opened(browser, run.ui_url, f"#token={TOKEN}") as page:
            page.get_by_role("link", name="visits").click()
            expect(page.locator(".pill").first).to_have_text("running", timeout=PATIENCE)
            yield OnCall(page, place, run)


class TestAPersonOnCall:
    def test_sees_every_tab_of_a_running_job(self, on_call: OnCall) -> None:
        page = on_call.page
        expect(page.locator("button.node", has_text="sums")).to_contain_text("× 2")
        expect(page.locator(".figure", has_text="Rows/s").locator(".value")).not_to_have_text("0", timeout=PATIENCE)
        page.locator("button.node", has_text="sums").click()
        expect(page.get_by_role("table", name="Subtasks of sums").locator("tbody tr")).to_have_count(2)
        expect(page.locator("#step")).to_contain_text("key groups", timeout=PATIENCE)
        on_call.tab("Data Skew")
        expect(page.get_by_role("table", name="Data skew of the steps")).to_contain_text("sums")
        on_call.tab("Exceptions")
        expect(page.get_by_role("tabpanel")).to_contain_text("Nothing went wrong")
        on_call.tab("Checkpoints")
        expect(page.locator(".card", has_text="Latest Completed Checkpoint")).to_contain_text("End to End Duration")
        page.get_by_role("tab", name="History").click()
        expect(page.get_by_text("COMPLETED").first).to_be_visible(timeout=PATIENCE)
        page.locator("tr", has_text="COMPLETED").first.get_by_role("button").click()
        expect(page.get_by_role("img", name=re.compile("Timeline of checkpoint"))).to_be_visible()
        page.get_by_role("tab", name="Summary").click()
        expect(page.get_by_role("table", name=re.compile("Summary of"))).to_contain_text("Maximum")
        on_call.tab("Configuration")
        expect(page.get_by_role("table", name="Options of the job")).to_contain_text("checkpoint_interval")
        assert TOKEN not in page.content()
        on_call.tab("Rescales")
        expect(page.get_by_role("table", name="Statuses of the run")).to_contain_text("running")
        on_call.tab("Logs")
        expect(page.get_by_label("Process").locator("option", has_text="slot-1")).to_be_attached()
        page.get_by_label("Process").select_option("slot-1")
        expect(page.get_by_role("region", name="Log of slot-1")).to_be_visible()

    def test_writes_a_savepoint_by_button(self, on_call: OnCall) -> None:
        page = on_call.page
        on_call.press("Savepoint")
        page.get_by_role("button", name="Write the savepoint").click()
        line = page.locator(".operations li", has_text="Savepoint")
        expect(line).to_contain_text("Savepoint completed. Path: ", timeout=PATIENCE)
        path = Path(line.locator(".outcome").inner_text().partition("Path: ")[2].removeprefix("file://"))
        assert path.parent == on_call.place.root / "saved"
        assert (path / "_metadata").exists()
        on_call.tab("Checkpoints")
        page.get_by_role("tabpanel", name="Checkpoints").get_by_role("tab", name="Overview").click()
        expect(page.locator(".card", has_text="Latest Savepoint")).to_contain_text(path.name)

    def test_rescales_the_running_job_by_button(self, on_call: OnCall) -> None:
        page = on_call.page
        on_call.press("Rescale")
        page.get_by_label("Subtasks per step").fill("3")
        page.get_by_role("dialog").get_by_role("button", name="Rescale").click()
        expect(page.locator(".operations li", has_text="Rescale to 3")).to_contain_text(
            "The job runs with 3 subtasks per step.", timeout=PATIENCE
        )
        on_call.tab("Rescales")
        expect(page.get_by_role("table", name="Rescales", exact=True)).to_contain_text("2 → 3")
        on_call.tab("Overview")
        expect(page.locator("button.node", has_text="sums")).to_contain_text("× 3")

    def test_reads_the_cause_of_a_failure_in_words(self, on_call: OnCall) -> None:
        pid = slot_pid(on_call.run, 1)
        os.kill(pid, signal.SIGKILL)
        on_call.tab("Exceptions")
        failures = on_call.page.get_by_role("table", name="Failures")
        expect(failures).to_contain_text("Slots lost and rebuilt", timeout=PATIENCE)
        expect(failures).to_contain_text(re.compile(r"slot 1: .*(killed|SIGKILL|signal|ended|exit)", re.IGNORECASE))
        on_call.tab("Rescales")
        expect(on_call.page.get_by_role("table", name="Recoveries")).to_contain_text("Rebuilt slot 1")

    def test_stops_the_job_by_button_and_still_sees_it(self, on_call: OnCall) -> None:
        page = on_call.page
        on_call.press("Stop")
        page.get_by_role("button", name="Stop the job").click()
        stopped = page.locator(".operations li", has_text="Stop")
        expect(stopped).to_contain_text("The job stopped after a last checkpoint.", timeout=PATIENCE)
        expect(page.locator(".pill").first).to_have_text("stopped")
        expect(page.locator("#why-not")).to_contain_text("the run is over")
        assert on_call.run.status == "stopped"


def test_the_page_of_a_killed_driver_says_so_and_keeps_what_was_known(browser: Browser, tmp_path: Path) -> None:
    checkpoints = tmp_path / "ckpt"
    served = serve_jobs(HistoryJobs([str(checkpoints)]), RestSettings(ports=range(0, 1)))
    try:
        with Driver(tmp_path) as driver:
            (tmp_path / "in").mkdir()
            driver.start()
            driver.await_run()
            with opened(browser, served.url, f"#/jobs/{job_id(str(checkpoints), 'visits')}") as page:
                expect(page.locator(".pill").first).to_have_text("running", timeout=PATIENCE)
                expect(page.locator("#why-not")).to_contain_text("the job runs elsewhere")
                driver.kill()
                expect(page.locator(".pill").first).to_have_text("driver lost", timeout=PATIENCE)
                expect(page.locator(".finding.critical")).to_contain_text("The driver is gone")
                expect(page.locator("button.node", has_text="sums")).to_contain_text("process by user")
    finally:
        served.close()
