"""Calls through the official client of OpenAI's Responses API: what the client gets, and what is on the log."""

from __future__ import annotations

import asyncio
import base64
import warnings
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from polar.devmodel import Match, Reply, Rule, Script
from polar.schemas import CompletionCaptured, ControlState, SamplingSpec
from tests.proxy.harness import Door, captured
from tests.proxy.responses_harness import (
    ASKED,
    CUSTOM,
    TOOLS,
    USER,
    fields,
    gathered,
    post,
    sent_back,
    streamed,
)
from tests.proxy.test_calls import CALLING, MODES, assert_as_sampled, without_ids

pytestmark = pytest.mark.filterwarnings("error")
Start = Callable[..., Any]


async def ask(asking: openai.AsyncOpenAI, *, stream: bool, **changes: Any) -> Response:
    """One response, to its end; every event of its type, without a warning."""
    if not stream:
        found: Response = await asking.responses.create(**fields(**changes))
    else:
        last: Any = None
        async for event in await asking.responses.create(**fields(stream=True, **changes)):
            event.model_dump_json()
            last = event
        assert last.type == f"response.{last.response.status}"
        found = last.response
    found.model_dump_json()
    return found


async def test_a_whole_reply_is_told_and_captured(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("It is sunny in Paris."))
    door: Door = await door_to(engine)
    async with door.client() as asking:
        raw = await asking.responses.with_raw_response.create(
            **fields(instructions="Be brief.", temperature=0.3, max_output_tokens=200, prompt_cache_key="mine")
        )
    reply = raw.parse()
    record = captured(await door.settled())

    assert reply.output_text == "It is sunny in Paris."
    assert (reply.model, reply.object, reply.status) == ("gpt-x", "response", "completed")
    assert reply.id == f"resp_{record.completion_id}"
    assert raw.headers["x-request-id"] == record.completion_id
    assert reply.usage is not None
    assert reply.usage.input_tokens == len(record.prompt.ids)
    assert reply.usage.output_tokens == len(record.choices[0].ids)

    assert_as_sampled(record, engine)
    assert (record.dialect, record.streamed, record.complete) == ("openai.responses", False, True)
    assert record.prompt.messages == [{"role": "system", "content": "Be brief."}, *USER]
    assert record.choices[0].message == {"role": "assistant", "content": "It is sunny in Paris."}
    assert (record.sampling_asked.temperature, record.sampling.temperature) == (0.3, 1.0)
    assert record.sampling.max_tokens == 200
    assert record.hints.session == "mine"
    assert engine.calls[0].body["model"] == "scripted"


def used(name: str, arguments: Any) -> Reply:
    return Reply(tool_calls=[{"name": name, "arguments": arguments}])


REPLIES = {
    "text": Reply(text="One. Two. Three. ☀️", tokens_per_chunk=2),
    "empty": Reply(text=""),
    "calls": CALLING,
    "call after white space": Reply(text="\n", tool_calls=CALLING.tool_calls[:1]),
    "custom": used("note", {"input": "a\nb ä"}),
    "local shell": used("local_shell", {"command": ["ls", "-l"]}),
    "custom, then function": Reply(
        tool_calls=[{"name": "note", "arguments": {"input": "x"}}, *CALLING.tool_calls[:1]], text="Both."
    ),
    "namespace": used("mcp__files__look", {"city": "Paris"}),
    "reasoning": Reply(reasoning="Hm, weather.", text="Sunny."),
    "reasoning and calls": Reply(reasoning="Hm.", text="Let me look.", tool_calls=CALLING.tool_calls),
    "reasoning and a call": Reply(reasoning="Hm.", tool_calls=CALLING.tool_calls[:1]),
    "length": Reply(text="One. Two.", finish="length"),
    "white space only": Reply(text=" \n "),
    "drifted": Reply(text="One. Two. Three.", drift=2),
}


