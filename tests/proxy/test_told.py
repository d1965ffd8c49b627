"""Captured before told: nothing that closes leaves the proxy before the broker's acknowledgement."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest

from polar.bus import BrokerUnavailable, RecordTooLarge
from polar.devmodel import Failure, Reply, Rule, Script
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed, FailureKind
from tests.proxy.harness import Door, ask, captured, failed, finished
from tests.proxy.test_calls import CALLING, MODES, TOOLS, USER

Start = Callable[..., Any]
AWAY = BrokerUnavailable("no broker")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The data of each event; `DONE` for the last."""
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield "DONE" if data == b"[DONE]" else json.loads(data)


def closes(event: Any) -> bool:
    """Whether a client would act on this event."""
    return event == "DONE" or any(choice["finish_reason"] for choice in event["choices"]) or not event["choices"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


async def no_more_for(iterator: AsyncIterator[Any], seconds: float) -> asyncio.Task[Any]:
    """The next event's task, which had not come within `seconds`."""
    task = asyncio.ensure_future(anext(iterator))
    done, _ = await asyncio.wait([task], timeout=seconds)
    assert not done, task.result()
    return task


def request(door: Door, http: aiohttp.ClientSession, **fields: Any) -> Any:
    body = {"model": "m", "messages": USER, **fields}
    return http.post(f"{door.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {door.key()}"})


@pytest.mark.parametrize("mode", MODES)
async def test_no_closing_event_leaves_before_the_acknowledgement(mode: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("It is sunny.")), stream_mode=mode)
    gate = door.sender.withhold(CompletionCaptured)
    async with (
        aiohttp.ClientSession() as http,
        asyncio.timeout(20),
    ):
        pending = asyncio.ensure_future(request(door, http, stream=True, stream_options={"include_usage": True}))
        await until(lambda: CompletionCaptured in door.sender.waiting)
        text, told = "", None
        if mode == "live":
            response = await pending
            told = events(response)
            while text != "It is sunny.":
                event = await anext(told)
                assert not closes(event)
                text += event["choices"][0]["delta"].get("content", "")
            waiting = await no_more_for(told, 0.3)
            gate.set()
            rest = [await waiting, *[event async for event in told]]
        else:
            await asyncio.wait([pending], timeout=0.3)
            assert not pending.done()
            gate.set()
            response = await pending
            rest = [event async for event in events(response)]
        response.close()
    assert rest[-1] == "DONE"
    assert sum(closes(event) for event in rest) == 3
    captured(await door.settled())


async def test_a_whole_reply_leaves_after_the_acknowledgement(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("It is sunny.")))
    gate = door.sender.withhold(CompletionCaptured)
    async with door.client() as client:
        pending = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER))  # type: ignore[arg-type]
        await until(lambda: CompletionCaptured in door.sender.waiting)
        await asyncio.wait([pending], timeout=0.3)
        assert not pending.done()
        gate.set()
        assert (await pending).choices[0].message.content == "It is sunny."


async def test_no_tool_call_is_whole_before_the_acknowledgement(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(tool_calls=CALLING.tool_calls)])]))
    door: Door = await door_to(engine)
    gate = door.sender.withhold(CompletionCaptured)
    async with aiohttp.ClientSession() as http, request(door, http, stream=True, tools=TOOLS) as response:
        told = events(response)
        arguments = ""
        await until(lambda: CompletionCaptured in door.sender.waiting)
        while not arguments.startswith('{"city": "Paris"'):
            event = await anext(told)
            assert not closes(event)
            for call in event["choices"][0]["delta"].get("tool_calls", ()):
                assert call["index"] == 0
                arguments += call["function"]["arguments"]
        assert arguments == '{"city": "Paris"'
        waiting = await no_more_for(told, 0.3)
        gate.set()
        found = {0: arguments}
        for event in [await waiting, *[event async for event in told]]:
            if event != "DONE":
                for call in event["choices"][0]["delta"].get("tool_calls", ()):
                    found[call["index"]] = found.get(call["index"], "") + call["function"]["arguments"]
    assert [json.loads(found[i]) for i in (0, 1)] == [call["arguments"] for call in CALLING.tool_calls]


