"""Captured before told, in the dialect google.generate_content: nothing closes before the broker's acknowledgement."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from google.genai.errors import APIError

from polar.devmodel import Failure, Reply, Rule, Script
from polar.schemas import CompletionCaptured, FailureKind
from tests.proxy.google_harness import ARRAY, CLEAN, MODEL, SSE, TEXT, TOOLS, client, closes, events, gathered, post
from tests.proxy.harness import Door, captured, failed
from tests.proxy.test_calls import CALLING, MODES
from tests.proxy.test_told import AWAY, until

pytestmark = CLEAN
Start = Callable[..., Any]
REPLIES = {
    "text": Reply(text="It is sunny."),
    "thinking": Reply(reasoning="Hm, weather.", text="It is sunny."),
    "text and calls": Reply(text="Let me look.", tool_calls=CALLING.tool_calls),
    "thinking and a call": Reply(reasoning="Hm.", tool_calls=CALLING.tool_calls[:1]),
    "call": Reply(tool_calls=CALLING.tool_calls[:1]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REPLIES)
async def test_nothing_that_closes_leaves_before_the_acknowledgement(
    name: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[REPLIES[name]])]), reasoning="thinking" in name)
    said = ""
    door: Door = await door_to(engine, stream_mode=mode)
    gate = door.sender.withhold(CompletionCaptured)
    asked: dict[str, Any] = {"tools": TOOLS, "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        pending = asyncio.ensure_future(post(door, http, SSE, **asked))
        await until(lambda: CompletionCaptured in door.sender.waiting)
        seen: list[dict[str, Any]] = []
        if mode == "live" and name != "call":
            response = await pending
            told = events(response)
            while (waiting := asyncio.ensure_future(anext(told))) and (await asyncio.wait([waiting], timeout=0.5))[0]:
                seen.append(waiting.result())
            assert seen
            assert not any(map(closes, seen))
            parts = [part for piece in seen for part in piece["candidates"][0]["content"]["parts"]]
            said = "".join(part["text"] for part in parts if not part.get("thought"))
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
    content = record.choices[0].message["content"] or ""
    assert content.startswith(said)
    assert len(said) < len(content) or not content
    message = gathered(seen)
    assert message["candidates"][0]["finishReason"] == "STOP"
    assert message["usageMetadata"]["promptTokenCount"] == len(record.prompt.ids)


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_capture_that_is_not_acknowledged_is_never_told(mode: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(
        await engine_of(Script.say("Yes.")), capture_timeout=0.3, stream_mode="live" if mode == "whole" else mode
    )
    door.sender.failing[CompletionCaptured] = AWAY
    action = "generateContent" if mode == "whole" else SSE
    async with aiohttp.ClientSession() as http, post(door, http, action) as response:
        seen = [event async for event in events(response)]
        assert response.status == (200 if mode == "live" else 503)
        assert mode == "live" or response.headers["Retry-After"]
    error = seen.pop()["error"]
    assert (error["code"], error["status"]) == (503, "UNAVAILABLE")
    assert error["details"][0]["retryDelay"].endswith("s")
    assert not any(map(closes, seen))
    door.sender.failing.clear()
    captured(await door.settled())


@pytest.mark.parametrize("action", [SSE, ARRAY])
@pytest.mark.parametrize("mode", MODES)
async def test_headers_come_early_and_white_space_after_them(
    mode: str, action: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, post(door, http, action) as response:
        assert response.status == 200
        assert [await response.content.readline() for _ in range(3)] == [b"\n"] * 3
        engine.open("go")
        rest = await response.read()
    pieces = json.loads(rest) if action == ARRAY else [json.loads(line[6:]) for line in rest.splitlines() if line]
    message = gathered(pieces)
    assert message["candidates"][0]["content"]["parts"] == [{"text": "Yes."}]
    assert message["usageMetadata"]["promptTokenCount"] == len(captured(await door.settled()).prompt.ids)


@pytest.mark.parametrize("mode", MODES)
async def test_the_official_client_bears_the_white_space(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes, yes.", gate="go")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.1, keepalive_every=0.05)
    stream = await client(door).aio.models.generate_content_stream(model=MODEL, contents=TEXT)
    waiting = asyncio.ensure_future(anext(stream))
    assert not (await asyncio.wait([waiting], timeout=0.4))[0]
    engine.open("go")
    said = (await waiting).text or ""
    async for piece in stream:
        said += piece.text or ""
    assert said == "Yes, yes."
    captured(await door.settled())


@pytest.mark.parametrize("mode", MODES)
async def test_an_overflow_is_a_400_though_the_engine_is_silent(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="never")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=1.0)
    async with aiohttp.ClientSession() as http:
        async with post(door, http, "countTokens") as response:
            count = (await response.json())["totalTokens"]
        task = asyncio.ensure_future(post(door, http, SSE))
        await until(lambda: engine.stats.running == 1)
        engine.backend.max_model_len = count  # it hangs on what it would refuse
        async with await task as response:
            assert response.status == 400
            error = (await response.json())["error"]
    assert error["message"] == (
        f"The input token count ({count}) exceeds the maximum number of tokens allowed ({count - 1})."
    )
    end = failed(await door.settled())
    assert (end.http_status, end.failure.kind) == (400, FailureKind.PROVIDER)
    await until(lambda: engine.stats.running == 0)


@pytest.mark.parametrize("action", [SSE, ARRAY])
@pytest.mark.parametrize("mode", MODES)
async def test_an_error_after_the_headers_is_in_the_stream(
    mode: str, action: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(delay=0.6, error=Failure(status=500))])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.05)
    async with aiohttp.ClientSession() as http, post(door, http, action) as response:
        assert response.status == 200
        data = await response.read()
    told = json.loads(data)
    error = (told if action == SSE else told[-1])["error"]
    assert (error["code"], error["status"]) == (500, "INTERNAL")
    assert failed(await door.settled()).http_status == 200


@pytest.mark.parametrize("after", [0, 3])
async def test_an_engine_that_falls_silent_is_an_error_and_no_endless_stream(
    after: int, engine_of: Start, door_to: Start
) -> None:
    reply = Reply(text="It is sunny in Paris.", gate="never", gate_after=after)
    engine = await engine_of(Script([Rule(replies=[reply])]))
    door: Door = await door_to(engine, engine_silence=1.0, early_headers_after=0.1, keepalive_every=0.1)
    async with aiohttp.ClientSession() as http, post(door, http, SSE) as response:
        seen = [event async for event in events(response)]
    error = seen.pop()["error"]
    assert (error["code"], error["status"]) == (504, "DEADLINE_EXCEEDED")
    assert not any(map(closes, seen))
    records = await door.settled()
    if after:
        assert not captured(records).complete
    else:
        assert failed(records).failure.retryable
    await until(lambda: engine.stats.running == 0)


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_client_that_leaves_ends_the_generation(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny in Paris.", gate="never", gate_after=3)])]))
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
    async with aiohttp.ClientSession() as http:
        task = asyncio.ensure_future(post(door, http, "generateContent" if mode == "whole" else SSE))
        if mode == "live":
            response = await task
            await anext(events(response))
            response.close()
        else:
            await until(lambda: engine.stats.running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.stats.running == 0)
    assert engine.stats.aborted == 1
    records = await door.settled()
    if mode == "live":
        record = captured(records)
        assert (record.complete, record.choices[0].finish, len(record.choices[0].ids)) == (False, None, 3)
    else:
        assert failed(records).failure.kind is FailureKind.CANCELLED


async def test_an_official_client_is_told_of_an_error_before_the_headers(engine_of: Start, door_to: Start) -> None:
    full = Reply(error=Failure(status=503, headers={"Retry-After": "3"}))
    door: Door = await door_to(await engine_of(Script([Rule(replies=[full])])))
    with pytest.raises(APIError) as raised:
        async for _ in await client(door).aio.models.generate_content_stream(model=MODEL, contents=TEXT):
            pass
    assert (raised.value.code, raised.value.status) == (503, "UNAVAILABLE")
    assert failed(await door.settled()).http_status == 503
