"""The dialect openai.chat: what it takes, refuses and normalizes."""

import json
from typing import Any

import pytest

from polar.proxy.calls import Call
from polar.proxy.dialects import Limits, OpenAIChat
from polar.proxy.errors import BadRequest

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def parse(**fields: Any) -> Call:
    body = {"model": "m", "messages": USER, **fields}
    return OpenAIChat().parse(json.dumps(body).encode(), Limits(max_choices=4))


def test_a_plain_request_asks_for_nothing_in_particular() -> None:
    call = parse()
    assert (call.model, call.messages, call.tools, call.n, call.stream) == ("m", USER, None, 1, False)
    assert (call.asked.temperature, call.asked.max_tokens, call.asked.n, call.constraints) == (None, None, 1, ())
    assert call.unknown == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_completion_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "look"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"functions": [{}]}, "functions"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"text"', b"null"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        OpenAIChat().parse(body, Limits(max_choices=1))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadRequest) as refused:
        OpenAIChat().parse(b'{"messages": []}', Limits(max_choices=1))
    error = OpenAIChat().error(refused.value)["error"]
    assert error == {
        "message": "Missing required parameter: 'model'.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "missing_required_parameter",
    }


def test_the_same_history_in_other_forms_is_the_same() -> None:
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [_made("1")], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    decorated = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None},
        {
            "role": "assistant",
            "tool_calls": [{**_made("1"), "index": 0}],
            "reasoning_content": "hm",
            "refusal": None,
            "annotations": [],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]},
    ]
    assert parse(messages=plain).messages == parse(messages=decorated).messages == plain


def _made(identity: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_several_parts_stay_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == parts


@pytest.mark.parametrize(
    ("fields", "constraints"),
    [
        ({"response_format": {"type": "json_object"}}, ("grammar",)),
        ({"response_format": {"type": "text"}}, ()),
        ({"tools": [TOOL], "tool_choice": "auto"}, ()),
        ({"tools": [TOOL], "tool_choice": "required"}, ("forced_tool",)),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, ("forced_tool",)),
        ({"logit_bias": {"5": 1}}, ("logit_bias",)),
        ({"logit_bias": {}}, ()),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, ("grammar",)),
        ({"thinking_token_budget": 10}, ("thinking_budget",)),
    ],
)
def test_what_forces_tokens_is_named(fields: dict[str, Any], constraints: tuple[str, ...]) -> None:
    assert parse(**fields).constraints == constraints


def test_unknown_fields_are_counted_and_not_passed_on() -> None:
    call = parse(sparkle=1, glitter={"a": 2}, user="me", store=False, parallel_tool_calls=False)
    assert call.unknown == 2
    assert call.extras == {}


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert parse(max_tokens=5, max_completion_tokens=7).asked.max_tokens == 7
    assert parse(max_tokens=5).asked.max_tokens == 5
