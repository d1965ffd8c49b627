"""The dialect anthropic.messages: what it takes, refuses and normalizes."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.calls import Call, Media
from polar.proxy.dialects import AnthropicMessages, Limits
from polar.proxy.dialects.anthropic.thinking import sign
from polar.proxy.errors import BadRequest, ProxyError

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
FUNCTION = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
SEARCH = {"type": "web_search_20260318", "name": "web_search"}
PNG = base64.b64encode(b"not really a picture").decode()
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
ANY = Limits(max_choices=1)


def parse(limits: Limits = ANY, **fields: Any) -> Call:
    body = {"model": "m", "max_tokens": 10, "messages": USER, **fields}
    return AnthropicMessages().parse(json.dumps({k: v for k, v in body.items() if v != "absent"}).encode(), limits)


def messages(*given: Any, limits: Limits = ANY, **fields: Any) -> list[Any]:
    return parse(limits, messages=list(given), **fields).messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(identity: str, content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def use(identity: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": "look", "input": given}


def test_a_plain_request_asks_for_nothing_in_particular() -> None:
    call = parse()
    assert (call.dialect, call.model, call.messages, call.tools) == ("anthropic.messages", "m", USER, None)
    assert (call.n, call.stream, call.extras, call.constraints, call.unknown) == (1, False, {}, (), 0)
    assert (call.asked.max_tokens, call.asked.temperature, call.asked.stop) == (10, None, [])


def test_sampling_is_what_was_asked() -> None:
    asked = parse(max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["\n\nEnd", "x"]).asked
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (7, 0.5, 0.9, 40)
    assert asked.stop == ["\n\nEnd", "x"]
    assert parse(top_k=0).asked.top_k is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "absent"}, "model"),
        ({"model": 3}, "model"),
        ({"max_tokens": "absent"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": "absent"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [user({"text": "x"})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "sparkle"})]}, "messages.0.content.0"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text"),
        ({"messages": [user("x")]}, "messages.0.content.0"),
        ({"messages": [user({"type": "tool_result"})]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [user(result("1", is_error="no"))]}, "messages.0.content.0.is_error"),
        ({"messages": [user(result("1", [{"type": "sparkle"}]))]}, "messages.0.content.0.content.0"),
        ({"messages": [assistant({"type": "tool_use", "name": "x", "input": {}})]}, "messages.0.content.0.id"),
        ({"messages": [assistant({"type": "tool_use", "id": "1", "name": "x"})]}, "messages.0.content.0.input"),
        ({"messages": [assistant({**use("1"), "input": "{}"})]}, "messages.0.content.0.input"),
        ({"messages": [*USER, assistant(use("1"))]}, "messages"),
        ({"messages": [*USER, {"role": "assistant", "content": "So "}]}, "messages"),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [{"role": "system", "content": [PICTURE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "system", "content": "x", "clear_at": "noon"}]}, "messages.0.clear_at"),
        ({"system": 3}, "system"),
        ({"system": [PICTURE]}, "system.0"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [" "]}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences.0"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "look"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "look", "input_schema": {}, "description": 3}]}, "tools.0.description"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": 3}]}, "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"metadata": {"user_id": 7}}, "metadata.user_id"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    body = AnthropicMessages().error(refused.value, "req_1")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(f"{param}: ")
    assert (body["type"], body["request_id"]) == ("error", "req_1")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'"text"', b"null", b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        AnthropicMessages().parse(body, ANY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(
    ["text", "image", "document", "tool_use", "tool_result", "thinking", "search_result", "tool_addition", "base64",
     "content", "url", "user", "assistant", "system", "tool_reference", "custom", "any", "tool", "json_schema"]
)  # fmt: skip
NAMES = st.sampled_from(
    ["type", "text", "content", "source", "data", "id", "name", "input", "tool_use_id", "thinking", "signature", "tool",
     "role", "is_error", "definition", "title", "input_schema", "media_type", "defer_loading", "format", "schema"]
)  # fmt: skip
NEARLY = st.recursive(
    WORDS | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(
            ["messages", "system", "tools", "tool_choice", "thinking", "metadata", "output_config", "top_k"]
        ),
        NEARLY | st.lists(st.dictionaries(NAMES, NEARLY, max_size=6), max_size=3),
    )
)
def test_any_json_is_read_or_refused(fields: dict[str, Any]) -> None:
    body = {"model": "m", "max_tokens": 10, "messages": USER, **fields}
    refused: list[ProxyError] = []
    try:
        assert AnthropicMessages().parse(json.dumps(body).encode(), ANY).messages
    except ProxyError as error:
        refused.append(error)
    assert all(error.status == 400 for error in refused)


def test_a_system_prompt_is_the_first_message() -> None:
    assert parse(system="Be brief.").messages == [{"role": "system", "content": "Be brief."}, *USER]
    parts = [text("Be"), text("brief.", cache_control={"type": "ephemeral"})]
    assert parse(system=parts).messages[0] == {"role": "system", "content": [text("Be"), text("brief.")]}
    assert parse(system="").messages == USER


def test_tool_results_and_text_keep_their_order() -> None:
    found = messages(
        user(text("go")),
        assistant(text("Both."), use("1", path="a"), use("2", path="b")),
        user(result("2", "two"), result("1", [text("one"), PICTURE]), text("and"), PICTURE, text("now?")),
    )
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "user"]
    assert found[1] == {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}},
            {"id": "2", "type": "function", "function": {"name": "look", "arguments": '{"path": "b"}'}},
        ],
    }
    # results in the order of their calls: test_results_stand_in_the_order_of_their_calls
    assert found[2] == {"role": "tool", "tool_call_id": "1", "content": [text("one"), SHOWN]}
    assert found[3] == {"role": "tool", "tool_call_id": "2", "content": "two"}
    assert found[4] == {"role": "user", "content": [text("and"), SHOWN, text("now?")]}


def test_text_before_a_tool_result_stays_before_it() -> None:
    found = messages(user(text("first"), result("1"), text("last")))
    assert [message["content"] for message in found] == ["first", "ok", "last"]


def test_a_failed_tool_without_words_says_that_it_failed() -> None:
    assert messages(user(result("1", "", is_error=True)))[0]["content"] == "Error"
    assert messages(user({**result("1"), "content": None, "is_error": True}))[0]["content"] == "Error"
    assert messages(user(result("1", "no such file", is_error=True)))[0]["content"] == "no such file"
    assert messages(user(result("1", [])))[0]["content"] == ""


def test_images_are_kept_with_their_hashes_in_order() -> None:
    other = {**PICTURE, "source": {**PICTURE["source"], "data": base64.b64encode(b"other").decode()}}
    call = parse(messages=[user(other, result("1", [PICTURE]))])
    hashes = [hashlib.sha256(raw).hexdigest() for raw in (b"other", b"not really a picture")]
    assert call.media == tuple(Media("image", one) for one in hashes)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"type": "url", "url": "http://example.com/a.png"}, "source"),
        ({"type": "file", "file_id": "f"}, "source"),
        ({"type": "base64", "media_type": "image/tiff", "data": PNG}, "source.base64.media_type"),
        ({"type": "base64", "media_type": "image/png", "data": "?"}, "source.base64.data"),
        ({"type": "base64", "media_type": "image/png", "data": ""}, "source.base64.data"),
        (None, "source"),
    ],
)
def test_an_image_that_cannot_be_shown_is_refused(source: Any, path: str) -> None:
    with pytest.raises(BadRequest) as refused:
        messages(user({"type": "image", "source": source}))
    assert refused.value.param == f"messages.0.content.0.{path}"


def test_images_by_url_may_be_allowed() -> None:
    source = {"type": "url", "url": "http://example.com/a.png"}
    (found,) = messages(user({"type": "image", "source": source}), limits=ANY._replace(image_urls="allow"))
    assert found["content"] == [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]


def test_documents_of_text_are_shown_and_others_refused() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Once."}
    (found,) = messages(user({"type": "document", "title": "Tale", "source": plain, "context": "old"}))
    assert [part["text"] for part in found["content"]] == ["Tale", "old", "Once."]
    inner = {"type": "content", "content": [text("a"), PICTURE]}
    assert messages(user({"type": "document", "source": inner}))[0]["content"] == [text("a"), SHOWN]
    assert messages(user({"type": "document", "source": {"type": "content", "content": "b"}}))[0]["content"] == "b"
    for kind in ("base64", "url", "file"):
        with pytest.raises(BadRequest, match="cannot be shown"):
            messages(user({"type": "document", "source": {"type": kind, "data": "x"}}))


def test_search_results_are_text() -> None:
    block = {"type": "search_result", "title": "T", "source": "http://x", "content": [text("a"), text("b")]}
    assert messages(user(block))[0]["content"] == "T\nhttp://x\na\nb"


def test_thinking_is_the_reasoning_of_its_message() -> None:
    found = messages(
        *USER,
        assistant({"type": "thinking", "thinking": "Hm.", "signature": "whose"}, text("Yes.")),
        *USER,
    )
    assert found[1] == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}


@pytest.mark.parametrize(
    "block",
    [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "", "signature": "EqQBCgI"}],
)
def test_thinking_of_others_is_dropped_or_refused(block: dict[str, Any]) -> None:
    history = [*USER, assistant(block, text("Yes.")), *USER]
    call = parse(messages=history)
    assert call.messages[1] == {"role": "assistant", "content": "Yes."}
    assert call.dropped == (block["type"],)
    with pytest.raises(BadRequest):
        parse(ANY._replace(foreign_thinking="refuse"), messages=history)


def test_a_damaged_signature_of_ours_is_refused() -> None:
    block = {"type": "thinking", "thinking": "", "signature": "polar.kept.AAAA"}
    with pytest.raises(BadRequest, match="Invalid `signature` in `thinking` block"):
        messages(*USER, assistant(block, text("Yes.")), *USER)


def test_tools_are_functions() -> None:
    call = parse(tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}])
    assert call.tools == [FUNCTION]
    described = parse(tools=[{**TOOL, "input_examples": [{"a": 1}]}]).tools
    assert described is not None
    assert described[0]["function"]["description"] == 'Looks.\nExamples of its input:\n{"a": 1}'


@pytest.mark.parametrize(
    ("choice", "extras", "constraints"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}, ()),
        ({"type": "none"}, {"tool_choice": "none"}, ()),
        ({"type": "any"}, {"tool_choice": "required"}, ("forced_tool",)),
        (
            {"type": "tool", "name": "look"},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
            ("forced_tool",),
        ),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
            (),
        ),
    ],
)
def test_how_tools_may_be_chosen(choice: Any, extras: Any, constraints: Any) -> None:
    call = parse(tools=[TOOL], tool_choice=choice)
    assert (call.extras, call.constraints) == (extras, constraints)


def test_a_choice_without_tools_is_no_choice() -> None:
    assert parse(tool_choice={"type": "auto"}).extras == {}


def test_provider_side_tools_are_dropped_and_counted_or_refused() -> None:
    call = parse(tools=[TOOL, SEARCH, {"type": "mcp_toolset", "mcp_server_name": "x"}], mcp_servers=[{"name": "x"}])
    assert (call.tools, call.dropped) == ([FUNCTION], ("mcp_servers", "web_search_20260318", "mcp_toolset"))
    refusing = ANY._replace(provider_tools="refuse")
    for fields in ({"tools": [TOOL, SEARCH]}, {"mcp_servers": [{"name": "x"}]}, {"container": "c"}):
        with pytest.raises(BadRequest, match="provider"):
            parse(refusing, **fields)


def test_a_request_with_nothing_but_provider_side_tools_is_refused() -> None:
    with pytest.raises(BadRequest, match="web_search"):
        parse(tools=[SEARCH])


def test_traces_of_provider_side_tools_are_dropped_or_refused() -> None:
    traces = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    history = [*USER, assistant(*traces, text("Found.")), *USER]
    call = parse(messages=history)
    assert call.messages[1]["content"] == "Found."
    assert call.dropped == ("server_tool_use", "web_search_tool_result")
    with pytest.raises(BadRequest, match="provider"):
        parse(ANY._replace(provider_tools="refuse"), messages=history)
    with pytest.raises(BadRequest, match="not supported"):
        messages(user({"type": "compaction", "content": "x"}))


def test_tools_come_and_go_with_the_conversation() -> None:
    inline = {"type": "tool_definition", "definition": {"name": "late", "input_schema": {}}}
    changes = [
        {"type": "tool_addition", "tool": inline},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
        {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "mcp_server_name": "x"}},
    ]
    call = parse(tools=[TOOL], messages=[*USER, {"role": "system", "content": [text("More."), *changes]}])
    assert [tool["function"]["name"] for tool in call.tools or ()] == ["late"]
    assert call.messages[1] == {"role": "system", "content": "More."}
    assert call.dropped == ("mcp_toolset_reference",)
    assert parse(tools=[TOOL], messages=[*USER, {"role": "system", "content": changes[:1]}]).messages == USER


def test_a_system_message_may_be_for_one_turn_only() -> None:
    late = {"role": "system", "content": "Now.", "clear_at": "next_user_message"}
    assert messages(*USER, late) == [*USER, {"role": "system", "content": "Now."}]
    assert messages(*USER, late, assistant(text("Yes.")), *USER)[1]["role"] == "assistant"


def test_the_assistants_last_words_are_gone_on_with() -> None:
    call = parse(messages=[*USER, {"role": "assistant", "content": "The answer is ("}])
    assert call.extras == {"add_generation_prompt": False, "continue_final_message": True}
    assert call.messages[-1] == {"role": "assistant", "content": "The answer is ("}


@pytest.mark.parametrize(
    ("fields", "extras"),
    [
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_whether_the_model_thinks(fields: dict[str, Any], extras: dict[str, Any]) -> None:
    assert parse(**fields).extras == extras
    assert parse(ANY._replace(thinking_switch="template"), **fields).extras == {}


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_a_schema_for_the_reply_is_a_grammar(name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    call = parse(**{name: form if name == "output_format" else {"format": form}})
    assert call.extras == {
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}}
    }
    assert call.constraints == ("grammar",)


def test_unknown_fields_are_counted_and_known_ones_without_effect_are_not() -> None:
    call = parse(sparkle=1, glitter=2, service_tier="auto", context_management={"edits": []}, cache_control=None)
    assert call.unknown == 2
    assert call.extras == {}


def test_a_prompt_may_be_counted_without_max_tokens() -> None:
    body = {"model": "m", "messages": USER, "system": "Be brief.", "tools": [TOOL]}
    call = AnthropicMessages().parse_count(json.dumps(body).encode(), ANY)
    assert ([message["role"] for message in call.messages], call.tools) == (["system", "user"], [FUNCTION])


def test_thinking_that_comes_compressed_is_bounded_for_a_request_as_a_whole() -> None:
    signature = sign("x" * (6 * 1024 * 1024), omitted=True)
    block = {"type": "thinking", "thinking": "", "signature": signature}
    history = [*USER, assistant(block, text("a")), *USER, assistant(block, text("b")), *USER]
    assert parse(messages=history).messages[1]["reasoning"] == "x" * (6 * 1024 * 1024)
    with pytest.raises(BadRequest, match="too much that is compressed"):
        parse(messages=[*history, assistant(block, text("c")), *USER])


def test_a_kind_of_block_that_nobody_knows_is_refused_however_long() -> None:
    for kind in ("sparkle", "x" * 100_000, "text>.x", "*"):
        with pytest.raises(BadRequest):
            parse(messages=[user({"type": kind})])
