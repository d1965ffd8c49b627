"""Clients whose connections close, and that come back: what is generated, what they are told, what is on the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from polar.devmodel import Failure, Reply, Rule, Script, ScriptedEngine
from polar.proxy import ProxyService, ProxySettings
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed, ControlState, FailureKind
from tests.proxy import anthropic_harness
from tests.proxy.harness import SECRET, Door, GatedSender, captured, failed, running
from tests.proxy.test_calls import CALLING, MODES, USER, assert_as_sampled
from tests.proxy.wire_harness import (
    CHAT,
    CLOSES,
    DIALECTS,
    Connection,
    Speaking,
    connect,
    connected,
    sse,
    text_of,
    understood,
    until,
)

Start = Callable[..., Any]
TEXT = "It is sunny in Paris."
KINDS = [*MODES, "whole"]


def held(*texts: str, **more: Any) -> Script:
    """Two tokens, and the rest when the test opens `go`."""
    return Script([Rule(replies=[Reply(text=text, gate="go", gate_after=2, **more) for text in texts or (TEXT,)])])


def count(door: Door, name: str, **labels: str) -> float:
    return door.service.registry.get_sample_value(f"polar_proxy_{name}", labels) or 0.0


async def finishing(door_to: Start, engine: Any, kind: str = "live", **changes: Any) -> Door:
    mode = "live" if kind == "whole" else kind
    door: Door = await door_to(engine, on_disconnect="finish", stream_mode=mode, **changes)
    return door


async def begun(
    door: Door, engine: ScriptedEngine, speaking: Speaking = CHAT, kind: str = "live", **fields: Any
) -> Connection:
    """A call whose engine has told its first tokens, and whose client has what it may have of them."""
    before = engine.stats.started
    connection = await connect(door, speaking, stream=kind != "whole", **fields)
    await engine.until(lambda stats: stats.started == before + 1 and stats.running > 0)
    if kind == "live":
        await speaks(connection, speaking)
    return connection


async def speaks(connection: Connection, speaking: Speaking = CHAT) -> None:
    """Some of the text was told."""
    while not text_of(speaking.name, connection.body):
        await connection.more()


async def left(door: Door, connection: Connection, calls: int = 1) -> None:
    """Close the connection; the proxy knows."""
    connection.close()
    await until(lambda: len(door.service.resends) == calls)


async def answer(door: Door, speaking: Speaking = CHAT, *, stream: bool = True, **fields: Any) -> Connection:
    """A call from its beginning to its end."""
    async with connected(door, speaking, stream=stream, **fields) as connection:
        await connection.rest()
    assert connection.status == 200, connection.seen
    return connection


def starts(records: list[Any]) -> list[CallStarted]:
    return [one for one in records if isinstance(one, CallStarted)]


# the default --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_by_default_nothing_joins_and_the_new_call_says_whose_retry_it_is(
    kind: str, engine_of: Start, door_to: Start
) -> None:
    engine, stream = await engine_of(held()), kind != "whole"
    door: Door = await door_to(engine, stream_mode="live" if kind == "whole" else kind)
    await left(door, await begun(door, engine, CHAT, kind))
    await engine.until(lambda stats: stats.aborted == 1)
    engine.open("go")
    await answer(door, stream=stream)
    records = await door.settled()
    first, second = starts(records)
    (last,) = [one for one in records if isinstance(one, CompletionCaptured) and one.complete]
    assert (last.completion_id, last.retry_of) == (second.completion_id, first.completion_id)
    assert engine.stats.started == 2
    assert count(door, "retries_total") == 1
    assert count(door, "joins_total", call="running") == count(door, "joins_total", call="captured") == 0
    await answer(door, stream=stream)
    assert (await door.settled())[-1].retry_of is None, "a client that has its reply asks anew"


async def test_another_body_is_no_retry(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(held())
    door: Door = await door_to(engine)
    await left(door, await begun(door, engine))
    engine.open("go")
    await answer(door, temperature=0.5)
    assert (await door.settled())[-1].retry_of is None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("finish", [True, False])
async def test_a_client_that_closes_at_the_last_byte_has_its_reply(
    finish: bool, stream: bool, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say(TEXT))
    door: Door = await door_to(engine, on_disconnect="finish" if finish else "abort")
    for _ in range(10):
        async with connected(door, CHAT, stream=stream) as connection:
            await connection.until(b"\r\n0\r\n\r\n" if stream else b'"system_fingerprint"')
    records = await door.settled()
    assert [one.retry_of for one in records if isinstance(one, CompletionCaptured)] == [None] * 10
    assert engine.stats.started == 10
    await until(lambda: len(door.service.resends) == 0)


# joining ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DIALECTS)
async def test_a_client_that_comes_back_gets_the_reply_that_it_left(
    name: str, kind: str, engine_of: Start, door_to: Start
) -> None:
    speaking, stream = DIALECTS[name], kind != "whole"
    engine = await engine_of(held(tool_calls=CALLING.tool_calls))
    door = await finishing(door_to, engine, kind)
    await left(door, await begun(door, engine, speaking, kind))
    engine.open("go")
    await until(lambda: door.service.resends.kept > 0)
    assert count(door, "resend_bytes") == door.service.resends.kept
    record = captured(await door.settled())
    assert record.complete
    assert_as_sampled(record, engine)

    again = await answer(door, speaking, stream=stream)
    assert record.completion_id.encode() in again.seen
    assert (engine.stats.started, engine.stats.aborted) == (1, 0)
    assert captured(await door.settled()) == record, "nothing new is on the log"
    assert (len(door.service.resends), door.service.resends.kept) == (0, 0)
    assert count(door, "orphans_total", outcome="captured") == 1
    assert count(door, "joins_total", call="captured") == 1
    assert count(door, "calls_total", dialect=name, outcome="captured") == 1
    assert count(door, "resend_bytes") == 0

    reference = await answer(door, speaking, stream=stream, session="s2")
    assert understood(name, again.body, stream=stream) == understood(name, reference.body, stream=stream)


@pytest.mark.parametrize("name", DIALECTS)
async def test_who_joins_a_call_that_runs_gets_what_was_told_at_once_and_the_rest_live(
    name: str, engine_of: Start, door_to: Start
) -> None:
    speaking = DIALECTS[name]
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    await left(door, await begun(door, engine, speaking))
    acknowledge = door.sender.withhold(CompletionCaptured)
    async with connected(door, speaking, stream=True) as second:
        await speaks(second, speaking)
        assert count(door, "joins_total", call="running") == 1
        engine.open("go")
        await until(lambda: CompletionCaptured in door.sender.waiting)
        # all but what would close anything; Google's dialect keeps the last character for its last piece
        while text_of(name, second.body) not in (TEXT, TEXT[:-1]):
            await second.more()
        assert await second.silent_for(0.3), "something was told before the broker's word"
        assert not CLOSES[name](second.body)
        acknowledge.set()
        await second.rest()
    assert text_of(name, second.body) == TEXT
    assert CLOSES[name](second.body)
    assert engine.stats.started == 1
    assert captured(await door.settled()).retry_of is None


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_connection_may_end_at_any_byte(name: str, engine_of: Start, door_to: Start) -> None:
    speaking = DIALECTS[name]
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    probe = await begun(door, engine, speaking, session="probe")
    told = len(probe.seen)
    head = probe.seen.index(b"\r\n\r\n") + 4
    engine.open("go")
    reference = understood(name, (await probe.rest()) and probe.body, stream=True)
    engine.close_gate("go")
    for number, at in enumerate((0, 1, head - 1, head, head + 1, (head + told) // 2, told)):
        session = f"s{number}"
        connection = await connect(door, speaking, stream=True, session=session)
        await engine.until(lambda stats: stats.running == 1)
        await connection.exactly(at)
        await left(door, connection)
        engine.open("go")
        again = await answer(door, speaking, session=session)
        engine.close_gate("go")
        assert understood(name, again.body, stream=True) == reference, at
        assert captured(await door.settled(session)).complete
    assert engine.stats.started == 8


async def test_a_client_that_half_closes_has_left(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    first = await begun(door, engine)
    first.half_close()
    await first.rest()  # the proxy has closed it: nobody is told what somebody else is told too
    await until(lambda: len(door.service.resends) == 1)
    engine.open("go")
    assert text_of(CHAT.name, (await answer(door)).body) == TEXT
    captured(await door.settled())


async def test_a_reply_that_was_not_taken_to_its_end_was_not_told(engine_of: Start, door_to: Start) -> None:
    text = "word " * 700
    engine = await engine_of(Script([Rule(replies=[Reply(text=text, tokens_per_chunk=50)])]))
    door = await finishing(door_to, engine, "whole", resend_session_bytes=2**30, resend_bytes=2**30)
    # a reply so long that it cannot all be on its way
    asked: dict[str, Any] = {"stream": False, "logprobs": True, "top_logprobs": 20}
    async with connected(door, CHAT, buffer=4096, **asked) as first:
        await until(lambda: door.service.slots.taken == 1)
        async with asyncio.timeout(60):
            await door.service.slots.all_free()
        await left(door, first)
    assert door.service.resends.kept > 0
    again = await answer(door, **asked)
    told = understood(CHAT.name, again.body, stream=False)["choices"]
    assert [one["message"]["content"] for one in told] == [text]
    captured(await door.settled())


async def test_what_is_kept_is_let_go_of_in_time_though_nobody_asks(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine, resend_window=2.0)
    await left(door, await begun(door, engine))
    engine.open("go")
    await until(lambda: len(door.service.resends) == 0)
    assert (door.service.resends.kept, count(door, "resend_bytes")) == (0, 0)
    assert captured(await door.settled()).complete


@pytest.mark.parametrize("stream", [True, False])
async def test_all_replies_of_a_call_are_joined(stream: bool, engine_of: Start, door_to: Start) -> None:
    texts = ("It is so.", "It is not so.", "It may be so.")
    engine = await engine_of(Script([Rule(replies=[Reply(texts=texts, gate="go", gate_after=2)])]))
    door = await finishing(door_to, engine)
    await left(door, await begun(door, engine, CHAT, "live" if stream else "whole", n=3))
    async with connected(door, CHAT, stream=stream, n=3) as again:
        await until(lambda: count(door, "joins_total", call="running") == 1)
        engine.open("go")
        await again.rest()
    told = understood(CHAT.name, again.body, stream=stream)["choices"]
    record = captured(await door.settled())
    assert [one["message"]["content"] for one in told] == [one.message["content"] for one in record.choices]
    assert len(told) == 3


async def test_asked_logprobs_are_told_to_who_joins(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    await left(door, await begun(door, engine, logprobs=True))
    engine.open("go")
    again = await answer(door, logprobs=True)
    (choice,) = understood(CHAT.name, again.body, stream=True)["choices"]
    assert [one["logprob"] for one in choice["logprobs"]] == engine.calls[0].logprobs[0]


# who may join -------------------------------------------------------------------------------------------------------


async def test_while_a_connection_is_open_equal_requests_are_calls_of_their_own(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    twins = [await begun(door, engine) for _ in range(3)]
    await left(door, twins[0])
    third = await connect(door, CHAT, stream=True)  # of the one that left
    await until(lambda: count(door, "joins_total", call="running") == 1)
    fourth = await begun(door, engine)  # of none
    engine.open("go")
    for one in (*twins[1:], third, fourth):
        await one.rest()
        assert text_of(CHAT.name, one.body) == TEXT
    assert engine.stats.started == 4
    ids = {sse(one.body)[0]["id"] for one in (*twins[1:], third, fourth)}
    assert len(ids) == 4
    records = await door.settled()
    assert len(starts(records)) == 4
    assert all(one.retry_of is None for one in records if isinstance(one, CompletionCaptured))


@pytest.mark.parametrize(
    ("speaking", "fields"),
    [
        (CHAT, {"session": "s2"}),
        (CHAT, {"temperature": 0.5}),
        (CHAT, {"stream": False}),
        (CHAT, {"headers": {"X-Claude-Code-Agent-Id": "another"}}),
        (DIALECTS["anthropic.messages"], {}),
    ],
    ids=["session", "body", "not streamed", "sub-agent", "dialect"],
)
async def test_another_request_does_not_join(
    speaking: Speaking, fields: dict[str, Any], engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    await left(door, await begun(door, engine))
    engine.open("go")
    await answer(door, speaking, **fields)
    assert engine.stats.started == 2


async def test_after_the_window_nothing_joins(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine, resend_window=0)
    await left(door, await begun(door, engine))
    engine.open("go")
    async with asyncio.timeout(30):
        await door.service.slots.all_free()
    await answer(door)
    records = await door.settled()
    assert len(starts(records)) == 2
    assert (records[-1].complete, records[-1].retry_of) == (True, None)


async def test_who_joined_and_left_too_leaves_it_to_the_next(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    await left(door, await begun(door, engine))
    for number in range(1, 4):
        again = await connect(door, CHAT, stream=True)
        await speaks(again)
        assert count(door, "joins_total", call="running") == number
        await left(door, again)
    engine.open("go")
    assert text_of(CHAT.name, (await answer(door)).body) == TEXT
    assert engine.stats.started == 1
    captured(await door.settled())


@pytest.mark.parametrize("limit", ["resend_bytes", "resend_session_bytes"])
async def test_a_reply_that_there_is_no_room_for_is_generated_anew(
    limit: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine, **{limit: 0})
    await left(door, await begun(door, engine))
    engine.open("go")
    await door.settled()
    assert (len(door.service.resends), door.service.resends.kept) == (1, 0)
    await answer(door)
    first, _, second, last = await door.settled()
    assert second.completion_id == last.completion_id
    assert last.retry_of == first.completion_id


# failures -----------------------------------------------------------------------------------------------------------


async def test_a_call_that_failed_is_not_told_again_but_made_anew(engine_of: Start, door_to: Start) -> None:
    broken = Reply(text=TEXT, gate="go", gate_after=2, disconnect_after=3)
    engine = await engine_of(Script([Rule(replies=[broken, Reply(text="It works.")])]))
    door = await finishing(door_to, engine)
    await left(door, await begun(door, engine))
    engine.open("go")
    records = await door.settled()
    assert not captured(records).complete
    assert count(door, "orphans_total", outcome="failed") == 1
    assert text_of(CHAT.name, (await answer(door)).body) == "It works."
    last = (await door.settled())[-1]
    assert (last.complete, last.retry_of) == (True, records[0].completion_id)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_joined_a_call_that_fails_is_told_its_error(stream: bool, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(
        Script([Rule(replies=[Reply(gate="go", error=Failure(status=503, headers={"Retry-After": "3"}))])])
    )
    door = await finishing(door_to, engine)
    first = await connect(door, CHAT, stream=stream)
    await engine.until(lambda stats: stats.started == 1)
    await left(door, first)
    async with connected(door, CHAT, stream=stream) as again:
        await until(lambda: count(door, "joins_total", call="running") == 1)
        engine.open("go")
        await again.rest()
    assert again.status == 503
    assert b"Retry-After: 3" in again.seen
    assert failed(await door.settled()).http_status == 503


async def test_an_error_that_nobody_heard_has_no_status(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(gate="go", error=Failure(status=400))])]))
    door = await finishing(door_to, engine)
    first = await connect(door, CHAT, stream=True)
    await engine.until(lambda stats: stats.started == 1)
    await left(door, first)
    engine.open("go")
    end = failed(await door.settled())
    assert (end.failure.kind, end.http_status) == (FailureKind.PROVIDER, None)


async def test_a_client_that_leaves_before_the_start_is_acknowledged_finds_its_reply(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say(TEXT))
    door = await finishing(door_to, engine)
    acknowledge = door.sender.withhold(CallStarted)
    first = await connect(door, CHAT, stream=True)
    await until(lambda: CallStarted in door.sender.waiting)
    await left(door, first)
    assert engine.stats.started == 0
    acknowledge.set()
    await until(lambda: door.service.resends.kept > 0)
    assert text_of(CHAT.name, (await answer(door)).body) == TEXT
    captured(await door.settled())


async def test_a_client_that_leaves_before_the_capture_is_acknowledged_is_told_after_it(
    engine_of: Start, door_to: Start
) -> None:
    door = await finishing(door_to, await engine_of(Script.say(TEXT)), "whole")
    acknowledge = door.sender.withhold(CompletionCaptured)
    first = await connect(door, CHAT, stream=False)
    await until(lambda: CompletionCaptured in door.sender.waiting)
    await left(door, first)
    async with connected(door, CHAT, stream=False) as again:
        await until(lambda: count(door, "joins_total", call="running") == 1)
        assert await again.silent_for(0.3)
        acknowledge.set()
        await again.rest()
    assert again.status == 200
    captured(await door.settled())


@pytest.mark.parametrize("state", [ControlState.CLOSED, ControlState.FENCED])
async def test_a_sessions_end_stops_the_calls_that_were_left_and_drops_the_replies(
    state: ControlState, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine)
    await left(door, await begun(door, engine))
    engine.open("go")
    await until(lambda: door.service.resends.kept > 0)
    engine.close_gate("go")
    await left(door, await begun(door, engine, temperature=0.5), calls=2)
    await door.control("s1", state)
    await engine.until(lambda stats: stats.aborted == 1)
    records = await door.settled()
    assert [one.complete for one in records if isinstance(one, CompletionCaptured)] == [True, False]
    assert (len(door.service.resends), door.service.resends.kept, door.service.resends.running) == (0, 0, 0)
    async with connected(door, CHAT, stream=True) as again:
        await again.rest()
    assert again.status == (409 if state is ControlState.FENCED else 401)


# stopping -----------------------------------------------------------------------------------------------------------


async def test_draining_waits_for_calls_that_were_left(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(held())
    door = await finishing(door_to, engine, drain_timeout=30)
    await left(door, await begun(door, engine))
    draining = asyncio.ensure_future(door.service.drain())
    await until(lambda: not door.service.ready.is_set())
    await asyncio.wait([draining], timeout=0.2)
    assert not draining.done()
    engine.open("go")
    await draining
    assert captured(await door.settled()).complete


async def test_a_proxy_that_is_stopped_ends_the_calls_that_were_left(engine_of: Start, buses: Any) -> None:
    engine = await engine_of(held())
    settings = ProxySettings(
        port=0, engine_urls=engine.base_url, logprobs_mode="processed_logprobs", on_disconnect="finish"
    )
    service = ProxyService(settings, buses[0], SECRET)
    async with running(service):
        door = Door(service, buses[0], buses[1], GatedSender(buses[0]))
        await left(door, await begun(door, engine))
        open_one = await begun(door, engine, session="s2")
    await door.closing.aclose()
    open_one.close()
    for session in ("s1", "s2"):
        assert not captured(await door.settled(session)).complete
    assert (engine.stats.running, engine.stats.aborted, service.resends.running) == (0, 2, 0)


# official clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_the_official_openai_client_times_out_and_finds_its_reply(
    stream: bool, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text=TEXT, gate="go")])]))
    door = await finishing(door_to, engine, early_headers_after=60)
    client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key(), max_retries=20, timeout=1)
    asked: Any = {"model": "m", "messages": USER, "stream": stream}
    async with client:
        asking = asyncio.ensure_future(client.chat.completions.create(**asked))
        await until(lambda: count(door, "joins_total", call="running") >= 1)
        engine.open("go")
        reply: Any = await asking
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])
        else:
            text = reply.choices[0].message.content
    assert text == TEXT
    assert engine.stats.started == 1
    captured(await door.settled())


async def test_the_official_anthropic_client_times_out_and_finds_its_reply(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text=TEXT, gate="go")])]))
    door = await finishing(door_to, engine)
    client = anthropic.AsyncAnthropic(base_url=door.url, api_key=door.key(), auth_token=None, max_retries=20, timeout=1)
    async with client:
        asking = asyncio.ensure_future(client.messages.create(**anthropic_harness.fields()))
        await until(lambda: count(door, "joins_total", call="running") >= 1)
        engine.open("go")
        message = await asking
    assert message.content[0].text == TEXT
    assert engine.stats.started == 1
    captured(await door.settled())


async def test_headers_that_go_early_go_early_for_who_joins_too(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text=TEXT, gate="go")])]))
    door = await finishing(door_to, engine, early_headers_after=0.05, keepalive_every=0.05)
    first = await connect(door, DIALECTS["anthropic.messages"], stream=True)
    await first.until(b"event: ping")
    await left(door, first)
    async with connected(door, DIALECTS["anthropic.messages"], stream=True) as again:
        await again.until(b"event: ping")
        (start,) = [event for event in sse(again.body) if event["type"] == "message_start"]
        engine.open("go")
        await again.rest()
    record = captured(await door.settled())
    assert start["message"]["usage"]["input_tokens"] == len(record.prompt.ids)
    assert text_of("anthropic.messages", again.body) == TEXT


async def test_calls_of_many_clients_that_come_and_go_are_each_generated_once(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(
        Script([Rule(replies=[Reply(text="You said: $last_user", template=True, chunk_delay=0.01)])])
    )
    door = await finishing(door_to, engine)
    headers = {"Authorization": f"Bearer {door.key()}"}

    async def ask(http: aiohttp.ClientSession, number: int) -> str:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"number {number}"}]}
        for within in (0.02 * (number % 5), 0.05, None):
            try:
                async with (
                    asyncio.timeout(within),
                    http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response,
                ):
                    return text_of(CHAT.name, await response.read())
            except TimeoutError:
                continue
        raise AssertionError

    async with aiohttp.ClientSession() as http:
        texts = await asyncio.gather(*(ask(http, number) for number in range(30)))
    assert texts == [f"You said: number {number}" for number in range(30)]
    records = await door.settled()
    ends = [one for one in records if isinstance(one, CompletionCaptured | CompletionFailed)]
    assert len(starts(records)) == len(ends)
    assert all(isinstance(one, CompletionCaptured) and one.complete for one in ends)
    asked = [json.dumps(call.body["messages"]) for call in engine.calls]
    # a client whose time was up before the proxy had read its request, or as it had written the last byte, is no orphan
    assert len(asked) - len(set(asked)) <= count(door, "retries_total") + len(set(asked))
