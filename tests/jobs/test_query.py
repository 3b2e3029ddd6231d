"""`run.query` in a real run: every kind of step, by key."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

import strandline as sl
from tests.jobs.place import Place, Sum

pytestmark = pytest.mark.spark


def test_a_query_of_a_processor_needs_no_library_that_its_slot_has_not_loaded(place: Place) -> None:
    """It takes a slot seconds to load pandas while batches are at work, so the driver encodes the key."""
    with place.sums(Sum()).start() as run:
        assert run.query("sums", key="a") is None
        slots = [slot.pid for manager in run.processes().task_managers for slot in manager.slots]
        assert slots
        assert not [pid for pid in slots if "/pandas/" in Path(f"/proc/{pid}/maps").read_text()]
        place.write([("a", 1), ("b", 2), ("a", 3)])
        run.process_all_available()
        assert run.query("sums", "total", "a") == run.query("sums", key="a", timeout="1min") == (2, 4)
        assert run.query("sums", key="c") is None


def test_steps_without_user_code_show_what_they_keep_for_a_key(place: Place) -> None:
    job = place.job()
    timed = place.source().selectExpr("user", "x", "timestamp_seconds(x) AS ts")
    rows = job.source(timed, event_time="ts", watermark_delay="10s")
    steps = {
        "totals": rows.key_by("user").aggregate(n=sl.count(), s=sl.sum("x"), uid="totals"),
        "minutes": rows.key_by("user").window(sl.tumbling("1m")).aggregate(n=sl.count(), uid="minutes"),
        "first": rows.key_by("user").deduplicate(uid="first"),
    }
    for name, stream in steps.items():
        stream.sink(sl.ParquetSink(str(place.root / name)))
    place.write([("a", 1), ("b", 2), ("a", 70)])
    with job.start() as run:
        run.process_all_available()
        assert run.query("totals", key="a") == {"n": 2, "s": 71}
        assert run.query("totals", key="c") is None
        # The watermark, 60 s, has closed the first minute.
        (window,) = run.query("minutes", key="a")
        assert (window["window_start"], window["window_end"], window["n"]) == (
            datetime(1970, 1, 1, 0, 1, tzinfo=UTC),
            datetime(1970, 1, 1, 0, 2, tzinfo=UTC),
            1,
        )
        assert run.query("minutes", key="b") == []
        assert run.query("first", key="b") == {"expires": None}
        with pytest.raises(sl.ConfigError, match="give the key, such as key='alice'"):
            run.query("totals")
