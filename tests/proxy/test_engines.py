"""Several engines and several models: who is asked, who waits, what a client is told where nobody can be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import aiohttp
import openai
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from polar.bus import Bus, BusSettings, Out
from polar.devmodel import Failure, Reply, Rule, Script, ScriptedEngine
from polar.proxy import ProxySettings
from polar.proxy.engine import Endpoint, cache_salt
from polar.proxy.upstreams.metrics import EngineMetrics
from polar.proxy.upstreams.policy import published
from polar.proxy.upstreams.spec import EngineSpec
from polar.proxy.upstreams.upstream import Upstream
from polar.schemas import CompletionCaptured, CompletionFailed, FailureKind, PolicyPublished
from polar.schemas.topics import Service
from tests.proxy.engines_harness import DIALECTS, QUICK, asked, engines_of, refusal_of, sample, upstream_of
from tests.proxy.harness import Door, ask, captured, failed
from tests.proxy.test_calls import USER
from tests.proxy.test_told import until

Start = Callable[..., Any]


def gated(*, after: int = 0) -> Script:
    """Replies that wait for the gate `go`."""
    return Script([Rule(replies=[Reply(text="It is sunny.", gate="go", gate_after=after)])])


def in_flight(door: Door, session: str = "s1", *, stream: bool = False) -> asyncio.Task[None]:
    """A call on its way."""

    async def call() -> None:
        async with door.client(session) as client:
            await ask(client, stream=stream, messages=USER)

    return asyncio.create_task(call())


async def two(engine_of: Start, door_to: Start, **changes: Any) -> tuple[Door, ScriptedEngine, ScriptedEngine]:
    """A proxy over two engines; the session `s1` belongs to the first of those returned."""
    engines = [await engine_of(Script.say("Yes.")) for _ in range(2)]
    door: Door = await door_to(",".join(one.base_url for one in engines), **{**QUICK, **changes})
    home = engines_of(door).of("s1", "the-policy").url
    return door, *sorted(engines, key=lambda one: one.base_url != home)


# models -----------------------------------------------------------------------------------------------------------


async def test_the_sessions_model_chooses_among_the_engines(engine_of: Start, door_to: Start) -> None:
    small, large, rest = [await engine_of(Script.say(name), model=name) for name in ("small", "served-large", "any")]
    door: Door = await door_to(
        "http://127.0.0.1:1/v1",
        engines=[
            {"model": "small", "urls": [small.base_url]},
            {"model": "large", "urls": [large.base_url], "served": "served-large"},
            {"urls": [rest.base_url]},
        ],
    )
    for model, text in (("small", "small"), ("large", "served-large"), ("what-not", "any")):
        reply = await asked(door, "chat", model, model=model)
        assert (reply.choices[0].message.content, reply.model) == (text, "gpt-x")
        record = captured(await door.settled(model))
        assert record.engine.model == text


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_model_that_nobody_serves_is_404_before_anything_is_recorded(
    dialect: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."), model="small")
    door: Door = await door_to(engine, engines=[{"model": "small", "urls": [engine.base_url]}])
    status, body, _ = await refusal_of(door, dialect, model="large")
    assert status == 404
    assert "large" in body
    words = {"anthropic": "not_found_error", "google": "NOT_FOUND"}.get(dialect, "model_not_found")
    assert words in body
    assert await door.settled() == []
    assert sample(door, "polar_proxy_engine_refused_total", reason="model_not_found") == 1


async def test_engines_that_serve_another_model_are_404_and_found_again_when_they_serve_it(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."), model="other")
    door: Door = await door_to(engine, engines=[{"model": "small", "urls": [engine.base_url]}], **QUICK)
    await until(lambda: upstream_of(door, engine.base_url).endpoint.unfit is not None)
    status, body, _ = await refusal_of(door, "chat", model="small")
    assert status == 404
    assert "it serves other" in body
    assert await door.settled() == []


async def test_a_model_that_goes_while_it_is_used_is_404_and_what_comes_is_found(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    await asked(door, "chat", "first")
    engine.scripted.model = "other"
    status, body, _ = await refusal_of(door, "chat")
    assert (status, "model_not_found" in body) == (404, True)
    assert failed(await door.settled()).http_status == 404
    await asked(door, "chat", "then")
    assert captured(await door.settled("then")).engine.model == "other"


async def test_one_engine_may_serve_several_models(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."), any_model=True)
    entries = [{"model": name, "urls": [engine.base_url], "served": "scripted"} for name in ("base", "adapter")]
    door: Door = await door_to(engine, engines=[entries[0] | {"max_calls": 3}, entries[1]])
    for model in ("base", "adapter"):
        await asked(door, "chat", model, model=model)
        labels = {"engine": engine.base_url, "model": model}
        assert door.service.registry.get_sample_value("polar_proxy_engine_up", labels) == 1
    assert [one.line.seats for one in engines_of(door).all] == [3, 512]


def test_settings_name_what_is_wrong_with_an_engine() -> None:
    for wrong in ({"urls": ["http://a"]}, {"urls": []}, {"urls": ["http://a/v1"], "max_callz": 3}):
        with pytest.raises(ValidationError):
            ProxySettings(engines=[wrong])


def test_engines_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [{"model": "m", "urls": ["http://a:1/v1/", "http://b:1/v1"], "kind": "sglang", "max_calls": 7}]
    monkeypatch.setenv("POLAR_PROXY_ENGINES", json.dumps(said))
    (spec,) = ProxySettings().specs
    assert (spec.urls, spec.kind, spec.max_calls, spec.asked) == (("http://a:1/v1", "http://b:1/v1"), "sglang", 7, "m")


# health -----------------------------------------------------------------------------------------------------------


async def test_a_session_moves_while_its_engine_calls_itself_ill_and_returns(engine_of: Start, door_to: Start) -> None:
    door, home, other = await two(engine_of, door_to)
    await asked(door, "chat")
    home.lifecycle.healthy = False
    await until(lambda: not upstream_of(door, home.base_url).usable)
    await asked(door, "chat")
    home.lifecycle.healthy = True
    await until(lambda: upstream_of(door, home.base_url).usable)
    await asked(door, "chat")
    assert (home.stats.finished, other.stats.finished) == (2, 1)
    assert sample(door, "polar_proxy_engine_ejections_total", engine=home.base_url, reason="ill") == 1
    assert sample(door, "polar_proxy_engine_up", engine=home.base_url) == 1


async def test_a_session_moves_at_once_when_its_engine_is_gone_and_returns_with_it(
    engine_of: Start, door_to: Start
) -> None:
    door, home, other = await two(engine_of, door_to)
    await asked(door, "chat")
    port = int(home.url.rpartition(":")[2])
    await home.__aexit__(None, None, None)
    for stream in (False, True):
        async with door.client() as client:
            await ask(client, stream=stream, messages=USER)
    assert other.stats.finished == 2
    again = await engine_of(Script.say("Again."), port=port)
    await until(lambda: upstream_of(door, home.base_url).usable)
    assert (await asked(door, "chat")).choices[0].message.content == "Again."
    assert again.stats.finished == 1
    assert all(isinstance(one, CompletionCaptured) for one in (await door.settled())[1::2])


async def test_an_engine_that_breaks_every_call_is_left(engine_of: Start, door_to: Start) -> None:
    door, home, other = await two(engine_of, door_to, engine_probe_every=30)
    home.scripted.script = Script([Rule(replies=[Reply(text="It is sunny.", disconnect_after=1)])])
    for _ in range(3):
        assert (await refusal_of(door, "chat"))[0] == 502
    await asked(door, "chat")
    assert other.stats.finished == 1


async def test_with_every_engine_gone_a_call_is_told_so_and_the_first_back_is_used(
    engine_of: Start, door_to: Start
) -> None:
    door, home, other = await two(engine_of, door_to)
    port = int(other.url.rpartition(":")[2])
    for engine in (home, other):
        await engine.__aexit__(None, None, None)
    status, body, headers = await refusal_of(door, "chat")
    assert (status, "engine_unavailable" in body, float(headers["retry-after"]) > 0) == (503, True, True)
    await engine_of(Script.say("Again."), port=port)
    await until(lambda: upstream_of(door, other.base_url).usable)
    assert (await asked(door, "chat")).choices[0].message.content == "Again."


# the self-test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_engine_that_tells_no_ids_is_refused_and_the_client_told_why(
    dialect: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script.say("Yes."), probe=Reply(text="Yes.", damage="no_ids"))
    door: Door = await door_to(engine, **QUICK)
    await until(lambda: upstream_of(door, engine.base_url).endpoint.unfit is not None)
    status, body, headers = await refusal_of(door, dialect)
    assert status == (529 if dialect == "anthropic" else 503)
    assert "return_token_ids" in body
    assert float(headers["retry-after"]) > 0
    assert engine.stats.started == 0
    assert await door.settled() == []
    assert sample(door, "polar_proxy_engine_refused_total", reason="unfit") == 1


@pytest.mark.parametrize("damage", ["short_logprobs", "short_ids", "no_logprobs", "no_prompt_ids", "not_json"])
async def test_the_self_test_finds_every_engine_that_cannot_be_captured(
    damage: str, engine_of: Start, door_to: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = await engine_of(Script.say("Yes."), probe=Reply(text="Yes.", damage=damage))
    door: Door = await door_to(engine)
    await until(lambda: upstream_of(door, engine.base_url).endpoint.unfit is not None)
    assert door.service.ready.is_set()
    assert (await refusal_of(door, "chat"))[0] == 503
    assert "engine cannot be used" in capsys.readouterr().out


async def test_an_unfit_engine_leaves_the_others_their_calls(engine_of: Start, door_to: Start) -> None:
    good = await engine_of(Script.say("Yes."))
    bad = await engine_of(Script.say("No."), probe=Reply(text="Yes.", damage="short_ids"))
    door: Door = await door_to(f"{good.base_url},{bad.base_url}")
    for session in range(8):  # from the start on, also before the engines were met
        await asked(door, "chat", f"s{session}")
    assert (good.stats.finished, bad.stats.started) == (8, 0)


async def test_an_engine_that_refuses_the_self_test_says_what_is_missing(engine_of: Start, door_to: Start) -> None:
    refuses = Reply(error=Failure(status=400, message="logprobs are disabled", type="BadRequestError"))
    engine = await engine_of(Script.say("Yes."), probe=refuses)
    door: Door = await door_to(engine)
    await until(lambda: upstream_of(door, engine.base_url).endpoint.unfit is not None)
    assert "logprobs are disabled" in (await refusal_of(door, "chat"))[1]


# waiting ----------------------------------------------------------------------------------------------------------


async def test_calls_wait_in_the_order_they_came(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(gated())
    door: Door = await door_to(engine, max_calls_per_endpoint=1)
    line = upstream_of(door, engine.base_url).line
    calls = []
    for number in range(5):
        calls.append(in_flight(door, f"s{number}", stream=number % 2 == 0))
        await until(lambda number=number: line.sizes == (1, number))  # type: ignore[misc]
    assert sample(door, "polar_proxy_engine_waiting", engine=engine.base_url) == 4
    engine.open("go")
    await asyncio.gather(*calls)
    order = [one.id for one in engine.calls]
    for number, identity in enumerate(order):
        assert captured(await door.settled(f"s{number}")).completion_id == identity
    assert engine.stats.most_running == 1
    assert line.sizes == (0, 0)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_full_queue_is_503_with_retry_after_before_anything_is_recorded(
    dialect: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(gated())
    door: Door = await door_to(engine, max_calls_per_endpoint=1, max_waiting_per_endpoint=1, retry_after=3)
    line = upstream_of(door, engine.base_url).line
    calls = []
    for waiting in range(2):
        calls.append(in_flight(door, f"s{waiting}"))
        await until(lambda waiting=waiting: line.sizes == (1, waiting))  # type: ignore[misc]
    status, body, headers = await refusal_of(door, dialect, "third")
    assert status == (529 if dialect == "anthropic" else 503)
    assert headers["retry-after"] == "3"
    assert "try again" in body
    assert await door.records("third") == []
    assert sample(door, "polar_proxy_engine_refused_total", reason="queue_full") == 1
    engine.open("go")
    await asyncio.gather(*calls)
    await asked(door, dialect, "third")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_wait_that_is_too_long_is_503_and_one_end(dialect: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(gated())
    door: Door = await door_to(engine, max_calls_per_endpoint=1, engine_wait=0.2)
    first = in_flight(door, "first")
    await engine.until(lambda stats: stats.running == 1)
    status, _, headers = await refusal_of(door, dialect, "second")
    assert status == (529 if dialect == "anthropic" else 503)
    assert float(headers["retry-after"]) > 0
    engine.open("go")
    await first
    end = failed(await door.settled("second"))
    assert (end.failure.kind, end.failure.retryable, end.http_status) == (FailureKind.INFRA, True, status)
    assert sample(door, "polar_proxy_engine_refused_total", reason="queue_deadline") == 1


async def test_a_client_that_waits_is_kept_alive_and_may_leave(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(gated())
    door: Door = await door_to(engine, max_calls_per_endpoint=1, early_headers_after=0.05, keepalive_every=0.05)
    line = upstream_of(door, engine.base_url).line
    first = in_flight(door, "first")
    await engine.until(lambda stats: stats.running == 1)
    async with door.client("second") as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)  # type: ignore[arg-type]
        assert line.sizes == (1, 1), "it has its headers, and waits"
        await stream.close()
    await until(lambda: line.sizes == (1, 0))
    engine.open("go")
    await first
    end = (await door.settled("second"))[-1]
    assert isinstance(end, CompletionFailed)
    assert engine.stats.started == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_wait_that_is_too_long_is_told_in_the_stream_where_headers_went_early(
    dialect: str, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(gated())
    door: Door = await door_to(
        engine, max_calls_per_endpoint=1, early_headers_after=0.05, keepalive_every=0.05, engine_wait=0.6
    )
    first = in_flight(door, "first")
    await engine.until(lambda stats: stats.running == 1)
    path, body = {
        "chat": ("/v1/chat/completions", {"model": "m", "messages": USER, "stream": True}),
        "responses": ("/v1/responses", {"model": "m", "input": "Hello.", "stream": True}),
        "anthropic": ("/v1/messages", {"model": "m", "messages": USER, "max_tokens": 9, "stream": True}),
        "google": (
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            {"contents": [{"role": "user", "parts": [{"text": "Hello."}]}]},
        ),
    }[dialect]
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{door.url}/s/{door.key('second')}{path}", json=body) as response,
    ):
        told = await response.text()
    assert response.status == 200
    assert "had no room in time; try again" in told
    engine.open("go")
    await first
    assert failed(await door.settled("second")).http_status == 200


async def test_those_who_wait_for_an_engine_that_goes_wait_elsewhere(engine_of: Start, door_to: Start) -> None:
    door, home, other = await two(engine_of, door_to, max_calls_per_endpoint=1)
    home.scripted.script = gated()
    first = in_flight(door)
    await home.until(lambda stats: stats.running == 1)
    second = in_flight(door)
    line = upstream_of(door, home.base_url).line
    await until(lambda: line.sizes == (1, 1))
    home.lifecycle.healthy = False
    await second
    assert other.stats.finished == 1
    home.open("go")
    await first


async def test_an_engines_own_refusals_keep_their_retry_after(engine_of: Start, door_to: Start) -> None:
    for status in (429, 503):
        full = Reply(error=Failure(status=status, headers={"Retry-After": "7"}))
        door: Door = await door_to(await engine_of(Script([Rule(replies=[full])])))
        for dialect in DIALECTS:
            told, _, headers = await refusal_of(door, dialect, f"s-{status}")
            assert (told, headers["retry-after"]) == (529 if dialect == "anthropic" else 503, "7")


# weights ----------------------------------------------------------------------------------------------------------


async def test_the_cache_salt_follows_the_engines_version(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    await asked(door, "chat")
    engine.lifecycle.version = "step-2"
    await asked(door, "chat")
    assert [call.body["cache_salt"] for call in engine.calls] == [
        cache_salt("default", version) for version in ("default", "step-2")
    ]
    last = (await door.settled())[-1]
    assert [(span.version, span.exact) for span in last.choices[0].spans] == [("step-2", True)]


async def test_a_published_version_separates_the_cache_of_an_engine_without_a_word(
    engine_of: Start, door_to: Start, bus_settings: BusSettings
) -> None:
    engine = await engine_of(Script.say("Yes."), dev_mode=False)
    door: Door = await door_to(engine)
    endpoint = upstream_of(door, engine.base_url).endpoint
    await asked(door, "chat")
    # vLLM's newer chat answers tell their version, which wins over the published one
    assert endpoint.version == "default"
    async with Bus(bus_settings, Service.TRAINER) as trainer:
        event = PolicyPublished(model="scripted", version="7", endpoints={engine.base_url: "7"}, at_ms=1)
        await trainer.send(Out("policy", "scripted", event))
        await until(lambda: endpoint.version == "7")
    await asked(door, "chat")
    assert engine.calls[-1].body["cache_salt"] == cache_salt("default", "7")
    last = (await door.settled())[-1]
    assert [span.version for span in last.choices[0].spans] == ["default"], "the record holds the engine's own word"


def test_a_published_version_is_for_the_engines_it_names() -> None:
    spec = EngineSpec(model="small", urls=("http://a/v1",), served="org/small")
    metrics = EngineMetrics(CollectorRegistry())
    upstream = Upstream("http://a/v1", spec, metrics, seats=1, room=1, failures=1)
    upstream.endpoint = Endpoint("http://a/v1", ProxySettings(), cast(Any, None), model="org/small")

    def told(model: str, endpoints: dict[str, str]) -> str | None:
        return published(PolicyPublished(model=model, version="9", endpoints=endpoints, at_ms=1), upstream)

    assert [told(model, {}) for model in ("small", "org/small", "other")] == ["9", "9", None]
    assert told("small", {"http://a/v1/": "8"}) == told("other", {"http://a": "8"}) == "8"
    assert told("small", {"http://b/v1": "8"}) is None


async def test_models_are_listed_for_what_a_session_may_ask(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    async with door.client() as client:
        assert [one.id async for one in client.models.list()] == ["the-policy"]
        with pytest.raises(openai.NotFoundError):
            await client.post("/embeddings", cast_to=object, body={})
