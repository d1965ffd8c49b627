"""Calls while something happens to engines, the log or the proxy: whose they are, what they hold, what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from polar.devmodel import ChatTokenizer, Failure, Reply, Rule, Script, ScriptedEngine
from polar.proxy import ProxyService, ProxySettings
from polar.proxy.engine import cache_salt
from polar.proxy.errors import EngineAway
from polar.proxy.token_in import compare
from polar.proxy.token_in.asking import Asking
from polar.proxy.upstreams.trainers import key_of_installation
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed
from tests.proxy.engines_harness import asked, upstream_of
from tests.proxy.harness import SECRET, Door, GatedSender, captured, failed, running
from tests.proxy.test_anthropic_calls import Template
from tests.proxy.test_calls import USER
from tests.proxy.test_engines import gated, in_flight, two
from tests.proxy.test_engines_pauses import trainer
from tests.proxy.test_told import until

Start = Callable[..., Any]
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def met(door: Door, engine: ScriptedEngine) -> Any:
    """The proxy's side of an engine, once it knows it."""
    upstream = upstream_of(door, engine.base_url)
    await until(lambda: upstream.endpoint.engine is not None)
    return upstream


async def test_another_calls_broken_connection_does_not_fail_a_call_that_begins(
    engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    endpoint = (await met(door, engine)).endpoint
    weight_version = endpoint.weight_version

    async def meanwhile() -> Any:
        word = await weight_version()
        endpoint.forget()  # what a broken connection of another call does
        return word

    monkeypatch.setattr(endpoint, "weight_version", meanwhile)
    await asked(door, "chat")
    assert captured(await door.settled()).engine.model == "scripted"


async def test_a_call_that_waits_is_counted_as_the_template_takes_it(
    tokenizer: ChatTokenizer, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(gated(), tokenizer=Template(tokenizer, "strict"))
    door: Door = await door_to(engine, max_calls_per_endpoint=1, early_headers_after=0.05, keepalive_every=0.05)
    first = in_flight(door, "first")
    await engine.until(lambda stats: stats.running == 1)
    late = [*USER, {"role": "system", "content": "Be brief."}]
    async with door.client("second") as client:
        # its headers come while it waits for a seat
        stream = await client.chat.completions.create(model="m", messages=late, stream=True)
        engine.open("go")
        assert [chunk async for chunk in stream]
    await first
    assert captured(await door.settled("second")).complete


async def test_a_failed_call_leaves_its_seat_before_the_log_has_its_end(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(error=Failure(status=500, message="broken"))])]))
    door: Door = await door_to(engine)
    gate = door.sender.withhold(CompletionFailed)
    with pytest.raises(openai.InternalServerError):
        await asked(door, "chat")
    await until(lambda: CompletionFailed in door.sender.waiting)
    assert (upstream_of(door, engine.base_url).line.sizes, door.service.slots.taken) == ((0, 0), 1)
    gate.set()
    assert failed(await door.settled()).http_status == 502


async def test_a_call_that_the_log_does_not_take_leaves_its_seat(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, start_timeout=0.1)
    gate = door.sender.withhold(CallStarted)
    with pytest.raises(openai.InternalServerError):
        await asked(door, "chat")
    assert (upstream_of(door, engine.base_url).line.sizes, door.service.slots.taken) == ((0, 0), 1)
    gate.set()
    assert failed(await door.settled()).http_status == 503


async def test_a_call_that_moves_to_an_engine_of_another_length_still_fits_its_record(
    engine_of: Start, door_to: Start
) -> None:
    door, home, other = await two(engine_of, door_to, engine_probe_every=60)
    theirs = await met(door, home)
    await met(door, other)
    theirs.endpoint.max_model_len = 1000  # so short that its replies need no bound
    start = door.sender.withhold(CallStarted)
    async with door.client() as client:
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER, n=16))
        await until(lambda: theirs.line.sizes == (1, 0))
        await home.__aexit__(None, None, None)
        start.set()
        await asking
    (call,) = other.calls
    most = door.bus.settings.max_record_bytes // (16 * 24)
    record = captured(await door.settled())
    assert 0 < call.body["max_completion_tokens"] <= most
    assert record.sampling.max_tokens == call.body["max_completion_tokens"]
    assert record.engine.endpoint == other.base_url


