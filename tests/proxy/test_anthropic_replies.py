"""The dialect anthropic.messages: replies whole and streamed, and what comes back of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from anthropic.types import Message, ModelInfo
from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.calls import Call, Delta, Reply, ReplyChoice, ToolDelta
from polar.proxy.dialects import AnthropicMessages, Limits, Told
from polar.proxy.dialects.anthropic.thinking import OMITTED, kept, sign
from polar.proxy.dialects.arguments import MALFORMED
from polar.proxy.errors import (
    AttemptFenced,
    BadRequest,
    EngineBroken,
    EngineRefused,
    EngineTimeout,
    KeyRefused,
    Overloaded,
    PromptTooLong,
    ProxyError,
    RecordRefused,
    retry_headers,
)
from polar.proxy.gate import Gate
from polar.schemas import Logprobs, Sampling, TokenIds

DIALECT = AnthropicMessages()
TOLD = Told("c1", 1, "claude-x")
CLOSING = {"content_block_stop", "message_delta", "message_stop"}


def call(*, hide: bool = False, stop: Sequence[str] = ()) -> Call:
    return Call(
        dialect=DIALECT.name,
        model="claude-x",
        messages=[],
        asked=Sampling(stop=list(stop)),
        stream=True,
        hide_thinking=hide,
    )


def reply(
    message: dict[str, Any], finish: str = "stop", stop: int | str | None = None, usage: dict[str, int] | None = None
) -> Reply:
    choice = ReplyChoice(
        index=0,
        ids=TokenIds([1, 2, 3]),
        logprobs=Logprobs([-1.0] * 3),
        message={"role": "assistant", **message},
        finish=finish,
        stop=stop,
    )
    return Reply(prompt_ids=TokenIds([5] * 7), choices=[choice], usage=usage or {})


def made(name: str, arguments: str, identity: str = "call-1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def whole(asked: Call, answer: Reply) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(DIALECT.reply(asked, TOLD, answer))
    Message.model_validate(told)
    return told


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().split("\n\n"):
        if event:
            name, body = event.split("\n")
            found.append(json.loads(body.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def gathered(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events come to; blocks are told one after the other."""
    message: dict[str, Any] = {}
    pieces = ""
    for event in told:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                pieces = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        pieces += delta["partial_json"]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(pieces or "{}")
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def sent_back(told: dict[str, Any]) -> dict[str, Any]:
    """What the proxy makes of a reply that its client sends back in the next request."""
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": told["content"]},
        {"role": "user", "content": "go on"},
    ]
    body = {"model": "m", "max_tokens": 10, "messages": history}
    message: dict[str, Any] = DIALECT.parse(json.dumps(body).encode(), Limits(max_choices=1)).messages[1]
    return message


TEXTS = st.text(min_size=1, max_size=30)
OBJECTS = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9), max_size=3
)
ARGUMENTS = st.one_of(
    OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False)),
    TEXTS.filter(lambda text: text.strip() and not _is_object(text)),
    st.sampled_from(['{"a": ', '{"a": 1} x', "[1]", '"x"', "null", '{"a": NaN}', '{"a": "\\ud800"}']),
)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@st.composite
def message(draw: st.DrawFn) -> dict[str, Any]:
    """A reply as the engine's answer is gathered."""
    calls = draw(st.lists(ARGUMENTS, max_size=3))
    content = draw(st.just("") | TEXTS)
    found: dict[str, Any] = {"content": content}
    if draw(st.booleans()):
        found["reasoning"] = draw(TEXTS)
    if calls:
        found["content"] = content if content.strip() else None
        found["tool_calls"] = [made("look", arguments, f"call-{i}") for i, arguments in enumerate(calls)]
    return found


@given(said=message(), hide=st.booleans())
def test_what_a_client_sends_back_is_the_message_that_was_captured(said: dict[str, Any], hide: bool) -> None:
    assert sent_back(whole(call(hide=hide), reply(said))) == {"role": "assistant", **said}


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(edges) if a < b]


