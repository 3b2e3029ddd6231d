"""Encoded answers are kept as long as the facts are the same, within bounds."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from strandline.rest import answers
from strandline.rest.answers import AnswerCache
from tests.observe.generated import generated_facts

FACTS = generated_facts(samples=0)


def test_an_answer_is_made_once_for_the_same_facts() -> None:
    cache, numbers = AnswerCache(), count()
    given = (FACTS, FACTS, msgspec.structs.replace(FACTS), FACTS)
    assert [cache.get(facts, "a", lambda: next(numbers)).body for facts in given] == [b"0", b"0", b"1", b"2"]


def test_two_questions_about_the_same_facts_have_two_answers_with_two_tags() -> None:
    cache = AnswerCache()
    one, other = cache.get(FACTS, "a", lambda: [1]), cache.get(FACTS, "b", lambda: [2])
    assert (one.body, other.body) == (b"[1]", b"[2]")
    assert one.tag != other.tag


def test_kept_answers_are_bounded_in_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEPT_BYTES", 10_000)
    cache = AnswerCache()
    for number in range(500):
        facts = msgspec.structs.replace(FACTS, id=str(number % 100))
        assert cache.get(facts, str(number), lambda: b"x" * 900).body == b"x" * 900
        kept = [answer for _, some in cache._jobs.values() for answer in some.values()]
        assert sum(len(one.body) for one in kept) == cache._bytes <= 10_000
    assert cache.get(FACTS, "huge", lambda: b"x" * 20_000).body == b"x" * 20_000
    assert cache._bytes == 0
