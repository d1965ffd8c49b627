"""The dialect openai.chat has an answer to every field that the official SDK publishes."""

from __future__ import annotations

import re

from openai.types.chat import completion_create_params

from polar.proxy.dialects.openai_chat import FIELDS
from tests.dialect_tables import published

PART = re.compile(r"(?:messages\[\]<\w+>|prediction<\w+>)\.content\[\](?=<)")
VLLMS = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "chat_template_kwargs",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
}


def paths() -> set[str]:
    """What rows call fields: a part is the same wherever it stands."""
    return {PART.sub("part", path) for path in published(completion_create_params.CompletionCreateParamsStreaming)}


def answered(path: str) -> bool:
    return any(field.covers(path) for field in FIELDS)


def test_every_published_field_has_an_answer() -> None:
    assert len(paths()) > 100
    assert sorted(path for path in paths() if not answered(path)) == []


def test_a_field_that_nobody_has_thought_of_has_none() -> None:
    for path in (
        "sparkle",
        "tools[]<sparkle>",
        "messages[]<user>.sparkle",
        "messages[]<sparkle>",
        "part<text>.sparkle",
        "part<sparkle>",
        "stream_options.sparkle",
    ):
        assert not answered(path), path


def test_every_row_is_of_something_that_is_published_or_vllms() -> None:
    unknown = {field.path for field in FIELDS if not any(field.covers(path) for path in paths())}
    assert unknown == VLLMS
