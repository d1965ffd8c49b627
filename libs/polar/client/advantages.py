"""Group-relative advantages, as GRPO defines them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
