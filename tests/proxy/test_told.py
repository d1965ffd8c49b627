"""What every dialect keeps to: captured before told, headers, errors in a stream, clients that leave.

One suite for all; what it needs to know of a dialect is a row of `spoken`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from google.genai.errors import APIError

from polar.bus import BrokerUnavailable, RecordTooLarge
from polar.devmodel import ChatTokenizer, Failure, Reply, Rule, Script, ScriptedEngine
from polar.devmodel.errors import ApiError
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed, FailureKind
from tests.proxy import google_harness
from tests.proxy.harness import Door, captured, failed
from tests.proxy.spoken import CHAT, DIALECTS, Spoken, expected
from tests.proxy.test_calls import CALLING, MODES

pytestmark = google_harness.CLEAN
Start = Callable[..., Any]
AWAY = BrokerUnavailable("no broker")
SUNNY = "It is sunny in Paris."
REPLIES = {
    "text": Reply(text="It is sunny."),
    "thinking": Reply(reasoning="Hm, weather.", text="It is sunny."),
    "text and calls": Reply(text="Let me look.", tool_calls=CALLING.tool_calls),
    "thinking and a call": Reply(reasoning="Hm.", tool_calls=CALLING.tool_calls[:1]),
    "call": Reply(tool_calls=CALLING.tool_calls[:1]),
    "custom": Reply(text="So.", tool_calls=[{"name": "note", "arguments": {"input": "x"}}]),
}
CASES = [(dialect, name) for dialect, spoken in DIALECTS.items() for name in spoken.tells]
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
every_mode = pytest.mark.parametrize("mode", MODES)
every_way = pytest.mark.parametrize("mode", [*MODES, "whole"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


async def so_far(told: AsyncIterator[Any], seen: list[Any], enough: Callable[[], bool]) -> asyncio.Task[Any]:
    """Take events until `enough` of them are there and none comes any more; the task of the next one."""
    while True:
        waiting = asyncio.ensure_future(anext(told))
        done, _ = await asyncio.wait([waiting], timeout=0.5 if enough() else 20)
        if not done:
            assert enough(), seen
            return waiting
        seen.append(waiting.result())


def door_mode(mode: str) -> str:
    return "live" if mode == "whole" else mode


async def asked(
    spoken: Spoken, door: Door, http: aiohttp.ClientSession, *, stream: bool = True
) -> tuple[int, dict[str, str], list[Any]]:
    """A call's status, headers, and events, or the body of an answer that is not streamed."""
    async with spoken.post(door, http, stream=stream) as response:
        streamed = stream and response.status == 200
        seen = [event async for event in spoken.events(response)] if streamed else [await response.json()]
        return response.status, dict(response.headers), seen


