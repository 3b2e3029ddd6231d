"""How long catching up takes, from measured figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.observe.catching_up import catching_up
from strandline.observe.facts import JobFacts
from tests.observe.rules.courses import quiet, sampled, with_


def rated(now: float, before: float, busy: float = 0.5, **config: object) -> JobFacts:
    """A job whose input was `before` until three minutes ago and is `now` since."""
    facts = quiet()
    facts = with_(facts, config={**facts.config, **config})
    return sampled(
        facts,
        lambda back, one: with_(one, rows_per_second=now if back <= 180 else before, busy=busy, back_pressured=0.0),
    )


def test_the_time_follows_from_the_rate_that_was_seen() -> None:
    result = catching_up(rated(1000.0, 3000.0, changelog=True), 60)
    assert result is not None
    # 60 s of loss and 2.1 s of restore at 1000 rows/s wait; 2000 rows/s are to spare.
    assert (result.measured, result.capacity, result.waiting_rows) == ("seen", 3000.0, 62_100)
    assert result.seconds == pytest.approx(31.05)
    assert "catch up in about 31 s" in result.in_words()
    assert "3,000 rows/s" in result.in_words()


def test_without_the_changelog_the_rows_since_the_last_checkpoint_are_processed_again() -> None:
    with_log = catching_up(rated(1000.0, 3000.0, changelog=True), 60)
    without = catching_up(rated(1000.0, 3000.0, checkpoint_interval="10 min"), 60)
    assert with_log is not None
    assert without is not None
    assert without.waiting_rows - with_log.waiting_rows >= 600_000


def test_a_job_that_never_ran_faster_is_judged_by_its_busy_time() -> None:
    result = catching_up(rated(1000.0, 1000.0, busy=0.25), 60)
    assert result is not None
    assert (result.measured, result.capacity) == ("busy", 4000.0)
    assert "by its busy time" in result.in_words()


@pytest.mark.parametrize("busy", [0.0, 0.02])
def test_a_job_that_is_nearly_idle_catches_up(busy: float) -> None:
    result = catching_up(rated(1000.0, 1000.0, busy=busy), 60)
    assert result is not None
    assert result.capacity == 10_000.0, "not more than ten times what was seen"
    assert result.seconds is not None


def test_a_job_that_is_always_busy_never_catches_up() -> None:
    result = catching_up(rated(1000.0, 1000.0, busy=0.99), 60)
    assert result is not None
    assert result.seconds is None
    assert "never catch up" in result.in_words()
    assert "rescale" in result.in_words()


def test_a_job_without_rows_says_nothing() -> None:
    assert catching_up(rated(0.0, 3000.0), 60) is None
    assert catching_up(quiet(samples=0), 60) is None


@given(st.floats(0, 10**6), st.floats(1, 10**6), st.floats(1, 10**6), st.floats(0, 1))
def test_a_longer_loss_never_takes_less_time(lost: float, now: float, before: float, busy: float) -> None:
    facts = rated(now, before, busy)
    short, long = catching_up(facts, lost), catching_up(facts, lost + 60)
    assert short is not None
    assert long is not None
    assert (short.seconds is None) is (long.seconds is None)
    if short.seconds is not None and long.seconds is not None:
        assert 0 <= short.seconds < long.seconds
