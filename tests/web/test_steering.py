"""The buttons of the page: confirmation, progress, result and errors in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.rest.served import Client, serving
from tests.rest.steered import SteeredJob
from tests.waiting import wait_until
from tests.web.browser import opened
from tests.web.jobs import given, lost_job, running_job

JOB = f"#/jobs/{running_job().id}"


@pytest.fixture
def job() -> Iterator[SteeredJob]:
    job = SteeredJob()
    yield job
    job.go_on.set()


@contextmanager
def page_of(browser: Browser, job: SteeredJob, *, token: bool = True) -> Iterator[tuple[Page, Client]]:
    with serving(given(running_job(), job)) as client:
        path = f"{JOB}&token={client.served.token}" if token else JOB
        try:
            with opened(browser, client.served.url, path) as page:
                yield page, client
        finally:
            job.go_on.set()


def press(page: Page, button: str) -> None:
    page.get_by_role("group", name="Change the job visits").get_by_role("button", name=button).click()


def test_a_savepoint_asks_shows_progress_and_says_its_path(browser: Browser, job: SteeredJob) -> None:
    with page_of(browser, job) as (page, _):
        expect(page).to_have_url(re.compile(r"#/jobs/\w+$"))  # the token left the address
        press(page, "Savepoint")
        dialog = page.get_by_role("dialog", name="Write a savepoint?")
        expect(dialog).to_contain_text("The job goes on. The whole state (218 MB) is written")
        dialog.get_by_label("Directory").fill("/saved")
        dialog.get_by_label("Native").check()
        dialog.get_by_role("button", name="Write the savepoint").click()
        running = page.locator(".operations .running")
        expect(running).to_contain_text("Savepoint")
        expect(running.get_by_role("progressbar")).to_be_visible()
        job.go_on.set()
        expect(page.locator(".operations .good")).to_contain_text("Savepoint completed. Path: /saved/savepoint-1")
        expect(page.locator("#announcements")).to_contain_text("Savepoint completed.")
        assert job.asked == [("savepoint", "/saved", "native")]


def test_a_rescale_says_its_steps_and_blocks_other_changes(browser: Browser, job: SteeredJob) -> None:
    with page_of(browser, job) as (page, _):
        press(page, "Rescale")
        page.get_by_label("Subtasks per step").fill("4")
        page.get_by_role("button", name="Rescale", exact=True).last.click()
        expect(page.locator(".operations .running")).to_contain_text("taking a last checkpoint")
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        job.go_on.set()
        expect(page.locator(".operations .good")).to_contain_text("The job runs with 4 subtasks per step.")
        assert job.asked == [("rescale", 4)]


@pytest.mark.parametrize(
    ("button", "confirm", "asked", "result"),
    [
        ("Checkpoint", "Take a checkpoint", ("checkpoint", False), "Checkpoint 19 completed."),
        ("Stop", "Stop the job", ("stop", None, "canonical", False), "The job stopped after a last checkpoint."),
        ("Cancel", "Cancel the job", ("cancel",), "The job is being cancelled."),
    ],
)
def test_a_button_does_what_its_dialog_says(
    browser: Browser, job: SteeredJob, button: str, confirm: str, asked: tuple[object, ...], result: str
) -> None:
    job.go_on.set()
    with page_of(browser, job) as (page, _):
        press(page, button)
        page.get_by_role("dialog").get_by_role("button", name=confirm).click()
        expect(page.locator(".operations .good")).to_contain_text(result)
        wait_until(lambda: job.asked == [asked], what="the call")


def test_a_job_that_has_done_its_work_is_drained(browser: Browser, job: SteeredJob) -> None:
    job.go_on.set()
    with page_of(browser, job) as (page, _):
        press(page, "Stop")
        page.get_by_role("checkbox", name="Drain: the job has done its work").check()
        page.get_by_role("dialog").get_by_role("button", name="Stop the job").click()
        expect(page.locator(".operations .good")).to_contain_text("The job stopped after a last checkpoint.")
        assert job.asked == [("stop", None, "canonical", True)]


def test_an_error_is_said_in_words(browser: Browser, job: SteeredJob) -> None:
    job.go_on.set()
    with page_of(browser, job) as (page, _):
        press(page, "Savepoint")
        page.get_by_label("Directory").fill("/full")
        page.get_by_role("button", name="Write the savepoint").click()
        failed = page.locator(".operations .bad")
        expect(failed).to_contain_text("the disk of /full has no space left; free some, and try again")
        failed.get_by_role("button", name="Remove this line").click()
        expect(failed).to_have_count(0)


def test_nothing_happens_without_the_confirmation(browser: Browser, job: SteeredJob) -> None:
    with page_of(browser, job) as (page, _):
        press(page, "Cancel")
        page.get_by_role("dialog").get_by_role("button", name="Do nothing").click()
        press(page, "Stop")
        expect(page.get_by_role("checkbox", name="Drain: the job has done its work")).not_to_be_checked()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        assert job.asked == []


def test_without_a_token_the_page_asks_for_it_and_goes_on(browser: Browser, job: SteeredJob) -> None:
    job.go_on.set()
    with page_of(browser, job, token=False) as (page, client):
        press(page, "Checkpoint")
        page.get_by_role("button", name="Take a checkpoint").click()
        for token in ("wrong-token", client.served.token):
            dialog = page.get_by_role("dialog", name="The server wants a token")
            dialog.get_by_label("Token", exact=True).fill(token)
            dialog.get_by_role("button", name="Go on").click()
        expect(page.locator(".operations .good")).to_contain_text("Checkpoint 19 completed.")
        assert job.asked == [("checkpoint", False)]


def test_a_job_whose_driver_died_says_so_and_has_its_buttons_off(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"#/jobs/{lost_job().id}") as page:
        finding = page.locator(".finding.critical")
        expect(finding).to_contain_text("The driver is gone")
        expect(finding).to_contain_text("The last status was running")
        expect(finding).to_contain_text("start the job again: `strandline run APP.py`. It goes on from checkpoint 19")
        expect(page.locator(".since")).to_have_text("last seen 2025-10-09 08:53:20")
        for button in page.get_by_role("group", name="Change the job lost").get_by_role("button").all():
            expect(button).to_be_disabled()
        expect(page.locator("#why-not")).to_contain_text("the driver is gone")
