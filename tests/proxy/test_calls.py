"""Calls through the official client: what the client gets, and what is on the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from polar.devmodel import Match, Reply, Rule, Script, ScriptedEngine
from polar.proxy.sampling import call_seed
from polar.schemas import CallStarted, CompletionCaptured, LogprobsMode, PolicySpan, SamplingSpec
from polar.schemas.prompts import Prompts
from tests.proxy.harness import Door, captured

MODES = ["live", "synthetic"]
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALLING = Reply(
    text="Let me look.",
    tool_calls=[
        {"name": "get_weather", "arguments": {"city": "Paris"}},
        {"name": "get_weather", "arguments": {"city": "Lyon {}"}},
    ],
)

Start = Callable[..., Any]


def assert_as_sampled(record: CompletionCaptured, engine: ScriptedEngine, call: int = -1) -> None:
    """The record holds exactly the ids and log-probabilities that the engine sampled."""
    truth = engine.calls[call]
    assert truth.id == record.completion_id
    assert record.prompt.ids.array.tolist() == truth.prompt_ids
    assert [choice.ids.array.tolist() for choice in record.choices] == truth.ids
    for choice, sampled in zip(record.choices, truth.logprobs, strict=True):
        assert choice.logprobs.array.tolist() == np.array(sampled, np.float32).tolist()


async def test_a_whole_reply_is_told_and_captured(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("It is sunny in Paris."))
    door: Door = await door_to(engine)

    async with door.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="gpt-9", messages=USER, max_completion_tokens=50, temperature=0.3, extra_body={"sparkle": 1}
        )
    reply = raw.parse()
    record = captured(await door.settled())

    assert reply.model == "gpt-9"
    assert reply.choices[0].message.content == "It is sunny in Paris."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None
    assert reply.id == f"chatcmpl-{record.completion_id}"
    assert raw.headers["x-request-id"] == record.completion_id
    assert reply.usage.prompt_tokens == len(record.prompt.ids)
    assert reply.usage.completion_tokens == len(record.choices[0].ids)

    assert_as_sampled(record, engine)
    asked = engine.calls[0].body
    assert asked["model"] == "scripted"
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["min_p"]) == (1.0, 1.0, -1, 0.0)
    assert (asked["repetition_penalty"], asked["presence_penalty"], asked["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert "seed" not in asked
    assert "sparkle" not in asked
    assert len(asked["cache_salt"]) == 32

    assert (record.task_id, record.group_id, record.sample, record.harness) == ("t1", "g1", 2, "shell")
    assert (record.dialect, record.streamed, record.complete) == ("openai.chat", False, True)
    assert (record.sampling_asked.temperature, record.sampling.temperature) == (0.3, 1.0)
    assert record.sampling.max_tokens == 50
    assert record.constraints == []
    assert record.prompt.messages == USER
    assert record.choices[0].message == {"role": "assistant", "content": "It is sunny in Paris."}
    assert (record.choices[0].finish, record.choices[0].stop) == ("stop", None)
    assert record.choices[0].spans == [
        PolicySpan(start=0, end=len(record.choices[0].ids), version="default", exact=True)
    ]
    assert (record.engine.model, record.engine.logprobs_mode) == ("scripted", LogprobsMode.PROCESSED)
    assert record.started_ms <= record.ended_ms
    assert len(record.request_sha256) == 64
    labels = {"dialect": "openai.chat"}
    assert door.service.registry.get_sample_value("polar_proxy_unknown_fields_total", labels) == 1
    labels["outcome"] = "captured"
    assert door.service.registry.get_sample_value("polar_proxy_calls_total", labels) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_streamed_reply_is_told_and_captured(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny in Paris. ☀️", tokens_per_chunk=2)])]))
    door: Door = await door_to(engine, stream_mode=mode)
    async with door.client() as client:
        stream = await client.chat.completions.create(
            model="gpt-9", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    record = captured(await door.settled())
    assert_as_sampled(record, engine)
    assert record.streamed
    assert (record.first_token_ms is not None) == (mode == "live")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        "It is sunny in Paris. ☀️"
    )
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{record.completion_id}"}
    assert {chunk.model for chunk in chunks} == {"gpt-9"}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(record.choices[0].ids)
    if mode == "live":
        assert len(chunks) > 5


async def test_usage_is_streamed_only_where_asked_for(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with door.client() as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        assert [chunk.usage async for chunk in stream if chunk.usage is not None] == []


REPLIES = {
    "text": Reply(text="One. Two. Three."),
    "empty": Reply(text=""),
    "calls": CALLING,
    "call without text": Reply(tool_calls=CALLING.tool_calls[:1]),
    "call after white space": Reply(text="\n", tool_calls=CALLING.tool_calls[:1]),
    "no arguments": Reply(tool_calls=[{"name": "get_weather", "arguments": {}}]),
    "reasoning": Reply(reasoning="Hm, weather.", text="Sunny."),
    "reasoning and a call": Reply(reasoning="Hm.", tool_calls=CALLING.tool_calls[:1]),
    "length": Reply(text="One. Two.", finish="length"),
    "white space only": Reply(text=" \n "),
    "drifted": Reply(text="One. Two. Three.", drift=2),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_live_synthetic_and_whole_agree(name: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[REPLIES[name]])]), reasoning="reasoning" in name)
    results, records = [], []
    for mode in (*MODES, "whole"):
        door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
        async with door.client(mode) as client:
            fields: Any = {"model": "m", "messages": USER, "tools": TOOLS, "logprobs": True, "top_logprobs": 2}
            if mode == "whole":
                completion = await client.chat.completions.create(**fields)
            else:
                async with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
                    try:
                        completion = await stream.get_final_completion()
                    except openai.LengthFinishReasonError as error:
                        completion = error.completion
        results.append(plain(completion))
        record = captured(await door.settled(mode))
        assert_as_sampled(record, engine)
        records.append(record)
    assert results[0] == results[1] == results[2]
    for record in records:
        same = [(c.ids, c.logprobs, without_ids(c.message), c.finish, c.stop, c.spans) for c in record.choices]
        assert same == [
            (c.ids, c.logprobs, without_ids(c.message), c.finish, c.stop, c.spans) for c in records[0].choices
        ]
        assert record.prompt == records[0].prompt
        assert record.sampling == records[0].sampling
        assert record.usage == records[0].usage


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The engine draws new ids of tool calls for each answer."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


def plain(completion: Any) -> Any:
    choice = completion.choices[0]
    dumped = choice.message.model_dump()
    return {
        "content": dumped.get("content") or None,
        "reasoning": dumped.get("reasoning"),
        "calls": [(one["function"]["name"], one["function"]["arguments"]) for one in dumped.get("tool_calls") or ()],
        "finish": choice.finish_reason,
        "logprobs": [(one.token, one.logprob, len(one.top_logprobs)) for one in choice.logprobs.content],
        "usage": completion.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}),
        "model": completion.model,
    }


async def test_several_choices_are_all_captured(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(texts=("Yes.", "No.", "Who knows?"))])]))
    for mode in MODES:
        door: Door = await door_to(engine, stream_mode=mode)
        async with door.client(mode) as client:
            stream = await client.chat.completions.create(model="m", messages=USER, n=3, stream=True)
            texts = ["", "", ""]
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        record = captured(await door.settled(mode))
        assert_as_sampled(record, engine)
        assert texts == [choice.message["content"] for choice in record.choices]
        assert record.sampling.n == 3


async def test_a_conversation_with_tools_is_counted_and_extends_its_prompts(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(
        Script(
            [
                Rule(match=Match(last_role="tool"), replies=[Reply(text="Sunny.")]),
                Rule(replies=[Reply(tool_calls=CALLING.tool_calls)]),
            ]
        )
    )
    door: Door = await door_to(engine)
    messages: list[Any] = list(USER)
    async with door.client() as client:
        first = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        calls = first.choices[0].message.tool_calls
        assert calls is not None
        assert [json.loads(call.function.arguments) for call in calls if call.type == "function"] == [
            {"city": "Paris"},
            {"city": "Lyon {}"},
        ]
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
        second = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "Sunny."
    records = await door.settled()
    starts = [one for one in records if isinstance(one, CallStarted)]
    ends = [one for one in records if isinstance(one, CompletionCaptured)]
    assert [one.call for one in starts] == [one.call for one in ends] == [0, 1]
    prompts = Prompts()
    opening, whole = prompts.take(ends[0]), prompts.take(ends[1])
    assert whole.messages[1] == ends[0].choices[0].message
    assert opening.tools == whole.tools == TOOLS
    before = [*opening.ids, *ends[0].choices[0].ids]
    assert [*whole.ids][: len(before)] == before
    assert [*whole.ids] == engine.calls[1].prompt_ids


async def test_the_synchronous_client_works_too(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{door.url}/v1", api_key=door.key(), max_retries=0) as client:
            whole = client.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]
            stream = client.chat.completions.create(model="m", messages=USER, stream=True)  # type: ignore[call-overload]
            return whole.choices[0].message.content, "".join(
                chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices
            )

    assert await asyncio.to_thread(ask) == ("Yes.", "Yes.")


async def test_asked_logprobs_are_told(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("It is sunny."))
    door: Door = await door_to(engine)
    async with door.client() as client:
        reply = await client.chat.completions.create(model="m", messages=USER, logprobs=True, top_logprobs=3)
    told = reply.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [one.logprob for one in told.content] == engine.calls[0].logprobs[0]
    assert {len(one.top_logprobs) for one in told.content} == {3}


async def test_a_task_may_seed_its_calls_and_let_the_harness_choose(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of()
    door: Door = await door_to(engine)
    spec = SamplingSpec(override="allow", seed_calls=True, max_tokens=20)
    async with door.client(sampling=spec) as client:
        for _ in range(2):
            await client.chat.completions.create(
                model="m", messages=USER, temperature=0.5, presence_penalty=0.1, seed=7, max_tokens=100, stop=["\n\n"]
            )
    bodies = [call.body for call in engine.calls]
    assert [body["seed"] for body in bodies] == [call_seed("s1", 0), call_seed("s1", 1)]
    assert (bodies[0]["temperature"], bodies[0]["max_completion_tokens"], bodies[0]["stop"]) == (0.5, 20, ["\n\n"])
    record = (await door.settled())[1]
    assert record.sampling.seed == call_seed("s1", 0)
    assert record.constraints == ["penalties"]


async def test_weights_that_change_during_a_call_are_recorded(engine_of: Start, door_to: Start) -> None:
    reply = Reply(text="One two three four five.", versions=[("v1", 3), ("v2", 0)])
    engine = await engine_of(Script([Rule(replies=[reply])]))
    for mode in MODES:
        door: Door = await door_to(engine, stream_mode=mode)
        async with door.client(mode) as client:
            await (await client.chat.completions.create(model="m", messages=USER, stream=True)).close()
            async for _ in await client.chat.completions.create(model="m", messages=USER, stream=True):
                pass
        record = [one for one in await door.settled(mode) if isinstance(one, CompletionCaptured) and one.complete][-1]
        size = len(record.choices[0].ids)
        assert record.choices[0].spans == [
            PolicySpan(start=0, end=3, version="v1", exact=True),
            PolicySpan(start=3, end=size, version="v2", exact=True),
        ]


async def test_the_key_may_stand_in_the_path_or_in_x_api_key(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    client = openai.AsyncOpenAI(base_url=f"{door.url}/s/{door.key()}/v1", api_key="anything", max_retries=0)
    async with client, aiohttp.ClientSession() as http:
        assert (await client.chat.completions.create(model="m", messages=USER)).choices[0].message.content == "Yes."
        names = [model.id async for model in await client.models.list()]
        assert names == ["the-policy"]
        assert (await client.models.retrieve("org/any")).id == "org/any"
        body = {"model": "m", "messages": USER}
        headers = {"x-api-key": door.key()}
        async with http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200


async def test_many_calls_at_once_each_get_their_own(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="You said: $last_user", template=True)])]))
    door: Door = await door_to(engine)

    async def ask(i: int) -> None:
        async with door.client(f"s{i % 10}") as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"number {i}"}], stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            assert text == f"You said: number {i}"

    await asyncio.gather(*(ask(i) for i in range(60)))
    by_id = {call.id: call for call in engine.calls}
    for session in range(10):
        ends = [one for one in await door.settled(f"s{session}") if isinstance(one, CompletionCaptured)]
        assert sorted(one.call for one in ends) == list(range(6))
        for end in ends:
            assert end.choices[0].ids.array.tolist() == by_id[end.completion_id].ids[0]
