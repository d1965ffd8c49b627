"""SGLang's shape, spoken by the scripted engine after SGLang's sources; no real one was at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from polar.devmodel import Failure, Reply, Rule, Script
from polar.proxy.answer import Answer
from polar.proxy.errors import EngineBroken
from polar.schemas import LogprobsMode, PolicySpan, SamplingSpec
from tests.proxy.engines_harness import DIALECTS, asked, upstream_of
from tests.proxy.harness import Door, ask, captured, failed
from tests.proxy.test_calls import CALLING, TOOLS, USER, assert_as_sampled
from tests.proxy.test_engines import gated, in_flight
from tests.proxy.test_engines_pauses import trainer
from tests.proxy.test_told import until

Start = Callable[..., Any]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_reply_is_captured_with_its_tokens(dialect: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("It is sunny."), kind="sglang")
    door: Door = await door_to(engine)
    await asked(door, dialect)
    record = captured(await door.settled())
    assert_as_sampled(record, engine)
    assert record.engine.build == "sglang 0.5.13"
    assert record.choices[0].finish == "stop"
    asked_for = engine.calls[0].body
    assert asked_for["rid"] == record.completion_id
    assert (asked_for["return_meta_info"], asked_for["return_prompt_token_ids"]) == (True, True)
    assert not {"return_token_ids", "return_weight_versions", "stream"} & set(asked_for)


async def test_a_streaming_client_is_told_the_whole_reply_at_its_end(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[CALLING])]), kind="sglang")
    door: Door = await door_to(engine, stream_mode="live")
    seen: list[Any] = []
    async with door.client() as client:
        await ask(client, stream=True, seen=seen, messages=USER, tools=TOOLS, logprobs=True, top_logprobs=2)
    record = captured(await door.settled())
    assert_as_sampled(record, engine)
    assert [call["function"]["name"] for call in record.choices[0].message["tool_calls"]] == ["get_weather"] * 2
    entries = [one for chunk in seen for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    assert len(entries) == len(record.choices[0].ids)
    assert {len(one.top_logprobs) for one in entries} == {2}


async def test_its_weights_are_told_around_the_call(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(
        Script([Rule(replies=[Reply(text="It is sunny.", gate="go", gate_after=2)])]), kind="sglang"
    )
    door: Door = await door_to(engine)
    engine.open("go")
    await asked(door, "chat", "same")
    (span,) = captured(await door.settled("same")).choices[0].spans
    assert (span.version, span.exact) == ("default", True)
    engine.close_gate("go")
    call = in_flight(door, "changed")
    await engine.until(lambda stats: stats.running == 1)
    engine.lifecycle.version = "step-2"
    engine.open("go")
    await call
    choice = captured(await door.settled("changed")).choices[0]
    assert choice.spans == [PolicySpan(start=0, end=len(choice.ids), version="step-2", exact=False)]


async def test_it_is_paused_and_resumed_by_its_own_routes(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(gated(after=2), kind="sglang")
    door: Door = await door_to(engine)
    call = in_flight(door)
    await engine.until(lambda stats: stats.running == 1)
    status, told = await trainer(door, "/pause", mode="abort")
    assert (status, told["engines"][0]["kind"], engine.lifecycle.paused) == (200, "sglang", True)
    with pytest.raises(openai.APIStatusError) as raised:
        await call
    assert raised.value.status_code == 503
    record = captured(await door.settled())
    assert (record.complete, record.choices[0].finish) == (False, "abort")
    engine.lifecycle.version = "step-2"
    engine.open("go")
    status, told = await trainer(door, "/resume")
    assert (status, told["engines"][0]["weight_version"], engine.lifecycle.paused) == (200, "step-2", False)
    await asked(door, "chat")


async def test_its_refusals_keep_their_meaning(engine_of: Start, door_to: Start) -> None:
    too_long = "The input (99999 tokens) is longer than the model's context length (32768 tokens)."
    errors = [
        (Failure(status=400, message=too_long), 400, "context_length_exceeded"),
        (Failure(status=400, message="bad grammar"), 400, None),
        (Failure(status=503, message="full", headers={"Retry-After": "4"}), 503, "engine_unavailable"),
    ]
    for number, (error, status, code) in enumerate(errors):
        engine = await engine_of(Script([Rule(replies=[Reply(error=error)])]), kind="sglang")
        door: Door = await door_to(engine)
        with pytest.raises(openai.APIStatusError) as raised:
            await asked(door, "chat", f"s{number}")
        assert (raised.value.status_code, raised.value.code) == (status, code)
        assert failed(await door.settled(f"s{number}")).http_status == status


async def test_its_log_probability_mode_is_found(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."), kind="sglang")
    door: Door = await door_to(engine, logprobs_mode="auto")
    await asked(door, "chat", sampling=SamplingSpec())
    assert captured(await door.settled()).engine.logprobs_mode is LogprobsMode.RAW
    assert engine.scripted.probed == 2


async def test_an_engine_that_is_told_to_be_one_is_asked_as_one(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, engine_kind="sglang")
    await until(lambda: upstream_of(door, engine.base_url).endpoint.unfit is not None)
    with pytest.raises(openai.APIStatusError) as raised:
        await asked(door, "chat")
    # a vLLM asked in SGLang's words tells no ids
    assert (raised.value.status_code, raised.value.code) == (503, "engine_unfit")
    assert "return_meta_info" in raised.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"meta_info": None}, "0 token ids with 1 log-probabilities"),
        ({"meta_info": {"output_token_logprobs": [[-0.5, 5, "a"], [-0.5, 6, None]]}}, "counts 1 sampled tokens"),
        ({"meta_info": {"output_token_logprobs": [["x", 5, "a"]]}}, "not a chat completion"),
        ({"prompt_token_ids": None}, "return_prompt_token_ids"),
    ],
)
def test_an_answer_that_is_not_token_exact_is_refused(change: dict[str, Any], message: str) -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a"},
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
        "finish_reason": "stop",
        "matched_stop": 2,
        "prompt_token_ids": [1, 2, 3],
        "meta_info": {"output_token_logprobs": [[-0.5, 5, None]]},
    }
    body = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}
    answer = Answer(1)
    answer.feed(json.dumps(body).encode())
    reply = answer.reply()
    assert (reply.prompt_ids.array.tolist(), reply.choices[0].ids.array.tolist()) == ([1, 2, 3], [5])
    assert (reply.choices[0].logprobs.array.tolist(), reply.choices[0].stop) == ([-0.5], 2)
    broken = Answer(1)

    def whole() -> None:
        broken.feed(json.dumps(body | {"choices": [choice | change]}).encode())
        broken.reply()

    with pytest.raises(EngineBroken, match=message):
        whole()
