"""The rules of building, one hand-made case each, as ids that a person can follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.schemas import encode
from tests.builder.conformance import Case, build, set_aside, shown, table
from tests.builder.conformance_cases import CASES

DOCS = Path(__file__).parents[2] / "docs" / "trajectories.md"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_build_keeps_the_rule(case: Case) -> None:
    trajectory = build(case)
    assert trajectory.error is None, trajectory.error
    assert [shown(trajectory, one) for one in trajectory.traces] == case.traces
    assert set_aside(trajectory) == case.aside
    assert encode(build(case)) == encode(trajectory)
    assert trajectory.statistics().replies + len(case.aside) >= len(case.calls)


def test_the_documentation_shows_the_cases() -> None:
    assert table(CASES) in DOCS.read_text(encoding="utf-8"), (
        "docs/trajectories.md is behind: python -m tests.builder.conformance_cases"
    )
