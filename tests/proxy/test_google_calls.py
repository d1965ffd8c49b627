"""Calls through the official client of Google: what the client gets, and what is on the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from google.genai import types
from google.genai.errors import ClientError

from polar.devmodel import Match, Reply, Rule, Script
from polar.schemas import CallStarted, CompletionCaptured, SamplingSpec
from tests.proxy.google_harness import (
    ARRAY,
    CHAT,
    CLEAN,
    MODEL,
    SSE,
    TEXT,
    TOOLS,
    USER,
    client,
    closes,
    events,
    gathered,
    post,
)
from tests.proxy.harness import Door, captured
from tests.proxy.test_anthropic_calls import REPLIES
from tests.proxy.test_calls import CALLING, MODES, assert_as_sampled, without_ids
from tests.proxy.test_google_replies import sent_back

pytestmark = CLEAN
Start = Callable[..., Any]
WEATHER = types.Tool.model_validate(TOOLS[0])


def config(**changes: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(**changes)


def parts(reply: types.GenerateContentResponse) -> list[types.Part]:
    assert reply.candidates
    assert reply.candidates[0].content
    return reply.candidates[0].content.parts or []


async def test_a_whole_reply_is_told_and_captured(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("It is sunny in Paris."))
    door: Door = await door_to(engine)
    asked = config(system_instruction="Be brief.", temperature=0.3, max_output_tokens=50)
    reply = await client(door).aio.models.generate_content(model=MODEL, contents=TEXT, config=asked)
    record = captured(await door.settled())

    assert reply.text == "It is sunny in Paris."
    assert reply.candidates
    assert reply.candidates[0].finish_reason is types.FinishReason.STOP
    assert reply.candidates[0].content
    assert reply.candidates[0].content.role == "model"
    assert reply.model_version == MODEL
    assert reply.response_id in (record.completion_id, None)  # older versions do not read it
    assert reply.prompt_feedback is None
    usage = reply.usage_metadata
    assert usage
    sampled = len(record.choices[0].ids)
    assert (usage.prompt_token_count, usage.candidates_token_count) == (len(record.prompt.ids), sampled)
    assert usage.total_token_count == len(record.prompt.ids) + sampled

    assert_as_sampled(record, engine)
    assert (record.dialect, record.streamed, record.complete) == ("google.generate_content", False, True)
    assert record.prompt.messages == [{"role": "system", "content": "Be brief."}, *CHAT]
    assert record.choices[0].message == {"role": "assistant", "content": "It is sunny in Paris."}
    assert (record.sampling_asked.temperature, record.sampling.temperature) == (0.3, 1.0)
    assert record.sampling.max_tokens == 50
    assert "google-genai-sdk" in (record.hints.user_agent or "")
    assert engine.calls[0].body["model"] == "scripted"


def body(thoughts: bool) -> dict[str, Any]:
    return {"tools": TOOLS, "generationConfig": {"thinkingConfig": {"includeThoughts": thoughts}}}


@pytest.mark.parametrize("thoughts", [True, False])
@pytest.mark.parametrize("name", REPLIES)
async def test_live_synthetic_and_whole_agree(name: str, thoughts: bool, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[REPLIES[name]])]), reasoning="reasoning" in name)
    results, records = [], []
    for mode, action in [(mode, action) for action in (SSE, ARRAY) for mode in MODES] + [("whole", "generateContent")]:
        door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
        session = f"{mode}{action == ARRAY}"
        async with aiohttp.ClientSession(headers={"x-goog-api-key": door.key(session)}) as http:
            url = f"{door.url}/v1beta/models/{MODEL}:{action}"
            async with http.post(url, json={"contents": USER, **body(thoughts)}) as response:
                assert response.status == 200
                match action:
                    case "generateContent":
                        message = await response.json()
                    case "streamGenerateContent":
                        assert response.content_type == "application/json"
                        message = gathered(await response.json())
                    case _:
                        assert response.content_type == "text/event-stream"
                        message = gathered([event async for event in events(response)])
        record = captured(await door.settled(session))
        assert_as_sampled(record, engine)
        assert record.streamed is (mode != "whole")
        assert sent_back(message["candidates"][0]["content"]) == record.choices[0].message
        results.append(plain(message))
        records.append(record)
    assert all(result == results[0] for result in results)
    assert results[0]["usageMetadata"]["promptTokenCount"] == len(records[0].prompt.ids)
    for record in records:
        choice, first = record.choices[0], records[0].choices[0]
        assert (choice.ids, choice.logprobs, choice.finish) == (first.ids, first.logprobs, first.finish)
        assert without_ids(choice.message) == without_ids(first.message)
        assert record.prompt == records[0].prompt
        assert (record.sampling, record.usage) == (records[0].sampling, records[0].usage)


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """What a client gets, without what differs from answer to answer."""
    told = json.loads(json.dumps(message))
    del told["responseId"]
    for part in told["candidates"][0]["content"].get("parts", ()):
        if "functionCall" in part:
            del part["functionCall"]["id"], part["thoughtSignature"]
    result: dict[str, Any] = told
    return result


@pytest.mark.parametrize("mode", MODES)
async def test_the_official_client_is_streamed_to(mode: str, engine_of: Start, door_to: Start) -> None:
    reply = Reply(reasoning="Hm.", text="Let me look. ☀️\u2028", tool_calls=CALLING.tool_calls, tokens_per_chunk=2)
    engine = await engine_of(Script([Rule(replies=[reply])]), reasoning=True)
    door: Door = await door_to(engine, stream_mode=mode)
    asked = config(tools=[WEATHER], thinking_config=types.ThinkingConfig(include_thoughts=True))
    told: list[types.Part] = []
    last: types.GenerateContentResponse | None = None
    async for last in await client(door).aio.models.generate_content_stream(model=MODEL, contents=TEXT, config=asked):
        told += parts(last)
    record = captured(await door.settled())
    assert "".join(part.text or "" for part in told if part.thought) == record.choices[0].message["reasoning"]
    said = "".join(part.text or "" for part in told if not part.thought)
    assert said == record.choices[0].message["content"]
    calls = [part.function_call for part in told if part.function_call]
    assert [call.args for call in calls] == [{"city": "Paris"}, {"city": "Lyon {}"}]
    assert [call.id for call in calls] == [call["id"] for call in record.choices[0].message["tool_calls"]]
    assert last is not None
    assert last.candidates
    assert last.candidates[0].finish_reason is types.FinishReason.STOP
    assert last.usage_metadata
    assert last.usage_metadata.prompt_token_count == len(record.prompt.ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_with_tools_extends_its_prompts(stream: bool, engine_of: Start, door_to: Start) -> None:
    rules = [
        Rule(match=Match(turn=3), replies=[Reply(text="Bye.")]),
        Rule(match=Match(turn=2), replies=[Reply(reasoning="Now I know.", text="It is sunny.")]),
        Rule(replies=[Reply(reasoning="Hm.", text="Let me look.", tool_calls=CALLING.tool_calls)]),
    ]
    engine = await engine_of(Script(rules), reasoning=True)
    door: Door = await door_to(engine, delta_prompts=False)
    chat = client(door).aio.chats.create(model=MODEL, config=config(tools=[WEATHER]))

    async def send(message: Any) -> list[types.Part]:
        if not stream:
            return parts(await chat.send_message(message))
        return [part async for piece in await chat.send_message_stream(message) for part in parts(piece)]

    calls = [part.function_call for part in await send(TEXT) if part.function_call]
    results = [
        types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": "sunny"}))
        for call in calls
    ]
    assert "".join(part.text or "" for part in await send(results)).strip() == "It is sunny."
    await send("Thanks.")
    ends = [one for one in await door.settled() if isinstance(one, CompletionCaptured)]
    for before, after in pairwise(ends):
        history = [*before.prompt.messages, before.choices[0].message]
        assert after.prompt.messages[: len(history)] == history
    assert [message["role"] for message in ends[1].prompt.messages][-2:] == ["tool", "tool"]
    assert ends[0].prompt.tools_sha256 == ends[1].prompt.tools_sha256


async def test_functions_are_called_by_the_client_itself(engine_of: Start, door_to: Start) -> None:
    rules = [
        Rule(match=Match(turn=2), replies=[Reply(text="It is sunny.")]),
        Rule(replies=[Reply(tool_calls=CALLING.tool_calls[:1])]),
    ]
    door: Door = await door_to(await engine_of(Script(rules)), delta_prompts=False)
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    get_weather.__annotations__ = {"city": str, "return": str}  # which the client reads, and not as text

    def ask() -> str | None:
        return client(door).models.generate_content(
            model=MODEL, contents=TEXT, config=config(tools=[get_weather])
        ).text  # fmt: skip

    assert await asyncio.to_thread(ask) == "It is sunny."
    assert asked == ["Paris"]
    ends = [one for one in await door.settled() if isinstance(one, CompletionCaptured)]
    assert [message["role"] for message in ends[1].prompt.messages] == ["user", "assistant", "tool"]
    assert ends[1].prompt.messages[1] == ends[0].choices[0].message


async def test_several_candidates(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("One.")))
    reply = await client(door).aio.models.generate_content(model=MODEL, contents=TEXT, config=config(candidate_count=2))
    record = captured(await door.settled())
    assert reply.candidates
    assert [candidate.index for candidate in reply.candidates] == [0, 1]
    assert reply.usage_metadata
    assert reply.usage_metadata.candidates_token_count == sum(len(choice.ids) for choice in record.choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_the_engines(stream: bool, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("One. Two.")))
    asked: dict[str, Any] = {"generationConfig": {"responseLogprobs": True, "logprobs": 2}}
    async with aiohttp.ClientSession() as http, post(door, http, SSE if stream else "generateContent", **asked) as got:
        told = gathered([event async for event in events(got)]) if stream else await got.json()
    record = captured(await door.settled())
    chosen = told["candidates"][0]["logprobsResult"]["chosenCandidates"]
    expected = record.choices[0].logprobs.array.tolist()
    assert [one["logProbability"] for one in chosen] == pytest.approx(expected, rel=1e-5)
    types.GenerateContentResponse.model_validate(told)


async def test_stop_sequences_and_limits_end_a_reply(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("One. Two. Three.")))
    asking = client(door).aio.models
    stopped = await asking.generate_content(model=MODEL, contents=TEXT, config=config(stop_sequences=["Two"]))
    assert stopped.text == "One. "
    cut = await asking.generate_content(model=MODEL, contents=TEXT, config=config(max_output_tokens=3))
    assert cut.candidates
    assert cut.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
    assert cut.usage_metadata
    assert cut.usage_metadata.candidates_token_count == 3


async def test_sampling_is_the_clients_where_the_task_allows_it(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    asking = client(door, sampling=SamplingSpec(override="allow"))
    await asking.aio.models.generate_content(
        model=MODEL, contents=TEXT, config=config(temperature=0.5, top_k=20, seed=7, presence_penalty=0.5)
    )
    asked = engine.calls[0].body
    assert (asked["temperature"], asked["top_k"], asked["seed"], asked["presence_penalty"]) == (0.5, 20, 7, 0.5)
    assert captured(await door.settled()).constraints == ["penalties"]


async def test_the_models_last_words_are_gone_on_with(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Paris."))
    door: Door = await door_to(engine)
    history: Any = [*USER, {"role": "model", "parts": [{"text": "The city is"}]}]
    asking = client(door).aio.models
    assert (await asking.generate_content(model=MODEL, contents=history)).text == "Paris."
    count = await asking.count_tokens(model=MODEL, contents=history)
    assert count.total_tokens == len(captured(await door.settled()).prompt.ids)
    assert engine.calls[0].body["continue_final_message"] is True


async def test_tokens_are_counted_without_a_generation(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    whole = {"contents": USER, "tools": TOOLS, "systemInstruction": {"parts": [{"text": "Be brief."}]}}
    async with aiohttp.ClientSession(headers={"x-goog-api-key": door.key()}) as http:
        url = f"{door.url}/v1beta/models/{MODEL}"
        async with http.post(f"{url}:countTokens", json={"generateContentRequest": whole}) as response:
            count = (await response.json())["totalTokens"]
            assert response.headers["X-Request-Id"]
        assert engine.stats.started == 0
        assert await door.settled() == []
        async with http.post(f"{url}:generateContent", json=whole) as response:
            usage = (await response.json())["usageMetadata"]
    assert count == usage["promptTokenCount"] == len(engine.calls[0].prompt_ids)
    assert door.service.slots.taken == 0


async def test_where_the_key_may_stand(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    for asking in (client(door), client(door, key="anything", path=f"/s/{door.key()}")):
        assert (await asking.aio.models.generate_content(model=MODEL, contents=TEXT)).text == "Yes."
        assert (await asking.aio.models.count_tokens(model=MODEL, contents=TEXT)).total_tokens
        assert [model.name async for model in await asking.aio.models.list()] == ["models/the-policy"]
    async with aiohttp.ClientSession() as http:
        for query, headers in (
            (f"?key={door.key()}", {}),
            ("", {"Authorization": f"Bearer {door.key()}"}),
            ("", {"X-Goog-Api-Key": door.key()}),
        ):
            for version in ("v1", "v1beta", "v1alpha"):
                url = f"{door.url}/{version}/models/{MODEL}:generateContent{query}"
                async with http.post(url, json={"contents": USER}, headers=headers) as response:
                    assert response.status == 200


async def test_models_are_told_in_googles_form(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=4096))
    asking = client(door).aio.models
    await asking.generate_content(model=MODEL, contents=TEXT)  # the engine is known then
    model = await asking.get(model="gemini-any")
    assert (model.name, model.input_token_limit) == ("models/gemini-any", 4096)
    async with aiohttp.ClientSession(headers={"x-goog-api-key": door.key()}) as http:
        for path in ("/v1/models", "/v1beta/models", "/v1alpha/models"):
            async with http.get(door.url + path) as response:
                assert [one["name"] for one in (await response.json())["models"]] == ["models/the-policy"]
        async with http.get(f"{door.url}/v1/models/x") as response:
            assert (await response.json())["name"] == "models/x"
        async with http.get(f"{door.url}/v1/models", headers={"anthropic-version": "2023-06-01"}) as response:
            assert response.status == 200
    async with door.client() as other:
        assert (await other.models.retrieve("any")).object == "model"


async def test_a_model_of_any_name_is_taken(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with aiohttp.ClientSession(headers={"x-goog-api-key": door.key()}) as http:
        for name in ("qwen3:8b", "Qwen/Qwen3-8B", "a b"):
            async with http.post(
                f"{door.url}/v1beta/models/{name}:generateContent", json={"contents": USER}
            ) as response:
                assert (await response.json())["modelVersion"] == name


async def test_a_schema_for_the_reply_is_marked_as_a_grammar(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say('{"a": 1}'))
    door: Door = await door_to(engine)
    asked = config(response_mime_type="application/json", response_schema={"type": "OBJECT", "properties": {}})
    reply = await client(door).aio.models.generate_content(model=MODEL, contents=TEXT, config=asked)
    assert reply.parsed == {"a": 1}
    assert engine.calls[0].body["response_format"]["json_schema"]["schema"]["type"] == "object"
    assert captured(await door.settled()).constraints == ["grammar"]


async def test_dropped_tools_are_counted(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    tools = [WEATHER, types.Tool(google_search=types.GoogleSearch())]
    await client(door).aio.models.generate_content(model=MODEL, contents=TEXT, config=config(tools=tools))
    assert [tool["function"]["name"] for tool in engine.calls[0].body["tools"]] == ["get_weather"]
    labels = {"dialect": "google.generate_content"}
    assert door.service.registry.get_sample_value("polar_proxy_dropped_total", labels) == 1


async def test_an_image_is_refused_clearly_by_a_model_without_eyes(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    picture = types.Part.from_bytes(data=b"picture", mime_type="image/png")
    with pytest.raises(ClientError, match="multimodal"):
        await client(door).aio.models.generate_content(model=MODEL, contents=[picture, TEXT])


async def test_pieces_are_those_of_the_provider(engine_of: Start, door_to: Start) -> None:
    reply = Reply(text="Let me look.", tool_calls=CALLING.tool_calls)
    door: Door = await door_to(await engine_of(Script([Rule(replies=[reply])])))
    async with aiohttp.ClientSession() as http, post(door, http, SSE, tools=TOOLS) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        told = [event async for event in events(response)]
        assert {piece["responseId"] for piece in told} == {response.headers["X-Request-Id"]}
    assert [closes(piece) for piece in told] == [False] * (len(told) - 1) + [True]
    last = told[-1]["candidates"][0]
    assert ["functionCall" in part for part in last["content"]["parts"]] == [False, True, True]
    assert last["finishReason"] == "STOP"
    starts = [one for one in await door.settled() if isinstance(one, CallStarted)]
    assert [one.dialect for one in starts] == ["google.generate_content"]
