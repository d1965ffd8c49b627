"""An engine's answer becomes a checked reply, whole or streamed."""

import json
from typing import Any

import numpy as np
import pytest

from polar.proxy.answer import Answer
from polar.proxy.engine import Events, refusal
from polar.proxy.errors import (
    EngineAway,
    EngineBroken,
    EngineError,
    EngineFailed,
    EngineRefused,
    ModelUnknown,
    PromptTooLong,
)
from polar.proxy.selftest import check_mode, read_mode
from polar.schemas import LogprobsMode


def entries(*values: float) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": value, "bytes": [120], "top_logprobs": []} for value in values]}


def whole(**changes: Any) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "xy", "reasoning": None, "tool_calls": []},
        "logprobs": entries(-0.5, -1.5),
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 2],
    }
    choice |= {name: value for name, value in changes.items() if name in choice}
    body = {
        "choices": [choice],
        "prompt_token_ids": [1, 2, 3],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None},
    }
    body |= {name: value for name, value in changes.items() if name not in choice}
    return json.dumps(body).encode()


def reply_of(*data: bytes, n: int = 1) -> Any:
    answer = Answer(n)
    for one in data:
        answer.feed(one)
    return answer.reply()


def test_ids_and_logprobs_come_through_exactly() -> None:
    reply = reply_of(whole())
    assert reply.prompt_ids.array.tolist() == [1, 2, 3]
    assert reply.choices[0].ids.array.tolist() == [7, 2]
    assert reply.choices[0].logprobs.array.tolist() == [np.float32(-0.5), np.float32(-1.5)]
    assert reply.choices[0].message == {"role": "assistant", "content": "xy"}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [7]},
        {"token_ids": [7, 2, 3]},
        {"token_ids": None},
        {"logprobs": None},
        {"logprobs": entries(-0.5)},
        {"token_ids": [], "logprobs": entries()},
        {"token_ids": [7, -2]},
        {"token_ids": [7, 2**31]},
        {"prompt_token_ids": None},
        {"prompt_token_ids": []},
        {"finish_reason": None},
        {"index": 1},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}},
        {"usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}},
        {"choices": "none"},
        {"choices": []},
    ],
)
def test_an_answer_that_no_record_may_be_made_of_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineBroken):
        reply_of(whole(**changes))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"nonsense", b'{"choices": [{"logprobs": {"content": [{"logprob": NaN}]}}]}']
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(EngineBroken):
        Answer(1).feed(data)


def chunk(delta: dict[str, Any], ids: list[int], **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "token_ids": ids, "logprobs": entries(*(-0.25 * i for i in ids))}
    return json.dumps({"choices": [choice | more]}).encode()


def test_a_stream_gives_what_the_whole_answer_gives() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    streamed = reply_of(
        json.dumps({"choices": [{"index": 0, "delta": {"content": ""}}], "prompt_token_ids": [1]}).encode(),
        chunk({"content": "\n"}, [3]),
        chunk({"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "look"}}]}, [4]),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]}, [5]),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}, [6]),
        chunk({}, [2], finish_reason="tool_calls", stop_reason=None),
    )
    at_once = reply_of(
        whole(
            prompt_token_ids=[1],
            token_ids=[3, 4, 5, 6, 2],
            logprobs=entries(*(-0.25 * i for i in (3, 4, 5, 6, 2))),
            message={"role": "assistant", "content": None, "tool_calls": [call]},
            finish_reason="tool_calls",
            usage=None,
        )
    )
    assert streamed == at_once
    assert streamed.usage == {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}


def test_an_error_inside_a_stream_is_an_error_without_its_text() -> None:
    with pytest.raises(EngineError) as raised:
        Answer(1).feed(b'{"error": {"message": "the prompt was: secret", "code": 500}}')
    assert "secret" not in raised.value.message


def test_a_partial_answer_needs_no_end() -> None:
    answer = Answer(1)
    answer.feed(json.dumps({"choices": [], "prompt_token_ids": [1]}).encode())
    answer.feed(chunk({"content": "a"}, [3]))
    with pytest.raises(EngineBroken):
        answer.reply()
    assert len(answer.reply(partial=True).choices[0].ids) == 1


def test_events_are_cut_wherever_the_network_cuts_them() -> None:
    stream = b'data: {"a": 1}\n\n: comment\n\ndata: {"b": 2}\r\n\r\ndata: [DONE]\n\n'
    for size in (1, 3, 7, len(stream)):
        events = Events(limit=1000)
        found = [one for at in range(0, len(stream), size) for one in events.feed(stream[at : at + size])]
        assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    with pytest.raises(EngineBroken):
        Events(limit=10).feed(stream)


@pytest.mark.parametrize(
    ("status", "body", "kind", "told", "code"),
    [
        (400, {"message": "too long", "param": "input_tokens"}, PromptTooLong, 400, "context_length_exceeded"),
        (400, {"message": "bad", "param": "body.x"}, EngineRefused, 400, None),
        (401, {"message": "key"}, EngineFailed, 502, "engine_error"),
        (404, {"message": "no model"}, ModelUnknown, 404, "model_not_found"),
        (500, {"message": "trace"}, EngineFailed, 502, "engine_error"),
        (503, {"message": "full"}, EngineAway, 503, "engine_unavailable"),
        (429, {"message": "full"}, EngineAway, 503, "engine_unavailable"),
    ],
)
def test_an_engines_refusal_keeps_its_meaning(
    status: int, body: dict[str, str], kind: type, told: int, code: str | None
) -> None:
    error = refusal(status, json.dumps({"error": body}).encode(), {"Retry-After": "7"})
    assert (type(error), error.status, error.code) == (kind, told, code)
    assert error.retry_after == (7.0 if kind is EngineAway else None)
    # without the engine's words a 404 may mean anything
    assert refusal(status, b"<html>", {}).status == (502 if status == 404 else told)


def test_the_mode_shows_in_how_temperature_moves_the_gap() -> None:
    ones = [("a", -0.1), ("b", -2.1)]
    assert read_mode(ones, ones) is LogprobsMode.RAW
    assert read_mode(ones, [("b", -1.4), ("a", -0.4)]) is LogprobsMode.PROCESSED
    assert read_mode(ones, [("a", -0.4)]) is LogprobsMode.UNKNOWN
    assert read_mode([("a", -0.1), ("b", -0.11)], ones) is LogprobsMode.UNKNOWN


def test_raw_logprobs_are_refused_where_they_would_be_wrong() -> None:
    for mode in (LogprobsMode.RAW, LogprobsMode.UNKNOWN):
        check_mode(mode, 1.0)
        check_mode(mode, 0.0)
        with pytest.raises(EngineRefused):
            check_mode(mode, 0.7)
    check_mode(LogprobsMode.PROCESSED, 0.7)
