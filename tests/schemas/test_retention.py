"""What the topics keep is enough for each other; what is not is named with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.schemas.topics import (
    DAY,
    EXPORT_WINDOW_MS,
    LONGEST_SESSION_MS,
    TABLE,
    RetentionProblem,
    retention_problems,
)

KEPT = {spec.name: spec.retention_ms for spec in TABLE}


def test_the_tables_own_settings_are_enough() -> None:
    assert retention_problems(KEPT) == []


@given(st.dictionaries(st.sampled_from(sorted(KEPT)), st.none() | st.integers(-1, 100 * DAY)))
def test_what_keeps_longer_than_the_table_is_never_a_problem(kept: dict[str, int | None]) -> None:
    longer = {
        name: None if value is None or KEPT[name] is None else max(value, KEPT[name] or 0)
        for name, value in kept.items()
    }
    assert retention_problems(longer) == []


@pytest.mark.parametrize("kept", [None, -1, EXPORT_WINDOW_MS + LONGEST_SESSION_MS])
def test_completions_kept_long_enough_or_for_ever_are_fine(kept: int | None) -> None:
    assert retention_problems({"completions": kept}) == []


def test_completions_must_outlive_the_export_window_and_the_longest_session() -> None:
    (problem,) = retention_problems({**KEPT, "completions": EXPORT_WINDOW_MS})
    assert problem[:3] == ("completions", EXPORT_WINDOW_MS, EXPORT_WINDOW_MS + LONGEST_SESSION_MS)
    assert "`completions` keeps 21 days, wanted 28 days or more: " in str(problem)
    (problem,) = retention_problems({"completions": 30 * DAY}, export_window_ms=24 * DAY)
    assert problem.wanted_ms == 31 * DAY


@given(st.integers(0, 60 * DAY), st.integers(0, 30 * DAY), st.integers(0, 60 * DAY))
def test_a_problem_says_what_would_be_enough(window: int, longest: int, kept: int) -> None:
    found = retention_problems({"completions": kept}, export_window_ms=window, longest_session_ms=longest)
    assert bool(found) == (kept < window + longest)
    for one in found:
        assert isinstance(one, RetentionProblem)
        assert not retention_problems(
            {"completions": one.wanted_ms}, export_window_ms=window, longest_session_ms=longest
        )


def test_what_is_not_named_is_not_judged_and_a_short_time_is_told_in_hours() -> None:
    assert retention_problems({"stages": 1, "unheard-of": 1}) == []
    (problem,) = retention_problems({"control": 3_600_000})
    assert "`control` keeps 1 hours" in str(problem)


def test_the_table_in_the_documents_is_the_codes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    told = {name: (kept, least) for names, kept, least, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(told) == set(KEPT)
    wanted = {one.topic: one.wanted_ms for one in retention_problems(dict.fromkeys(KEPT, 0))}
    for name, (kept, least) in told.items():
        days = KEPT[name]
        assert kept == ("for ever" if days is None else f"{days // DAY} days"), name
        assert least == (f"{wanted[name] // DAY} days" if name in wanted else ""), name
