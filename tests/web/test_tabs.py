"""What each part of the page shows of a generated job."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, Page, expect

from tests.rest.served import Client
from tests.web.browser import opened
from tests.web.jobs import running_job

JOB = f"#/jobs/{running_job().id}"


def headers(page: Page, caption: str) -> list[str]:
    table = page.get_by_role("table", name=caption, exact=True)
    expect(table).to_be_visible()
    texts = table.locator("> thead > tr > th").all_inner_texts()
    return [re.sub(r"[▼▲↕\s]+", " ", text).strip() for text in texts]


def row(page: Page, caption: str, number: int) -> list[str]:
    rows = page.get_by_role("table", name=caption, exact=True).locator("> tbody > tr")
    expect(rows.nth(number)).to_be_visible()
    return [text.strip() for text in rows.nth(number).locator("> *").all_inner_texts()]


def test_the_list_names_every_job_with_its_status_and_health(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url) as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")
        expect(page.get_by_role("row", name="visits")).to_contain_text("Back pressure (and 1 more)")
        expect(page.get_by_role("row", name=re.compile("^lost"))).to_contain_text("driver lost")
        expect(page.get_by_role("row", name="broken")).to_contain_text("The run failed")
        page.get_by_role("link", name="visits").click()
        expect(page).to_have_title("visits · running – Strandline")


def test_the_head_says_health_first_and_then_the_figures(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, JOB) as page:
        findings = page.locator(".finding")
        expect(findings).to_have_count(2)
        expect(findings.first).to_contain_text("critical")
        expect(findings.first).to_contain_text("Start delay 8.1 s of 9.0 s.")
        expect(findings.first).to_contain_text("What to do: Add subtasks: press Rescale.")
        values = dict(
            zip(
                page.locator(".figure dt").all_inner_texts(),
                page.locator(".figure .value").all_inner_texts(),
                strict=True,
            )
        )
        assert values == {
            "Rows/s": "9,000",
            "Lag": "20.0 s",
            "State": "218 MB",
            "Last checkpoint": "19.8 s ago",
            "Uptime": "1 h 0 m",
            "Parallelism": "2",
        }


def test_the_tabs_come_in_flinks_order_and_have_addresses(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, JOB) as page:
        tabs = page.get_by_role("tablist").first.get_by_role("tab")
        expect(tabs).to_have_text(
            [
                "Overview",
                re.compile("Exceptions"),
                "Data Skew",
                "Checkpoints",
                "Configuration",
                "Rescales and recoveries",
                "Logs",
            ]
        )
        tabs.nth(2).click()
        expect(page).to_have_url(re.compile("/skew$"))
        page.reload()
        expect(page.get_by_role("heading", name="Data Skew")).to_be_visible()
        page.go_back()
        expect(page.get_by_role("heading", name="Graph")).to_be_visible()


def test_the_graph_shows_steps_with_load_rate_lag_and_state(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, JOB) as page:
        node = page.locator("button.node", has_text="counts")
        expect(node).to_contain_text("× 2")
        for text in (
            "Busy (max) 68 %",
            "Back-pressured (max) 6 %",
            "Rows/s 3,223",
            "Watermark lag 20.0 s",
            "State 110 MB",
        ):
            expect(node).to_contain_text(text)
        assert "is-busy" in (node.get_attribute("class") or "")
        assert "is-idle" in (page.locator("button.node", has_text="enrich").get_attribute("class") or "")
        expect(page.locator(".node.sink")).to_contain_text("ParquetSink(out)")
        expect(page.locator("path.edge")).to_have_count(4)
        assert page.locator(".charts figure").count() == 6


def test_a_step_opens_to_subtasks_key_groups_and_a_flame_graph(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}&token={server.served.token}") as page:
        page.locator("button.node", has_text="counts").click()
        assert headers(page, "Subtasks of counts")[:6] == [
            "Subtask",
            "Load",
            "Busy",
            "Back-pressured",
            "Idle",
            "Rows in/s",
        ]
        busy = page.locator("th", has=page.get_by_role("button", name="Busy", exact=True))
        busy.get_by_role("button").click()
        expect(busy).to_have_attribute("aria-sort", "descending")
        assert row(page, "Subtasks of counts", 0)[2:4] == ["68 %", "6 % OK"]
        busy.get_by_role("button").click()
        expect(busy).to_have_attribute("aria-sort", "ascending")
        assert row(page, "Subtasks of counts", 0)[2] == "39 %"
        assert page.locator(".heat rect").count() == 128
        expect(page.locator("#step")).to_contain_text("The fullest of 128 key groups, 75, took 19,928 rows")
        page.get_by_role("button", name="Sample for 10 seconds").click()
        expect(page.get_by_role("button", name="work: 100 %, 2 samples")).to_be_visible()
        page.get_by_role("button", name="work: 100 %, 2 samples").press("Enter")
        expect(page.locator(".flame")).to_contain_text("Inside work")
        expect(page.get_by_role("table", name="Functions by time of their own")).to_contain_text("100 %")


def test_exceptions_say_the_cause_and_open_to_the_whole_text(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}/exceptions") as page:
        assert row(page, "Failures", 1)[1:] == [
            "2025-10-09 08:33:20",
            "Slots lost and rebuilt",
            "slot 0: its process 10000 was killed by SIGKILL",
            "0",
        ]
        page.get_by_role("button", name="Open the failure at 2025-10-09 08:03:20").click()
        expect(page.locator("tr.more pre")).to_have_text("OSError: disk full\n  at …")


def test_data_skew_has_a_figure_for_each_step(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}/skew") as page:
        assert row(page, "Data skew of the steps", 0)[:3] == ["enrich", "1 %", "52 %"]
        expect(page.get_by_role("img", name=re.compile("^Rows per subtask. 2 values: newest 1.00 M"))).to_be_visible()


def test_the_overview_of_checkpoints_has_flinks_labels(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}/checkpoints") as page:
        expect(page.locator(".card")).to_have_count(5)
        cards = {}
        for card in page.locator(".card").all():
            names, values = card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts()
            cards[card.locator("h3").inner_text()] = dict(zip(names, values, strict=True))
        assert cards == {
            "Checkpoint Counts": {
                "Triggered": "20",
                "In Progress": "1",
                "Completed": "18",
                "Failed": "1",
                "Restored": "2",
            },
            "Latest Completed Checkpoint": {
                "ID": "19",
                "Completion Time": "2025-10-09 08:53:00",
                "End to End Duration": "205 ms",
                "Checkpointed Data Size": "2.30 MB",
                "Full Checkpoint Data Size": "200 MB",
            },
            "Latest Failed Checkpoint": {
                "ID": "10",
                "Failure Time": "2025-10-09 08:51:30",
                "Cause": "subtask 1 of counts: storage says 503 Slow Down",
            },
            "Latest Savepoint": {
                "ID": "17",
                "Completion Time": "2025-10-09 08:52:40",
                "Checkpointed Data Size": "1.97 MB",
                "Full Checkpoint Data Size": "200 MB",
                "Savepoint Format": "native",
                "Path": "/data/checkpoints/visits/chk-17",
            },
            "Latest Restore": {
                "ID": "3",
                "Restore Time": "2025-10-09 08:03:20",
                "Type": "Checkpoint",
                "Path": "/data/checkpoints/visits/chk-3",
            },
        }


def test_the_history_opens_down_to_operators_and_subtasks(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}/checkpoints/history") as page:
        assert headers(page, "History of the checkpoints")[1:] == [
            "ID",
            "Status",
            "Acknowledged",
            "Trigger Time",
            "Latest Acknowledgement",
            "End to End Duration",
            "Checkpointed Data Size",
            "Full Checkpoint Data Size",
            "Processed (persisted) in-flight data",
        ]
        assert row(page, "History of the checkpoints", 0)[1:5] == [
            "20",
            "IN PROGRESS",
            "2/4 (50 %)",
            "2025-10-09 08:53:10.000",
        ]
        expect(page.get_by_role("row", name=re.compile("17 COMPLETED"))).to_contain_text("[Savepoint]")
        page.get_by_role("button", name="Open checkpoint 20").click()
        page.get_by_role("button", name="Open the subtasks of counts").click()
        subtasks = page.get_by_role("table", name="SubTasks of counts")
        assert headers(page, "SubTasks of counts") == [
            "ID",
            "Acknowledged",
            "End to End Duration",
            "Checkpointed Data Size",
            "Full Checkpoint Data Size",
            "Sync Duration",
            "Async Duration",
            "Processed (persisted) Data",
            "Alignment Duration",
            "Start Delay",
            "Unaligned Checkpoint",
        ]
        expect(subtasks.locator("tbody th")).to_have_text(["Minimum", "Average", "Maximum", "0", "1"])
        expect(subtasks.locator("tbody tr").last).to_contain_text("View Logs")
        expect(page.get_by_role("img", name=re.compile("Timeline of checkpoint 20 for 2 subtasks"))).to_be_visible()


def test_a_failed_checkpoint_says_why(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}/checkpoints/history") as page:
        page.get_by_role("button", name="Open checkpoint 10").click()
        expect(page.locator("tr.more")).to_contain_text("subtask 1 of counts: storage says 503 Slow Down")


def test_the_summary_has_percentiles_and_plots(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}/checkpoints/summary") as page:
        table = page.get_by_role("table", name="Summary of 18 completed checkpoints")
        expect(table.locator("tbody th")).to_have_text(["Minimum", "Average", "Maximum"])
        expect(table.locator("tbody tr").nth(2)).to_contain_text("243 ms")
        page.get_by_role("button", name="Percentiles").click()
        expect(table.locator("tbody th")).to_have_text(
            ["Minimum", "Average", "Maximum", *(f"{share} % percentile" for share in ("50", "90", "99", "99.9"))]
        )
        expect(page.locator(".chart-title")).to_have_text(
            ["End to end duration", "Size", "Start delay", "Amplification: full checkpoint size ÷ state size"]
        )


def test_configuration_rescales_and_recoveries_show_their_values(browser: Browser, server: Client) -> None:
    tables = {
        "checkpoints/configuration": {"Configuration of the checkpoints": ["Interval", "10.0 s"]},
        "configuration": {"Options of the job": ["checkpoint_interval", "10"]},
        "rescales": {
            "Rescales": ["1 → 2", "3.1 s", "1.4 s", "50.0 MB"],
            "Recoveries": ["Rebuilt slot 0, the others went on", "slot 0: its process was killed"],
            "Statuses of the run": ["starting", "4.0 s", "running"],
        },
    }
    with opened(browser, server.served.url, JOB) as page:
        for tab, captions in tables.items():
            page.goto(f"{server.served.url}/{JOB}/{tab}")
            for caption, texts in captions.items():
                for text in texts:
                    expect(page.get_by_role("table", name=caption, exact=True)).to_contain_text(text)


def test_logs_want_the_token_and_then_show_and_filter_lines(browser: Browser, server: Client) -> None:
    with opened(browser, server.served.url, f"{JOB}/logs") as page:
        page.get_by_role("button", name="Give the token").click()
        page.get_by_label("Token", exact=True).fill(server.served.token)
        page.get_by_role("button", name="Go on").click()
        log = page.get_by_role("region", name="Log of driver")
        expect(log).to_have_text("first line\nsecond line\n")
        page.get_by_label("Only lines with").fill("SECOND")
        expect(log).to_have_text("second line")
        page.get_by_label("Process").select_option("slot-0")
        page.get_by_label("Only lines with").fill("")
        expect(page.get_by_role("region", name="Log of slot-0")).to_have_text("the slot's own line\n")
        page.get_by_label("Process").select_option("slot-1")
        expect(page.get_by_role("region", name="Log of slot-1")).to_have_text("The log is empty.")
