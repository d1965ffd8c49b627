"""Aligning two renderings of a reply, id by id."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.builder.rendering import differences

ids = st.lists(st.integers(0, 5), max_size=40)


def array(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@settings(max_examples=400, deadline=None)
@given(ids, ids)
def test_the_stretches_are_all_that_differs(sampled: list[int], rendered: list[int]) -> None:
    found = differences(array(sampled), array(rendered))
    at = on = 0
    for one in found:
        same = one.position - at
        assert same >= 0
        assert sampled[at : at + same] == rendered[on : on + same]
        assert one.sampled or one.canonical
        at, on = one.position + one.sampled, on + same + one.canonical
    assert sampled[at:] == rendered[on:]
    assert (found == ()) == (sampled == rendered)


@pytest.mark.parametrize(
    ("sampled", "rendered", "expected"),
    [
        ([1, 2, 7, 8, 9], [12, 7, 8, 9], [(0, 2, 1)]),
        ([7, 8, 9, 1, 2, 7, 8, 9, 3, 4], [7, 8, 9, 12, 7, 8, 9, 34], [(3, 2, 1), (8, 2, 1)]),
        ([5, 6, 7, 8, 9], [7, 8, 9], [(0, 2, 0)]),
        ([7, 8, 9], [7, 8, 9, 4], [(3, 0, 1)]),
    ],
)
def test_each_stretch_is_told_apart(
    sampled: list[int], rendered: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert [tuple(one) for one in differences(array(sampled), array(rendered))] == expected


def test_a_long_rendering_with_many_stretches_is_aligned_by_short_looks() -> None:
    chance = np.random.default_rng(1)
    sampled, rendered, stretches = [], [], 300
    for number in range(stretches):
        same = chance.integers(100, 30_000, 40).tolist()
        sampled += [*same, 40_000 + number, 50_000 + number]
        rendered += [*same, 60_000 + number]
    found = differences(array(sampled), array(rendered))
    assert {(one.sampled, one.canonical) for one in found} == {(2, 1)}
    assert len(found) == stretches
