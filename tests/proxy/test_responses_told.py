"""Captured before told, in the dialect openai.responses: nothing closes before the broker's acknowledgement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from polar.devmodel import Failure, Reply, Rule, Script
from polar.schemas import CompletionCaptured, FailureKind
from tests.proxy.harness import Door, captured, failed
from tests.proxy.responses_harness import CLOSING, TOOLS, fields, gathered, post, streamed
from tests.proxy.test_calls import CALLING, MODES
from tests.proxy.test_told import AWAY, until

pytestmark = pytest.mark.filterwarnings("error")
Start = Callable[..., Any]
REPLIES = {
    "text": (Reply(text="It is sunny."), {"response.output_text.delta"}),
    "reasoning": (
        Reply(reasoning="Hm, weather.", text="It is sunny."),
        {"response.reasoning_text.delta", "response.output_text.delta"},
    ),
    "text and calls": (Reply(text="Let me look.", tool_calls=CALLING.tool_calls), {"response.output_text.delta"}),
    "reasoning and a call": (
        Reply(reasoning="Hm.", tool_calls=CALLING.tool_calls[:1]),
        {"response.reasoning_text.delta", "response.function_call_arguments.delta"},
    ),
    "call": (Reply(tool_calls=CALLING.tool_calls[:1]), {"response.function_call_arguments.delta"}),
    "custom": (
        Reply(text="So.", tool_calls=[{"name": "note", "arguments": {"input": "x"}}]),
        {"response.output_text.delta"},
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REPLIES)
async def test_no_closing_event_leaves_before_the_acknowledgement(
    name: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    reply, live_deltas = REPLIES[name]
    engine = await engine_of(Script([Rule(replies=[reply])]), reasoning="reasoning" in name)
    door: Door = await door_to(engine, stream_mode=mode)
    gate = door.sender.withhold(CompletionCaptured)
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        pending = asyncio.ensure_future(post(door, http, stream=True, tools=TOOLS))
        await until(lambda: CompletionCaptured in door.sender.waiting)
        seen: list[dict[str, Any]] = []
        if mode == "live":
            response = await pending
            told = streamed(response)
            while not seen or not seen[-1]["type"].endswith(".delta"):
                seen.append(await anext(told))
            while (waiting := asyncio.ensure_future(anext(told))) and (await asyncio.wait([waiting], timeout=0.5))[0]:
                seen.append(waiting.result())
            assert not {event["type"] for event in seen} & CLOSING
            assert {event["type"] for event in seen if event["type"].endswith(".delta")} == live_deltas
            gate.set()
            seen.append(await waiting)
        else:
            await asyncio.wait([pending], timeout=0.3)
            assert not pending.done()
            gate.set()
            response = await pending
            told = streamed(response)
        seen += [event async for event in told]
        response.close()
    record = captured(await door.settled())
    assert gathered(seen)["usage"]["input_tokens"] == len(record.prompt.ids)


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_capture_that_is_not_acknowledged_is_never_told(mode: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(
        await engine_of(Script.say("Yes.")), capture_timeout=0.3, stream_mode="live" if mode == "whole" else mode
    )
    door.sender.failing[CompletionCaptured] = AWAY
    async with aiohttp.ClientSession() as http, post(door, http, stream=mode != "whole") as response:
        if mode == "live":
            seen = [event async for event in streamed(response)]
            assert not {event["type"] for event in seen} & (CLOSING - {"response.failed"})
            assert seen[-1]["response"]["error"]["code"] == "rate_limit_exceeded"
        else:
            assert response.status == 503
            assert response.headers["Retry-After"]
            assert (await response.json())["error"]["code"] == "log_unavailable"
    assert door.service.responses.size == 0
    door.sender.failing.clear()
    captured(await door.settled())


@pytest.mark.parametrize("mode", MODES)
async def test_an_overflow_is_a_400_though_the_engine_is_silent(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="never")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=1.0)
    async with door.client() as asking:
        count = (await asking.responses.input_tokens.count(model="m", input=fields()["input"])).input_tokens
        task = asyncio.create_task(asking.responses.create(**fields(stream=True)))
        await until(lambda: engine.stats.running == 1)
        engine.backend.max_model_len = count  # it hangs on what it would refuse
        with pytest.raises(openai.BadRequestError, match="exceeds the context window") as raised:
            await task
    assert raised.value.code == "context_length_exceeded"
    end = failed(await door.settled())
    assert (end.http_status, end.failure.kind) == (400, FailureKind.PROVIDER)
    await until(lambda: engine.stats.running == 0)


@pytest.mark.parametrize("mode", MODES)
async def test_an_error_after_the_headers_is_an_event(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(delay=0.6, error=Failure(status=500))])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.05)
    async with door.client() as asking:
        seen = [event async for event in await asking.responses.create(**fields(stream=True))]
    for event in seen:
        event.model_dump_json()
    assert [event.type for event in (seen[0], *seen[-2:])] == ["response.created", "error", "response.failed"]
    assert seen[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    end = failed(await door.settled())
    assert (end.http_status, seen[-1].response.id) == (200, f"resp_{end.completion_id}")


@pytest.mark.parametrize("after", [0, 2])
async def test_an_engine_that_falls_silent_is_an_error_and_no_endless_keepalive(
    after: int, engine_of: Start, door_to: Start
) -> None:
    reply = Reply(text="It is sunny in Paris.", gate="never", gate_after=after)
    engine = await engine_of(Script([Rule(replies=[reply])]))
    door: Door = await door_to(engine, engine_silence=1.0, early_headers_after=0.1, keepalive_every=0.1)
    async with aiohttp.ClientSession() as http, post(door, http, stream=True) as response:
        seen = [event async for event in streamed(response)]
    assert seen[-1]["response"]["error"]["code"] == "server_error"
    assert not {event["type"] for event in seen} & (CLOSING - {"response.failed"})
    records = await door.settled()
    if after:
        assert not captured(records).complete
    else:
        assert failed(records).failure.retryable
    await until(lambda: engine.stats.running == 0)


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_client_that_leaves_ends_the_generation(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny in Paris.", gate="never", gate_after=2)])]))
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
    async with door.client() as asking:
        task = asyncio.create_task(asking.responses.create(**fields(stream=mode != "whole")))
        if mode == "live":
            stream = await task
            seen = [await anext(aiter(stream)) for _ in range(5)]
            await until(lambda: engine.stats.running == 1)
            await stream.close()
            assert seen[-1].type == "response.output_text.delta"
        else:
            await until(lambda: engine.stats.running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.stats.running == 0)
    assert engine.stats.aborted == 1
    assert door.service.responses.size == 0
    records = await door.settled()
    if mode == "live":
        record = captured(records)
        assert (record.complete, record.choices[0].finish) == (False, None)
        assert len(record.choices[0].ids) == 2
    else:
        assert failed(records).failure.kind is FailureKind.CANCELLED
