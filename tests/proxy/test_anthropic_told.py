"""Captured before told, in the dialect anthropic.messages: no block closes before the broker's acknowledgement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import pytest

from polar.devmodel import ChatTokenizer, Failure, Reply, Rule, Script, ScriptedEngine
from polar.devmodel.errors import ApiError
from polar.schemas import CompletionCaptured, FailureKind
from tests.proxy.anthropic_harness import CLOSING, TOOLS, client, events, fields, post
from tests.proxy.harness import Door, captured, failed
from tests.proxy.test_anthropic_replies import gathered
from tests.proxy.test_calls import CALLING, MODES
from tests.proxy.test_told import AWAY, until

pytestmark = pytest.mark.filterwarnings("error")
Start = Callable[..., Any]
REPLIES = {
    "text": (Reply(text="It is sunny."), "text_delta"),
    "thinking": (Reply(reasoning="Hm, weather.", text="It is sunny."), "thinking_delta"),
    "text and calls": (Reply(text="Let me look.", tool_calls=CALLING.tool_calls), "text_delta"),
    "thinking and a call": (Reply(reasoning="Hm.", tool_calls=CALLING.tool_calls[:1]), "thinking_delta"),
    "call": (Reply(tool_calls=CALLING.tool_calls[:1]), None),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REPLIES)
async def test_no_closing_event_leaves_before_the_acknowledgement(
    name: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    reply, live_delta = REPLIES[name]
    engine = await engine_of(Script([Rule(replies=[reply])]), reasoning="thinking" in name)
    door: Door = await door_to(engine, stream_mode=mode)
    gate = door.sender.withhold(CompletionCaptured)
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        pending = asyncio.ensure_future(post(door, http, stream=True, tools=TOOLS))
        await until(lambda: CompletionCaptured in door.sender.waiting)
        seen: list[dict[str, Any]] = []
        if mode == "live":
            response = await pending
            told = events(response)
            while not seen or seen[-1]["type"] not in ("content_block_start", "content_block_delta"):
                seen.append(await anext(told))
            while (waiting := asyncio.ensure_future(anext(told))) and (await asyncio.wait([waiting], timeout=0.5))[0]:
                seen.append(waiting.result())
            assert not {event["type"] for event in seen} & CLOSING
            deltas = {event["delta"]["type"] for event in seen if event["type"] == "content_block_delta"}
            assert deltas == ({live_delta} if live_delta else set())
            gate.set()
            seen.append(await waiting)
        else:
            await asyncio.wait([pending], timeout=0.3)
            assert not pending.done()
            gate.set()
            response = await pending
            told = events(response)
        seen += [event async for event in told]
        response.close()
    record = captured(await door.settled())
    message = gathered(seen)
    assert message["stop_reason"] == ("tool_use" if record.choices[0].message.get("tool_calls") else "end_turn")
    assert seen[0]["message"]["usage"]["input_tokens"] == len(record.prompt.ids)


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_capture_that_is_not_acknowledged_is_never_told(mode: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(
        await engine_of(Script.say("Yes.")), capture_timeout=0.3, stream_mode="live" if mode == "whole" else mode
    )
    door.sender.failing[CompletionCaptured] = AWAY
    seen: list[Any] = []

    async def ask() -> None:
        async with client(door) as asking:
            if mode == "whole":
                await asking.messages.create(**fields())
            else:
                async for event in await asking.messages.create(**fields(stream=True)):
                    seen.append(event)

    with pytest.raises(anthropic.APIStatusError) as raised:
        await ask()
    assert not {event.type for event in seen} & CLOSING
    assert raised.value.body["error"]["type"] == "overloaded_error"
    if mode != "live":
        assert raised.value.status_code == 529
        assert raised.value.response.headers["retry-after"]
    door.sender.failing.clear()
    captured(await door.settled())


@pytest.mark.parametrize("mode", MODES)
async def test_headers_come_early_with_the_true_count_and_pings(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, post(door, http, stream=True) as response:
        assert response.status == 200
        told = events(response)
        seen = [await anext(told) for _ in range(4)]
        assert [event["type"] for event in seen] == ["message_start", "ping", "ping", "ping"]
        engine.open("go")
        seen += [event async for event in told]
    record = captured(await door.settled())
    assert seen[0]["message"]["usage"]["input_tokens"] == len(record.prompt.ids)
    assert gathered(seen)["content"] == [{"type": "text", "text": "Yes."}]
    assert [event["type"] for event in seen].count("message_start") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_an_overflow_is_a_400_though_the_engine_is_silent(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="never")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=1.0)
    async with client(door) as asking:
        count = (await asking.messages.count_tokens(model="m", messages=fields()["messages"])).input_tokens
        task = asyncio.create_task(asking.messages.create(**fields(stream=True)))
        await until(lambda: engine.stats.running == 1)
        engine.backend.max_model_len = count  # it hangs on what it would refuse
        with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: {count} tokens > {count - 1} max"):
            await task
    end = failed(await door.settled())
    assert (end.http_status, end.failure.kind) == (400, FailureKind.PROVIDER)
    await until(lambda: engine.stats.running == 0)


class Uncounting(ScriptedEngine):
    """An engine that has no /tokenize to speak of."""

    async def _tokenize(self, http: Any) -> Any:
        raise ApiError("out of order", status=500)


async def test_an_engine_that_cannot_count_does_not_hold_the_headers(tokenizer: ChatTokenizer, door_to: Start) -> None:
    script = Script([Rule(replies=[Reply(text="Yes.", gate="go")])])
    async with Uncounting(script, tokenizer=tokenizer) as engine, aiohttp.ClientSession() as http:
        door: Door = await door_to(engine, early_headers_after=0.1, keepalive_every=0.05)
        async with post(door, http, stream=True) as response:
            told = events(response)
            assert [(await anext(told))["type"] for _ in range(2)] == ["ping", "ping"]
            engine.open("go")
            seen = [event async for event in told]
    message = gathered(seen)
    assert message["usage"]["input_tokens"] == len(captured(await door.settled()).prompt.ids)


@pytest.mark.parametrize("mode", MODES)
async def test_an_error_after_the_headers_is_an_event(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(delay=0.6, error=Failure(status=500))])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.05)
    async with aiohttp.ClientSession() as http, post(door, http, stream=True) as response:
        seen = [event async for event in events(response)]
    assert seen[0]["type"] == "message_start"
    assert (seen[-1]["type"], seen[-1]["error"]["type"]) == ("error", "api_error")
    end = failed(await door.settled())
    assert (end.http_status, seen[-1]["request_id"]) == (200, end.completion_id)


@pytest.mark.parametrize("after", [0, 2])
async def test_an_engine_that_falls_silent_is_an_error_and_no_endless_ping(
    after: int, engine_of: Start, door_to: Start
) -> None:
    reply = Reply(text="It is sunny in Paris.", gate="never", gate_after=after)
    engine = await engine_of(Script([Rule(replies=[reply])]))
    door: Door = await door_to(engine, engine_silence=1.0, early_headers_after=0.1, keepalive_every=0.1)
    async with aiohttp.ClientSession() as http, post(door, http, stream=True) as response:
        seen = [event async for event in events(response)]
    assert (seen[-1]["type"], seen[-1]["error"]["type"]) == ("error", "timeout_error")
    assert not {event["type"] for event in seen} & CLOSING
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
    async with client(door) as asking:
        task = asyncio.create_task(asking.messages.create(**fields(stream=mode != "whole")))
        if mode == "live":
            stream = await task
            seen = [await anext(aiter(stream)) for _ in range(3)]
            await until(lambda: engine.stats.running == 1)
            await stream.close()
            assert [event.type for event in seen][:2] == ["message_start", "content_block_start"]
        else:
            await until(lambda: engine.stats.running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.stats.running == 0)
    assert engine.stats.aborted == 1
    records = await door.settled()
    if mode == "live":
        record = captured(records)
        assert (record.complete, record.choices[0].finish) == (False, None)
        assert len(record.choices[0].ids) == 2
    else:
        assert failed(records).failure.kind is FailureKind.CANCELLED