@given(data=st.data(), said=message(), hide=st.booleans())
def test_streamed_and_whole_say_the_same_and_nothing_closes_before_the_end(
    data: st.DataObject, said: dict[str, Any], hide: bool
) -> None:
    asked, answer = call(hide=hide), reply(said)
    deltas: list[Delta] = []
    draw: Any = data.draw
    deltas += [Delta(index=0, reasoning=piece) for piece in pieces(draw, said.get("reasoning") or "")]
    deltas += [Delta(index=0, content=piece) for piece in pieces(draw, said["content"] or "")]
    for i, one in enumerate(said.get("tool_calls", ())):
        function = one["function"]
        deltas.append(Delta(index=0, tools=[ToolDelta(i, one["id"], function["name"])]))
        deltas += [
            Delta(index=0, tools=[ToolDelta(i, arguments=piece)]) for piece in pieces(draw, function["arguments"])
        ]
    gate, encoder = Gate(1), DIALECT.stream(asked, TOLD)
    encoder.prompt(7)
    live = b"".join(encoder.deltas([passed]) for one in deltas if (passed := gate.admit(one)) is not None)
    assert not {event["type"] for event in events(live)} & CLOSING
    streamed = events(live + encoder.deltas(gate.rest()) + encoder.finish(answer))
    assert gathered(streamed) == whole(asked, answer)
    assert streamed[0]["message"]["usage"]["input_tokens"] == 7
    assert [event["type"] for event in streamed[-2:]] == ["message_delta", "message_stop"]
    synthetic = DIALECT.stream(asked, TOLD)
    assert gathered(events(synthetic.deltas(answer.deltas()) + synthetic.finish(answer))) == whole(asked, answer)


def test_text_is_told_as_it_comes_and_what_follows_it_at_the_end() -> None:
    encoder = DIALECT.stream(call(), TOLD)
    encoder.prompt(7)
    first = events(encoder.deltas([Delta(index=0, content="Let me ")]))
    assert [event["type"] for event in first] == ["message_start", "ping", "content_block_start", "content_block_delta"]
    assert encoder.deltas([Delta(index=0, content="look.")])
    assert not encoder.deltas([Delta(index=0, tools=[ToolDelta(0, "i", "look")])])


def test_reasoning_that_comes_late_is_told_after_the_text() -> None:
    encoder = DIALECT.stream(call(), TOLD)
    data = encoder.deltas([Delta(index=0, content="Yes."), Delta(index=0, reasoning="Hm.")])
    data += encoder.finish(reply({"content": "Yes.", "reasoning": "Hm."}))
    told = gathered(events(data))
    assert [block["type"] for block in told["content"]] == ["text", "thinking"]
    assert sent_back(told) == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}


def test_a_call_without_text_is_begun_before_the_end_but_its_input_is_not() -> None:
    encoder = DIALECT.stream(call(), TOLD)
    begun = events(
        encoder.deltas([Delta(index=0, tools=[ToolDelta(0, "i", "look"), ToolDelta(0, arguments='{"path": "a"')])])
    )
    assert begun[-1]["content_block"] == {"type": "tool_use", "id": "i", "name": "look", "input": {}}


def test_arguments_are_told_byte_for_byte() -> None:
    raw = '{"b":  1.0, "a": [1,2 ],\n "c": "\\u00e4"}'
    said = {"content": None, "tool_calls": [made("look", raw)]}
    assert raw.encode() in DIALECT.reply(call(), TOLD, reply(said))
    encoder = DIALECT.stream(call(), TOLD)
    told = events(encoder.finish(reply(said)))
    assert [e["delta"]["partial_json"] for e in told if e["type"] == "content_block_delta"] == [raw]


@pytest.mark.parametrize("raw", ['{"command": "rm -rf /tmp/a" "timeout": 5}', "[1]", "null", '{"a": NaN}', '{"a"'])
def test_malformed_arguments_reach_the_client_as_what_they_are(raw: str) -> None:
    said = {"content": None, "tool_calls": [made("look", raw)]}
    told = whole(call(), reply(said))
    assert told["content"][0]["input"] == {MALFORMED: raw}
    assert sent_back(told)["tool_calls"][0]["function"]["arguments"] == raw


def test_a_call_without_arguments_has_an_empty_input() -> None:
    assert whole(call(), reply({"content": None, "tool_calls": [made("look", "")]}))["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("said", "finish", "stop", "told"),
    [
        ({"content": "x"}, "stop", None, ("end_turn", None)),
        ({"content": "x"}, "length", None, ("max_tokens", None)),
        ({"content": "x"}, "stop", "END", ("stop_sequence", "END")),
        ({"content": "x"}, "stop", "other", ("end_turn", None)),
        ({"content": "x"}, "stop", 151643, ("end_turn", None)),
        ({"content": "x"}, "content_filter", None, ("refusal", None)),
        ({"content": "x"}, "repetition", None, ("end_turn", None)),
        ({"content": None, "tool_calls": [made("look", "{}")]}, "tool_calls", None, ("tool_use", None)),
        ({"content": None, "tool_calls": [made("look", "{}")]}, "stop", None, ("tool_use", None)),
        ({"content": None, "tool_calls": [made("look", "{}")]}, "length", None, ("max_tokens", None)),
    ],
)
def test_why_a_reply_ended(said: dict[str, Any], finish: str, stop: Any, told: tuple[str, str | None]) -> None:
    found = whole(call(stop=["END"]), reply(said, finish, stop))
    assert (found["stop_reason"], found["stop_sequence"]) == told


