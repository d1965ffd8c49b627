"""The page on dialects says what the code does, and the code has an answer to every field that a provider publishes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from polar.proxy.dialects.anthropic import FIELDS
from polar.proxy.dialects.fields import Action, Field
from tests.dialect_tables import published, rewritten

PAGE = Path(__file__).parents[2] / "docs" / "dialects.md"
BLOCK = re.compile(r"\.content\[\](?=<)")
SCHEMAS = {
    "messages": message_create_params.MessageCreateParamsStreaming,
    "count_tokens": message_count_tokens_params.MessageCountTokensParams,
    "beta messages": beta_create_params.MessageCreateParamsStreaming,
    "beta count_tokens": beta_count_params.MessageCountTokensParams,
}


def test_the_tables_in_the_page_are_the_codes() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page, "run python -m tests.dialect_tables docs/dialects.md"


def names(path: str) -> tuple[str, ...]:
    """What rows may call a field: a block is the same wherever it stands."""
    return path, *(f"block{path[found.end() :]}" for found in BLOCK.finditer(path))


def answered(path: str) -> bool:
    return any(field.covers(name) for name in names(path) for field in FIELDS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_published_field_of_anthropics_has_an_answer(name: str) -> None:
    # below every role the same blocks are met again
    paths = {names(path)[1 if ".content[]<" in path else 0] for path in published(SCHEMAS[name])}
    assert len(paths) > 100
    assert sorted(path for path in paths if not answered(path)) == []


def test_the_older_sampling_parameters_have_an_answer_though_the_sdk_no_longer_names_them() -> None:
    assert all(answered(path) for path in ("temperature", "top_p", "top_k", "output_format"))


def test_a_field_that_nobody_has_thought_of_has_none() -> None:
    for path in (
        "sparkle",
        "tools[]<custom>.sparkle",
        "tools[]<sparkle_20270101>",
        "messages[]<user>.content[]<sparkle>",
    ):
        assert not answered(path)


def test_only_what_is_not_looked_at_covers_what_is_below() -> None:
    row: Any = Field("a", Action.IGNORED, "why")
    assert row.covers("a.b[]<c>.d")
    assert not row.covers("ab")
    assert not Field("a", Action.MAPPED, "").covers("a.b")
    assert Field("a", Action.MAPPED, "", whole=True).covers("a[]<x>")
