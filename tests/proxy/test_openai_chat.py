"""The dialect openai.chat: what it takes, refuses and normalizes."""

import base64
import hashlib
import json
from typing import Any

import pytest

from polar.proxy.calls import Call, Media
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


# what the model is shown ---------------------------------------------------------------------------------------------

PNG = base64.b64encode(b"not really a picture").decode()
SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}


def user(*parts: Any, limits: Limits = Limits(max_choices=4)) -> Call:  # noqa: B008 - plain data
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}
    return OpenAIChat().parse(json.dumps(body).encode(), limits)


def test_pictures_are_shown_and_known_by_their_hash() -> None:
    call = user({**SHOWN, "image_url": {**SHOWN["image_url"], "detail": "low"}, "cache_control": {}})  # type: ignore[dict-item]
    assert call.messages[0]["content"] == [SHOWN]
    assert call.media == (Media("image", hashlib.sha256(b"not really a picture").hexdigest()),)


def test_pictures_by_address_are_the_settings_matter() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(BadRequest, match="not fetched"):
        user(part)
    call = user(part, limits=Limits(max_choices=1, image_urls="allow"))
    assert call.messages[0]["content"] == [part]
    assert len(call.media) == 1


def test_a_file_of_text_is_its_name_and_its_text() -> None:
    data = "data:text/plain;base64," + base64.b64encode("Grüße".encode()).decode()
    call = user({"type": "file", "file": {"filename": "a.txt", "file_data": data}})
    assert [part["text"] for part in call.messages[0]["content"]] == ["a.txt", "Grüße"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
        {"type": "file"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image_url", "image_url": {"url": f"data:image/tiff;base64,{PNG}"}},
        {"type": "image_url"},
        {"type": "sparkle"},
    ],
)
def test_what_the_model_cannot_be_shown_is_refused(part: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        user({"type": "text", "text": "x"}, part)
    assert (refused.value.param or "").startswith("messages[0].content[1]")


def test_marks_of_caches_do_not_reach_the_prompt() -> None:
    marked = {"type": "text", "text": "x", "cache_control": {"type": "e"}, "prompt_cache_breakpoint": {"mode": "auto"}}
    plain = {"type": "text", "text": "x"}
    assert user(marked, plain).messages == user(plain, marked).messages


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
    ],
)
def test_a_refusal_is_what_was_said(message: dict[str, Any], content: str) -> None:
    assert parse(messages=[*USER, {"role": "assistant", **message}, *USER]).messages[1]["content"] == content


@pytest.mark.parametrize("name", ["function_call", "audio"])
def test_older_forms_of_an_assistants_message_are_refused_not_dropped(name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(messages=[*USER, {"role": "assistant", "content": "x", name: {"name": "f", "arguments": "{}"}}])
    assert refused.value.param == f"messages[1].{name}"


def test_only_allowed_tools_are_shown() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    only = {"type": "function", "function": {"name": "look"}}
    for mode, marks in (("auto", ()), ("required", ("forced_tool",))):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [only]}}
        call = parse(tools=[TOOL, other], tool_choice=choice)
        assert (call.tools, call.extras["tool_choice"], call.constraints) == ([TOOL], mode, marks)


def test_a_providers_search_is_dropped_or_refused_and_counted() -> None:
    assert parse(web_search_options={"search_context_size": "low"}).dropped == ("web_search_options",)
    body = json.dumps({"model": "m", "messages": USER, "web_search_options": {"x": 1}}).encode()
    with pytest.raises(BadRequest):
        OpenAIChat().parse(body, Limits(max_choices=1, provider_tools="refuse"))


def test_sound_is_not_answered_with() -> None:
    assert parse(modalities=["text"]).unknown == 0
    with pytest.raises(BadRequest):
        parse(modalities=["text", "audio"])