def test_cached_and_thinking_tokens_are_told() -> None:
    found = whole(call(), reply({"content": "x"}, usage={"cached_tokens": 4, "reasoning_tokens": 2}))["usage"]
    assert (found["input_tokens"], found["cache_read_input_tokens"], found["output_tokens"]) == (3, 4, 3)
    assert found["output_tokens_details"] == {"thinking_tokens": 2}


def test_thinking_that_a_client_does_not_want_to_see_travels_in_its_signature() -> None:
    said = {"content": "Yes.", "reasoning": "Hm, " * 500}
    told = whole(call(hide=True), reply(said))
    assert told["content"][0]["thinking"] == ""
    assert len(told["content"][0]["signature"]) < 200
    assert sent_back(told) == {"role": "assistant", **said}


@pytest.mark.parametrize(
    "signature", [OMITTED + "AAAA", OMITTED + "?", OMITTED, OMITTED + sign("x" * 99, omitted=True)[11:-8]]
)
def test_a_damaged_signature_says_so(signature: str) -> None:
    with pytest.raises(ValueError, match="it is"):
        kept(signature)


def test_a_signature_that_unpacks_to_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        kept(sign("x" * (17 * 1024 * 1024), omitted=True))
    assert kept(sign("Hm.", omitted=False)) is None


def test_keep_alives_are_pings_and_begin_the_message_once_its_input_is_known() -> None:
    encoder = DIALECT.stream(call(), TOLD)
    assert [event["type"] for event in events(encoder.keepalive(0))] == ["ping"]
    encoder.prompt(9)
    begun = events(encoder.keepalive(1))
    assert [event["type"] for event in begun] == ["message_start", "ping", "ping"]
    assert begun[0]["message"]["usage"]["input_tokens"] == 9
    assert [event["type"] for event in events(encoder.keepalive(2))] == ["ping"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (BadRequest("no"), 400, "invalid_request_error", None),
        (BadRequest("no", status=404), 404, "not_found_error", None),
        (BadRequest("no", status=405), 405, "invalid_request_error", None),
        (BadRequest("no", status=413), 413, "request_too_large", None),
        (KeyRefused("no"), 401, "authentication_error", "false"),
        (AttemptFenced("no"), 409, "conflict_error", "false"),
        (Overloaded("no"), 529, "overloaded_error", "true"),
        (EngineTimeout("no"), 504, "timeout_error", "true"),
        (EngineBroken("no"), 502, "api_error", "false"),
        (RecordRefused("no"), 413, "request_too_large", None),
        (ProxyError("no"), 500, "api_error", None),
        (ProxyError("no", status=429), 429, "rate_limit_error", None),
        (ProxyError("no", status=403), 403, "permission_error", None),
    ],
)
def test_errors_have_the_providers_status_and_type(
    error: ProxyError, status: int, kind: str, retry: str | None
) -> None:
    assert DIALECT.status(error) == status
    assert DIALECT.error(error, "r") == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "r"}
    assert retry_headers(error).get("X-Should-Retry") == retry
    (event,) = events(DIALECT.stream(call(), TOLD).error(error))
    assert (event["error"]["type"], event["request_id"]) == (kind, "c1")


def test_limits_are_told_in_the_words_that_claude_code_knows() -> None:
    def words(error: ProxyError) -> str:
        told: str = DIALECT.error(error)["error"]["message"]
        return told

    assert words(PromptTooLong("x", tokens=210, limit=200)) == "prompt is too long: 210 tokens > 200 maximum"
    assert words(PromptTooLong("x", tokens=200, limit=200)) == "prompt is too long: 200 tokens > 199 maximum"
    assert words(PromptTooLong("the engine's words")) == "prompt is too long: the engine's words"
    vllm = "max_tokens=9000 cannot be greater than max_model_len=4096. Please request fewer output tokens."
    assert words(EngineRefused(vllm, param="max_tokens")) == (
        "max_tokens: 9000 > 4096, which is the maximum allowed number of output tokens for this model"
    )
    assert words(EngineRefused("other", param="max_tokens")) == "other"


def test_models_are_told_as_the_provider_does() -> None:
    one = DIALECT.model("m", 4096)
    assert ModelInfo.model_validate(one).max_input_tokens == 4096
    assert DIALECT.models([one]) == {"data": [one], "has_more": False, "first_id": "m", "last_id": "m"}
