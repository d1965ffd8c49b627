"""The dialect google.generate_content: replies whole and streamed, and what comes back of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.calls import Call, Delta, Entry, Reply, ReplyChoice, ToolDelta
from polar.proxy.dialects import GoogleGenerate, Limits, Told
from polar.proxy.dialects.arguments import MALFORMED
from polar.proxy.dialects.google.signatures import MAGIC, Kept, read, same, sign, survives
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
)
from polar.proxy.gate import Gate
from polar.schemas import Logprobs, Sampling, TokenIds
from tests.proxy.google_harness import USER, closes, gathered
from tests.proxy.test_anthropic_replies import ARGUMENTS, TEXTS, made, pieces

DIALECT = GoogleGenerate("gemini-x", stream=True)
ARRAY = GoogleGenerate("gemini-x", stream=True, sse=False)
TOLD = Told("c1", 1, "gemini-x")


def call(*, hide: bool = False, n: int = 1, **more: Any) -> Call:
    return Call(
        dialect=DIALECT.name,
        model="gemini-x",
        messages=[],
        asked=Sampling(),
        stream=True,
        hide_thinking=hide,
        n=n,
        **more,
    )


def reply(
    *messages: dict[str, Any],
    finish: str = "stop",
    usage: dict[str, int] | None = None,
    entries: Sequence[Entry] = (),
) -> Reply:
    choices = [
        ReplyChoice(
            index=i,
            ids=TokenIds([1, 2, 3]),
            logprobs=Logprobs([-1.0] * 3),
            message={"role": "assistant", **message},
            finish=finish,
            stop=None,
            entries=entries,
        )
        for i, message in enumerate(messages)
    ]
    return Reply(prompt_ids=TokenIds([5] * 7), choices=choices, usage=usage or {})


def whole(asked: Call, answer: Reply) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(DIALECT.reply(asked, TOLD, answer))
    types.GenerateContentResponse.model_validate(told)
    return told


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().split("\n\n"):
        if event.strip():
            assert event.splitlines() == [event]
            found.append(json.loads(event.removeprefix("data: ")))
    return found


def sent_back(*contents: dict[str, Any]) -> dict[str, Any]:
    """What the proxy makes of a reply that its client sends back in the next request."""
    body = {"contents": [*USER, *contents, *USER]}
    _, message, _ = DIALECT.parse(json.dumps(body).encode(), Limits(max_choices=1)).messages
    return message


@st.composite
def message(draw: st.DrawFn) -> dict[str, Any]:
    """A reply as the engine's answer is gathered."""
    calls = draw(
        st.lists(ARGUMENTS | st.sampled_from(["", '{"b": 1.0}', '{"10": 1, "2": 12345678901234567890}']), max_size=3)
    )
    content = draw(st.just("") | TEXTS)
    found: dict[str, Any] = {"content": content}
    if draw(st.booleans()):
        found["reasoning"] = draw(TEXTS)
    if calls:
        found["content"] = content if content.strip() else None
        found["tool_calls"] = [made("look", arguments, f"call-{i}") for i, arguments in enumerate(calls)]
    return found


def as_javascript(value: Any) -> Any:
    """What JSON.parse and JSON.stringify make of a value."""
    match value:
        case dict():
            numbers = sorted((key for key in value if key.isascii() and key.isdigit()), key=int)
            return {key: as_javascript(value[key]) for key in [*numbers, *(k for k in value if k not in numbers)]}
        case list():
            return [as_javascript(one) for one in value]
        case float() if value.is_integer():
            return int(value)
        case int() if not isinstance(value, bool) and abs(value) > 2**53:
            return int(float(value))
        case _:
            return value


@given(said=message(), hide=st.booleans(), data=st.data())
def test_what_a_client_sends_back_is_the_message_that_was_captured(
    said: dict[str, Any], hide: bool, data: st.DataObject
) -> None:
    content = whole(call(hide=hide), reply(said))["candidates"][0]["content"]
    kept = content.get("parts", [])
    for part in kept:
        if "functionCall" in part and data.draw(st.booleans()):
            part["functionCall"] = as_javascript(part["functionCall"])
        if "functionCall" in part and data.draw(st.booleans()):
            del part["functionCall"]["id"]
    if data.draw(st.booleans()):  # as Gemini CLI does
        content["parts"] = [part for part in kept if not part.get("thought")]
    assert sent_back(content) == {"role": "assistant", **said}