@pytest.mark.parametrize("asked", [{}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}])
@pytest.mark.parametrize("name", REPLIES)
async def test_live_synthetic_and_whole_agree(name: str, asked: Any, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[REPLIES[name]])]), reasoning="reasoning" in name)
    results, records = [], []
    for mode in (*MODES, "whole"):
        door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
        async with door.client(mode) as asking:
            response = await ask(asking, stream=mode != "whole", tools=TOOLS, **asked)
        record = captured(await door.settled(mode))
        assert_as_sampled(record, engine)
        output = [item.model_dump(exclude_unset=True) for item in response.output]
        assert sent_back(output) == record.choices[0].message
        results.append(plain(response))
        records.append(record)
    assert results[0] == results[1] == results[2]
    assert results[0]["usage"]["input_tokens"] == len(records[0].prompt.ids)
    assert results[0]["status"] == ("incomplete" if name == "length" else "completed")
    for record in records:
        choice, first = record.choices[0], records[0].choices[0]
        assert (choice.ids, choice.logprobs, choice.finish) == (first.ids, first.logprobs, first.finish)
        assert without_ids(choice.message) == without_ids(first.message)
        assert record.prompt == records[0].prompt
        assert (record.sampling, record.usage) == (records[0].sampling, records[0].usage)


@pytest.mark.parametrize(
    ("name", "arguments"), [("get_weather", '{"city":  "Paris",\n "n": 1.0}'), ("note", '{"input":"\\u00e4"}')]
)
async def test_arguments_come_back_byte_for_byte(name: str, arguments: str, engine_of: Start, door_to: Start) -> None:
    # live only: asked for the whole, the engine's tool parser writes arguments anew
    door: Door = await door_to(await engine_of(Script([Rule(replies=[used(name, arguments)])])))
    async with door.client() as asking:
        response = await ask(asking, stream=True, tools=TOOLS)
    output = [item.model_dump(exclude_unset=True) for item in response.output]
    record = captured(await door.settled())
    assert record.choices[0].message["tool_calls"][0]["function"]["arguments"] == arguments
    assert sent_back(output) == record.choices[0].message


def plain(response: Response) -> dict[str, Any]:
    """What a client gets, without what differs from answer to answer."""
    dumped = response.model_dump(exclude={"id", "created_at"})
    for item in dumped["output"]:
        item.pop("id", None)
        item.pop("call_id", None)
    return dumped


TWO_TURNS = Script(
    [
        Rule(match=Match(turn=2), replies=[Reply(text="Sunny.")]),
        Rule(replies=[Reply(tool_calls=[*CALLING.tool_calls, {"name": "note", "arguments": {"input": "x"}}])]),
    ]
)


def answers(response: Response) -> list[Any]:
    return [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "sunny"}
        for item in response.output
        if item.type in ("function_call", "custom_tool_call")
    ]


@pytest.mark.parametrize("how", ["items", "previous"])
@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_conversation_with_tools_extends_its_prompts(
    how: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(TWO_TURNS)
    door: Door = await door_to(engine, delta_prompts=False, stream_mode="live" if mode == "whole" else mode)
    async with door.client() as asking:
        first = await ask(asking, stream=mode != "whole", tools=TOOLS)
        if how == "previous":
            more: dict[str, Any] = {"previous_response_id": first.id, "input": answers(first)}
        else:
            back = [item.model_dump(exclude_unset=True) for item in first.output]
            more = {"input": [*USER, *back, *answers(first)]}
        second = await ask(asking, stream=mode != "whole", tools=TOOLS, **more)
        assert second.output_text == "Sunny."
        if how == "previous":
            assert second.previous_response_id == first.id
        again = await asking.responses.retrieve(second.id)
        assert again == second
    records = [one for one in await door.settled() if isinstance(one, CompletionCaptured)]
    assert records[1].prompt.messages[:2] == [*USER, records[0].choices[0].message]
    assert [message["role"] for message in records[1].prompt.messages[2:]] == ["tool"] * 3
    assert len(engine.calls) == 2


async def test_the_helper_that_gathers_a_stream_works(engine_of: Start, door_to: Start) -> None:
    class Weather(BaseModel):
        sky: str

    engine = await engine_of(Script.say('{"sky": "blue"}'))
    door: Door = await door_to(engine)
    async with door.client() as asking:
        async with asking.responses.stream(**fields(text_format=Weather)) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        parsed = await asking.responses.parse(**fields(text_format=Weather))
    assert final.output_parsed == parsed.output_parsed == Weather(sky="blue")
    assert kinds[-1] == "response.completed"
    records = [one for one in await door.settled() if isinstance(one, CompletionCaptured)]
    assert [record.constraints for record in records] == [["grammar"]] * 2


async def test_a_path_may_hold_the_key(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with openai.AsyncOpenAI(base_url=f"{door.url}/s/{door.key()}/v1", api_key="-", max_retries=0) as asking:
        response = await ask(asking, stream=True)
        assert (await asking.responses.retrieve(response.id)).output_text == "Yes."
        assert (await asking.responses.input_tokens.count(model="m", input=ASKED)).input_tokens > 0


async def test_input_tokens_are_those_of_the_prompt(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    async with door.client() as asking:
        count = await asking.responses.input_tokens.count(
            model="m", input=USER, instructions="Be brief.", tools=TOOLS[:1]
        )
        assert engine.stats.started == 0
        response = await ask(asking, stream=False, instructions="Be brief.", tools=TOOLS[:1])
    assert response.usage is not None
    assert (count.object, count.input_tokens) == ("response.input_tokens", response.usage.input_tokens)


async def test_log_probabilities_are_told_where_they_are_asked_for(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(reasoning="Hm.", text="Sunny.")])]), reasoning=True)
    door: Door = await door_to(engine)
    found = []
    async with door.client() as asking:
        for stream in (False, True):
            response = await ask(asking, stream=stream, include=["message.output_text.logprobs"], top_logprobs=2)
            said: Any = response.output[-1]
            (part,) = said.content
            found.append("".join(one.token for one in part.logprobs))
            assert all(one.top_logprobs for one in part.logprobs)
    assert found[0] == found[1]
    assert found[0].strip() == "Sunny."


