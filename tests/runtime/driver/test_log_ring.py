"""The driver's own log in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from strandline.runtime.driver.log_ring import KEPT_LINES, LONGEST_EVENT, LogRing


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LogRing, logging.Logger]]:
    monkeypatch.delenv("STRANDLINE_LOG_FORMAT", raising=False)
    logger = logging.getLogger("test-of-the-ring")
    logger.setLevel(logging.INFO)
    ring = LogRing()
    logger.addHandler(ring)
    yield ring, logger
    logger.removeHandler(ring)


def test_the_last_lines_are_kept(ring: tuple[LogRing, logging.Logger]) -> None:
    kept, logger = ring
    logger.info("job %s: begins", "visits")
    end = kept.end(10_000)
    assert end.process == "driver"
    assert end.text.endswith("job visits: begins\n")
    assert not end.cut
    for number in range(KEPT_LINES):
        logger.info("event %d", number)
    end = kept.end(10_000_000)
    assert len(end.text.splitlines()) == KEPT_LINES
    assert end.cut


def test_an_end_is_bounded_in_bytes_and_has_whole_lines(ring: tuple[LogRing, logging.Logger]) -> None:
    kept, logger = ring
    for number in range(100):
        logger.info("event %d", number)
    end = kept.end(500)
    assert len(end.text.encode()) <= 500
    assert end.text.endswith("event 99\n")
    assert end.cut
    logger.info("x" * (2 * LONGEST_EVENT))
    assert len(kept.end(1_000_000).text) < 2 * LONGEST_EVENT


def test_secrets_are_hidden(ring: tuple[LogRing, logging.Logger]) -> None:
    kept, logger = ring
    kept.hide(["hunter22"])
    logger.info("the word is hunter22")
    assert "hunter22" not in kept.end(1000).text


def test_a_warning_still_reaches_standard_error_if_the_user_has_no_handlers(
    ring: tuple[LogRing, logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    _kept, logger = ring
    logger.propagate = False  # as if the root logger had no handler
    try:
        logger.info("quiet")
        logger.warning("look here")
        logger.addHandler(logging.NullHandler())
        logger.warning("the user's own handler has this one")
    finally:
        logger.propagate = True
        logger.handlers[:] = logger.handlers[:1]
    assert capsys.readouterr().err == "look here\n"