async def test_nothing_is_generated_before_the_start_is_acknowledged(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    gate = door.sender.withhold(CallStarted)
    async with door.client() as client:
        pending = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER))  # type: ignore[arg-type]
        await until(lambda: CallStarted in door.sender.waiting)
        await asyncio.wait([pending], timeout=0.2)
        assert engine.stats.started == 0
        gate.set()
        await pending
    captured(await door.settled())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_broker_that_is_away_answers_503_and_nothing_is_generated(
    stream: bool, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    door.sender.failing[CallStarted] = AWAY
    async with door.client() as client:
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(model="m", messages=USER, stream=stream)  # type: ignore[call-overload]
    assert (raised.value.status_code, raised.value.code) == (503, "log_unavailable")
    assert engine.stats.started == 0
    # the start may be on the log for all the proxy knows, so its end is
    records = await door.settled()
    assert [type(one) for one in records] == [CompletionFailed]


async def test_a_start_that_is_not_acknowledged_in_time_gets_an_end(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, start_timeout=0.2)
    gate = door.sender.withhold(CallStarted)
    async with door.client() as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=USER)
    assert engine.stats.started == 0
    assert door.service.slots.taken == 1
    gate.set()
    end = failed(await door.settled())
    assert (end.failure.kind, end.failure.retryable, end.http_status) == (FailureKind.INFRA, True, 503)


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_capture_that_is_not_acknowledged_is_never_told_and_goes_on_being_written(
    mode: str, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(
        await engine_of(Script.say("Yes.")), capture_timeout=0.3, stream_mode="live" if mode == "whole" else mode
    )
    door.sender.failing[CompletionCaptured] = AWAY
    async with door.client() as client:
        seen: list[Any] = []
        with pytest.raises(openai.APIError) as raised:
            await ask(client, messages=USER, stream=mode != "whole", seen=seen)
    assert not finished(seen)
    assert raised.value.code == "log_unavailable"
    if mode != "live":
        assert isinstance(raised.value, openai.InternalServerError)
        assert raised.value.response.headers["retry-after"]
    await until(lambda: sum(isinstance(one, CompletionCaptured) for one in door.sender.sent) > 1)
    door.sender.failing.clear()
    captured(await door.settled())


async def test_a_reply_that_does_not_fit_a_record_ends_as_a_failure(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    door.sender.failing[CompletionCaptured] = RecordTooLarge("x", topic="completions", size=9, limit=8)
    async with door.client() as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(model="m", messages=USER)
    assert (raised.value.status_code, raised.value.code) == (413, "record_too_large")
    assert failed(await door.settled()).failure.kind is FailureKind.INFRA


async def test_headers_come_early_and_keepalives_while_nothing_is_said(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go", gate_after=1)])]))
    door: Door = await door_to(engine, stream_mode="synthetic", early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, request(door, http, stream=True) as response:
        assert response.status == 200
        lines = []
        while b"data: " not in (line := await response.content.readline()):
            lines.append(line)
        assert lines.count(b": keep-alive\n") >= 3
        assert json.loads(line[6:])["choices"][0]["delta"]["role"] == "assistant"  # the empty chunk
        engine.open("go")
        assert b"[DONE]" in await response.read()
    captured(await door.settled())


async def test_an_error_after_the_headers_is_an_event(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(delay=0.5, error=Failure(status=500))])]))
    door: Door = await door_to(engine, stream_mode="synthetic", early_headers_after=0.05)
    async with door.client() as client:
        with pytest.raises(openai.APIError) as raised:
            await ask(client, messages=USER, stream=True)
    assert raised.value.code == "engine_error"
    assert failed(await door.settled()).http_status == 200