async def test_a_session_that_is_over_is_forgotten(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with door.client() as asking:
        response = await ask(asking, stream=False)
        assert door.service.responses.size > 0
        await door.control("s1", ControlState.CLOSED)
        assert door.service.responses.size == 0
        with pytest.raises(openai.AuthenticationError):
            await asking.responses.retrieve(response.id)


async def test_the_task_pins_sampling_unless_it_allows(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    async with door.client(sampling=SamplingSpec(override="allow", max_tokens=50)) as asking:
        await ask(asking, stream=False, temperature=0.5, top_p=0.5)
    body = engine.calls[0].body
    assert (body["temperature"], body["top_p"], body["max_completion_tokens"]) == (0.5, 0.5, 50)


async def test_dropped_tools_are_counted(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    async with door.client() as asking:
        response = await ask(asking, stream=False, tools=[CUSTOM, {"type": "web_search"}])
    assert [tool.type for tool in response.tools] == ["custom", "web_search"]
    assert [tool["function"]["name"] for tool in engine.calls[0].body["tools"]] == ["note"]
    labels = {"dialect": "openai.responses"}
    assert door.service.registry.get_sample_value("polar_proxy_dropped_total", labels) == 1


async def test_the_synchronous_client_works_too(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))

    def asked() -> list[str]:
        with (
            warnings.catch_warnings(action="error"),
            openai.OpenAI(base_url=f"{door.url}/v1", api_key=door.key(), max_retries=0) as asking,
        ):
            stream = asking.responses.create(**fields(stream=True))
            return [event.delta for event in stream if event.type == "response.output_text.delta"]

    assert "".join(await asyncio.to_thread(asked)) == "Yes."


async def test_an_image_is_refused_clearly_by_a_model_without_eyes(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    url = f"data:image/png;base64,{base64.b64encode(b'picture').decode()}"
    sent = [{"role": "user", "content": [{"type": "input_image", "detail": "auto", "image_url": url}]}]
    async with door.client() as asking:
        with pytest.raises(openai.BadRequestError, match="multimodal"):
            await asking.responses.create(**fields(input=sent))


async def test_events_are_those_of_the_provider(engine_of: Start, door_to: Start) -> None:
    reply = Reply(reasoning="Hm.", text="Let me look.", tool_calls=CALLING.tool_calls[:1])
    door: Door = await door_to(await engine_of(Script([Rule(replies=[reply])]), reasoning=True))
    async with aiohttp.ClientSession() as http, post(door, http, stream=True, tools=TOOLS) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        told = [event async for event in streamed(response)]
        assert response.headers["x-request-id"] in told[0]["response"]["id"]
    kinds = [event["type"].removeprefix("response.") for event in told if not event["type"].endswith(".delta")]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_item.added", "content_part.added", "output_item.added",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_text.done", "content_part.done", "output_item.done",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [item["type"] for item in gathered(told)["output"]] == ["reasoning", "message", "function_call"]
