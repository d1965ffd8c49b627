from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from polar.client import group_advantages

REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=40)


def test_equal_rewards_have_no_advantage() -> None:
    assert group_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]


def test_one_of_two_wins() -> None:
    won, lost = group_advantages([1.0, 0.0])
    assert won is not None
    assert math.isclose(won, 1.0, rel_tol=1e-4)
    assert lost == -won


@given(REWARDS)
def test_a_session_without_a_reward_is_in_no_baseline(rewards: list[float | None]) -> None:
    found = group_advantages(rewards)
    assert [one is None for one in found] == [one is None for one in rewards]
    known = [one for one in found if one is not None]
    assert math.isclose(sum(known), 0.0, abs_tol=1e-3)
    assert group_advantages([one for one in rewards if one is not None]) == known