def streamed(said: dict[str, Any], data: st.DataObject, index: int = 0) -> list[Delta]:
    draw: Any = data.draw
    deltas = [Delta(index=index, reasoning=piece) for piece in pieces(draw, said.get("reasoning") or "")]
    deltas += [Delta(index=index, content=piece) for piece in pieces(draw, said["content"] or "")]
    for i, one in enumerate(said.get("tool_calls", ())):
        function = one["function"]
        deltas.append(Delta(index=index, tools=[ToolDelta(i, one["id"], function["name"])]))
        deltas += [
            Delta(index=index, tools=[ToolDelta(i, arguments=piece)]) for piece in pieces(draw, function["arguments"])
        ]
    return deltas


@given(data=st.data(), said=st.lists(message(), min_size=1, max_size=2), hide=st.booleans())
def test_streamed_and_whole_say_the_same_and_nothing_closes_before_the_end(
    data: st.DataObject, said: list[dict[str, Any]], hide: bool
) -> None:
    asked, answer = call(hide=hide, n=len(said)), reply(*said)
    deltas = [delta for i, one in enumerate(said) for delta in streamed(one, data, i)]
    gate, encoder = Gate(len(said)), DIALECT.stream(asked, TOLD)
    live = b"".join(encoder.deltas([passed]) for one in deltas if (passed := gate.admit(one)) is not None)
    assert not any(map(closes, events(live)))
    told = events(live + encoder.deltas(gate.rest()) + encoder.finish(answer))
    assert gathered(told) == whole(asked, answer)
    assert [closes(piece) for piece in told] == [False] * (len(told) - 1) + [True]
    synthetic = DIALECT.stream(asked, TOLD)
    assert gathered(events(synthetic.deltas(answer.deltas()) + synthetic.finish(answer))) == whole(asked, answer)
    array = ARRAY.stream(asked, TOLD)
    data_of = array.keepalive(0) + array.deltas(answer.deltas()) + array.keepalive(1) + array.finish(answer)
    assert gathered(json.loads(data_of)) == whole(asked, answer)
    if len(said) == 1:
        # clients that keep each piece as a content of its own
        contents = [piece["candidates"][0]["content"] for piece in told]
        assert sent_back(*contents) == {"role": "assistant", **said[0]}
        assert all(content.get("parts") for content in contents[:-1])


def test_the_last_piece_of_a_text_is_told_with_its_end() -> None:
    encoder = DIALECT.stream(call(), TOLD)
    first = events(encoder.deltas([Delta(index=0, content="It is "), Delta(index=0, content="sunny.")]))
    assert "".join(piece["candidates"][0]["content"]["parts"][0]["text"] for piece in first) == "It is sunny"
    (last,) = events(encoder.finish(reply({"content": "It is sunny."})))
    assert last["candidates"][0] == {
        "content": {"parts": [{"text": "."}], "role": "model"},
        "index": 0,
        "finishReason": "STOP",
    }
    assert last["usageMetadata"] == {"promptTokenCount": 7, "candidatesTokenCount": 3, "totalTokenCount": 10}
    assert (last["modelVersion"], last["responseId"]) == ("gemini-x", "c1")


def test_reasoning_that_comes_late_is_told_after_the_text() -> None:
    encoder = DIALECT.stream(call(), TOLD)
    data = encoder.deltas([Delta(index=0, content="Yes."), Delta(index=0, reasoning="Hm.")])
    data += encoder.finish(reply({"content": "Yes.", "reasoning": "Hm."}))
    contents = [piece["candidates"][0]["content"] for piece in events(data)]
    assert sent_back(*contents) == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}


def test_thoughts_are_shown_to_who_asks_for_them() -> None:
    said = {"content": "Yes.", "reasoning": "Hm."}
    shown = whole(call(), reply(said))["candidates"][0]["content"]["parts"]
    hidden = whole(call(hide=True), reply(said))["candidates"][0]["content"]["parts"]
    assert shown == [{"text": "Hm.", "thought": True}, *hidden]
    assert hidden == [{"text": "Yes.", "thoughtSignature": sign(Kept(reasoning="Hm."))}]


def test_arguments_are_told_as_the_model_wrote_them_on_one_line() -> None:
    raw = '{"b":  1.0, "a": [1,2 ],\n "c": "\\u00e4"}'
    said = {"content": None, "tool_calls": [made("look", raw)]}
    told = raw.replace("\n", " ").encode()
    assert told in DIALECT.reply(call(), TOLD, reply(said))
    encoder = DIALECT.stream(call(), TOLD)
    data = encoder.finish(reply(said))
    assert told in data
    assert data.count(b"\n") == 2


