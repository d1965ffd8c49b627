"""The dialect openai.responses: what a request becomes, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.calls import Media
from polar.proxy.errors import BadRequest, ProxyError
from tests.proxy.responses_harness import (
    ANY,
    ASKED,
    CUSTOM,
    FUNCTION,
    TOOLS,
    USER,
    dialect,
    messages,
    parse,
)

PNG = base64.b64encode(b"not really a picture").decode()
PICTURE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}
SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
SEARCH = {"type": "web_search"}
CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}


def text(said: str) -> dict[str, str]:
    return {"type": "input_text", "text": said}


def shown(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(*parts: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(parts)}


def output(call: str, said: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call, "output": said}


def test_a_plain_request_asks_for_nothing_in_particular() -> None:
    call = parse()
    assert (call.dialect, call.model, call.messages, call.tools) == ("openai.responses", "gpt-x", USER, None)
    assert (call.n, call.stream, call.extras, call.constraints, call.unknown) == (1, False, {}, (), 0)
    assert (call.asked.max_tokens, call.asked.temperature, call.logprobs) == (None, None, False)
    assert parse(input=USER).messages == parse(input=[user(text(ASKED))]).messages == USER
    assert parse(sparkle=1).unknown == 1


def test_sampling_is_what_was_asked() -> None:
    asked = parse(max_output_tokens=7, temperature=0.5, top_p=0.9).asked
    assert (asked.max_tokens, asked.temperature, asked.top_p) == (7, 0.5, 0.9)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "sparkle"}]}, "input[0].type"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [user({"text": "x"})]}, "input[0].content[0].type"),
        ({"input": [user({"type": "sparkle"})]}, "input[0].content[0].type"),
        ({"input": [user({"type": "input_text"})]}, "input[0].content[0].text"),
        ({"input": [user("x")]}, "input[0].content[0]"),
        ({"input": [{"role": "system", "content": [PICTURE]}]}, "input[0].content[0].type"),
        ({"input": [output("1", None)]}, "input[0].output"),
        ({"input": [{**output("1"), "call_id": 1}]}, "input[0].call_id"),
        ({"input": [output("1", [{"type": "sparkle"}])]}, "input[0].output[0].type"),
        ({"input": [*USER, {**CALL, "arguments": {}}]}, "input[1].arguments"),
        ({"input": [*USER, {**CALL, "name": None}]}, "input[1].name"),
        ({"input": [*USER, {"type": "custom_tool_call", "call_id": "1", "name": "x"}]}, "input[1].input"),
        ({"input": [*USER, {"type": "local_shell_call", "call_id": "1"}]}, "input[1].action"),
        ({"input": [*USER, CALL]}, "input"),
        ({"input": [*USER, {"type": "reasoning", "summary": "x"}]}, "input[1].summary"),
        (
            {"input": [*USER, {"type": "reasoning", "encrypted_content": "polar.kept.AAAA"}]},
            "input[1].encrypted_content",
        ),
        ({"input": [*USER, {"type": "compaction", "encrypted_content": "x"}]}, "input[1].type"),
        ({"input": [*USER, {"type": "compaction_trigger"}]}, "input[1].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"instructions": 3}, "instructions"),
        ({"instructions": "Be brief.", "input": None}, "input"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"include": "all"}, "include"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{**FUNCTION, "description": 3}]}, "tools[0].description"),
        ({"tools": [{**FUNCTION, "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1]"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "custom", "name": "get_weather"}}, "tool_choice"),
        ({"tools": [FUNCTION, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "shell"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert refused.value.status == (404 if "item_reference" in str(fields) else 400)
    body = dialect().error(refused.value)["error"]
    assert (body["type"], body["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'"text"', b"null", b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        dialect().parse(body, ANY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
     "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call", "exec",
     "apply_patch_call_output", "additional_tools", "item_reference", "input_text", "output_text", "input_image",
     "input_file", "refusal", "user", "assistant", "developer", "function", "custom", "namespace", "local_shell",
     "shell", "apply_patch", "web_search", "grammar", "json_schema", "allowed_tools", "required", "local",
     "tool_search", "data:image/png;base64,AAAA",
     "data:text/plain;base64,AAAA", "rs_ab_1", "msg_ab", "fc_ab_0", "auto", "compaction"]
)  # fmt: skip
NAMES = st.sampled_from(
    ["type", "text", "content", "role", "id", "call_id", "name", "namespace", "arguments", "input", "output", "action",
     "operation", "summary", "encrypted_content", "image_url", "file_data", "filename", "tools", "format", "schema",
     "parameters", "description", "environment", "mode", "command", "commands", "effort", "refusal", "status"]
)  # fmt: skip
NEARLY = st.recursive(
    WORDS | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
FIELDS = ["input", "instructions", "tools", "tool_choice", "reasoning", "text", "include", "metadata", "store"]


@given(
    fields=st.dictionaries(
        st.sampled_from(FIELDS), NEARLY | st.lists(st.dictionaries(NAMES, NEARLY, max_size=6), max_size=3)
    )
)
def test_any_json_is_read_or_refused(fields: dict[str, Any]) -> None:
    refused: list[ProxyError] = []
    try:
        assert parse(**fields).messages
    except ProxyError as error:
        refused.append(error)
    assert all(error.status in (400, 404) for error in refused)


def test_instructions_are_the_first_message() -> None:
    assert parse(instructions="Be brief.").messages == [{"role": "system", "content": "Be brief."}, *USER]
    assert parse(instructions="").messages == USER


def test_parts_keep_their_order() -> None:
    (found,) = messages(user(text("and"), PICTURE, text("now?")))
    assert found["content"] == [shown("and"), SHOWN, shown("now?")]
    assert messages(user())[0]["content"] == ""


def test_what_an_assistant_said_is_text() -> None:
    said = [{"type": "output_text", "text": "Yes.", "annotations": []}, {"type": "refusal", "refusal": "No."}]
    found = messages(*USER, {"type": "message", "role": "assistant", "content": said}, *USER)
    assert found[1] == {"role": "assistant", "content": [shown("Yes."), shown("No.")]}


def test_two_replies_without_a_user_between_them_stay_two() -> None:
    one, two = ({"role": "assistant", "content": said} for said in "ab")
    assert messages(*USER, one, two, *USER)[1:3] == [one, two]
    same = {**one, "id": "msg_ab-1"}
    assert [message["content"] for message in messages(*USER, same, same, *USER)[1:3]] == ["a", "a"]
    history = [CALL, output("1"), {**CALL, "call_id": "2"}, output("2")]
    roles = [message["role"] for message in messages(*USER, *history)]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


def test_outputs_hold_text_and_images() -> None:
    found = messages(*USER, CALL, output("1", [text("one"), PICTURE]))
    assert found[2] == {"role": "tool", "tool_call_id": "1", "content": [shown("one"), SHOWN]}
    custom = {"type": "custom_tool_call_output", "call_id": "1", "output": [text("one")]}
    assert messages(*USER, CALL, custom)[2]["content"] == "one"
    assert messages(*USER, CALL, output("1", ""))[2]["content"] == ""


def test_outputs_of_the_shells_and_of_patches_are_text() -> None:
    action = {"type": "exec", "command": ["ls", "ä"], "env": {}}
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": action, "status": "completed"}
    for said in ({"id": "lsh_1"}, {"call_id": "c"}, {"id": "c"}):
        found = messages(*USER, call, {"type": "local_shell_call_output", "output": "a", **said})
        assert found[1]["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": '{"command": ["ls", "ä"]}'}
        assert found[2] == {"role": "tool", "tool_call_id": "c", "content": "a"}
    told = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    shell = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "timeout_ms": None}}
    found = messages(*USER, shell, {"type": "shell_call_output", "call_id": "c", "output": told})
    assert found[1]["tool_calls"][0]["function"] == {"name": "shell", "arguments": '{"commands": ["ls"]}'}
    assert json.loads(found[2]["content"]) == told
    patch = {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}}
    for more, content in (({}, "failed"), ({"output": "no such file"}, "no such file")):
        done = {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", **more}
        assert messages(*USER, patch, done)[2]["content"] == content


def test_images_are_kept_with_their_hashes_in_order() -> None:
    other = {**PICTURE, "image_url": f"data:image/png;base64,{base64.b64encode(b'other').decode()}"}
    call = parse(input=[user(other), CALL, output("1", [PICTURE])])
    hashes = [hashlib.sha256(raw).hexdigest() for raw in (b"other", b"not really a picture")]
    assert call.media == tuple(Media("image", one) for one in hashes)


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"image_url": "http://example.com/a.png"}, "image_url"),
        ({"file_id": "f"}, "file_id"),
        ({}, "image_url"),
        ({"image_url": f"data:image/tiff;base64,{PNG}"}, "image_url"),
        ({"image_url": "data:image/png;base64,?"}, "image_url"),
        ({"image_url": "data:image/png;base64,"}, "image_url"),
        ({"image_url": "data:image/png,x"}, "image_url"),
    ],
)
def test_an_image_that_cannot_be_shown_is_refused(part: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as refused:
        messages(user({"type": "input_image", **part}))
    assert refused.value.param == f"input[0].content[0].{path}"


def test_images_by_url_may_be_allowed() -> None:
    part = {"type": "input_image", "image_url": "http://example.com/a.png"}
    (found,) = messages(user(part), limits=ANY._replace(image_urls="allow"))
    assert found["content"] == [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]


def test_files_of_text_are_shown_and_others_refused() -> None:
    data = base64.b64encode("Once ä.".encode()).decode()
    (found,) = messages(
        user({"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{data}"})
    )
    assert found["content"] == [shown("a.txt"), shown("Once ä.")]
    for part in (
        {"file_data": f"data:application/pdf;base64,{data}"},
        {"file_data": data},
        {"file_data": f"data:text/plain;base64,{base64.b64encode(bytes([255])).decode()}"},
        {"file_id": "f"},
        {"file_url": "http://example.com/a.pdf"},
    ):
        with pytest.raises(BadRequest, match="text"):
            messages(user({"type": "input_file", **part}))


def test_reasoning_of_others_is_dropped_or_refused() -> None:
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "S"}]}
    foreign["encrypted_content"] = "gAAAAB"
    call = parse(input=[*USER, foreign, {"role": "assistant", "content": "Yes."}, *USER])
    assert call.messages[1] == {"role": "assistant", "content": "Yes."}
    assert call.dropped == ("reasoning",)
    with pytest.raises(BadRequest):
        parse(ANY._replace(foreign_thinking="refuse"), input=[*USER, foreign])
    readable = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert parse(input=[*USER, readable, *USER]).messages[1]["reasoning"] == "Hm."
    assert parse(input=[*USER, {"type": "reasoning", "summary": []}, *USER]).messages == [*USER, *USER]


def test_every_tool_that_a_client_runs_is_a_function() -> None:
    call = parse(tools=TOOLS)
    functions = [tool["function"] for tool in call.tools or ()]
    names = ["get_weather", "note", "local_shell", "shell", "apply_patch", "mcp__files__look"]
    assert [function["name"] for function in functions] == names
    assert functions[0] == {name: FUNCTION[name] for name in ("name", "description", "parameters")}
    assert functions[1]["parameters"]["required"] == ["input"]
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    (tool,) = parse(tools=[{**CUSTOM, "format": grammar}]).tools or [{}]
    assert tool["function"]["description"] == 'Writes a note.\n`input` is text of this lark grammar:\nstart: "x"'


def test_provider_side_tools_are_dropped_and_counted_or_refused() -> None:
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    call = parse(tools=[FUNCTION, SEARCH, {"type": "mcp", "server_label": "x"}, hosted])
    assert [tool["function"]["name"] for tool in call.tools or ()] == ["get_weather"]
    assert call.dropped == ("web_search", "mcp", "shell")
    with pytest.raises(BadRequest, match="provider"):
        parse(ANY._replace(provider_tools="refuse"), tools=[FUNCTION, SEARCH])
    with pytest.raises(BadRequest, match="web_search"):
        parse(tools=[SEARCH])


def test_traces_of_provider_side_tools_are_dropped_or_refused() -> None:
    traces = [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"type": "mcp_list_tools"}]
    call = parse(input=[*USER, *traces, {"role": "assistant", "content": "Found."}, *USER])
    assert call.messages[1]["content"] == "Found."
    assert call.dropped == ("web_search_call", "mcp_list_tools")
    with pytest.raises(BadRequest, match="provider"):
        parse(ANY._replace(provider_tools="refuse"), input=[*USER, *traces])
    assert parse(input=[*USER, {"type": "configuration_update", "reasoning": {}}]).messages == USER


FORCED = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


@pytest.mark.parametrize(
    ("choice", "extras", "constraints", "count"),
    [
        ("auto", {"tool_choice": "auto"}, (), 6),
        ("none", {"tool_choice": "none"}, (), 6),
        ("required", {"tool_choice": "required"}, ("forced_tool",), 6),
        ({"type": "function", "name": "get_weather"}, FORCED, ("forced_tool",), 6),
        (
            {"type": "custom", "name": "note"},
            {"tool_choice": {"type": "function", "function": {"name": "note"}}},
            ("forced_tool",),
            6,
        ),
        (
            {"type": "shell"},
            {"tool_choice": {"type": "function", "function": {"name": "shell"}}},
            ("forced_tool",),
            6,
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
            {"tool_choice": "auto"},
            (),
            1,
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "note"}]},
            {"tool_choice": "required"},
            ("forced_tool",),
            1,
        ),
    ],
)
def test_how_tools_may_be_chosen(choice: Any, extras: Any, constraints: Any, count: int) -> None:
    call = parse(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert (call.extras, call.constraints) == (extras | {"parallel_tool_calls": False}, constraints)
    assert len(call.tools or ()) == count


def test_a_choice_without_tools_is_no_choice() -> None:
    assert parse(tool_choice="auto", parallel_tool_calls=True).extras == {}


@pytest.mark.parametrize(
    ("effort", "extras"),
    [
        ("none", {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        ("minimal", {"reasoning_effort": "low"}),
        ("xhigh", {"reasoning_effort": "high"}),
    ],
)
def test_how_hard_the_model_thinks(effort: str, extras: Any) -> None:
    assert parse(reasoning={"effort": effort}).extras == extras
    assert parse(ANY._replace(thinking_switch="template"), reasoning={"effort": effort}).extras == {}


def test_a_format_is_a_grammar() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": "d"}
    call = parse(text={"format": form})
    told = {name: form[name] for name in ("name", "schema", "strict", "description")}
    assert call.extras == {"response_format": {"type": "json_schema", "json_schema": told}}
    assert call.constraints == ("grammar",)
    assert parse(text={"format": {"type": "json_object"}}).extras == {"response_format": {"type": "json_object"}}
    assert parse(text={"format": {"type": "text"}, "verbosity": "low"}).extras == {}
