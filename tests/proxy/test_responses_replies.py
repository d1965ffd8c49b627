"""The dialect openai.responses: replies whole and streamed, and what comes back of them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from polar.proxy.calls import Call, Delta, Entry, Reply, ToolDelta
from polar.proxy.dialects.responses.ids import item_id, meaning
from polar.proxy.errors import (
    AttemptFenced,
    BadRequest,
    EngineBroken,
    KeyRefused,
    LogAway,
    Overloaded,
    PromptTooLong,
    ProxyError,
)
from polar.proxy.gate import Gate
from tests.proxy.responses_harness import (
    CLOSING,
    TOLD,
    TOOLS,
    dialect,
    events,
    gathered,
    made,
    parse,
    reply,
    sent_back,
)

pytestmark = pytest.mark.filterwarnings("error")


def whole(asked: Call, answer: Reply) -> dict[str, Any]:
    body = dialect().reply(asked, TOLD, answer)
    Response.model_validate_json(body).model_dump_json()
    told: dict[str, Any] = json.loads(body)
    return told


TEXTS = st.text(min_size=1, max_size=30)
JSON = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=5), JSON, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False)),
    TEXTS,
    st.sampled_from(
        ["", "{}", '{"a": ', '{"input": "x"}', '{"input":"ä\\u00e4"}', '{"input": "\\ud800"}', '{"input": 1}',
         '{"command": ["ls", "-l"]}', '{"command":["ls"], "timeout_ms": 1.0}', '{"command": ["ls"], "env": {}}',
         '{"commands": ["ls"]}', '{"commands": "ls"}', '{"type": "delete_file", "path": "a"}',
         '{"type": "update_file", "path": "a", "diff": "@@"}', '{"type": "update_file", "path": "a"}',
         '{"command": ["ls"], "type": "exec"}', '{"a": 1}{', "[1]", "null", '{"a": NaN}', "[" * 5000]
    ),
)  # fmt: skip
NAMES = st.sampled_from(
    ["get_weather", "note", "local_shell", "shell", "apply_patch", "mcp__files__look", "unheard_of"]
)


@st.composite
def message(draw: st.DrawFn) -> dict[str, Any]:
    """A reply as the engine's answer is gathered."""
    calls = draw(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3))
    content = draw(st.just("") | TEXTS)
    found: dict[str, Any] = {"content": content}
    if draw(st.booleans()):
        found["reasoning"] = draw(TEXTS)
    if calls:
        found["content"] = content if content.strip() else None
        found["tool_calls"] = [made(name, arguments, f"call-{i}") for i, (name, arguments) in enumerate(calls)]
    return found


ASKINGS = st.fixed_dictionaries(
    {},
    optional={
        "reasoning": st.just({"summary": "auto"}),
        "include": st.just(["reasoning.encrypted_content"]),
    },
)


@given(said=message(), asking=ASKINGS)
def test_what_a_client_sends_back_is_the_message_that_was_captured(said: dict[str, Any], asking: Any) -> None:
    output = whole(parse(tools=TOOLS, **asking), reply(said))["output"]
    assert sent_back(output) == {"role": "assistant", **said}


@given(said=message(), asking=ASKINGS)
def test_outputs_between_the_calls_of_one_reply_do_not_part_them(said: dict[str, Any], asking: Any) -> None:
    output = whole(parse(tools=TOOLS, **asking), reply(said))["output"]
    mixed = []
    for item in output:
        mixed.append(item)
        if "call_id" in item:
            mixed.append({"type": "function_call_output", "call_id": item["call_id"], "output": "ok"})
    assert sent_back(mixed) == {"role": "assistant", **said}


@given(said=message())
def test_items_without_ids_are_joined_by_their_order(said: dict[str, Any]) -> None:
    output = whole(parse(tools=TOOLS), reply(said))["output"]
    back = sent_back([{name: value for name, value in item.items() if name != "id"} for item in output])
    for message in (back, said):
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if function["name"] in ("note", "shell", "local_shell", "apply_patch"):
                function["arguments"] = None  # how it was spelled is in the id
    assert back == {"role": "assistant", **said}


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(edges) if a < b]