@pytest.mark.parametrize("raw", ['{"command": "rm -rf /tmp/a" "timeout": 5}', "[1]", "null", '{"a": NaN}', '{"a"'])
def test_malformed_arguments_reach_the_client_as_what_they_are(raw: str) -> None:
    said = {"content": None, "tool_calls": [made("look", raw)]}
    content = whole(call(), reply(said))["candidates"][0]["content"]
    assert content["parts"][0]["functionCall"]["args"] == {MALFORMED: raw}
    assert sent_back(content)["tool_calls"][0]["function"]["arguments"] == raw


def test_arguments_that_a_client_changed_are_its_own() -> None:
    said = {"content": None, "tool_calls": [made("look", '{"a":1.0}')]}
    content = whole(call(), reply(said))["candidates"][0]["content"]
    content["parts"][0]["functionCall"]["args"]["a"] = 2
    assert sent_back(content)["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'


@pytest.mark.parametrize("end", ["\u0085", "\u2028", "\u2029"])
def test_what_ends_a_line_elsewhere_is_escaped(end: str) -> None:
    said = {"content": f"a{end}b", "tool_calls": [made("look", json.dumps({"a": end}, ensure_ascii=False))]}
    data = DIALECT.stream(call(), TOLD).finish(reply(said))
    assert end.encode() not in data
    assert sent_back(events(data)[0]["candidates"][0]["content"]) == {"role": "assistant", **said}


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        ("stop", "STOP"),
        ("length", "MAX_TOKENS"),
        ("tool_calls", "STOP"),
        ("content_filter", "SAFETY"),
        ("repetition", "STOP"),
    ],
)
def test_why_a_reply_ended(finish: str, told: str) -> None:
    assert whole(call(), reply({"content": "x"}, finish=finish))["candidates"][0]["finishReason"] == told


def test_an_empty_reply_has_no_parts() -> None:
    assert whole(call(), reply({"content": ""}))["candidates"][0]["content"] == {"role": "model"}


def test_cached_and_thinking_tokens_are_told() -> None:
    usage = {"cached_tokens": 4, "reasoning_tokens": 2}
    assert whole(call(), reply({"content": "x"}, usage=usage))["usageMetadata"] == {
        "promptTokenCount": 7,
        "cachedContentTokenCount": 4,
        "candidatesTokenCount": 1,
        "thoughtsTokenCount": 2,
        "totalTokenCount": 10,
    }


def test_log_probabilities_are_told_where_they_are_asked_for() -> None:
    entries = [
        Entry("a", -1.0, top_logprobs=[Entry("a", -1.0), Entry("b", -2.0)]),
        Entry("c", -3.0, top_logprobs=[Entry("c", -3.0)]),
    ]
    asked = call(logprobs=True, top_logprobs=2)
    (candidate,) = whole(asked, reply({"content": "ac"}, entries=entries))["candidates"]
    assert candidate["avgLogprobs"] == -2.0
    assert candidate["logprobsResult"]["chosenCandidates"] == [
        {"token": "a", "logProbability": -1.0},
        {"token": "c", "logProbability": -3.0},
    ]
    assert [len(one["candidates"]) for one in candidate["logprobsResult"]["topCandidates"]] == [2, 1]
    assert "logprobsResult" not in whole(call(), reply({"content": "ac"}, entries=entries))["candidates"][0]


@given(reasoning=st.none() | TEXTS, arguments=st.none() | TEXTS)
def test_a_signature_gives_back_what_it_holds(reasoning: str | None, arguments: str | None) -> None:
    kept = Kept(reasoning=reasoning, id="call-1", arguments=arguments)
    signature = sign(kept)
    assert read(signature) == kept
    assert read(signature.replace("+", "-").replace("/", "_").rstrip("=")) == kept


def test_signatures_of_others_hold_nothing() -> None:
    for foreign in ("", "skip_thought_signature_validator", "CiQBjz1rX9==", "ü", "AAAA"):
        assert read(foreign) is None


@pytest.mark.parametrize("cut", [8, 20])
def test_a_damaged_signature_says_so(cut: int) -> None:
    signature = sign(Kept(reasoning="Hm, " * 40))
    with pytest.raises(ValueError, match="it is"):
        read(signature[:-cut])
    with pytest.raises(BadRequest, match="Thought signature is not valid") as refused:
        sent_back({"role": "model", "parts": [{"text": "x", "thoughtSignature": signature[:-cut]}]})
    assert refused.value.param == "contents[1].parts[0].thoughtSignature"


def test_a_signature_that_unpacks_to_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        read(sign(Kept(reasoning="x" * (17 * 1024 * 1024))))
    assert MAGIC.startswith(b"polar")


