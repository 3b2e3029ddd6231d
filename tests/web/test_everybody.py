"""The page for everybody: phones, dark rooms, keyboards, screen readers, hostile names, and servers that went away."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from strandline.observe.facts import JobFacts
from strandline.rest.server import RestSettings
from tests.observe.generated import generated_facts
from tests.rest.served import Client, serving
from tests.web.browser import PHONE, opened
from tests.web.jobs import HOSTILE, broken_job, given, hostile_job, lost_job, running_job

JOB = f"#/jobs/{running_job().id}"
TABS = ["overview", "exceptions", "skew", "checkpoints", "configuration", "rescales", "logs"]
SUBTABS = ["checkpoints/history", "checkpoints/summary", "checkpoints/configuration"]

CONTRAST = """() => {
  const parse = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    return { rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1 };
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const { rgb, alpha } = parse(getComputedStyle(at).backgroundColor);
      if (alpha > 0.99) return rgb;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.closest(":disabled, svg, .unseen, .skip, .arrow")) continue;
    const [text, back] = [light(parse(getComputedStyle(element).color).rgb), light(behind(element))];
    const ratio = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    if (ratio < 4.5) poor.push(element.className + ": " + element.textContent.slice(0, 40) + " " + ratio.toFixed(2));
  }
  return poor;
}"""


def go(page: Page, path: str) -> None:
    page.evaluate("hash => { location.hash = hash }", path)
    expect(page.get_by_role("tabpanel").first).to_be_visible()
    expect(page.locator("#job-panel *").first).to_be_attached()


def test_nothing_is_wider_than_a_phone(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, JOB, size=PHONE) as page:
        for path in [*TABS, *SUBTABS]:
            go(page, f"{JOB}/{path}")
            if path == "overview":
                page.locator("button.node").first.click()
            if path == "checkpoints/history":
                page.get_by_role("button", name="Open checkpoint 19").click()
                page.get_by_role("button", name="Open the subtasks of counts").click()
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], f"{path} is {width} pixels wide"
        go(page, f"#/jobs/{hostile_job().id}")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read_in_light_and_dark(browser: Browser, server: Client, dark: bool) -> None:
    with opened(browser, server.served.url, JOB, dark=dark) as page:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(14, 19, 22)") is dark
        others = [f"#/jobs/{facts.id}" for facts in (lost_job(), broken_job())]
        for path in [*(f"{JOB}/{tab}" for tab in [*TABS, *SUBTABS]), *others]:
            go(page, path)
            assert page.evaluate(CONTRAST) == [], path


def test_the_keyboard_reaches_everything(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, JOB) as page:
        expect(page.get_by_role("tab", name="Overview")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        seen: list[str] = []
        for _ in range(9):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.innerText.split('\\n')[0]"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", seen
        assert seen[:6] == ["Checkpoint", "Savepoint", "Rescale", "Stop", "Cancel", "Overview"]
        page.get_by_role("tab", name="Overview").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Exceptions")).to_be_focused()
        expect(page.get_by_role("heading", name="Exceptions")).to_be_visible()
        page.keyboard.press("End")
        expect(page.get_by_role("tab", name="Logs")).to_be_focused()
        page.keyboard.press("Home")
        page.locator("button.node").first.press("Enter")
        expect(page.locator("#step")).to_contain_text("Subtasks")


def test_a_dialog_keeps_the_focus_inside(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, JOB) as page:
        page.get_by_role("button", name="Savepoint").press("Enter")
        expect(page.get_by_label("Directory")).to_be_focused()
        for _ in range(8):
            page.keyboard.press("Tab")
            assert page.evaluate(
                "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
            )
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Savepoint")).to_be_focused()


def test_screen_readers_find_landmarks_headings_and_names(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, JOB) as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("visits")
        for role in ("banner", "main", "navigation"):
            expect(page.get_by_role(role).first).to_be_attached()
        page.locator("button.node").first.click()
        for path in [*TABS, *SUBTABS]:
            go(page, f"{JOB}/{path}")
            assert page.locator("svg[role=img]:not([aria-label])").count() == 0
            assert page.locator("th:not([scope])").count() == 0
            assert page.locator("table:not(:has(caption))").count() == 0
            nameless = "b => !(b.getAttribute('aria-label') || b.textContent.trim() || b.closest('label'))"
            fields = "[...document.querySelectorAll('button, input, select')]"
            assert page.evaluate(f"{fields}.filter({nameless}).length") == 0


def test_hostile_names_are_shown_as_text(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url) as page:
        page.get_by_role("link", name=HOSTILE).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
        for tab in [*TABS, *SUBTABS]:
            go(page, f"#/jobs/{hostile_job().id}/{tab}")
        go(page, f"#/jobs/{hostile_job().id}/exceptions")
        page.get_by_role("button", name="Open the failure").click()
        expect(page.locator("tr.more pre")).to_have_text(HOSTILE)
        assert page.locator("img, script:not([src])").count() == 0


def test_an_unknown_job_and_a_wild_address_are_answered_in_words(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, "#/jobs/nobody%2F..%2F%3Cb%3E/overview") as page:
        expect(page.locator("#notices")).to_contain_text("not found", ignore_case=True)
        expect(page.get_by_role("link", name="All jobs")).to_be_visible()
    with opened(browser, server.served.url, "#/jobs/%E0%A4%A/x/y/z") as page:
        expect(page.get_by_role("link", name="All jobs")).to_be_visible()


def test_a_refresh_keeps_focus_scrolling_sorting_and_open_rows(browser: Browser) -> None:
    job = given(running_job())
    with serving(job) as client, opened(browser, client.served.url, f"{JOB}/checkpoints/history") as page:
        page.get_by_role("button", name="End to End Duration").click()
        page.get_by_role("button", name="Open checkpoint 7").click()
        # The subtasks come with a call of their own; before that the row is shorter, and says that they are loaded.
        expect(page.get_by_role("button", name="Open the subtasks of counts")).to_be_visible()
        page.get_by_role("button", name="Close checkpoint 7").focus()
        page.evaluate("window.scrollTo(0, 300)")
        where = page.evaluate("scrollY")
        before = page.get_by_role("table", name="History of the checkpoints").inner_text()
        job.given = newer(job.given)
        expect(page.locator(".figure .value").first).to_have_text("1,234")
        expect(page.locator(".finding")).to_have_count(2)  # also if two have one name
        assert page.evaluate("scrollY") == where
        expect(page.get_by_role("button", name="Close checkpoint 7")).to_be_focused()
        assert page.get_by_role("table", name="History of the checkpoints").inner_text() == before


def newer(facts: JobFacts) -> JobFacts:
    """The facts of a second later: another rate."""
    assert facts.figures is not None
    figures = msgspec.structs.replace(facts.figures, rows_per_second=1234.0)
    return msgspec.structs.replace(facts, taken_ms=facts.taken_ms + 1000, figures=figures, health=facts.health[:1] * 2)


def test_the_page_says_when_the_server_is_gone_and_when_it_is_back(browser: Browser) -> None:
    with serving(given(running_job())) as client:
        port = urlsplit(client.served.url).port or 0
        with opened(browser, client.served.url, JOB) as page:
            expect(page.get_by_role("heading", level=1)).to_have_text("visits")
            client.served.close()
            notice = page.locator("#notices")
            expect(notice).to_contain_text("The server cannot be reached since")
            expect(notice).to_contain_text("What you see is from")
            expect(page.get_by_role("heading", level=1)).to_have_text("visits")
            with serving(given(running_job()), settings=RestSettings(ports=range(port, port + 1))):
                expect(notice).to_have_text("")


def test_a_hidden_tab_asks_for_nothing(browser: Browser, server: Client) -> None:
    hide = """hidden => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with opened(browser, server.served.url, JOB) as page:
        page.clock.install()
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("visits")
        with page.expect_request(re.compile("/facts")):
            page.clock.fast_forward(2000)
        page.evaluate(hide, True)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.fast_forward(60_000)
        with page.expect_request(re.compile("/facts")):
            page.evaluate(hide, False)
        assert len(asked) == 1


def test_a_thousand_subtasks_and_ten_thousand_checkpoints_stay_usable(browser: Browser) -> None:
    facts = generated_facts(parallelism=1000, checkpoints=10_000)
    with serving(given(facts)) as client, opened(browser, client.served.url, f"#/jobs/{facts.id}") as page:
        page.locator("button.node", has_text="counts").click()
        subtasks = page.get_by_role("table", name="Subtasks of counts")
        expect(subtasks.locator("tbody tr")).to_have_count(25)
        go(page, f"#/jobs/{facts.id}/checkpoints/history")
        history = page.get_by_role("navigation", name="Pages of History of the checkpoints")
        expect(history).to_contain_text("Page 1 of 400 · 10,000 rows")
        history.get_by_role("button", name="Last page").click()
        expect(page.get_by_role("row", name=re.compile("^Open checkpoint 1 1 COMPLETED"))).to_be_visible()
        history.get_by_role("button", name="First page").click()
        page.get_by_role("button", name="Open checkpoint 9999").click()
        page.get_by_role("button", name="Open the subtasks of enrich").click()
        expect(page.get_by_role("navigation", name="Pages of SubTasks of enrich")).to_contain_text("1,000 rows")
        assert page.evaluate("document.querySelectorAll('*').length") < 5000