@given(data=st.data(), said=message(), asking=ASKINGS, finish=st.sampled_from(["stop", "length"]))
def test_streamed_and_whole_say_the_same_and_nothing_closes_before_the_end(
    data: st.DataObject, said: dict[str, Any], asking: Any, finish: str
) -> None:
    asked, answer = parse(tools=TOOLS, **asking), reply(said, finish)
    draw: Any = data.draw
    deltas = [Delta(index=0, reasoning=piece) for piece in pieces(draw, said.get("reasoning") or "")]
    deltas += [Delta(index=0, content=piece) for piece in pieces(draw, said["content"] or "")]
    for i, one in enumerate(said.get("tool_calls", ())):
        function = one["function"]
        deltas.append(Delta(index=0, tools=[ToolDelta(i, one["id"], function["name"])]))
        deltas += [
            Delta(index=0, tools=[ToolDelta(i, arguments=piece)]) for piece in pieces(draw, function["arguments"])
        ]
    gate, encoder = Gate(1), dialect().stream(asked, TOLD)
    live = b"".join(encoder.deltas([passed]) for one in deltas if (passed := gate.admit(one)) is not None)
    assert not {event["type"] for event in events(live)} & CLOSING
    told = events(live + encoder.deltas(gate.rest()) + encoder.finish(answer))
    expected = whole(asked, answer)
    assert gathered(told) == expected
    synthetic = dialect().stream(asked, TOLD)
    assert gathered(events(synthetic.deltas(answer.deltas()) + synthetic.finish(answer))) == expected


def test_text_is_told_while_its_reasoning_is_still_open() -> None:
    encoder = dialect().stream(parse(), TOLD)
    told = events(encoder.deltas([Delta(index=0, reasoning="Hm."), Delta(index=0, content="Yes")]))
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "output_item.added", "content_part.added", "output_text.delta",
    ]  # fmt: skip
    assert [event["type"] for event in events(encoder.deltas([Delta(index=0, content=".")]))] == [
        "response.output_text.delta"
    ]


def test_reasoning_that_comes_late_is_told_after_the_text_and_belongs_to_it() -> None:
    encoder = dialect().stream(parse(), TOLD)
    data = encoder.deltas([Delta(index=0, content="Yes."), Delta(index=0, reasoning="Hm.")])
    data += encoder.finish(reply({"content": "Yes.", "reasoning": "Hm."}))
    output = gathered(events(data))["output"]
    assert [item["type"] for item in output] == ["message", "reasoning"]
    assert sent_back(output) == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}


def test_a_functions_arguments_are_told_byte_for_byte() -> None:
    raw = '{"b":  1.0, "a": [1,2 ],\n "c": "\\u00e4"}'
    said = {"content": None, "tool_calls": [made("get_weather", raw)]}
    (item,) = whole(parse(tools=TOOLS), reply(said))["output"]
    assert (item["type"], item["arguments"], item["call_id"]) == ("function_call", raw, "call-1")


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("note", '{"input": "a\\nb"}', {"type": "custom_tool_call", "name": "note", "input": "a\nb"}),
        ("note", '{"text": "a"}', {"type": "function_call", "name": "note", "arguments": '{"text": "a"}'}),
        (
            "local_shell",
            '{"command": ["ls"]}',
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        ),
        ("local_shell", "ls", {"type": "function_call", "name": "local_shell", "arguments": "ls"}),
        (
            "shell",
            '{"commands": ["ls"], "timeout_ms": 5}',
            {
                "type": "shell_call",
                "action": {"commands": ["ls"], "timeout_ms": 5, "max_output_length": None},
                "environment": {"type": "local"},
            },
        ),
        (
            "apply_patch",
            '{"type": "delete_file", "path": "a"}',
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        ),
        ("mcp__files__look", "{}", {"type": "function_call", "name": "look", "namespace": "mcp__files"}),
        ("unheard_of", "{", {"type": "function_call", "name": "unheard_of", "arguments": "{"}),
    ],
)
def test_every_tool_is_called_in_its_own_form(name: str, arguments: str, told: dict[str, Any]) -> None:
    said = {"content": None, "tool_calls": [made(name, arguments)]}
    (item,) = whole(parse(tools=TOOLS), reply(said))["output"]
    assert {key: item[key] for key in told} == told
    assert item["call_id"] == "call-1"


