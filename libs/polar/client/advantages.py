"""Group-relative advantages, as GRPO defines them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polar.schemas import GroupClosed

EPSILON = 1e-6
"""Keeps a group whose rewards are all equal at advantage 0."""


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """`(reward - mean) / (standard deviation + epsilon)` over the members that have a reward (DeepSeekMath, 4.1).

    None stays None: a session without a reward is in no baseline and trains nothing.
    """
    known = np.array([one for one in rewards if one is not None], np.float64)
    if known.size == 0:
        return list(rewards)
    mean, deviation = known.mean(), known.std()
    return [None if one is None else float((one - mean) / (deviation + EPSILON)) for one in rewards]


def advantages_of(group: GroupClosed) -> dict[str, float]:
    """The advantage of each session that the closed group selected, by session id; its other members have none."""
    selected = set(group.selection)
    rewards = {one.session_id: one.reward for one in group.members if one.session_id in selected}
    found = zip(rewards, group_advantages(list(rewards.values())), strict=True)
    return {session: advantage for session, advantage in found if advantage is not None}
