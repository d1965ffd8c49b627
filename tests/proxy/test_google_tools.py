"""The dialect google.generate_content: functions, their schemas, and how the model may choose among them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.google_harness import TOOLS
from tests.proxy.test_google_requests import declared, parse

FUNCTION = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_functions_come_in_both_forms() -> None:
    assert parse(tools=TOOLS).tools == [FUNCTION]
    schema = {"type": "object", "properties": {"a_b": {"type": "string"}}, "x": [1]}
    (tool,) = parse(**declared(parametersJsonSchema=schema)).tools or []
    assert tool["function"]["parameters"] == schema
    (tool,) = parse(**declared()).tools or []
    assert tool["function"] == {"name": "look", "parameters": {"type": "object", "properties": {}}}
    snake = {"function_declarations": [{"name": "look", "parameters_json_schema": schema}]}
    (tool,) = parse(tools=[snake]).tools or []
    assert tool["function"]["parameters"] == schema


def test_googles_schema_becomes_json_schema() -> None:
    given = {
        "type": "OBJECT",
        "title": "T",
        "propertyOrdering": ["b", "a_b"],
        "properties": {
            "a_b": {"type": "STRING", "nullable": True, "enum": ["x"], "format": "enum"},
            "anyOf": {"any_of": [{"type": "INTEGER"}, {"ref": "#/$defs/d"}], "nullable": True},
            "list": {"type": "ARRAY", "items": {"type": "NUMBER", "minimum": 0}, "minItems": "1", "max_items": 3},
            "any": {"type": "TYPE_UNSPECIFIED", "description": "x", "example": 5},
        },
        "required": ["a_b"],
        "additionalProperties": {"type": "BOOLEAN"},
        "defs": {"d": {"type": "NULL"}},
    }
    (tool,) = parse(**declared(parameters=given)).tools or []
    assert tool["function"]["parameters"] == {
        "type": "object",
        "title": "T",
        "properties": {
            "a_b": {"type": ["string", "null"], "enum": ["x", None], "format": "enum"},
            "anyOf": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/d"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 1, "maxItems": 3},
            "any": {"description": "x", "examples": [5]},
        },
        "required": ["a_b"],
        "additionalProperties": {"type": "boolean"},
        "$defs": {"d": {"type": "null"}},
    }


TWO = [*TOOLS, {"functionDeclarations": [{"name": "look"}]}]


@pytest.mark.parametrize(
    ("fields", "choice", "shown", "marks"),
    [
        ({}, "auto", 2, ()),
        ({"mode": "AUTO"}, "auto", 2, ()),
        ({"mode": "NONE"}, "none", 2, ()),
        ({"mode": "VALIDATED"}, "auto", 2, ()),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["look"]}, "auto", 1, ()),
        ({"mode": "ANY"}, "required", 2, ("forced_tool",)),
        ({"mode": "ANY", "allowedFunctionNames": ["look", "get_weather"]}, "required", 2, ("forced_tool",)),
        (
            {"mode": "ANY", "allowedFunctionNames": ["look"]},
            {"type": "function", "function": {"name": "look"}},
            2,
            ("forced_tool",),
        ),
    ],
)
def test_how_the_model_may_choose(fields: dict[str, Any], choice: Any, shown: int, marks: tuple[str, ...]) -> None:
    call = parse(tools=TWO, toolConfig={"functionCallingConfig": fields})
    assert (call.extras["tool_choice"], len(call.tools or ()), call.constraints) == (choice, shown, marks)
    assert parse(toolConfig={"functionCallingConfig": {"mode": "NONE"}}).extras == {}
    assert parse(toolConfig={}).extras == {}