def test_arguments_that_a_form_would_respell_travel_in_the_items_id() -> None:
    raw = '{"input":"\\u00e4"}'
    (item,) = whole(parse(tools=TOOLS), reply({"content": None, "tool_calls": [made("note", raw)]}))["output"]
    assert item["input"] == "ä"
    found = meaning(item["id"])
    assert found is not None
    assert found.arguments == raw
    plain = '{"input": "ä"}'
    (item,) = whole(parse(tools=TOOLS), reply({"content": None, "tool_calls": [made("note", plain)]}))["output"]
    assert item["id"] == "ctc_0191-c1_0"


def test_an_item_that_its_client_has_changed_says_what_it_says_now() -> None:
    made_so = {"content": None, "tool_calls": [made("note", '{"input":"a"}')]}
    (item,) = whole(parse(tools=TOOLS), reply(made_so))["output"]
    assert sent_back([item])["tool_calls"][0]["function"]["arguments"] == '{"input":"a"}'
    assert sent_back([{**item, "input": "b"}])["tool_calls"][0]["function"]["arguments"] == '{"input": "b"}'


def test_a_small_request_does_not_become_a_large_one() -> None:
    item = whole(parse(include=["reasoning.encrypted_content"]), reply({"content": "x", "reasoning": "y" * 6_000_000}))[
        "output"
    ][0]
    bare = {**item, "content": None}
    assert len(str(bare)) < 100_000
    with pytest.raises(BadRequest, match="too much") as refused:
        sent_back([bare] * 3)
    assert refused.value.param == "input[3].encrypted_content"


@pytest.mark.parametrize("identity", [None, 7, "", "x", "msg_", "ctc_a_0.!", "ctc_ab_0.AAAA", "rs_" + "a" * 99])
def test_an_id_of_somebody_elses_says_nothing(identity: Any) -> None:
    assert meaning(identity) is None


def test_ids_of_one_reply_name_its_completion() -> None:
    kinds = ["reasoning", "message", "function", "custom", "local_shell", "shell", "apply_patch"]
    found = [meaning(item_id(kind, "0191-c1", 3)) for kind in kinds]
    assert {one.completion for one in found if one is not None} == {"0191-c1"}
    assert None not in found