@given(value=ARGUMENTS)
def test_arguments_that_survive_are_written_as_they_were(value: str) -> None:
    if survives(value):
        again = as_javascript(json.loads(value))
        assert json.dumps(again, ensure_ascii=False) == value


def test_numbers_are_the_same_however_they_are_spelt() -> None:
    assert same({"a": [1, 2.0, "x", None, True]}, {"a": [1.0, 2, "x", None, True]})
    assert same(12345678901234567890, 12345678901234567168)
    assert same(10**400, 10**400)
    assert not same(10**400, 10**400 + 1)
    for one, other in [(1, True), (0, None), ("1", 1), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ([], {})]:
        assert not same(one, other)


def test_keep_alives_are_white_space() -> None:
    for dialect in (DIALECT, ARRAY):
        assert [dialect.stream(call(), TOLD).keepalive(beat) for beat in range(3)] == [b"\n"] * 3


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (BadRequest("no"), 400, "INVALID_ARGUMENT"),
        (BadRequest("no", status=404), 404, "NOT_FOUND"),
        (BadRequest("no", status=405), 404, "NOT_FOUND"),
        (BadRequest("no", status=408), 408, "DEADLINE_EXCEEDED"),
        (BadRequest("no", status=413), 413, "INVALID_ARGUMENT"),
        (BadRequest("no", status=422), 400, "INVALID_ARGUMENT"),
        (KeyRefused("no"), 401, "UNAUTHENTICATED"),
        (AttemptFenced("no"), 409, "ABORTED"),
        (Overloaded("no"), 503, "UNAVAILABLE"),
        (EngineTimeout("no"), 504, "DEADLINE_EXCEEDED"),
        (EngineBroken("no"), 500, "INTERNAL"),
        (RecordRefused("no"), 413, "INVALID_ARGUMENT"),
        (ProxyError("no"), 500, "INTERNAL"),
        (ProxyError("no", status=429), 429, "RESOURCE_EXHAUSTED"),
        (ProxyError("no", status=403), 403, "PERMISSION_DENIED"),
        (ProxyError("no", status=507), 507, "INTERNAL"),
        (ProxyError("no", status=411), 411, "INVALID_ARGUMENT"),
    ],
)
def test_errors_have_the_providers_code_and_status(error: ProxyError, code: int, status: str) -> None:
    body = DIALECT.error(error, "r")
    assert DIALECT.status(error) == code
    assert {name: body["error"][name] for name in ("code", "message", "status")} == {
        "code": code,
        "message": "no",
        "status": status,
    }
    assert events(DIALECT.stream(call(), TOLD).error(error)) == [body]
    array = ARRAY.stream(call(), TOLD)
    assert json.loads(array.error(error)) == [body]
    array = ARRAY.stream(call(), TOLD)
    assert json.loads(array.deltas([Delta(index=0, content="abc")]) + array.error(error))[1] == body


def test_details_say_when_to_come_back_and_what_was_wrong() -> None:
    def details(error: ProxyError) -> Any:
        (found,) = DIALECT.error(error)["error"]["details"]
        return found

    kind = "type.googleapis.com/google.rpc."
    assert details(Overloaded("no", retry_after=2.5)) == {"@type": f"{kind}RetryInfo", "retryDelay": "2.5s"}
    assert details(KeyRefused("no"))["reason"] == "API_KEY_INVALID"
    assert details(BadRequest("no", param="contents"))["fieldViolations"] == [
        {"field": "contents", "description": "no"}
    ]
    assert "details" not in DIALECT.error(EngineBroken("no"))["error"]


def test_limits_are_told_in_the_words_that_clients_know() -> None:
    def words(error: ProxyError) -> str:
        told: str = DIALECT.error(error)["error"]["message"]
        return told

    assert words(PromptTooLong("x", tokens=210, limit=200)) == (
        "The input token count (210) exceeds the maximum number of tokens allowed (200)."
    )
    assert words(PromptTooLong("x", tokens=200, limit=200)).endswith("(199).")
    assert words(PromptTooLong("the engine's words")).startswith("The input token count exceeds the maximum number")
    vllm = "max_tokens=9000 cannot be greater than max_model_len=4096. Please request fewer output tokens."
    assert "maxOutputTokens value of 9000 but the supported range is from 1 (inclusive) to 4097 (exclusive)" in words(
        EngineRefused(vllm, param="max_tokens")
    )
    assert words(EngineRefused("other", param="max_tokens")) == "other"


def test_models_are_told_as_the_provider_does() -> None:
    one = DIALECT.model("m", 4096)
    assert one["inputTokenLimit"] == 4096
    assert "inputTokenLimit" not in DIALECT.model("m", None)
    assert DIALECT.models([one]) == {"models": [one]}
