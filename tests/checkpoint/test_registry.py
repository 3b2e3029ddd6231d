"""The shared state registry: who uses what, and what may go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint import SharedStateRegistry


def files(checkpoint: str, *names: str) -> dict[str, str]:
    return {name: f"{checkpoint}/{name}" for name in names}


def test_the_four_checkpoints_of_the_seeds_with_two_retained() -> None:
    registry: SharedStateRegistry[str, str] = SharedStateRegistry()

    registry.register(1, files("cp-1", "1", "2"))
    assert [registry.uses(name) for name in "12"] == [{1}, {1}]

    registry.register(2, {**files("cp-1", "1", "2"), **files("cp-2", "3", "4")})
    assert [registry.uses(name) for name in "1234"] == [{1, 2}, {1, 2}, {2}, {2}]

    registry.register(3, {**files("cp-3", "1,2,3", "5"), **files("cp-2", "4")})
    assert registry.drop(1) == []
    assert [registry.uses(name) for name in ("1", "2", "3", "4", "1,2,3", "5")] == [{2}, {2}, {2}, {2, 3}, {3}, {3}]

    registry.register(4, {**files("cp-3", "1,2,3"), **files("cp-4", "4,5,6")})
    assert sorted(registry.drop(2)) == ["cp-1/1", "cp-1/2", "cp-2/3"]
    assert [registry.uses(name) for name in ("1", "2", "3")] == [set(), set(), set()]
    assert [registry.uses(name) for name in ("4", "5", "1,2,3", "4,5,6")] == [{3}, {3}, {3, 4}, {4}]
    assert registry.handle("4") == "cp-2/4"
    assert registry.checkpoints() == (3, 4)
    assert len(registry) == 4


def test_the_first_confirmed_copy_survives_and_the_second_is_a_duplicate() -> None:
    registry: SharedStateRegistry[str, str] = SharedStateRegistry()
    registry.register(1, {"sst": "cp-1/a"})
    registration = registry.register(2, {"sst": "cp-2/a", "new": "cp-2/b"})
    assert registration.handles == {"sst": "cp-1/a", "new": "cp-2/b"}
    assert registration.replaced == {"sst": "cp-1/a"}
    assert registration.duplicates == ("cp-2/a",)
    assert registry.drop(1) == []
    assert sorted(registry.drop(2)) == ["cp-1/a", "cp-2/b"]


def test_repeated_registration_and_repeated_drop_change_nothing() -> None:
    registry: SharedStateRegistry[str, str] = SharedStateRegistry()
    for _ in range(3):
        assert registry.register(1, {"a": "x"}).duplicates == ()
    registry.register(2, {"a": "x"})
    assert registry.uses("a") == {1, 2}
    assert registry.drop(1) == []
    assert registry.drop(1) == []
    assert registry.drop(99) == []
    assert registry.drop(2) == ["x"]
    assert registry.drop(2) == []
    assert "a" not in registry
    assert registry.handle("a") is None


def test_a_file_known_under_two_keys_goes_with_the_last_of_them() -> None:
    registry: SharedStateRegistry[str, str] = SharedStateRegistry()
    registry.register(1, {"groups 0-7": "x"})
    registry.register(2, {"groups 0-3": "x", "groups 4-7": "x"})
    assert registry.drop(1) == []
    assert registry.drop(2) == ["x"]


def test_handles_into_one_upload_give_it_up_together() -> None:
    registry: SharedStateRegistry[str, tuple[str, int]] = SharedStateRegistry(location=lambda handle: handle[0])
    registry.register(1, {"a": ("group", 0), "b": ("group", 10)})
    registry.register(2, {"b": ("group", 10)})
    assert registry.drop(1) == []
    assert registry.drop(2) == [("group", 10)]


def test_a_duplicate_that_somebody_refers_to_is_not_given_up() -> None:
    registry: SharedStateRegistry[str, str] = SharedStateRegistry()
    registry.register(1, {"a": "x", "b": "y"})
    assert registry.register(2, {"a": "y"}).duplicates == ()


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.integers(1, 5),
                st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["p", "q", "r", "s", "t"])),
            ),
            st.integers(1, 5),
        ),
        max_size=30,
    )
)
def test_the_registry_agrees_with_a_naive_model(steps: list[tuple[int, dict[str, str]] | int]) -> None:
    registry: SharedStateRegistry[str, str] = SharedStateRegistry()
    refers: dict[int, dict[str, str]] = {}
    for step in steps:
        if isinstance(step, int):
            before = {path for named in refers.values() for path in named.values()}
            refers.pop(step, None)
            after = {path for named in refers.values() for path in named.values()}
            deleted = registry.drop(step)
            assert set(deleted) == before - after
            assert len(deleted) == len(set(deleted))
        else:
            checkpoint, named = step
            registration = registry.register(checkpoint, named)
            for key, path in named.items():
                copies = {other[key] for other in refers.values() if key in other}
                assert registration.handles[key] == (copies.pop() if copies else path)
            refers.setdefault(checkpoint, {}).update(registration.handles)
            in_use = {path for other in refers.values() for path in other.values()}
            assert set(registration.duplicates) == set(named.values()) - in_use
        for key in "abcd":
            assert registry.uses(key) == {checkpoint for checkpoint, named in refers.items() if key in named}
    for checkpoint in list(refers):
        registry.drop(checkpoint)
    assert len(registry) == 0
