"""What a client is answered when a call cannot be, and what is on the log then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from polar.devmodel import Failure, Match, Reply, Rule, Script
from polar.proxy import ProxyService, ProxySettings
from polar.schemas import CompletionCaptured, ControlState, FailureKind, SamplingSpec
from polar.service.clock import SystemClock
from polar.service.tokens import sign_session
from tests.proxy.harness import SECRET, Door, GatedSender, ask, captured, failed, finished, rest_of, running
from tests.proxy.test_calls import MODES, USER
from tests.proxy.test_told import until

Start = Callable[..., Any]


async def refused(door: Door, session: str = "s1", *, key: str | None = None, **fields: Any) -> openai.APIStatusError:
    async with door.client(session, key=key) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await ask(client, **({"messages": USER, "stream": False} | fields))
    body = raised.value.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return raised.value


ENGINE_ERRORS = {
    "broken": (Failure(status=500), 502, "engine_error", True),
    "refuses": (Failure(status=400, param="body.x", message="bad x"), 400, None, False),
    "full": (Failure(status=503, headers={"Retry-After": "3"}), 503, "engine_unavailable", True),
    "its key": (Failure(status=401), 502, "engine_error", True),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ENGINE_ERRORS)
async def test_an_engines_error_keeps_its_status(name: str, stream: bool, engine_of: Start, door_to: Start) -> None:
    error, status, code, retryable = ENGINE_ERRORS[name]
    engine = await engine_of(Script([Rule(replies=[Reply(error=error)])]))
    door: Door = await door_to(engine)
    told = await refused(door, stream=stream)
    assert (told.status_code, told.code) == (status, code)
    if name == "full":
        assert told.response.headers["retry-after"] == "3"
    end = failed(await door.settled())
    assert (end.failure.kind, end.failure.retryable, end.http_status) == (FailureKind.PROVIDER, retryable, status)


async def test_a_prompt_that_is_too_long_says_so_as_openai_does(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=64))
    told = await refused(door, messages=[{"role": "user", "content": "word " * 200}])
    assert (told.status_code, told.code, told.type) == (400, "context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 64" in told.message
    assert failed(await door.settled()).failure.kind is FailureKind.PROVIDER


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_down_is_503_with_retry_after(stream: bool, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    await engine.__aexit__(None, None, None)
    told = await refused(door, stream=stream)
    assert (told.status_code, told.code) == (503, "engine_unavailable")
    assert float(told.response.headers["retry-after"]) > 0
    end = failed(await door.settled())
    assert (end.failure.kind, end.failure.retryable) == (FailureKind.PROVIDER, True)


DAMAGES = [
    "short_logprobs",
    "short_ids",
    "no_ids",
    "no_logprobs",
    "no_prompt_ids",
    "nan_logprobs",
    "no_finish",
    "not_json",
]


@pytest.mark.parametrize("mode", [*MODES, "whole"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_answer_that_is_not_token_exact_is_refused(
    damage: str, mode: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny.", damage=damage)])]))
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
    async with door.client() as client:
        seen: list[Any] = []
        with pytest.raises(openai.APIError) as raised:
            await ask(client, messages=USER, stream=mode != "whole", seen=seen)
    assert not finished(seen)
    assert raised.value.code == "engine_protocol"
    end = failed(await door.settled())
    assert (end.failure.kind, end.failure.retryable) == (FailureKind.PROVIDER, False)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_stream_that_breaks_off_keeps_what_was_told(reset: bool, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(
        Script([Rule(replies=[Reply(text="It is sunny in Paris.", disconnect_after=3, reset=reset)])])
    )
    door: Door = await door_to(engine)
    seen: list[Any] = []
    async with door.client() as client:
        with pytest.raises(openai.APIError) as raised:
            await ask(client, messages=USER, stream=True, seen=seen)
    assert raised.value.code == "engine_error"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in seen)
    record = captured(await door.settled())
    assert not record.complete
    assert len(record.choices[0].ids) == len(record.choices[0].logprobs) == 3
    assert (record.choices[0].message["content"], record.choices[0].finish) == (text, None)


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_an_aborted_generation_is_kept_and_asked_for_again(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny.", finish="abort")])]))
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
    async with door.client() as client:
        with pytest.raises(openai.APIError) as raised:
            await ask(client, messages=USER, stream=mode != "whole")
    assert raised.value.code == "engine_unavailable"
    record = captured(await door.settled())
    assert (record.complete, record.choices[0].finish) == (False, "abort")


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_client_that_leaves_ends_the_generation(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny in Paris.", gate="never", gate_after=2)])]))
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
    async with door.client() as client:
        pending = asyncio.ensure_future(
            client.chat.completions.create(model="m", messages=USER, stream=mode != "whole")  # type: ignore[call-overload]
        )
        if mode == "live":
            stream = await pending
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
        else:
            await engine.until(lambda stats: stats.running == 1)
            pending.cancel()
    await engine.until(lambda stats: stats.aborted == 1 and stats.running == 0)
    records = await door.settled()
    if mode == "live":
        record = captured(records)
        assert not record.complete
        assert 1 <= len(record.choices[0].ids) <= 2
    else:
        end = failed(records)
        assert (end.failure.kind, end.http_status) == (FailureKind.CANCELLED, None)


async def test_keys_that_are_missing_wrong_forged_or_expired_are_401(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    expired = sign_session(door.token(not_after_ms=SystemClock().now_ms() - 1000), SECRET)
    forged = sign_session(door.token(), "another secret, just as long as the real one")
    for key in ("nonsense", "a.b.c", expired, forged):
        told = await refused(door, key=key)
        assert (told.status_code, told.code) == (401, "invalid_api_key")
        assert told.response.headers["x-should-retry"] == "false"
    async with aiohttp.ClientSession() as http:
        for path in ("/v1/models", "/v1/chat/completions"):
            async with http.request("GET" if "models" in path else "POST", door.url + path) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert engine.stats.started == 0
    assert await door.settled() == []


@pytest.mark.parametrize(
    ("state", "status"),
    [(ControlState.CLOSED, 401), (ControlState.CANCELLED, 401), (ControlState.FENCED, 409)],
)
async def test_sessions_that_are_over_are_refused(
    state: ControlState, status: int, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    await door.control("s1", state)
    assert (await refused(door)).status_code == status
    assert engine.stats.started == 0
    async with door.client(attempt=2) as client, door.client("other") as other:
        await other.chat.completions.create(model="m", messages=USER)
        if state is ControlState.FENCED:
            await client.chat.completions.create(model="m", messages=USER)
        else:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=USER)


async def test_a_session_closed_before_the_proxy_started_is_refused(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    first: Door = await door_to(engine)
    await first.control("s1", ControlState.CLOSED)
    second: Door = await door_to(engine)
    assert (await refused(second)).status_code == 401


@pytest.mark.parametrize(("state", "status"), [(ControlState.CLOSED, 401), (ControlState.FENCED, 409)])
@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_call_that_runs_while_its_session_ends_is_stopped(
    mode: str, state: ControlState, status: int, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny.", gate="never", gate_after=2)])]))
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)
    async with door.client() as client:
        pending = asyncio.ensure_future(
            client.chat.completions.create(model="m", messages=USER, stream=mode != "whole")  # type: ignore[call-overload]
        )
        if mode == "live":
            stream = await pending
            await anext(stream)
        else:
            await engine.until(lambda stats: stats.running == 1)
        await door.control("s1", state)
        rest = rest_of(stream) if mode == "live" else pending
        with pytest.raises(openai.APIError) as raised:
            await rest
        if mode != "live":
            assert isinstance(raised.value, openai.APIStatusError)
            assert raised.value.status_code == status
    await engine.until(lambda stats: stats.aborted == 1)
    records = await door.settled()
    if mode == "live":
        assert not captured(records).complete
    else:
        assert failed(records).failure.kind is FailureKind.CANCELLED


async def test_what_is_not_a_generation_never_generates(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    headers = {"Authorization": f"Bearer {door.key()}"}
    paths = [
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/completions", 404),
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", f"/s/{door.key()}/metrics", 404),
    ]
    async with aiohttp.ClientSession(headers=headers) as http:
        for method, path, status in paths:
            async with http.request(method, door.url + path, json={"messages": USER}) as response:
                assert response.status == status, path
                body = await response.json()
                assert set(body["error"]) == {"message", "type", "param", "code"}
        for path in ("/health", "/ready"):
            async with http.get(door.url + path) as response:
                assert response.status == 200
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_a_bad_request_is_400_and_leaves_no_record(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    told = await refused(door, n=99)
    assert (told.status_code, told.type, told.param) == (400, "invalid_request_error", "n")
    headers = {"Authorization": f"Bearer {door.key()}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{door.url}/v1/chat/completions", data=b"{not json") as response,
    ):
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_bodies_and_records_that_are_too_large_are_413(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, max_body_bytes=12 * 1024 * 1024)
    for size in (13, 9):
        told = await refused(door, messages=[{"role": "user", "content": "x" * size * 1024 * 1024}])
        assert told.status_code == 413
    assert engine.stats.started == 0
    assert await door.settled() == []
    assert door.service.slots.taken == 0


async def test_more_calls_than_slots_are_told_to_come_again(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, max_concurrent=2)
    async with door.client() as client:
        running = [
            asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER))  # type: ignore[arg-type]
            for _ in range(2)
        ]
        await engine.until(lambda stats: stats.running == 2)
        told = await refused(door)
        assert (told.status_code, told.code, told.response.headers["retry-after"]) == (503, "overloaded", "1")
        engine.open("go")
        await asyncio.gather(*running)
        await door.settled()
        await client.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]


async def test_draining_lets_calls_end_and_takes_no_more(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine)
    async with door.client() as client:
        running = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER))  # type: ignore[arg-type]
        await engine.until(lambda stats: stats.running == 1)
        draining = asyncio.ensure_future(door.service.drain())
        await until(lambda: not door.service.ready.is_set())
        assert (await refused(door)).status_code == 503
        engine.open("go")
        assert (await running).choices[0].message.content == "Yes."
        await draining
    captured(await door.settled())


async def test_a_proxy_that_is_stopped_writes_the_ends_of_its_calls(engine_of: Start, buses: Any) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="It is sunny.", gate="never", gate_after=2)])]))
    settings = ProxySettings(port=0, engine_urls=engine.base_url, logprobs_mode="processed_logprobs")
    service = ProxyService(settings, buses[0], SECRET)
    async with running(service):
        door = Door(service, buses[0], buses[1], GatedSender(buses[0]))
        client = door.client()
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        while not (await anext(stream)).choices[0].delta.content:
            pass
    await client.close()
    record = captured(await door.settled())
    assert not record.complete
    assert (engine.stats.running, engine.stats.aborted) == (0, 1)


async def test_raw_logprobs_are_found_out_and_refused_at_another_temperature(engine_of: Start, door_to: Start) -> None:
    # the scripted engine's log-probabilities do not move with temperature: raw ones
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, logprobs_mode="auto")
    async with door.client() as client:
        await client.chat.completions.create(model="m", messages=USER)
    assert captured(await door.settled()).engine.logprobs_mode == "raw_logprobs"
    async with door.client("hot", sampling=SamplingSpec(temperature=0.7)) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="m", messages=USER)
    assert raised.value.code == "logprobs_mode"
    assert engine.scripted.probed == 2
    assert failed(await door.settled("hot")).failure.kind is FailureKind.PROVIDER


async def test_an_engine_that_was_away_is_found_again(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    port = int(engine.url.rpartition(":")[2])
    door: Door = await door_to(engine)
    await engine.__aexit__(None, None, None)
    assert (await refused(door)).status_code == 503
    await engine_of(Script.say("Again."), port=port, model="other")
    async with door.client() as client:
        reply = await client.chat.completions.create(model="m", messages=USER)
    assert reply.choices[0].message.content == "Again."
    end = (await door.settled())[-1]
    assert isinstance(end, CompletionCaptured)
    assert end.engine.model == "other"


async def test_nothing_secret_is_logged(engine_of: Start, door_to: Start, capsys: pytest.CaptureFixture[str]) -> None:
    engine = await engine_of(
        Script(
            [
                Rule(match=Match(last_user="break"), replies=[Reply(error=Failure(status=500, message="sesame"))]),
                Rule(replies=[Reply(text="sesame")]),
            ]
        )
    )
    door: Door = await door_to(engine)
    key = door.key()
    async with aiohttp.ClientSession() as http:
        for text in ("sesame", "sesame break"):
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            async with http.post(f"{door.url}/s/{key}/v1/chat/completions", data=json.dumps(body)) as response:
                await response.read()
        async with http.get(f"{door.url}/s/{key}/v1/unknown") as response:
            assert response.status == 404
    await door.settled()
    out, err = capsys.readouterr()
    assert "sesame" not in out + err
    assert key not in out + err


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_bug_in_the_proxy_is_an_error_and_one_end(
    mode: str, engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_of(Script.say("It is sunny."))
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("sesame")

    monkeypatch.setattr("polar.proxy.generation.captured", broken)
    async with door.client() as client:
        with pytest.raises(openai.APIError) as raised:
            await ask(client, messages=USER, stream=mode != "whole")
    assert raised.value.code == "internal_error"
    assert "sesame" not in str(raised.value)
    end = failed(await door.settled())
    assert (end.failure.kind, end.http_status) == (FailureKind.INFRA, 200 if mode == "live" else 500)
    assert "sesame" not in end.failure.message


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 2**70},
        {"max_tokens": 2**70},
        {"extra_body": {"top_k": 2**70}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 2**70}}}]},
    ],
)
async def test_what_no_record_holds_is_refused_before_the_call_begins(
    fields: dict[str, Any], engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    told = await refused(door, **fields)
    assert told.status_code == 400
    assert not door.sender.sent, "a call that began has to end"


async def test_a_body_nested_too_deep_is_refused(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    body = b'{"model": "m", "messages": [], "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    headers = {"Authorization": f"Bearer {sign_session(door.token(), SECRET)}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{door.url}/v1/chat/completions", data=body, headers=headers) as answer,
    ):
        assert answer.status == 400
        assert "nested" in (await answer.json())["error"]["message"]
