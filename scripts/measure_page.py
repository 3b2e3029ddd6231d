"""How the page copes with 1,000 subtasks per step and 10,000 checkpoints: `python -m scripts.measure_page`.

The facts are generated and change every second; the server and the browser are real.
"""

from __future__ import annotations

import time

import msgspec
from playwright.sync_api import Page
from tests.observe.generated import generated_facts
from tests.rest.served import GivenJob, serving
from tests.web.browser import chromium, opened

from strandline.observe.facts import JobFacts

SECONDS = 6
WATCH = """() => {
  window.drawn = []; window.frames = []; let last = 0; let before = performance.now();
  const look = () => {
    const now = performance.now();
    frames.push(now - before); before = now;
    if (strandlinePage.updated !== last) {
      last = strandlinePage.updated;
      requestAnimationFrame(() => drawn.push(strandlinePage.drawnMs));
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""
ANSWERS = """() => performance.getEntriesByType("resource").filter((one) => one.name.includes("/facts?"))
  .map((one) => one.transferSize)"""


class MovingJob(GivenJob):
    """A job whose facts are newer every second."""

    def facts(self) -> JobFacts:
        return msgspec.structs.replace(self.given, taken_ms=int(time.time()) * 1000)


def prepare(page: Page, tab: str) -> None:
    page.wait_for_selector(".figure")
    if tab == "overview":
        page.locator("button.node").first.click()
    if tab == "checkpoints/history":
        page.get_by_role("button", name="Open checkpoint 9999").click()
        page.get_by_role("button", name="Open the subtasks of enrich").click()


def main() -> None:
    facts = generated_facts(parallelism=1000, checkpoints=10_000)
    lines = []
    with serving(MovingJob(facts)) as client, chromium() as browser:
        for tab in ("overview", "checkpoints/history", "checkpoints/summary", "skew", "exceptions"):
            began = time.monotonic()
            with opened(browser, client.served.url, f"#/jobs/{facts.id}/{tab}") as page:
                prepare(page, tab)
                first = time.monotonic() - began
                page.evaluate(WATCH)
                page.wait_for_timeout(SECONDS * 1000)
                drawn, frames, sizes = page.evaluate("drawn"), page.evaluate("frames"), page.evaluate(ANSWERS)
            lines.append(
                f"{tab}: shown after {first:.1f} s, refresh drawn in {sorted(drawn)[len(drawn) // 2]:.0f} ms (at most "
                f"{max(drawn):.0f}), longest frame {max(frames):.0f} ms, {sizes[0]:,} bytes, then {sizes[-1]:,}"
            )
    print("\n".join(lines))  # noqa: T201 - what the user asked for


if __name__ == "__main__":
    main()
