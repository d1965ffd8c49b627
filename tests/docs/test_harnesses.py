"""The page on harnesses says what the harness suite runs."""

from __future__ import annotations

from pathlib import Path

from tests.harness_tables import rewritten

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"


def test_what_is_made_in_the_page_is_what_the_suite_runs() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page, "run python -m tests.harness_tables docs/harnesses.md"
