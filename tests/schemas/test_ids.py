"""Ids: made at the edge from a clock and bytes, derived from causes, or chosen by people."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.schemas.ids import MAX_ID_LENGTH, derived, id_problem, session_id, trajectory_id, uuid7


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_uuid7_is_one_and_holds_its_time(at_ms: int, noise: bytes) -> None:
    made = uuid.UUID(uuid7(at_ms, noise))
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == at_ms
    assert id_problem(str(made)) is None


@given(st.lists(st.tuples(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10)), min_size=2, max_size=5))
def test_uuid7_sorts_by_time(made: list[tuple[int, bytes]]) -> None:
    by_time = sorted(made, key=lambda one: one[0])
    texts = [uuid7(at, noise)[:13] for at, noise in by_time]
    assert texts == sorted(texts)


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10), st.binary(min_size=10, max_size=10))
def test_uuid7_keeps_the_randomness(at_ms: int, one: bytes, other: bytes) -> None:
    # 74 bits count: the low 62, and 12 above them
    counted = (1 << 74) - 1
    same = int.from_bytes(one, "big") & counted == int.from_bytes(other, "big") & counted
    assert (uuid7(at_ms, one) == uuid7(at_ms, other)) is same


@pytest.mark.parametrize("size", [0, 9, 11, 16])
def test_uuid7_refuses_another_number_of_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="takes 10 random bytes"):
        uuid7(0, bytes(size))


_TEXT = st.text(alphabet=st.characters(exclude_characters="\x1f", exclude_categories=["Cs"]))


@given(st.lists(st.one_of(_TEXT, st.integers()), max_size=4))
def test_derived_ids_repeat(cause: list[str | int]) -> None:
    assert derived(*cause) == derived(*cause)
    assert uuid.UUID(derived(*cause)).version == 5


def test_derived_ids_tell_causes_apart() -> None:
    assert derived("a", "b") != derived("ab")
    assert derived("a", "b") != derived("b", "a")
    made = {session_id(p, o, s) for p in range(3) for o in range(3) for s in range(3)}
    assert len(made) == 27
    assert trajectory_id("s", 1, "{}") != trajectory_id("s", 2, "{}")


def test_derived_ids_never_change() -> None:
    """A crash, an upgrade or a replay makes the same ids: these are on logs already."""
    assert session_id(0, 0, 0) == "40261854-e27a-5778-b052-b3155f6b3064"
    assert trajectory_id("s", 1, "b") == "f460b2aa-c4a4-5b79-b310-8a8976aeb79b"


@pytest.mark.parametrize("text", ["a", "0", "task-1", "a.b_c:d@e+f", "A" * MAX_ID_LENGTH, "550e8400-e29b-41d4"])
def test_ids_people_choose(text: str) -> None:
    assert id_problem(text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("a" * (MAX_ID_LENGTH + 1), "longer than 200"),
        ("a/b", "no slashes"),
        ("../etc", "no slashes"),
        (".hidden", "starts with a letter or digit"),
        ("-flag", "starts with a letter or digit"),
        ("a b", "may hold letters"),
        ("a\n", "may hold letters"),
        ("a\x00", "may hold letters"),
        ("ä", "may hold letters"),
    ],
)
def test_ids_that_are_unsafe_somewhere(text: str, reason: str) -> None:
    problem = id_problem(text)
    assert problem is not None
    assert reason in problem


@given(st.text(max_size=300))
def test_an_accepted_id_is_safe_in_a_path_and_a_key(text: str) -> None:
    if id_problem(text) is None:
        assert "/" not in text
        assert "\\" not in text
        assert text not in (".", "..")
        assert text.isascii()
        assert text.isprintable()
        assert " " not in text
