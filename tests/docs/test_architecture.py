"""The documents say what the code does."""

from __future__ import annotations

from pathlib import Path

from polar.cli.operate import markdown_table

ROOT = Path(__file__).parents[2]


def test_the_topic_table_in_the_architecture_page_is_the_codes() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rest = page.partition("<!-- topics:")
    shown = rest.partition("-->")[2].partition("<!-- /topics -->")[0].strip()
    assert shown == markdown_table(), "run `polar topics --markdown` and paste it into docs/architecture.md"
