"""The dialect google.generate_content: what it takes, refuses and normalizes."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.calls import Call, Media
from polar.proxy.dialects import GoogleGenerate, Limits
from polar.proxy.dialects.google.signatures import Kept, sign
from polar.proxy.errors import BadRequest, ProxyError
from tests.proxy.google_harness import CHAT, TOOLS, USER
from tests.proxy.test_anthropic_requests import JSON

PNG = base64.b64encode(b"not really a picture").decode()
PICTURE = {"inlineData": {"mimeType": "image/png", "data": PNG}}
SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
ANY = Limits(max_choices=4)
SEARCH: dict[str, Any] = {"googleSearch": {}}


def parse(limits: Limits = ANY, **fields: Any) -> Call:
    body = {"contents": USER, **fields}
    return GoogleGenerate("m").parse(json.dumps(body).encode(), limits)


def messages(*contents: Any, limits: Limits = ANY) -> list[Any]:
    return parse(limits, contents=list(contents)).messages


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def used(name: str = "look", **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **more}}


def answer(name: str = "look", output: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": output}, **more}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_a_plain_request_asks_for_nothing_in_particular() -> None:
    call = parse()
    assert (call.dialect, call.model, call.messages, call.tools) == ("google.generate_content", "m", CHAT, None)
    assert (call.n, call.stream, call.extras, call.constraints, call.unknown) == (1, False, {}, (), 0)
    assert (call.asked.max_tokens, call.asked.temperature, call.asked.stop) == (None, None, [])
    assert call.hide_thinking
    assert GoogleGenerate("m", stream=True).parse(json.dumps({"contents": USER}).encode(), ANY).stream


def test_one_value_may_stand_for_a_list_of_one() -> None:
    assert parse(contents={"parts": {"text": "hi"}}, tools=TOOLS[0]).messages == [{"role": "user", "content": "hi"}]


CONFIG = {
    "maxOutputTokens": 7,
    "temperature": 0.5,
    "topP": 0.9,
    "topK": 40.0,
    "stopSequences": ["x"],
    "candidateCount": 2,
    "seed": 3,
    "presencePenalty": 0.1,
    "frequencyPenalty": 0.2,
    "responseLogprobs": True,
    "logprobs": 4,
}
SNAKE = {
    "max_output_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "stop_sequences": ["x"],
    "candidate_count": 2,
    "seed": 3.0,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "response_logprobs": True,
    "logprobs": 4,
}


@pytest.mark.parametrize("fields", [{"generationConfig": CONFIG}, {"generation_config": SNAKE}])
def test_sampling_is_what_was_asked(fields: dict[str, Any]) -> None:
    call = parse(**fields)
    asked = call.asked
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k, asked.seed) == (7, 0.5, 0.9, 40, 3)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.stop, asked.n) == (0.1, 0.2, ["x"], 2)
    assert (call.n, call.logprobs, call.top_logprobs, call.unknown) == (2, True, 4, 0)


def test_nulls_are_absent() -> None:
    nothing: dict[str, Any] = {
        "generationConfig": {"topK": None, "thinkingConfig": None},
        "tools": None,
        "systemInstruction": None,
    }
    assert parse(ANY, **nothing) == parse()


def test_unknown_fields_are_counted() -> None:
    assert parse(sparkle=1, generationConfig={"glitter": 1, "topK": 1}).unknown == 2


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


def calling(**fields: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "toolConfig": {"functionCallingConfig": fields}}


def declared(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"functionDeclarations": [{"name": "look", **fields}]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": ["hi"]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [{"role": 3, "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [{"role": "user"}]}, "contents[0].parts"),
        ({"contents": [user("x")]}, "contents[0].parts[0]"),
        ({"contents": [user({})]}, "contents[0].parts[0]"),
        ({"contents": [user({"sparkle": {}})]}, "contents[0].parts[0]"),
        ({"contents": [user({"text": "x", "inlineData": {}})]}, "contents[0].parts[0]"),
        ({"contents": [user({"text": 3})]}, "contents[0].parts[0].text"),
        ({"contents": [user(used())]}, "contents[0].parts[0]"),
        ({"contents": [*USER, model(answer())]}, "contents[1].parts[0]"),
        ({"contents": [user({"functionResponse": {}})]}, "contents[0].parts[0].functionResponse.name"),
        ({"contents": [user(answer(id=3))]}, "contents[0].parts[0].functionResponse.id"),
        ({"contents": [user(answer(response="x"))]}, "contents[0].parts[0].functionResponse.response"),
        ({"contents": [user(answer(parts=[{"text": "x"}]))]}, "contents[0].parts[0].functionResponse.parts[0]"),
        ({"contents": [*USER, model({"functionCall": {}})]}, "contents[1].parts[0].functionCall.name"),
        ({"contents": [*USER, model(used(args=[]))]}, "contents[1].parts[0].functionCall.args"),
        ({"contents": [*USER, model(used(partialArgs=[{}]))]}, "contents[1].parts[0].functionCall.partialArgs"),
        ({"contents": [*USER, model({"text": "x", "thought": "yes"})]}, "contents[1].parts[0].thought"),
        ({"contents": [*USER, model({"text": "x", "thoughtSignature": 3})]}, "contents[1].parts[0].thoughtSignature"),
        ({"contents": [*USER, model(used())]}, "contents"),
        ({"contents": [*USER, model({"text": "So "})]}, "contents"),
        ({"contents": [*USER, model()]}, "contents"),
        ({"contents": [user({"inlineData": {"data": PNG}})]}, "contents[0].parts[0].inlineData.mimeType"),
        ({"contents": [user({"inlineData": {"mimeType": "image/png"}})]}, "contents[0].parts[0].inlineData.data"),
        (
            {"contents": [user({"inlineData": {"mimeType": "image/png", "data": "?"}})]},
            "contents[0].parts[0].inlineData.data",
        ),
        (
            {"contents": [user({"inlineData": {"mimeType": "application/pdf", "data": PNG}})]},
            "contents[0].parts[0].inlineData.mimeType",
        ),
        (
            {"contents": [user({"inlineData": {"mimeType": "text/plain", "data": "/w=="}})]},
            "contents[0].parts[0].inlineData.data",
        ),
        ({"contents": [user({"fileData": {"fileUri": "files/abc"}})]}, "contents[0].parts[0].fileData"),
        ({"contents": [user({"fileData": {}})]}, "contents[0].parts[0].fileData.fileUri"),
        (
            {"contents": [user({"fileData": {"fileUri": "https://x/y", "mimeType": "video/mp4"}})]},
            "contents[0].parts[0].fileData.mimeType",
        ),
        ({"systemInstruction": "x"}, "systemInstruction"),
        ({"systemInstruction": {"parts": [PICTURE]}}, "systemInstruction.parts[0]"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"continuationToken": "x"}, "continuationToken"),
        ({"generationConfig": []}, "generationConfig"),
        (config(temperature=2.5), "generationConfig.temperature"),
        (config(temperature="hot"), "generationConfig.temperature"),
        (config(topP=-1), "generationConfig.topP"),
        (config(topK=-1), "generationConfig.topK"),
        (config(topK=1.5), "generationConfig.topK"),
        (config(maxOutputTokens=-1), "generationConfig.maxOutputTokens"),
        (config(candidateCount=5), "generationConfig.candidateCount"),
        (config(stopSequences=[""]), "generationConfig.stopSequences"),
        (config(stopSequences=["x"] * 65), "generationConfig.stopSequences"),
        (config(stopSequences=[1]), "generationConfig.stopSequences[0]"),
        (config(presencePenalty=3), "generationConfig.presencePenalty"),
        (config(frequencyPenalty=-3), "generationConfig.frequencyPenalty"),
        (config(responseLogprobs=True, logprobs=21), "generationConfig.logprobs"),
        (config(logprobs=2), "generationConfig.logprobs"),
        (config(responseModalities=["AUDIO"]), "generationConfig.responseModalities"),
        (config(responseMimeType="text/html"), "generationConfig.responseMimeType"),
        (config(responseSchema={"type": "OBJECT"}), "generationConfig.responseSchema"),
        (config(responseMimeType="text/x.enum"), "generationConfig.responseSchema"),
        (
            config(responseMimeType="application/json", responseSchema={"type": "X"}),
            "generationConfig.responseSchema.type",
        ),
        (config(responseMimeType="application/json", responseJsonSchema=[]), "generationConfig.responseJsonSchema"),
        (
            config(responseMimeType="application/json", responseJsonSchema={}, responseSchema={}),
            "generationConfig.responseJsonSchema",
        ),
        (config(responseFormat=[{"text": {}}]), "generationConfig.responseFormat"),
        (config(translationConfig={"targetLanguageCode": "de"}), "generationConfig.translationConfig"),
        (config(thinkingConfig={"thinkingLevel": "DEEP"}), "generationConfig.thinkingConfig.thinkingLevel"),
        (config(thinkingConfig={"thinkingBudget": -2}), "generationConfig.thinkingConfig.thinkingBudget"),
        (config(thinkingConfig={"includeThoughts": "yes"}), "generationConfig.thinkingConfig.includeThoughts"),
        ({"tools": [SEARCH]}, "tools"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        (declared(name=3), "tools[0].functionDeclarations[0].name"),
        (declared(name=""), "tools[0].functionDeclarations[0].name"),
        (declared(description=3), "tools[0].functionDeclarations[0].description"),
        (declared(parameters={}, parametersJsonSchema={}), "tools[0].functionDeclarations[0]"),
        (declared(parametersJsonSchema=[]), "tools[0].functionDeclarations[0].parametersJsonSchema"),
        (declared(parameters={"properties": []}), "tools[0].functionDeclarations[0].parameters.properties"),
        (declared(parameters={"anyOf": {}}), "tools[0].functionDeclarations[0].parameters.anyOf"),
        (declared(parameters={"minItems": "x"}), "tools[0].functionDeclarations[0].parameters.minItems"),
        (declared(parameters={"items": 3}), "tools[0].functionDeclarations[0].parameters.items"),
        (calling(mode="SOME"), "toolConfig.functionCallingConfig.mode"),
        (calling(mode="ANY", allowedFunctionNames=["x"]), "toolConfig.functionCallingConfig.allowedFunctionNames"),
        (calling(allowedFunctionNames=["get_weather"]), "toolConfig.functionCallingConfig.allowedFunctionNames"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig"),
        ({"toolConfig": "x"}, "toolConfig"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    error = GoogleGenerate().error(refused.value)["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["message"].startswith(f"Invalid value at '{param}': ")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'"text"', b"null", b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    for ask in (GoogleGenerate("m").parse, GoogleGenerate("m").parse_count):
        with pytest.raises(BadRequest):
            ask(body, ANY)


NAMES = st.sampled_from(
    ["role", "parts", "text", "thought", "thoughtSignature", "functionCall", "functionResponse", "inlineData", "name",
     "args", "response", "data", "mimeType", "mime_type", "fileUri", "functionDeclarations", "parameters", "type",
     "parametersJsonSchema", "functionCallingConfig", "mode", "properties", "items", "anyOf", "responseSchema",
     "responseMimeType", "thinkingConfig", "thinkingLevel", "id", "executableCode", "allowedFunctionNames", "enum"]
)  # fmt: skip
WORDS = st.sampled_from(["user", "model", "function", "STRING", "OBJECT", "object", "ANY", "NONE", "image/png", "YWI=",
                         "text/plain", "application/json", "text/x.enum", "HIGH", "look"])  # fmt: skip
NEARLY = st.recursive(
    WORDS | JSON, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=20
)
PARTS = st.lists(st.dictionaries(NAMES, NEARLY, max_size=3), max_size=3)
CONTENTS = st.lists(st.fixed_dictionaries({"role": WORDS, "parts": PARTS | NEARLY}), max_size=3)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "contents": CONTENTS | NEARLY,
        "systemInstruction": NEARLY,
        "tools": st.lists(st.fixed_dictionaries({"functionDeclarations": NEARLY}), max_size=2) | NEARLY,
        "toolConfig": NEARLY,
        "generationConfig": st.dictionaries(NAMES, NEARLY, max_size=4) | NEARLY,
        "generateContentRequest": NEARLY,
        "cached_content": NEARLY,
    },
)


@given(fields=BODIES, counting=st.booleans())
def test_any_json_is_read_or_refused(fields: dict[str, Any], counting: bool) -> None:
    dialect = GoogleGenerate("m")
    refused: list[ProxyError] = []
    try:
        ask = dialect.parse_count if counting else dialect.parse
        assert ask(json.dumps({"contents": USER, **fields}).encode(), ANY).messages
    except ProxyError as error:
        refused.append(error)
    assert all(error.status == 400 for error in refused)


def test_a_system_instruction_is_the_first_message() -> None:
    for name in ("systemInstruction", "system_instruction"):
        told = parse(ANY, **{name: {"role": "user", "parts": [{"text": "Be brief."}]}})
        assert told.messages == [{"role": "system", "content": "Be brief."}, *CHAT]
        assert told.unknown == 0
    parts = parse(systemInstruction={"parts": [{"text": "Be"}, {"text": "brief."}]}).messages[0]["content"]
    assert parts == [text("Be"), text("brief.")]
    assert parse(systemInstruction={"parts": [{"text": ""}]}).messages == CHAT


def test_responses_and_text_keep_their_order() -> None:
    found = messages(
        user({"text": "go"}),
        model({"text": "I look."}, used(id="1"), used(id="2")),
        user({"text": "first"}, answer(id="1"), {"text": "then"}, answer(id="2"), PICTURE),
    )
    assert [message["role"] for message in found] == ["user", "assistant", "user", "tool", "user", "tool", "user"]
    assert found[1] == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": identity, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            for identity in ("1", "2")
        ],
    }
    assert [message["tool_call_id"] for message in found if message["role"] == "tool"] == ["1", "2"]
    assert found[-1]["content"] == [SHOWN]


def test_contents_of_the_model_that_follow_each_other_are_one() -> None:
    split = messages(*USER, model({"text": "I "}), model({"text": "look."}), model(used(id="1")), user(answer(id="1")))
    assert split == messages(*USER, model({"text": "I look."}, used(id="1")), user(answer(id="1")))


def test_calls_without_ids_are_known_by_their_place() -> None:
    found = messages(
        *USER, model(used("a"), used("b"), used("a")), user(answer("b", 1), answer("a", 2), answer("a", 3))
    )
    ids = [call["id"] for call in found[1]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [(message["tool_call_id"], message["content"]) for message in found[2:]] == [
        (ids[1], "1"),
        (ids[0], "2"),
        (ids[2], "3"),
    ]
    longer = messages(*USER, model(used("a"), used("b"), used("a")), user(answer("b", 1)), *USER)
    assert longer[1] == found[1]


def test_a_response_that_comes_twice_or_without_a_call_is_told_all_the_same() -> None:
    found = messages(*USER, model(used(id="1")), user(answer(), answer()))
    assert [message["tool_call_id"] for message in found[2:]] == ["1", "1"]
    assert messages(user(answer("gone")))[0]["tool_call_id"] == "call_of_gone"
    assert messages({"role": "function", "parts": [answer(id="7")]})[0]["tool_call_id"] == "7"


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"output": "ok"}, "ok"),
        ({"output": {"a": "ä"}}, '{"a": "ä"}'),
        ({"error": "no"}, '{"error": "no"}'),
        ({"output": "ok", "code": 0}, '{"output": "ok", "code": 0}'),
        ({"result": [1]}, '{"result": [1]}'),
        ({}, ""),
        ({"output": ""}, ""),
    ],
)
def test_what_a_function_gave(response: dict[str, Any], shown: str) -> None:
    part = {"functionResponse": {"name": "look", "response": response}}
    assert messages(user(part))[0]["content"] == shown


def test_a_response_may_hold_pictures() -> None:
    found = messages(user(answer(parts=[PICTURE])))
    assert found[0]["content"] == [text("ok"), SHOWN]


def test_pictures_are_shown_and_known_by_their_hash() -> None:
    urlsafe = {"inline_data": {"mime_type": "image/PNG", "data": PNG.rstrip("=").replace("+", "-")}}
    call = parse(contents=[user(PICTURE, urlsafe)])
    assert call.messages[0]["content"] == [SHOWN, SHOWN]
    assert call.media == (Media("image", hashlib.sha256(b"not really a picture").hexdigest()),) * 2


def test_text_that_is_sent_as_data_is_text() -> None:
    data = {"inlineData": {"mimeType": "text/markdown", "data": base64.b64encode("# ä".encode()).decode()}}
    assert messages(user(data))[0]["content"] == "# ä"


def test_pictures_by_address_are_a_setting() -> None:
    part = {"fileData": {"fileUri": "https://x/y.png", "mimeType": "image/png"}}
    call = parse(Limits(max_choices=1, image_urls="allow"), contents=[user(part)])
    assert call.messages[0]["content"] == [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    with pytest.raises(BadRequest, match="inlineData"):
        parse(contents=[user(part)])


def test_traces_of_provider_tools_are_a_setting() -> None:
    traces = [{"executableCode": {"code": "1"}}, {"codeExecutionResult": {"outcome": "OUTCOME_OK"}}, {"toolCall": {}}]
    call = parse(contents=[*USER, model(*traces, {"text": "One."}), *USER], tools=[*TOOLS, SEARCH, {"urlContext": {}}])
    assert call.messages[1] == {"role": "assistant", "content": "One."}
    assert call.dropped == ("googleSearch", "urlContext", "executableCode", "codeExecutionResult", "toolCall")
    strict = Limits(max_choices=1, provider_tools="refuse")
    with pytest.raises(BadRequest) as refused:
        parse(strict, contents=[*USER, model(*traces), *USER])
    assert refused.value.param == "contents[1].parts[0]"
    with pytest.raises(BadRequest) as refused:
        parse(strict, tools=[*TOOLS, SEARCH])
    assert refused.value.param == "tools[1].googleSearch"


def test_thinking_of_another_provider_is_a_setting() -> None:
    foreign = model({"text": "One.", "thoughtSignature": "CiQBjz1rX9=="})
    call = parse(contents=[*USER, foreign, *USER])
    assert call.messages[1] == {"role": "assistant", "content": "One."}
    assert call.dropped == ("thoughtSignature",)
    shown = model({"text": "Hm.", "thought": True}, *foreign["parts"])
    call = parse(contents=[*USER, shown, *USER])
    assert call.messages[1] == {"role": "assistant", "content": "One.", "reasoning": "Hm."}
    assert call.dropped == ()
    with pytest.raises(BadRequest):
        parse(Limits(max_choices=1, foreign_thinking="refuse"), contents=[*USER, foreign, *USER])


@pytest.mark.parametrize(
    ("thinking", "extras", "hidden"),
    [
        ({"includeThoughts": True}, {}, False),
        ({"thinkingBudget": 0}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, True),
        ({"thinkingBudget": -1}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, True),
        (
            {"thinkingLevel": "high", "includeThoughts": True},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "reasoning_effort": "high"},
            False,
        ),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, {}, True),
    ],
)
def test_thinking_is_asked_of_the_template(thinking: dict[str, Any], extras: dict[str, Any], hidden: bool) -> None:
    call = parse(**config(thinkingConfig=thinking))
    assert (call.extras, call.hide_thinking) == (extras, hidden)
    assert parse(Limits(max_choices=1, thinking_switch="template"), **config(thinkingConfig=thinking)).extras == {}


def test_the_form_of_a_reply() -> None:
    mime = "application/json"
    schema = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}}
    json_schema = {"type": "json_schema", "json_schema": {"name": "output", "schema": plain}}
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"responseMimeType": mime}, {"response_format": {"type": "json_object"}}),
        ({"responseMimeType": mime, "responseSchema": schema}, {"response_format": json_schema}),
        ({"response_mime_type": mime, "response_json_schema": plain}, {"response_format": json_schema}),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["x", "y"]}},
            {"structured_outputs": {"choice": ["x", "y"]}},
        ),
    ]
    for fields, extras in forms:
        call = parse(ANY, **config(**fields))
        assert (call.extras, call.constraints) == (extras, ("grammar",))
    assert parse(**config(responseMimeType="text/plain", responseModalities=["TEXT"])).constraints == ()


def test_the_models_last_words_are_gone_on_with() -> None:
    call = parse(contents=[*USER, model({"text": "The city is"})])
    assert call.messages[-1] == {"role": "assistant", "content": "The city is"}
    assert call.extras == {"add_generation_prompt": False, "continue_final_message": True}


def test_what_is_counted_is_the_request() -> None:
    dialect = GoogleGenerate("m")
    whole = {"contents": USER, "systemInstruction": {"parts": [{"text": "Be brief."}]}, "tools": TOOLS}
    asked = dialect.parse(json.dumps(whole).encode(), ANY)
    for body in (whole, {"generateContentRequest": {"model": "models/m", **whole}}):
        counted = dialect.parse_count(json.dumps(body).encode(), ANY)
        assert (counted.messages, counted.tools) == (asked.messages, asked.tools)
    assert json.loads(dialect.counted(5)) == {"totalTokens": 5}
    with pytest.raises(BadRequest):
        dialect.parse_count(json.dumps({"generateContentRequest": whole, "contents": USER}).encode(), ANY)


def test_what_signatures_hold_is_bounded_for_a_request_as_a_whole() -> None:
    part = {"text": "a", "thoughtSignature": sign(Kept(reasoning="x" * (6 * 1024 * 1024)))}
    history = [user(text("hi")), model(part), user(text("go on")), model(part), user(text("go on"))]
    assert messages(*history)[1]["reasoning"] == "x" * (6 * 1024 * 1024)
    with pytest.raises(BadRequest, match="too much that is compressed"):
        messages(*history, model(part), user(text("go on")))
