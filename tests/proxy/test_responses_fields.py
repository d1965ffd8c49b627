"""The dialect openai.responses has an answer to every field that the official SDK publishes."""

from __future__ import annotations

import re

import pytest
from openai.types.responses import input_token_count_params, response_create_params

from polar.proxy.dialects.responses import FIELDS
from tests.dialect_tables import published

PART = re.compile(r"input\[\]<\w+>\.(?:content|output)\[\](?=<(?:input_|output_|refusal))")
DECLARED = re.compile(r"input\[\]<additional_tools>\.tools\[\]|tools\[\]<namespace>\.tools\[\]")
SCHEMAS = {
    "create": response_create_params.ResponseCreateParamsStreaming,
    "count": input_token_count_params.InputTokenCountParams,
}


def name(path: str) -> str:
    """What rows call a field: a part and a tool are the same wherever they stand."""
    path = DECLARED.sub("tools[]", DECLARED.sub("tools[]", path))
    return PART.sub("part", path)


def answered(path: str) -> bool:
    return any(field.covers(path) for field in FIELDS)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_published_field_has_an_answer(schema: str) -> None:
    paths = {name(path) for path in published(SCHEMAS[schema])}
    assert len(paths) > 100
    assert sorted(path for path in paths if not answered(path)) == []


def test_a_field_that_nobody_has_thought_of_has_none() -> None:
    for path in (
        "sparkle",
        "tools[]<function>.sparkle",
        "tools[]<sparkle>",
        "input[]<sparkle>",
        "input[]<message>.sparkle",
        "part<input_text>.sparkle",
        "reasoning.sparkle",
    ):
        assert not answered(path), path


def test_every_row_is_of_something_that_is_published() -> None:
    paths = {name(path) for schema in SCHEMAS.values() for path in published(schema)}
    unknown = {field.path for field in FIELDS if not any(field.covers(path) for path in paths)}
    # what Codex sends beside the API, and what is no field
    assert unknown == {"client_metadata", "header Authorization"}
