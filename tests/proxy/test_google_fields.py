"""Every field that Google publishes has an answer in the table."""

from __future__ import annotations

import pytest
from google.genai import types

from polar.proxy.dialects.google import FIELDS
from polar.proxy.dialects.google.checks import camel
from tests.dialect_tables import published

CONFIG = "generationConfig."
SCHEMAS = {
    "contents[]": types.ContentDict,
    "tools[]": types.ToolDict,
    "toolConfig": types.ToolConfigDict,
    "generationConfig": types.GenerationConfigDict,
    "safetySettings[]": types.SafetySettingDict,
    "part": types.PartDict,
}


def answered(path: str) -> bool:
    return any(field.covers(path) for field in FIELDS)


def paths(name: str) -> list[str]:
    found = {camel(path) for path in published(SCHEMAS[name])}
    return sorted(f"{name}.{path}" for path in found if not path.startswith("parts[]."))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_published_field_of_googles_has_an_answer(name: str) -> None:
    found = paths(name)
    assert len(found) > 1
    assert [path for path in found if not answered(path)] == []


def test_every_field_of_a_request_has_an_answer() -> None:
    # the SDK calls configuration what the API has in the request and in generationConfig
    found = {camel(path) for path in published(types.GenerateContentConfigDict)}
    found |= {camel(path) for path in published(types.CountTokensConfigDict)}
    whole = [path for path in found if not path.startswith(("systemInstruction[", "systemInstruction."))]
    assert len(whole) > 100
    assert sorted(path for path in whole if not answered(path) and not answered(CONFIG + path)) == []
    assert all(answered(path) for path in ("contents", "model", "generateContentRequest", "systemInstruction.parts"))


def test_a_field_that_nobody_has_thought_of_has_none() -> None:
    for path in ("sparkle", "part.sparkle", "tools[].sparkle", "generationConfig.sparkle", "part.functionCall.sparkle"):
        assert not answered(path)