# captured before told -----------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize(("dialect", "name"), CASES)
async def test_no_closing_event_leaves_before_the_acknowledgement(
    dialect: str, name: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken, reply = DIALECTS[dialect], REPLIES[name]
    engine = await engine_of(Script([Rule(replies=[reply])]), reasoning="thinking" in name)
    door: Door = await door_to(engine, stream_mode=mode)
    gate = door.sender.withhold(CompletionCaptured)
    seen: list[Any] = []
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        pending = asyncio.ensure_future(spoken.post(door, http, tools=True))
        await until(lambda: CompletionCaptured in door.sender.waiting)
        live = spoken.tells[name]
        nothing = dialect == "google" and not live  # not even its headers
        if mode == "live" and not nothing:
            response = await pending
            told = spoken.events(response)
            waiting = await so_far(told, seen, lambda: set().union(*map(spoken.live, seen)) == live)
            assert not any(map(spoken.closes, seen))
            said = "".join(map(spoken.text, seen))
            gate.set()
            seen.append(await waiting)
        else:
            await asyncio.wait([pending], timeout=0.3)
            assert not pending.done()
            said = ""
            gate.set()
            response = await pending
            told = spoken.events(response)
        seen += [event async for event in told]
        response.close()
    record = captured(await door.settled())
    content = record.choices[0].message["content"] or ""
    whole = spoken.told(seen)
    assert (whole.text, whole.tokens) == (content, len(record.prompt.ids))
    assert content.startswith(said)
    if dialect == "google":
        # a piece has to hold something, so the one that ends the reply has the last of its text
        assert len(said) < len(content) or not content
    elif mode == "live" and "text" in live:
        assert said == content


async def test_no_tool_call_is_whole_before_the_acknowledgement(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(tool_calls=CALLING.tool_calls)])]))
    door: Door = await door_to(engine)
    gate = door.sender.withhold(CompletionCaptured)
    found: dict[int, str] = {}

    def more(event: Any) -> None:
        for choice in () if event == "DONE" else event["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                found[call["index"]] = found.get(call["index"], "") + call["function"]["arguments"]

    async with aiohttp.ClientSession() as http, CHAT.post(door, http, tools=True) as response:
        told = CHAT.events(response)
        await until(lambda: CompletionCaptured in door.sender.waiting)
        seen: list[Any] = []
        waiting = await so_far(told, seen, lambda: bool(seen))
        for event in seen:
            more(event)
        assert found == {0: '{"city": "Paris"'}
        gate.set()
        for event in [await waiting, *[event async for event in told]]:
            more(event)
    assert [json.loads(found[i]) for i in (0, 1)] == [call["arguments"] for call in CALLING.tool_calls]


@every_dialect
async def test_a_whole_reply_leaves_after_the_acknowledgement(dialect: str, engine_of: Start, door_to: Start) -> None:
    spoken = DIALECTS[dialect]
    door: Door = await door_to(await engine_of(Script.say("It is sunny.")))
    gate = door.sender.withhold(CompletionCaptured)
    async with aiohttp.ClientSession() as http:
        pending = asyncio.ensure_future(asked(spoken, door, http, stream=False))
        await until(lambda: CompletionCaptured in door.sender.waiting)
        await asyncio.wait([pending], timeout=0.3)
        assert not pending.done()
        gate.set()
        status, _, (body,) = await pending
    assert status == 200
    assert "It is sunny." in json.dumps(body)


@every_dialect
async def test_nothing_is_generated_before_the_start_is_acknowledged(
    dialect: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    gate = door.sender.withhold(CallStarted)
    async with aiohttp.ClientSession() as http:
        pending = asyncio.ensure_future(asked(DIALECTS[dialect], door, http, stream=False))
        await until(lambda: CallStarted in door.sender.waiting)
        await asyncio.wait([pending], timeout=0.2)
        assert engine.stats.started == 0
        gate.set()
        assert (await pending)[0] == 200
    captured(await door.settled())


@pytest.mark.parametrize("stream", [False, True])
@every_dialect
async def test_a_broker_that_is_away_is_told_as_such_and_nothing_is_generated(
    dialect: str, stream: bool, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    door.sender.failing[CallStarted] = AWAY
    async with aiohttp.ClientSession() as http:
        status, headers, (body,) = await asked(spoken, door, http, stream=stream)
    assert (status, spoken.error(body)) == (spoken.away, expected(spoken, "log"))
    assert headers["Retry-After"]
    assert engine.stats.started == 0
    # the start may be on the log for all the proxy knows, so its end is
    records = await door.settled()
    assert [type(one) for one in records] == [CompletionFailed]


async def test_a_start_that_is_not_acknowledged_in_time_gets_an_end(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, start_timeout=0.2)
    gate = door.sender.withhold(CallStarted)
    async with aiohttp.ClientSession() as http:
        assert (await asked(CHAT, door, http, stream=False))[0] == 503
    assert engine.stats.started == 0
    assert door.service.slots.taken == 1
    gate.set()
    end = failed(await door.settled())
    assert (end.failure.kind, end.failure.retryable, end.http_status) == (FailureKind.INFRA, True, 503)


@every_way
@every_dialect
async def test_a_capture_that_is_not_acknowledged_is_never_told_and_goes_on_being_written(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    door: Door = await door_to(await engine_of(Script.say("Yes.")), capture_timeout=0.3, stream_mode=door_mode(mode))
    door.sender.failing[CompletionCaptured] = AWAY
    async with aiohttp.ClientSession() as http:
        status, headers, seen = await asked(spoken, door, http, stream=mode != "whole")
    if mode == "live":
        assert status == 200
        told = [event for event in seen if not spoken.is_error(event)]
        assert not any(map(spoken.closes, told))
        errors = [spoken.error(event) for event in seen if spoken.is_error(event)]
        assert errors == [expected(spoken, "log", in_stream=True)]
    else:
        assert status == spoken.away
        assert headers["Retry-After"]
        assert spoken.error(seen[-1]) == expected(spoken, "log")
    assert door.service.responses.size == 0
    await until(lambda: sum(isinstance(one, CompletionCaptured) for one in door.sender.sent) > 1)
    door.sender.failing.clear()
    captured(await door.settled())


@every_way
@every_dialect
async def test_an_official_client_is_told_of_it(dialect: str, mode: str, engine_of: Start, door_to: Start) -> None:
    spoken = DIALECTS[dialect]
    door: Door = await door_to(await engine_of(Script.say("Yes.")), capture_timeout=0.3, stream_mode=door_mode(mode))
    door.sender.failing[CompletionCaptured] = AWAY
    with pytest.raises(spoken.refusals):
        await spoken.official(door, mode != "whole", [])
    door.sender.failing.clear()
    captured(await door.settled())


@every_dialect
async def test_a_reply_that_does_not_fit_a_record_ends_as_a_failure(
    dialect: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    door.sender.failing[CompletionCaptured] = RecordTooLarge("x", topic="completions", size=9, limit=8)
    async with aiohttp.ClientSession() as http:
        status, _, (body,) = await asked(spoken, door, http, stream=False)
    assert (status, spoken.error(body)) == (413, expected(spoken, "record"))
    assert failed(await door.settled()).failure.kind is FailureKind.INFRA


# headers and silence ------------------------------------------------------------------------------------------------


@every_mode
@every_dialect
async def test_headers_come_early_and_what_follows_is_as_ever(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, spoken.post(door, http) as response:
        assert response.status == 200
        assert await response.content.readline()  # a keep-alive, of whatever form
        engine.open("go")
        seen = [event async for event in spoken.events(response)]
    record = captured(await door.settled())
    if dialect == "responses":  # whose first event may have been the line that was read
        assert seen[-1]["response"]["usage"]["input_tokens"] == len(record.prompt.ids)
        return
    told = spoken.told(seen)
    assert (told.text, told.tokens) == ("Yes.", len(record.prompt.ids))


async def test_chats_keepalives_are_comments_and_now_and_then_an_empty_chunk(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go", gate_after=1)])]))
    door: Door = await door_to(engine, stream_mode="synthetic", early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, CHAT.post(door, http) as response:
        assert response.status == 200
        lines = []
        while b"data: " not in (line := await response.content.readline()):
            lines.append(line)
        assert lines.count(b": keep-alive\n") >= 3
        assert json.loads(line[6:])["choices"][0]["delta"]["role"] == "assistant"  # the empty chunk
        engine.open("go")
        assert b"[DONE]" in await response.read()
    captured(await door.settled())


@every_mode
async def test_anthropics_headers_come_early_with_the_true_count_and_pings(
    mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS["anthropic"]
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, spoken.post(door, http) as response:
        told = spoken.events(response)
        seen = [await anext(told) for _ in range(4)]
        assert [event["type"] for event in seen] == ["message_start", "ping", "ping", "ping"]
        engine.open("go")
        seen += [event async for event in told]
    record = captured(await door.settled())
    whole = spoken.told(seen)
    assert (whole.text, whole.tokens) == ("Yes.", len(record.prompt.ids))


@pytest.mark.parametrize("action", [google_harness.SSE, google_harness.ARRAY])
@every_mode
async def test_googles_headers_come_early_and_white_space_after_them(
    mode: str, action: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, google_harness.post(door, http, action) as response:
        assert response.status == 200
        assert [await response.content.readline() for _ in range(3)] == [b"\n"] * 3
        engine.open("go")
        rest = await response.read()
    array = action == google_harness.ARRAY
    pieces = json.loads(rest) if array else [json.loads(line[6:]) for line in rest.splitlines() if line]
    told = DIALECTS["google"].told(pieces)
    assert (told.text, told.tokens) == ("Yes.", len(captured(await door.settled()).prompt.ids))


@every_mode
@every_dialect
async def test_the_official_client_bears_what_keeps_a_stream_alive(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes, yes.", gate="go")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.1, keepalive_every=0.05)
    seen: list[Any] = []
    asking = asyncio.ensure_future(DIALECTS[dialect].official(door, True, seen))
    assert not (await asyncio.wait([asking], timeout=0.6))[0]
    engine.open("go")
    await asking
    assert captured(await door.settled()).choices[0].message["content"] == "Yes, yes."
    if dialect == "google":
        assert "".join(piece.text or "" for piece in seen) == "Yes, yes."


@every_mode
@every_dialect
async def test_an_overflow_is_a_400_though_the_engine_is_silent(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="never")])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=1.0)
    count = await spoken.count(door)
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(asked(spoken, door, http))
        await until(lambda: engine.stats.running == 1)
        count = count or len(engine.calls[-1].prompt_ids)
        engine.backend.max_model_len = count  # it hangs on what it would refuse
        status, _, (body,) = await task
    assert (status, spoken.error(body)) == (400, expected(spoken, "long"))
    message = body["error"]["message"]
    words = {
        "anthropic": f"prompt is too long: {count} tokens > {count - 1} maximum",
        "responses": "exceeds the context window",
        "google": f"The input token count ({count}) exceeds the maximum number of tokens allowed ({count - 1}).",
    }
    assert words.get(dialect, "") in message
    end = failed(await door.settled())
    assert (end.http_status, end.failure.kind) == (400, FailureKind.PROVIDER)
    await until(lambda: engine.stats.running == 0)


class Uncounting(ScriptedEngine):
    """An engine that has no /tokenize to speak of."""

    async def _tokenize(self, http: Any) -> Any:
        raise ApiError("out of order", status=500)


@every_dialect
async def test_an_engine_that_cannot_count_does_not_hold_the_headers(
    dialect: str, tokenizer: ChatTokenizer, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    script = Script([Rule(replies=[Reply(text="Yes.", gate="go")])])
    async with Uncounting(script, tokenizer=tokenizer) as engine, aiohttp.ClientSession() as http:
        door: Door = await door_to(engine, early_headers_after=0.1, keepalive_every=0.05)
        async with spoken.post(door, http) as response:
            assert response.status == 200
            if dialect == "anthropic":  # a message that begins would tell a count
                told = spoken.events(response)
                assert [(await anext(told))["type"] for _ in range(2)] == ["ping", "ping"]
                engine.open("go")
                whole = spoken.told([event async for event in told])
                assert whole.tokens == len(captured(await door.settled()).prompt.ids)
            else:
                assert await response.content.readline()
                engine.open("go")
                await response.read()
        captured(await door.settled())


# errors after the headers, and clients that leave -------------------------------------------------------------------


@every_mode
@every_dialect
async def test_an_error_after_the_headers_is_an_event(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    engine = await engine_of(Script([Rule(replies=[Reply(delay=0.6, error=Failure(status=500))])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.05)
    async with aiohttp.ClientSession() as http:
        status, _, seen = await asked(spoken, door, http)
    assert status == 200
    errors = [spoken.error(event) for event in seen if spoken.is_error(event)]
    assert errors == [expected(spoken, "engine", in_stream=True)]
    end = failed(await door.settled())
    assert end.http_status == 200
    if dialect == "anthropic":
        assert (seen[0]["type"], seen[-1]["request_id"]) == ("message_start", end.completion_id)
    if dialect == "responses":
        assert [event["type"] for event in (seen[0], *seen[-2:])] == ["response.created", "error", "response.failed"]
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert seen[-1]["response"]["id"] == f"resp_{end.completion_id}"


@every_mode
@every_dialect
async def test_an_official_client_understands_an_error_after_the_headers(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    engine = await engine_of(Script([Rule(replies=[Reply(delay=0.6, error=Failure(status=500))])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.05)
    with pytest.raises(spoken.refusals):
        await spoken.official(door, True, [])
    failed(await door.settled())


@every_mode
async def test_an_error_ends_googles_array_of_pieces(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(delay=0.6, error=Failure(status=500))])]))
    door: Door = await door_to(engine, stream_mode=mode, early_headers_after=0.05)
    async with aiohttp.ClientSession() as http, google_harness.post(door, http, google_harness.ARRAY) as response:
        assert response.status == 200
        told = json.loads(await response.read())
    assert DIALECTS["google"].error(told[-1]) == (500, "INTERNAL")
    assert failed(await door.settled()).http_status == 200


async def test_googles_client_is_told_of_an_error_before_the_headers(engine_of: Start, door_to: Start) -> None:
    full = Reply(error=Failure(status=503, headers={"Retry-After": "3"}))
    door: Door = await door_to(await engine_of(Script([Rule(replies=[full])])))
    with pytest.raises(APIError) as raised:
        await DIALECTS["google"].official(door, True, [])
    assert (raised.value.code, raised.value.status) == (503, "UNAVAILABLE")
    assert failed(await door.settled()).http_status == 503


@pytest.mark.parametrize("after", [0, 3])
@every_dialect
async def test_an_engine_that_falls_silent_is_an_error_and_no_endless_stream(
    dialect: str, after: int, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    engine = await engine_of(Script([Rule(replies=[Reply(text=SUNNY, gate="never", gate_after=after)])]))
    door: Door = await door_to(engine, engine_silence=1.0, early_headers_after=0.1, keepalive_every=0.1)
    async with aiohttp.ClientSession() as http:
        _, _, seen = await asked(spoken, door, http)
    errors = [spoken.error(event) for event in seen if spoken.is_error(event)]
    assert errors == [expected(spoken, "silence", in_stream=True)]
    assert not any(spoken.closes(event) for event in seen if not spoken.is_error(event))
    records = await door.settled()
    if after:
        assert not captured(records).complete
    else:
        assert failed(records).failure.retryable
    await until(lambda: engine.stats.running == 0)


@every_way
@every_dialect
async def test_a_client_that_leaves_ends_the_generation(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    engine = await engine_of(Script([Rule(replies=[Reply(text=SUNNY, gate="never", gate_after=3)])]))
    door: Door = await door_to(engine, stream_mode=door_mode(mode))
    async with aiohttp.ClientSession() as http:
        task = asyncio.ensure_future(spoken.post(door, http, stream=mode != "whole"))
        if mode == "live":
            response = await task
            told = spoken.events(response)
            while "text" not in spoken.live(await anext(told)):
                pass
            await until(lambda: engine.stats.running == 1)
            response.close()
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
        assert 1 <= len(record.choices[0].ids) <= 3
    else:
        assert failed(records).failure.kind is FailureKind.CANCELLED


# the same whatever the mode ------------------------------------------------------------------------------------------

SPELLED = ['{"city":"Paris"}', '{"city" : "\\u00c9vian",  "n":1.50}']
"""As a model may write arguments; an engine that answers whole writes them anew."""


@every_way
@every_dialect
async def test_arguments_are_the_models_own_text_in_every_mode(
    dialect: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    spoken = DIALECTS[dialect]
    calls = [{"name": "get_weather", "arguments": one} for one in SPELLED]
    engine = await engine_of(Script([Rule(replies=[Reply(text="Let me look.", tool_calls=calls)])]))
    door: Door = await door_to(engine, stream_mode=door_mode(mode))
    async with aiohttp.ClientSession() as http, spoken.post(door, http, stream=mode != "whole", tools=True) as response:
        told = (await response.read()).decode()
    made = captured(await door.settled()).choices[0].message["tool_calls"]
    assert [one["function"]["arguments"] for one in made] == SPELLED
    # Chat's and Responses' arguments are text, the others' an object; a stream may cut a text anywhere
    texts = SPELLED if dialect == "google" or (dialect, mode) == ("anthropic", "whole") else []
    if dialect in ("chat", "responses") and (mode != "live"):
        texts = [json.dumps(one, ensure_ascii=False) for one in SPELLED]
    assert all(one in told for one in texts)