@pytest.mark.parametrize(
    ("asking", "summary", "content", "sealed"),
    [
        ({}, [], ["Hm."], False),
        ({"reasoning": {"summary": "auto"}}, ["Hm."], None, False),
        ({"reasoning": {"summary": "none"}}, [], ["Hm."], False),
        ({"reasoning": {"generate_summary": "detailed"}}, ["Hm."], None, False),
        ({"include": ["reasoning.encrypted_content"]}, [], ["Hm."], True),
    ],
)
def test_reasoning_is_told_as_it_was_asked_for(asking: Any, summary: Any, content: Any, sealed: bool) -> None:
    item = whole(parse(**asking), reply({"content": "Yes.", "reasoning": "Hm."}))["output"][0]
    assert [part["text"] for part in item["summary"]] == summary
    assert (None if "content" not in item else [part["text"] for part in item["content"]]) == content
    assert ("encrypted_content" in item) is sealed
    if sealed:
        bare = {"type": "reasoning", "id": "rewritten", "summary": [], "encrypted_content": item["encrypted_content"]}
        assert sent_back([bare, {"role": "assistant", "content": "Yes."}])["reasoning"] == "Hm."


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("repetition", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_why_a_reply_ended(finish: str, status: str, details: Any) -> None:
    found = whole(parse(), reply({"content": "x"}, finish))
    assert (found["status"], found["incomplete_details"]) == (status, details)
    assert found["output"][0]["status"] == status


def test_cached_and_reasoning_tokens_are_told() -> None:
    found = whole(parse(), reply({"content": "x"}, usage={"cached_tokens": 4, "reasoning_tokens": 2}))["usage"]
    assert (found["input_tokens"], found["output_tokens"], found["total_tokens"]) == (7, 3, 10)
    assert found["input_tokens_details"]["cached_tokens"] == 4
    assert found["output_tokens_details"]["reasoning_tokens"] == 2


def test_log_probabilities_are_those_of_the_text() -> None:
    words = ["<think>", "Hm", "</think>", "Ye", "s.", "<end>"]
    entries = [Entry(word, -0.5, list(word.encode()), [Entry(word, -0.5, None)]) for word in words]
    asked = parse(include=["message.output_text.logprobs"], top_logprobs=1)
    assert (asked.logprobs, asked.top_logprobs) == (True, 1)
    found = whole(asked, reply({"content": "Yes.", "reasoning": "Hm"}, entries=entries))["output"][1]["content"][0]
    assert [one["token"] for one in found["logprobs"]] == ["Ye", "s."]
    assert found["logprobs"][0]["top_logprobs"][0]["bytes"] == []
    assert whole(asked, reply({"content": "other", "reasoning": "Hm"}, entries=entries))["output"][1]["content"][0][
        "logprobs"
    ] == []  # fmt: skip


def test_what_was_asked_is_told_back() -> None:
    found = whole(
        parse(
            instructions="Be brief.",
            metadata={"a": "b"},
            temperature=0.5,
            max_output_tokens=9,
            tools=TOOLS[:1],
            tool_choice="auto",
            store=False,
            reasoning={"effort": "low"},
            prompt_cache_key="k",
            truncation="auto",
        ),
        reply({"content": "x"}),
    )
    assert (found["id"], found["object"], found["model"], found["created_at"]) == (
        "resp_0191-c1",
        "response",
        "gpt-x",
        1,
    )
    assert (found["instructions"], found["metadata"], found["temperature"]) == ("Be brief.", {"a": "b"}, 0.5)
    assert (found["max_output_tokens"], found["store"], found["truncation"]) == (9, False, "disabled")
    assert (found["reasoning"], found["prompt_cache_key"]) == ({"effort": "low", "summary": None}, "k")
    assert found["tools"] == TOOLS[:1]


def test_keep_alives_begin_the_response_and_are_events() -> None:
    encoder = dialect().stream(parse(), TOLD)
    told = events(encoder.keepalive(0) + encoder.keepalive(1) + encoder.deltas([Delta(index=0, content="Yes.")]))
    kinds = [event["type"] for event in told]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert kinds.count("response.created") == 1
    told += events(encoder.keepalive(2) + encoder.finish(reply({"content": "Yes."})))
    assert gathered(told)["output"][0]["content"][0]["text"] == "Yes."


@pytest.mark.parametrize(
    ("error", "kind", "code", "within"),
    [
        (BadRequest("no", param="x"), "invalid_request_error", None, "invalid_prompt"),
        (BadRequest("no", status=404), "invalid_request_error", None, "invalid_prompt"),
        (KeyRefused("no"), "authentication_error", "invalid_api_key", "invalid_prompt"),
        (AttemptFenced("no"), "conflict_error", "attempt_fenced", "invalid_prompt"),
        (Overloaded("no"), "server_error", "overloaded", "rate_limit_exceeded"),
        (LogAway("no", retry_after=7), "server_error", "log_unavailable", "rate_limit_exceeded"),
        (EngineBroken("no"), "server_error", "engine_protocol", "server_error"),
        (ProxyError("no"), "server_error", "internal_error", "server_error"),
        (PromptTooLong("no"), "invalid_request_error", "context_length_exceeded", "context_length_exceeded"),
    ],
)
def test_errors_have_the_providers_shape(error: ProxyError, kind: str, code: str | None, within: str) -> None:
    body = dialect().error(error)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["type"], body["code"]) == (kind, code)
    told = events(dialect().stream(parse(), TOLD).error(error))
    assert [event["type"] for event in told] == [
        "response.created", "response.in_progress", "error", "response.failed",
    ]  # fmt: skip
    failed = told[-1]["response"]
    assert (failed["status"], failed["error"]["code"], told[-2]["code"]) == ("failed", within, within)


def test_limits_are_told_in_the_words_that_clients_know() -> None:
    body = dialect().error(PromptTooLong("x", tokens=210, limit=200))["error"]
    assert body["message"].startswith("Your input exceeds the context window of this model.")
    assert "This model's maximum context length is 200 tokens" in body["message"]  # LiteLLM's
    assert "210 tokens" in body["message"]
    assert body["param"] == "input"
    told = events(dialect().stream(parse(), TOLD).error(LogAway("Busy.", retry_after=7)))
    assert told[-1]["response"]["error"]["message"] == "Busy. Please try again in 7s."
