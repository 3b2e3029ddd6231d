"""A failed run comes back after a pause, until it has failed too often in a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strandline.config import Config
from strandline.runtime.driver.restart import RestartStrategy

DAY = 86_400.0


def strategy(kind: str = "exponential-delay", **other: float) -> RestartStrategy:
    settings = {"attempts": 3, "delay": 1.0, "max_delay": 10.0, "multiplier": 2.0, "reset_after": 60.0, **other}
    return RestartStrategy(
        kind,
        int(settings["attempts"]),
        settings["delay"],
        settings["max_delay"],
        settings["multiplier"],
        settings["reset_after"],
    )


def test_the_options_of_the_config_count() -> None:
    config = Config(checkpoint_dir="c", restart_strategy="fixed-delay", restart_attempts=2, restart_delay="3s")
    chosen = RestartStrategy.of(config)
    assert [chosen.after_failure(now) for now in (0.0, 1.0, 2.0)] == [3.0, 3.0, None]


def test_without_a_strategy_the_first_failure_is_the_last() -> None:
    assert strategy("none").after_failure(0.0) is None


def test_no_attempts_means_no_restart() -> None:
    assert strategy(attempts=0).after_failure(0.0) is None


def test_the_pause_grows_up_to_its_bound() -> None:
    chosen = strategy(attempts=6)
    assert [chosen.after_failure(float(now)) for now in range(7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, None]


def test_a_long_time_without_failure_forgives_the_earlier_ones() -> None:
    chosen = strategy()
    assert [chosen.after_failure(now) for now in (0.0, 60.0, 120.0)] == [1.0, 2.0, 4.0]
    assert chosen.after_failure(180.1) == 1.0


@given(gaps=st.lists(st.floats(0.0, 120.0), max_size=30), kind=st.sampled_from(["fixed-delay", "exponential-delay"]))
def test_never_more_restarts_in_a_row_than_allowed(gaps: list[float], kind: str) -> None:
    chosen = strategy(kind)
    now, in_a_row = 0.0, 0
    for gap in gaps:
        before, now = now, now + gap
        in_a_row = 1 if now - before > 60.0 else in_a_row + 1
        pause = chosen.after_failure(now)
        assert (pause is None) == (in_a_row > 3)
        if pause is not None:
            assert 1.0 <= pause <= 10.0


def test_a_run_that_fails_for_days_still_gets_its_pause() -> None:
    chosen = strategy(attempts=-1, reset_after=DAY)
    assert [chosen.after_failure(float(now)) for now in range(2000)][-1] == 10.0