async def test_a_call_that_moves_to_an_engine_without_token_in_tells_no_logprobs_unasked(
    engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [await engine_of(Script.say("Yes."), scale_out=able) for able in (True, False)]
    door: Door = await door_to(",".join(one.base_url for one in engines), capture_mode="token_in")
    for one in engines:
        await met(door, one)
    upstreams = door.service.engines
    assert upstreams is not None
    session = next(name for name in map(str, range(100)) if upstreams.of(name, "the-policy").url == engines[0].base_url)
    async with door.client(session) as client:
        reply = await client.chat.completions.create(model="m", messages=USER, tools=[TOOL])
        history = [*USER, reply.choices[0].message.model_dump(exclude_none=True), *USER]

        async def gone(*_: Any) -> None:
            upstream_of(door, engines[0].base_url).refused()
            raise EngineAway("the engine does not accept connections", untouched=True)

        monkeypatch.setattr(Asking, "generate", gone)
        stream = await client.chat.completions.create(model="m", messages=history, tools=[TOOL], stream=True)
        chunks = [chunk async for chunk in stream]
    assert all(choice.logprobs is None for chunk in chunks for choice in chunk.choices)
    last = [one for one in await door.settled(session) if isinstance(one, CompletionCaptured)][-1]
    assert (last.engine.endpoint, last.capture, last.fallback) == (engines[1].base_url, "rendered", "engine")


async def test_a_connection_that_breaks_says_nothing_of_an_engines_routes(
    engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    endpoint = (await met(door, engine)).endpoint

    async def breaks(*_: Any, **__: Any) -> Any:
        async with endpoint._errors():
            raise ConnectionResetError

    monkeypatch.setattr(Asking, "render", breaks)
    with pytest.raises(openai.InternalServerError) as raised:
        await asked(door, "chat", capture="token_in")
    assert raised.value.status_code == 502
    monkeypatch.undo()
    await asked(door, "chat", "s2", capture="token_in")
    assert captured(await door.settled("s2")).complete


async def test_a_proxy_that_is_stopped_waits_for_calls_that_take_their_time_to_unwind(
    engine_of: Start, buses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_of(Script.say("Yes."))
    service = ProxyService(
        ProxySettings(port=0, engine_urls=engine.base_url, logprobs_mode="processed_logprobs"), buses[0], SECRET
    )
    async with running(service):
        door = Door(service, buses[0], buses[1], GatedSender(buses[0]))
        endpoint = (await met(door, engine)).endpoint
        asking = asyncio.Event()

        async def hangs() -> None:
            asking.set()
            try:
                await asyncio.Event().wait()
            finally:
                try:
                    await asyncio.sleep(60)  # longer than the web server waits, which then cancels once more
                finally:
                    for _ in range(50):
                        await asyncio.sleep(0)

        monkeypatch.setattr(endpoint, "weight_version", hangs)
        call = in_flight(door)
        await asking.wait()
    # nothing is left to whoever closes the bus next
    assert (service.slots.taken, service.recorder.pending) == (0, 0)
    with pytest.raises(openai.APIConnectionError):
        await call
    assert failed(await door.records()).http_status is None


async def test_a_pause_that_is_still_under_way_cuts_nothing_after_a_resume(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(gated(), dev_mode=False)
    door: Door = await door_to(engine)
    upstream = await met(door, engine)
    start = door.sender.withhold(CallStarted)
    call = in_flight(door)
    await until(lambda: upstream.line.sizes == (1, 0))
    pausing = asyncio.create_task(trainer(door, "/pause", mode="abort", within_s=20))
    await until(lambda: upstream.pause_mode == "abort")
    assert (await trainer(door, "/resume"))[0] == 200
    start.set()
    await engine.until(lambda stats: stats.running == 1)
    await asyncio.sleep(0.5)  # more than a pause's step, in which nothing may happen
    engine.open("go")
    await call
    status, told = await pausing
    assert (status, told["error"]["code"]) == (409, "resumed")
    assert captured(await door.settled()).complete


async def test_an_engine_that_froze_though_its_answer_was_lost_is_let_go_on(
    engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, engine_probe_every=60)
    upstream = await met(door, engine)
    pause = upstream.endpoint.pause

    async def lost(mode: str) -> bool:
        await pause(mode)
        raise EngineAway("the answer was lost")

    monkeypatch.setattr(upstream.endpoint, "pause", lost)
    assert (await trainer(door, "/pause", mode="keep"))[0] == 503
    assert (engine.lifecycle.paused, upstream.is_paused, upstream.pauses_engine) == (False, False, False)
    await asked(door, "chat")


async def test_a_freeze_that_cannot_be_undone_at_one_engine_is_undone_at_the_others(
    engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [await engine_of(Script.say("Yes."), dev_mode=able) for able in (True, True, False)]
    door: Door = await door_to(",".join(one.base_url for one in engines), engine_probe_every=60)
    first, second, _ = [await met(door, one) for one in engines]
    resume = first.endpoint.resume

    async def away() -> bool:
        raise EngineAway("away")

    monkeypatch.setattr(first.endpoint, "resume", away)
    status, told = await trainer(door, "/pause", mode="keep")
    assert (status, told["error"]["code"]) == (409, "cannot_keep")
    assert [one.lifecycle.paused for one in engines] == [True, False, False]
    assert (first.pause_mode, second.pause_mode, first.pauses_engine) == (None, None, True)
    monkeypatch.setattr(first.endpoint, "resume", resume)
    assert (await trainer(door, "/resume"))[0] == 200
    assert not engines[0].lifecycle.paused


@pytest.mark.parametrize("text", ["[" * 20_000, '[{"a":' * 5_000, "{ x } " * 5_000])
def test_brackets_that_never_close_are_read_a_bounded_number_of_times(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, decode = [], compare._decode

    def counted(said: str, at: int) -> Any:
        tries.append(at)
        return decode(said, at)

    monkeypatch.setattr(compare, "_decode", counted)
    assert compare.skeleton(text) == compare.skeleton(text)
    assert len(tries) <= 2 * len(text) / 5


async def test_the_version_is_asked_for_while_the_log_takes_the_start(
    engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    endpoint = (await met(door, engine)).endpoint
    words, weight_version = [], endpoint.weight_version

    async def noted() -> Any:
        words.append(await weight_version())
        return words[-1]

    monkeypatch.setattr(endpoint, "weight_version", noted)
    start = door.sender.withhold(CallStarted)
    call = in_flight(door)
    await until(lambda: bool(words) and CallStarted in door.sender.waiting)
    assert engine.stats.started == 0
    start.set()
    await call
    (span,) = captured(await door.settled()).choices[0].spans
    assert (span.version, span.exact) == ("default", True)


async def test_a_version_from_before_a_pause_is_asked_for_again(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    upstream = await met(door, engine)
    start = door.sender.withhold(CallStarted)
    call = in_flight(door)
    await until(lambda: upstream.line.sizes == (1, 0) and CallStarted in door.sender.waiting)
    assert (await trainer(door, "/pause", mode="drain", within_s=0.01))[0] == 504
    engine.lifecycle.version = "step-2"
    assert (await trainer(door, "/resume"))[0] == 200
    start.set()
    await call
    (span,) = captured(await door.settled()).choices[0].spans
    assert (span.version, span.exact) == ("step-2", True)
    assert engine.calls[0].body["cache_salt"] == cache_salt("default", "step-2")


async def test_a_call_whose_start_is_refused_leaves_no_question_behind(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, start_timeout=0.1)
    endpoint = (await met(door, engine)).endpoint
    ended = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "weight_version", hangs)
        start = door.sender.withhold(CallStarted)
        with pytest.raises(openai.InternalServerError):
            await asked(door, "chat")
        assert ended.is_set()
    start.set()
    assert failed(await door.settled()).http_status == 503


async def test_the_secret_that_signs_keys_is_no_key_itself(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    for key in (SECRET, door.key()):
        assert (await trainer(door, key=key))[0] == 401
    assert (await trainer(door, key=key_of_installation(SECRET)))[0] == 200


async def test_a_key_of_any_bytes_is_refused_as_a_key(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    for path in ("/polar/v1/engines", "/v1/models"):
        reader, writer = await asyncio.open_connection("127.0.0.1", door.service.port)
        writer.write(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        status = await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert b" 401 " in status


async def test_an_engine_that_came_back_with_another_model_leaves_its_calls_to_the_others(
    engine_of: Start, door_to: Start
) -> None:
    door, home, other = await two(engine_of, door_to, model="scripted", engine_probe_every=60)
    theirs = await met(door, home)
    await met(door, other)
    home.scripted.model = "another"
    theirs.endpoint.forget()  # its connections broke
    await asked(door, "chat")
    assert captured(await door.settled()).engine.endpoint == other.base_url
